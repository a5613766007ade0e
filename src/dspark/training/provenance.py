"""Where a draft comes from, as `training.json` beside its weights states it, and the prompts it was trained on.

What is shipped with a draft names files, never folders of the machine it was made on.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.checkpoints.native import PROMPTS_FILE, TRAINING_FILE
from dspark.checkpoints.record import read_training
from dspark.data.prompts import read_prompt_hashes, write_prompt_hashes
from dspark.data.rows import Row, read_rows, row_notes
from dspark.machine import describe_machine
from dspark.training.recipe import Recipe
from dspark.training.validation import Validator

FORMAT = 1
CURVE = ("replay_acceptance", "loss_l1", "loss_bce")
PATHS = (
    ("data", "rows"),
    ("data", "features"),
    ("data", "vocabulary_prompts"),
    ("training", "out"),
    ("training", "init"),
)
FRESH: dict[str, Any] = {"seconds": 0.0, "validation_seconds": 0.0, "curve": [], "machines": [], "started_from": None}


class RunRecord:
    """What a run was given, what it has cost so far and how it went; `state` is kept over an interruption.

    Seconds are wall clock from the call of `train`: loading, reading, saving and validating included. Steps that a
    kill threw away are not in them. A run begun without a record does not know its seconds (None).
    started: time.perf_counter() of the call.
    """

    def __init__(
        self,
        recipe: Recipe,
        n: int,
        train_rows: Sequence[Row],
        held: Sequence[Row],
        validator: Validator,
        started: float,
        resumed: bool,
        saved: Mapping[str, Any] | None,
        say: Callable[[str], None],
    ) -> None:
        self.out, self.started, self.planned = Path(recipe.training.out), started, recipe.training.steps
        if saved is None:
            unknown = {"seconds": None, "validation_seconds": None} if resumed else {}
            saved = {**FRESH, "started_from": _started_from(recipe), **unknown}
        self.state = {**saved, "curve": list(saved["curve"]), "machines": list(saved["machines"])}
        if (machine := describe_machine()) not in self.state["machines"]:
            self.state["machines"].append(machine)
        self._before = self.state["seconds"]
        self.given = {
            "recipe": shippable_recipe(recipe),
            "rows": [without_folders(row_file(Path(name))) for name in recipe.data.rows],
            "training_rows": len(train_rows),
            "held_out_rows": len(held),
            "held_out_rows_seen_before": seen_before(recipe, held, say),
            "seed": recipe.training.seed,
            "compute_dtype": recipe.training.compute_dtype,
        }
        self.replay = {"n": recipe.training.replay_n or n, "rows": len(validator.replay_rows), "note": validator.note}
        self.prompts = self._keep_prompts(training_prompts(recipe, train_rows, say))

    def _keep_prompts(self, hashes: frozenset[str] | None) -> str | None:
        path = self.out / PROMPTS_FILE
        if hashes is None:
            path.unlink(missing_ok=True)
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        write_prompt_hashes(path, hashes)
        return path.read_text(encoding="utf-8")

    def tick(self) -> float | None:
        """Bring the seconds up to now; returns them as hours (None: unknown)."""
        if self._before is not None:
            self.state["seconds"] = self._before + time.perf_counter() - self.started
        return _hours(self.state["seconds"])

    def validated(self, step: int, values: Mapping[str, float], hours: float | None, seconds: float) -> None:
        """A validation begun `hours` into the run, which took `seconds`, gave these values."""
        if self.state["validation_seconds"] is not None:
            self.state["validation_seconds"] += seconds
        self.state["curve"].append({"step": step, "hours": hours, **{name: values.get(name) for name in CURVE}})

    def document(self, step: int, best: Mapping[str, Any], which: str | None = None) -> dict[str, Any]:
        """training.json after `step` steps. which: `best` or `last`, the draft it lies beside."""
        hours = self.tick()
        replayed = {"bonus": "counted", "mean": "macro over prompts", **self.replay}
        made: dict[str, Any] = {}
        if which == "best":
            at = next((point["hours"] for point in self.state["curve"] if point["step"] == best["step"]), None)
            made = {"draft": {"which": which, "step": best["step"], "hours": at}}
        elif which == "last":
            made = {"draft": {"which": which, "step": step, "hours": hours}}
        return {
            "format": FORMAT,
            **made,
            "steps": step,
            "complete": step >= self.planned,
            "best": {"step": best["step"], "replay_acceptance": best["acceptance"], **replayed},
            **self.state,
            **self.given,
        }

    def files(self, step: int, best: Mapping[str, Any], which: str) -> dict[str, str | None]:
        """What lies beside a draft's weights: for `save_draft`."""
        return {TRAINING_FILE: _text(self.document(step, best, which)), PROMPTS_FILE: self.prompts}

    def write(self, step: int, best: Mapping[str, Any]) -> None:
        """training.json of the run, and the one in best/ brought up to date when it is that of the best step."""
        _replace(self.out / TRAINING_FILE, _text(self.document(step, best)))
        beside = (read_training(self.out / "best") or {}).get("draft", {})
        if best["step"] is not None and beside.get("step") == best["step"]:
            _replace(self.out / "best" / TRAINING_FILE, _text(self.document(step, best, "best")))


def training_prompts(recipe: Recipe, train_rows: Sequence[Row], say: Callable[[str], None]) -> frozenset[str] | None:
    """Hashes of all prompts that the draft is trained on, those of the draft it starts from included.

    None, said aloud, when a row or that draft does not tell: half a list would read as a clean bill.
    """
    own = {row.prompt_hash for row in train_rows}
    if None in own:
        say(f"no {PROMPTS_FILE}: the rows carry no prompt hashes; rows made by `dspark regenerate` today do")
        return None
    init = init_folder(recipe)
    if init is None:
        return frozenset(one for one in own if one is not None)
    if not (init / PROMPTS_FILE).is_file():
        say(f"no {PROMPTS_FILE}: the draft it starts from does not say which prompts it was trained on")
        return None
    return read_prompt_hashes(init / PROMPTS_FILE) | {one for one in own if one is not None}


def seen_before(recipe: Recipe, held: Sequence[Row], say: Callable[[str], None]) -> int | None:
    """How many held-out rows ask a prompt that the draft it starts from was trained on (None: it does not tell).

    Said aloud when there are any: the acceptance that chooses the checkpoint flatters the draft on them.
    """
    init = init_folder(recipe)
    if init is None:
        return 0
    if not (init / PROMPTS_FILE).is_file() or any(row.prompt_hash is None for row in held):
        return None
    trained = read_prompt_hashes(init / PROMPTS_FILE)
    seen = sum(row.prompt_hash in trained for row in held)
    if seen:
        say(f"note: the draft in {init} was trained on the prompts of {seen} of {len(held)} held-out rows")
    return seen


def init_folder(recipe: Recipe) -> Path | None:
    """The draft that training starts from, None for other first weights."""
    init = recipe.training.init
    return None if init in ("random", "target-layers") else Path(init)


def _started_from(recipe: Recipe) -> dict[str, Any] | None:
    init = init_folder(recipe)
    return None if init is None else read_training(init)


def row_file(path: Path) -> dict[str, Any]:
    """Of a row file: name, sha256, rows, answer tokens, and what `regenerate` noted beside it. None: no such file."""
    facts: dict[str, Any] = {"name": path.name, "sha256": None, "rows": None, "answer_tokens": None, "settings": None}
    if not path.is_file():
        return facts
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    rows = read_rows(path)
    notes = {name: value for name, value in row_notes(path).items() if name != "dropped"}
    tokens = sum(len(row.answer_ids) for row in rows)
    return {**facts, "sha256": digest, "rows": len(rows), "answer_tokens": tokens, "settings": notes or None}


def shippable_recipe(recipe: Recipe) -> dict[str, Any]:
    """The whole recipe, its files and folders by their names."""
    whole = recipe.model_dump(mode="json")
    for section, key in PATHS:
        whole[section][key] = _names(whole[section][key])
    return dict(without_folders(whole))


def _names(value: Any) -> Any:
    """A path, or each of several, by its name."""
    if isinstance(value, list):
        return [_names(one) for one in value]
    return value if value is None else Path(value).name


def without_folders(value: Any) -> Any:
    """A JSON value in which every text that is a path of this machine has become the file's name."""
    if isinstance(value, Mapping):
        return {key: without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    if isinstance(value, str) and "/" in value:
        absolute = value.startswith(("/", "~/")) and value.count("/") > 1
        return Path(value).name if absolute or os.path.exists(value) else value
    return value


def _hours(seconds: float | None) -> float | None:
    return None if seconds is None else seconds / 3600


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1) + "\n"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
