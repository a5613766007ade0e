"""Captured states are the target's own, on disk and in memory; broken ones are refused before anything is trained."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dspark.data.rows import Row
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training.features import (
    CachedFeatures,
    Features,
    FeatureWriter,
    InProcessFeatures,
    cache_features,
    check_disk,
    check_features,
    estimate_bytes,
    verify_features,
)

TAPS = (1, 3)


@pytest.fixture
def source(target: TransformersTarget) -> InProcessFeatures:
    return InProcessFeatures(target, TAPS)


@pytest.fixture
def folder(tmp_path: Path, target: TransformersTarget, source: InProcessFeatures, rows: list[Row]) -> Path:
    with FeatureWriter(tmp_path / "f", target, TAPS, "fp32", shard_bytes=20_000) as writer:
        for row in rows:
            writer.add(row, source.get(row))
    return tmp_path / "f"


def test_in_process_features_are_the_models_own_hidden_states(
    target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    """Transformers' own `output_hidden_states` is the witness: entry id + 1 is the output of layer id."""
    row = rows[3]
    features = source.get(row)
    target.model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([row.ids[:-1]])
        with torch.no_grad():
            out = target.model(ids, output_hidden_states=True, use_cache=False)
    finally:
        target.model.set_attn_implementation("dspark_ragged")
    assert torch.allclose(features.taps[:, :32], out.hidden_states[2][0], atol=1e-5)
    answer = len(row.prompt_ids) - 1
    assert torch.allclose(features.lse[answer:], out.logits[0, answer:].logsumexp(-1), atol=1e-5)
    assert not features.lse[:answer].any()
    assert torch.allclose(target.head(features.last_hidden), out.logits[0], atol=1e-4)


def test_disk_gives_back_what_was_written(folder: Path, source: InProcessFeatures, rows: list[Row]) -> None:
    cached = CachedFeatures(folder)
    assert len(list(folder.glob("shard-*.safetensors"))) > 1 and not list(folder.glob("*.tmp"))
    for row in rows:
        a, b = cached.get(row), source.get(row)
        assert torch.equal(a.taps, b.taps) and torch.equal(a.last_hidden, b.last_hidden)
        assert torch.allclose(a.lse, b.lse, atol=1e-5)


def test_written_size_is_the_estimate(
    tmp_path: Path, target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    for dtype in ("bf16", "fp32"):
        with FeatureWriter(tmp_path / dtype, target, TAPS, dtype) as writer:
            cache_features(source, rows, writer, say=lambda _: None)
        (shard,) = (tmp_path / dtype).glob("shard-*.safetensors")
        header = int.from_bytes(shard.read_bytes()[:8], "little") + 8
        assert shard.stat().st_size - header == estimate_bytes(rows, len(TAPS), target.hidden_size, dtype)


def test_a_capture_of_the_engine_is_the_same_as_a_pass_alone(
    tmp_path: Path, target: TransformersTarget, rows: list[Row]
) -> None:
    """Rows captured in a ragged batch of four against each row alone."""
    requests = [Request(row.prompt_ids, max_tokens=len(row.answer_ids), ignore_eos=True) for row in rows]
    taken: dict[int, tuple[Tensor, Tensor]] = {}
    engine = Engine(target, max_batch=4, capture_taps=TAPS)
    list(engine.run(requests, lambda index, taps, last: taken.update({index: (taps, last)})))
    with FeatureWriter(tmp_path / "f", target, TAPS, "bf16") as writer:
        for index, row in enumerate(rows):
            writer.write(row, *taken[index])
    cached = CachedFeatures(tmp_path / "f")
    for row in rows:
        assert max(verify_features(target, row, cached.get(row), TAPS).values()) < 1e-2
    # p sums to one exactly as it is read back, although the states were rounded
    features = cached.get(rows[0])
    answer = len(rows[0].prompt_ids) - 1
    mass = (target.head(features.last_hidden) - features.lse[:, None])[answer:].exp().sum(-1)
    assert torch.allclose(mass, torch.ones_like(mass), atol=1e-5)


def test_verification_catches_what_goes_wrong(
    target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    row = rows[5]
    good = source.get(row)
    assert max(verify_features(target, row, good, TAPS).values()) < 1e-5
    off_by_one = InProcessFeatures(target, (0, 2)).get(row)
    with pytest.raises(DsparkError, match="tap 1"):
        verify_features(target, row, Features(off_by_one.taps, good.last_hidden, good.lse), TAPS)
    normed = target._decoder.norm(good.last_hidden)
    with pytest.raises(DsparkError, match="logits"):  # this target's final norm has a weight that is not one
        verify_features(target, row, Features(good.taps, normed * 1.5 + 0.5, good.lse), TAPS)
    shifted = Features(good.taps.roll(1, 0), good.last_hidden.roll(1, 0), good.lse.roll(1, 0))
    with pytest.raises(DsparkError, match="logits"):
        verify_features(target, row, shifted, TAPS)


@pytest.mark.parametrize("part", ["taps", "last_hidden", "lse"])
def test_broken_states_are_refused(part: str, source: InProcessFeatures, rows: list[Row]) -> None:
    row = rows[0]
    features = source.get(row)
    getattr(features, part)[1] = float("inf")
    with pytest.raises(DsparkError, match=f"{part}.*non-finite"):
        check_features(row, features, 2, 32)
    features = source.get(row)
    with pytest.raises(DsparkError, match="must have shape"):
        check_features(row, features.head(2), 2, 32)
    if part != "lse":
        states = getattr(features, part)
        states[:, -32:] = 0.0
        with pytest.raises(DsparkError, match="zero variance"):
            check_features(row, features, 2, 32)


def test_writing_goes_on_after_a_kill(
    folder: Path, target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    """A shard the index does not name yet is overwritten; rows that are there are not computed again."""
    index = json.loads((folder / "index.json").read_text())
    last = max(entry["shard"] for entry in index["rows"].values())
    lost = [row_id for row_id, entry in index["rows"].items() if entry["shard"] == last]
    for row_id in lost:
        del index["rows"][row_id]
    (folder / "index.json").write_text(json.dumps(index))
    (folder / last).write_bytes(b"half a shard")
    with FeatureWriter(folder, target, TAPS, "fp32") as writer:
        assert cache_features(source, rows, writer, say=lambda _: None) == len(lost)
    cached = CachedFeatures(folder)
    for row in rows:
        assert torch.equal(cached.get(row).taps, source.get(row).taps)


def test_other_features_are_refused(folder: Path, target: TransformersTarget, rows: list[Row]) -> None:
    cached = CachedFeatures(folder)
    cached.expect(target.name, TAPS, 32, 4)
    for change, field in (
        (("another", TAPS, 32, 4), "target"),
        ((target.name, (1, 2), 32, 4), "taps"),
        ((target.name, TAPS, 64, 4), "hidden_size"),
        ((target.name, TAPS, 32, 5), "num_layers"),
    ):
        with pytest.raises(DsparkError, match=f"features.{field}"):
            cached.expect(*change)
    with pytest.raises(DsparkError, match=r"features\.dtype"):
        FeatureWriter(folder, target, TAPS, "bf16")
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "target_dtype": "bfloat16"}))
    with pytest.raises(DsparkError, match=r"features\.target_dtype = 'bfloat16'.*other features than 'float32'"):
        FeatureWriter(folder, target, TAPS, "fp32")
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DsparkError, match=r"features\.taps"):
        FeatureWriter(folder, target, (0, 3), "fp32")
    with pytest.raises(DsparkError, match="has no row"):
        cached.get(rows[0].model_copy(update={"id": "unknown"}))
    shorter = rows[0].model_copy(update={"answer_ids": rows[0].answer_ids[:-1]})
    edited = rows[0].model_copy(update={"answer_ids": [*rows[0].answer_ids[:-1], 5]})
    turned = rows[0].model_copy(update={"prompt_ids": rows[0].ids[:-1], "answer_ids": rows[0].ids[-1:]})
    for changed in (shorter, edited, turned):
        assert changed not in cached
        with pytest.raises(DsparkError, match=r"holds features of other ids under this id.*capture again"):
            cached.get(changed)


def test_a_row_that_was_changed_is_captured_again(
    folder: Path, source: InProcessFeatures, target: TransformersTarget, rows: list[Row]
) -> None:
    """The states of the old ids stay in their shard, unread; the other rows keep theirs."""
    edited = rows[1].model_copy(update={"answer_ids": [*rows[1].answer_ids[:-1], 5, 6]})
    now = [rows[0], edited, *rows[2:]]
    with FeatureWriter(folder, target, TAPS, "fp32") as writer:
        assert cache_features(source, now, writer, say=lambda _: None) == 1
        assert cache_features(source, now, writer, say=lambda _: None) == 0
    cached = CachedFeatures(folder)
    for row in now:
        assert torch.equal(cached.get(row).taps, source.get(row).taps)


def test_damaged_folders_are_refused(folder: Path, rows: list[Row], tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match=r"no index\.json"):
        CachedFeatures(tmp_path / "nothing")
    entry = CachedFeatures(folder).index["rows"][rows[0].id]
    (folder / entry["shard"]).write_bytes(b"not safetensors")
    with pytest.raises(DsparkError, match="cannot be read"):
        CachedFeatures(folder).get(rows[0])
    index = CachedFeatures(folder).index
    (folder / "index.json").write_text(json.dumps({**index, "format": 1}))
    with pytest.raises(DsparkError, match=r"older version.*capture again"):
        CachedFeatures(folder)
    for damage in ({"rows": []}, {"rows": {rows[0].id: 3}}, {"taps": None}):
        (folder / "index.json").write_text(json.dumps({**index, **damage}))
        with pytest.raises(DsparkError, match="damaged"):
            CachedFeatures(folder)
    (folder / "index.json").write_text("{")
    with pytest.raises(DsparkError, match="not valid JSON"):
        CachedFeatures(folder)


def test_a_short_disk_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10 * 2**30, 0, 10 * 2**30))
    check_disk(tmp_path / "new" / "folder", 9 * 2**30, told.append)
    assert "9.00 GiB" in told[0] and "10.0 GiB free" in told[0]
    with pytest.raises(DsparkError, match=r"needs 11\.00 GiB"):
        check_disk(tmp_path, 11 * 2**30, told.append)


def test_a_folder_has_one_writer_at_a_time(
    source: InProcessFeatures, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    with FeatureWriter(tmp_path / "f", target, source.taps) as writer:
        with pytest.raises(DsparkError, match=r"features = .*being written by another run"):
            FeatureWriter(tmp_path / "f", target, source.taps)
        writer.add(rows[0], source.get(rows[0]))
    with pytest.raises(DsparkError, match=r"features\.taps"):
        FeatureWriter(tmp_path / "f", target, (0,))
    with FeatureWriter(tmp_path / "f", target, source.taps) as writer:  # a refused one lets it go
        assert rows[0] in writer
