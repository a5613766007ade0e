"""The draft as it lies there: its config and tensors by the readers that load it, and what they had to say.

A reader stops at the first fault. Where that is a field which the file lacks and the target or the file itself tells,
it is put in, said, and reading goes on, so that one run finds more than one fault.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints.hub import draft_source
from dspark.checkpoints.qwen3 import own_object
from dspark.checkpoints.read import GGUF_SUFFIX, read_checkpoint
from dspark.doctor.facts import TargetFacts
from dspark.doctor.findings import Finding, check_of
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.kinds import Config, Draft, new_draft
from dspark.errors import DsparkError
from dspark.training.recipe import load_recipe, recipe_names

CONFIG = "config.json"


@dataclass
class DraftFacts:
    """place: its folder or file, None of a recipe. form: native, speculators, ..., eagle3, gguf, recipe (no weights),
    or "" when it could not be read at all.

    values: its config.json as it is; tensors as they are stored; unsure_layout: the file does not say which slot layout
    it has, and `config` was read as anchor-first; findings: of reading it.
    """

    name: str
    place: Path | None = None
    form: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    config: Config | None = None
    tensors: dict[str, Tensor] | None = None
    unsure_layout: bool = False
    findings: list[Finding] = field(default_factory=list)

    def build(self, dtype: torch.dtype = torch.float32, **changes: Any) -> Draft:
        """A draft of these weights, unbound; changes: config fields read otherwise (same tensors).

        Raises DsparkError when the config does not allow them.
        """
        assert self.config is not None and self.tensors is not None
        config = type(self.config)(**{**self.config.model_dump(), **changes})
        with torch.device("meta"):
            draft = new_draft(config)
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in self.tensors.items()}
        if isinstance(draft, DSparkDraft):
            draft.own_head_rows = tensors.pop("lm_head.weight", None)
        draft.load_state_dict(tensors, strict=True, assign=True)
        return draft


def read_draft(name: str, target: TargetFacts) -> DraftFacts:
    """Read a draft: `embedded`, a folder of any form, a .gguf file of ours, or a recipe's name for its config alone."""
    if name in recipe_names() and not Path(name).is_dir():
        config = load_recipe(name).draft_config()
        return DraftFacts(
            name, None, "recipe", {}, config, findings=[Finding("files", "skipped", "a recipe has no weights")]
        )
    facts = DraftFacts(name)
    try:
        facts.place = path = draft_source(name)
        if path.suffix == GGUF_SUFFIX:
            _read(path, facts)
        else:
            _read_folder(path, facts, target)
    except DsparkError as error:
        facts.findings.append(Finding(check_of(error), "broken", str(error)))
        return facts
    facts.findings.append(Finding("files", "ok", f"{facts.form} form, {len(facts.tensors or {})} tensors, all whole"))
    return facts


def _read_folder(folder: Path, facts: DraftFacts, target: TargetFacts) -> None:
    """Fill in `facts`. Raises DsparkError naming the first fault that nothing here can mend."""
    values = _values(folder)
    facts.values = values
    for _ in range(6):
        try:
            with _with_config(folder, values) as place:
                _read(place, facts)
            return
        except DsparkError as error:
            stated = _known(error, values, target)
            if stated is None:
                raise
            values = {**values, **stated}
            facts.unsure_layout |= "sample_from_anchor" in stated
            facts.findings.append(_lacking(error, stated))
    raise DsparkError("draft", str(folder), "lacks too much of its config.json; get the checkpoint again")


def _read(source: Path, facts: DraftFacts) -> None:
    read = read_checkpoint(source)
    facts.form, facts.config, facts.tensors = read.form, read.config, dict(read.tensors)
    facts.findings += [Finding("config", "note", note) for note in read.notes]


def _values(folder: Path) -> dict[str, Any]:
    """config.json. Raises DsparkError."""
    if not folder.is_dir():
        raise DsparkError("draft", str(folder), "is no folder; give a draft folder, a .gguf file or `embedded`")
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DsparkError("draft", str(folder), f"has no {CONFIG} that can be read ({error})") from None
    if not isinstance(values, dict):
        raise DsparkError(CONFIG, str(folder / CONFIG), "must hold one JSON object")
    return values


@contextmanager
def _with_config(folder: Path, values: Mapping[str, Any]) -> Iterator[Path]:
    """The folder itself, or one with these values for config.json and links to its other files."""
    if values == _values(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        (place / CONFIG).write_text(json.dumps(values), encoding="utf-8")
        for file in folder.iterdir():
            if file.name != CONFIG:
                (place / file.name).symlink_to(file.absolute())
        yield place


def _known(error: DsparkError, values: Mapping[str, Any], target: TargetFacts) -> dict[str, Any] | None:
    """What can be said for a field that the file lacks; None when nothing can, or when something else is wrong."""
    name = error.field
    if error.value is not None or values.get(name) is not None or own_object(values).get(name) is not None:
        return None
    layer = values.get("transformer_layer_config")
    inner = layer if isinstance(layer, Mapping) else values
    found = {
        "sample_from_anchor": True,
        "target_name": target.name,
        "num_target_layers": target.depth,
        "training_length": inner.get("max_position_embeddings"),
    }.get(name)
    return None if found is None else {name: found}


def _lacking(error: DsparkError, stated: Mapping[str, Any]) -> Finding:
    """What a lacking field means."""
    (name, value), check = next(iter(stated.items())), check_of(error)
    if name == "sample_from_anchor":
        return Finding(check, "broken", str(error))
    remedy = f"is not stated by the file; taken to be {value!r} here; dspark convert --state {name}=... puts it in"
    return Finding(check, "note", f"{name} {remedy}")
