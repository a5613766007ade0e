"""training.json and the prompts' hashes: what they say, that they survive a resume, and that they name no folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark.checkpoints.native import PROMPTS_FILE, TRAINING_FILE
from dspark.checkpoints.record import read_training
from dspark.data.prompts import prompt_hash, read_prompt_hashes
from dspark.data.rows import Row, notes_path, write_rows
from dspark.targets.transformers import TransformersTarget
from dspark.training.batches import split_rows
from dspark.training.features import InProcessFeatures
from dspark.training.provenance import CURVE, row_file, without_folders
from dspark.training.recipe import Recipe
from dspark.training.state import SavedState
from dspark.training.trainer import train

Make = Callable[..., Recipe]


@pytest.fixture
def hashed(rows: list[Row]) -> list[Row]:
    return [row.model_copy(update={"prompt_hash": prompt_hash(f"{row.source}/{row.turn}")}) for row in rows]


@pytest.fixture
def given(target: TransformersTarget, hashed: list[Row], quiet: Console) -> dict[str, Any]:
    return {"target": target, "source": InProcessFeatures(target, (1, 3)), "rows": hashed, "console": quiet}


@pytest.fixture
def files(hashed: list[Row], target: TransformersTarget, tmp_path: Path) -> dict[str, Any]:
    """The rows in two files, the first with notes that hold a path."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    write_rows(one, hashed[:5])
    write_rows(two, hashed[5:])
    notes = {"target": target.name, "settings": {"max_tokens": 9}, "made_in": str(tmp_path), "dropped": {"a": "b"}}
    notes_path(one).write_text(json.dumps(notes))
    return {"rows": [str(one), str(two)], "features": str(tmp_path / "features")}


def test_a_resumed_run_tells_all_of_it(make_recipe: Make, given: dict[str, Any], files: dict[str, Any]) -> None:
    recipe = make_recipe(data=files, seed=3)
    out = Path(recipe.training.out)
    train(recipe, stop_after=2, **given)
    first = read_training(out)
    assert first is not None and (first["steps"], first["complete"], len(first["curve"])) == (2, False, 1)
    train(recipe, resume=True, **given)
    whole, best, last = (read_training(folder) for folder in (out, out / "best", out / "last"))
    assert whole is not None and best is not None and last is not None
    assert (whole["steps"], whole["complete"], whole["seed"], whole["compute_dtype"]) == (4, True, 3, "fp32")
    assert whole["seconds"] > first["seconds"] > first["validation_seconds"] > 0
    assert whole["validation_seconds"] > first["validation_seconds"]
    assert [point["step"] for point in whole["curve"]] == [2, 4] and whole["curve"][0] == first["curve"][0]
    assert 0 < whole["curve"][0]["hours"] < whole["curve"][1]["hours"] <= whole["seconds"] / 3600
    assert all(point[key] is not None for point in whole["curve"] for key in CURVE)
    saved = SavedState(out).best
    assert (whole["best"]["step"], whole["best"]["replay_acceptance"]) == (saved["step"], saved["acceptance"])
    assert (whole["best"]["n"], whole["best"]["rows"], len(whole["machines"])) == (4, 2, 1)
    assert "torch" in whole["machines"][0]
    for other, which, step in ((best, "best", saved["step"]), (last, "last", 4)):
        assert other["draft"]["which"] == which and other["draft"]["step"] == step and other["draft"]["hours"] > 0
        assert other["recipe"] == whole["recipe"] and other["curve"] == whole["curve"] and other["steps"] == 4


def test_rows_are_named_and_no_folder_is(
    make_recipe: Make, given: dict[str, Any], files: dict[str, Any], hashed: list[Row], tmp_path: Path
) -> None:
    recipe = make_recipe(data=files, steps=2)
    train(recipe, **given)
    text = (Path(recipe.training.out) / "best" / TRAINING_FILE).read_text()
    assert str(tmp_path) not in text and "/" not in json.loads(text)["recipe"]["target"]
    record = json.loads(text)
    (one, two), here = record["rows"], tmp_path.name
    assert (one["name"], one["rows"], two["rows"]) == ("one.jsonl", 5, len(hashed) - 5)
    assert one["answer_tokens"] == sum(len(row.answer_ids) for row in hashed[:5])
    assert two["sha256"] == hashlib.sha256((tmp_path / "two.jsonl").read_bytes()).hexdigest()
    assert one["settings"] == {"target": record["recipe"]["target"], "settings": {"max_tokens": 9}, "made_in": here}
    assert two["settings"] is None
    train_rows, held = split_rows(hashed, recipe.data)
    assert (record["training_rows"], record["held_out_rows"]) == (len(train_rows), len(held))
    for folder in ("best", "last"):
        hashes = read_prompt_hashes(Path(recipe.training.out) / folder / PROMPTS_FILE)
        assert hashes == {row.prompt_hash for row in train_rows}
        assert not hashes & {row.prompt_hash for row in held}


def test_the_chain_of_drafts_and_all_their_prompts(make_recipe: Make, given: dict[str, Any], hashed: list[Row]) -> None:
    first = make_recipe("first", steps=2)
    train(first, **given)
    init = Path(first.training.out) / "last"
    shared = {"init": str(init), "steps": 2}
    second = make_recipe("second", **shared)
    renamed = [row.model_copy(update={"prompt_hash": prompt_hash("new" + row.id)}) for row in hashed]
    train(second, **{**given, "rows": renamed})
    record = read_training(Path(second.training.out) / "last")
    assert record is not None and record["started_from"] == read_training(init)
    assert record["started_from"]["started_from"] is None and record["recipe"]["training"]["init"] == "last"
    new = {row.prompt_hash for row in split_rows(renamed, second.data)[0]}
    hashes = read_prompt_hashes(Path(second.training.out) / "last" / PROMPTS_FILE)
    assert hashes == new | read_prompt_hashes(init / PROMPTS_FILE)
    assert record["held_out_rows_seen_before"] == 0  # none of the renamed prompts was

    told = StringIO()
    wider = make_recipe("wider", data={"held_out": 4}, **shared)
    train(wider, **{**given, "console": Console(file=told, width=200)})
    before = {row.source for row in split_rows(hashed, first.data)[1]}
    held = split_rows(hashed, wider.data)[1]
    seen = sum(row.source not in before for row in held)
    record = read_training(Path(wider.training.out) / "last")
    assert record is not None and record["held_out_rows_seen_before"] == seen > 0
    assert f"was trained on the prompts of {seen} of {len(held)} held-out rows" in told.getvalue()

    (init / PROMPTS_FILE).unlink()  # now nobody knows what the draft has seen: silence, not half a list
    third = make_recipe("third", **shared)
    train(third, **given)
    assert not (Path(third.training.out) / "last" / PROMPTS_FILE).exists()


def test_rows_without_hashes_leave_no_list(
    make_recipe: Make, given: dict[str, Any], hashed: list[Row], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(steps=2)
    stale = Path(recipe.training.out) / "last" / PROMPTS_FILE
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    mixed = [*hashed[:-1], hashed[-1].model_copy(update={"prompt_hash": None})]
    for index in range(len(mixed)):  # whichever row is held out, one of the trained ones has none
        mixed[index] = mixed[index] if index % 2 else mixed[index].model_copy(update={"prompt_hash": None})
    train(recipe, **{**given, "rows": mixed, "console": Console(width=200)})
    assert "carry no prompt hashes" in capsys.readouterr().out
    for folder in (".", "best", "last"):
        assert not (Path(recipe.training.out) / folder / PROMPTS_FILE).exists()


def test_a_state_from_before_there_were_records_is_resumed_with_hours_unknown(
    make_recipe: Make, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe()
    train(recipe, stop_after=2, **given)
    old = SavedState.__init__

    def without_record(self: SavedState, out: str) -> None:
        old(self, out)
        self.record = None

    monkeypatch.setattr(SavedState, "__init__", without_record)
    train(recipe, resume=True, **given)
    record = read_training(recipe.training.out)
    assert record is not None and record["seconds"] is None and record["curve"][-1]["hours"] is None


def test_paths_and_what_only_looks_like_one(tmp_path: Path) -> None:
    value = {"a": [str(tmp_path / "x.jsonl"), "org/model", "/no_think", "https://a.b/c", 3], "b": {"c": "~/one/two"}}
    kept = {"a": ["x.jsonl", "org/model", "/no_think", "https://a.b/c", 3], "b": {"c": "two"}}
    assert without_folders(value) == kept


def test_rows_from_elsewhere_have_no_file_facts() -> None:
    facts = row_file(Path("gone/rows.jsonl"))
    assert facts == {"name": "rows.jsonl", "sha256": None, "rows": None, "answer_tokens": None, "settings": None}
