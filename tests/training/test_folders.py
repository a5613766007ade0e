"""Features from several folders and of some of the stored taps are what the target itself would give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark.data.rows import Row
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training.features import CachedFeatures, FeatureWriter, InProcessFeatures
from dspark.training.folders import open_folders
from dspark.training.recipe import Recipe
from dspark.training.setup import open_features

STORED = (0, 1, 2)


def silent(_: str) -> None:
    return None


@pytest.fixture
def folder(tmp_path: Path, target: TransformersTarget, rows: list[Row]) -> Path:
    return write(tmp_path / "first", target, rows[:4])


def write(folder: Path, target: TransformersTarget, rows: list[Row], taps: tuple[int, ...] = STORED) -> Path:
    source = InProcessFeatures(target, taps)
    with FeatureWriter(folder, target, taps, "fp32") as writer:
        for row in rows:
            writer.add(row, source.get(row))
    return folder


@pytest.mark.parametrize("taps", [(1,), (2, 0), (3,), (3, 1), (0, 1, 2, 3), STORED])
def test_chosen_taps_are_those_of_a_pass_of_the_target(
    taps: tuple[int, ...], folder: Path, target: TransformersTarget, rows: list[Row]
) -> None:
    """The last layer's output, 3, is never stored as a tap: it is the last hidden state."""
    cached = CachedFeatures(folder)
    cached.expect(target.name, taps, target.hidden_size, target.num_layers)
    assert cached.taps == taps
    read, computed = cached.get(rows[2]), InProcessFeatures(target, taps).get(rows[2])
    assert torch.equal(read.taps, computed.taps) and torch.equal(read.last_hidden, computed.last_hidden)


def test_a_tap_that_is_not_there_is_named(folder: Path, target: TransformersTarget, tmp_path: Path) -> None:
    other = write(tmp_path / "other", target, [], taps=(1, 2))
    with pytest.raises(DsparkError, match=r"taps = \[1, 2\].*lacks taps \[0\]"):
        CachedFeatures(other).expect(target.name, (0, 1, 3), target.hidden_size, target.num_layers)


def test_a_row_is_looked_up_in_whichever_folder_has_it(
    folder: Path, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    second = write(tmp_path / "second", target, rows[4:8])
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    source = open_folders([str(folder), str(second)], target, (2, 0), "bf16", rows[:8], silent)
    for row in (rows[0], rows[7]):
        assert torch.equal(source.get(row).taps, InProcessFeatures(target, (2, 0)).get(row).taps)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    with pytest.raises(DsparkError, match="has no row"):
        source.get(rows[9])


def test_missing_rows_go_to_the_first_folder_with_all_its_taps(
    folder: Path, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    second = write(tmp_path / "second", target, rows[4:8])
    told: list[str] = []
    source = open_folders([str(folder), str(second)], target, (2,), "bf16", rows, told.append)
    assert all(row in source for row in rows) and any("0/4 rows" in line for line in told)
    first = CachedFeatures(folder)
    assert len(first.index["rows"]) == 8 and len(CachedFeatures(second).index["rows"]) == 4
    assert torch.equal(first.get(rows[9]).taps, InProcessFeatures(target, STORED).get(rows[9]).taps)


def test_a_new_first_folder_takes_after_the_others(
    folder: Path, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    open_folders([str(tmp_path / "new"), str(folder)], target, (1,), "bf16", rows[:5], silent)
    index = CachedFeatures(tmp_path / "new").index
    assert (index["taps"], index["dtype"], list(index["rows"])) == (list(STORED), "fp32", [rows[4].id])
    with pytest.raises(DsparkError, match=r"no index\.json"):
        open_folders([str(folder), str(tmp_path / "nowhere")], target, (1,), "bf16", rows[:4], silent)


@pytest.mark.parametrize(("field", "value"), [("taps", [0, 1]), ("dtype", "bf16")])
def test_folders_that_differ_are_refused(
    field: str, value: object, folder: Path, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    second = write(tmp_path / "second", target, rows[4:8])
    index = json.loads((second / "index.json").read_text())
    (second / "index.json").write_text(json.dumps({**index, field: value}))
    with pytest.raises(DsparkError, match=rf"features\.{field}.*second must agree"):
        open_folders([str(folder), str(second)], target, (1,), "bf16", rows[:8], silent)
    (second / "index.json").write_text(json.dumps({**index, "target": "another"}))
    with pytest.raises(DsparkError, match=r"features\.target"):
        open_folders([str(folder), str(second)], target, (1,), "bf16", rows[:8], silent)


def test_a_recipe_names_one_folder_or_several(
    make_recipe: Callable[..., Recipe], folder: Path, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    second = write(tmp_path / "second", target, rows[4:])
    one = make_recipe(data={"features": str(folder)})
    assert one.data.features == (str(folder),) and make_recipe().data.features is None
    both = make_recipe(data={"features": [str(folder), str(second)]})
    told: list[str] = []
    source = open_features(both, target, rows, told.append)  # the recipe's taps 1 and 3, verified against a fresh pass
    assert source.taps == (1, 3) and len(told) == 2 and all("agree" in line for line in told)
