"""The run as a whole: exact resume, the last good checkpoint, fixed validation, figures."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.drafts.conftest import MLA

from dspark.checkpoints.native import load_draft
from dspark.data.rows import Row
from dspark.decoding.request import Round
from dspark.errors import DsparkError
from dspark.locks import lock_for_writing
from dspark.targets.transformers import TransformersTarget
from dspark.training.batches import Batches, Reader, cut, split_rows
from dspark.training.features import CachedFeatures, Features, FeatureWriter, InProcessFeatures
from dspark.training.loss import slot_weights
from dspark.training.recipe import Recipe
from dspark.training.state import STATE_NAME, SavedState
from dspark.training.trainer import learning_rate, train
from dspark.training.validation import replay_acceptance

Make = Callable[..., Recipe]
TAPS = (1, 3)


@pytest.fixture
def source(target: TransformersTarget) -> InProcessFeatures:
    return InProcessFeatures(target, TAPS)


def records(out: str, kind: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.parametrize("draft", [{}, {"markov_head_type": "rnn"}, {**MLA, "q_lora_rank": 16}])
def test_four_steps_are_two_and_two(
    make_recipe: Make,
    target: TransformersTarget,
    source: InProcessFeatures,
    rows: list[Row],
    quiet: Console,
    draft: dict[str, Any],
) -> None:
    whole, parts = make_recipe("whole", draft=draft), make_recipe("parts", draft=draft)
    given = {"target": target, "source": source, "rows": rows, "console": quiet}
    first = train(whole, **given)
    stopped = train(parts, stop_after=2, **given)
    assert stopped.interrupted and stopped.steps == 2 and SavedState(parts.training.out).step == 2
    second = train(parts, resume=True, **given)
    assert (first.steps, first.interrupted) == (second.steps, second.interrupted) == (4, False)
    a, b = SavedState(whole.training.out), SavedState(parts.training.out)
    assert a.tensors.keys() == b.tensors.keys() and a.best == b.best and a.draft_ids == b.draft_ids
    assert any(name.startswith("exp_avg_sq.") for name in a.tensors)
    for name, tensor in a.tensors.items():
        assert torch.equal(tensor, b.tensors[name]), name
    timings = {"tokens_per_s", "blocks_per_s", "step_s", "step_cpu_s", "data_wait_s", "data_wait_share"}
    for kind in ("train", "validation"):
        for one, other in zip(records(whole.training.out, kind), records(parts.training.out, kind), strict=True):
            assert {k: v for k, v in one.items() if k not in timings} == {
                k: v for k, v in other.items() if k not in timings
            }


def test_a_folder_is_trained_into_by_one_run_at_a_time_and_a_finished_one_says_so(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    recipe, told = make_recipe(steps=2), StringIO()
    given = {"target": target, "source": source, "rows": rows, "console": Console(file=told, width=200)}
    with (
        lock_for_writing(recipe.training.out, "training.out"),
        pytest.raises(DsparkError, match=r"training\.out = .*being written by another run"),
    ):
        train(recipe, **given)
    assert not Path(recipe.training.out).exists()
    train(recipe, **given)
    assert "nothing to do" not in told.getvalue()
    assert train(recipe, resume=True, **given).steps == 2
    assert "nothing to do: step 2 of 2 was reached before" in told.getvalue()


def test_each_step_moves_every_parameter_that_can_move(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    recipe = make_recipe(steps=2, save_every=1)
    train(recipe, target=target, source=source, rows=rows, console=quiet, stop_after=1)
    before = SavedState(recipe.training.out)
    train(recipe, target=target, source=source, rows=rows, console=quiet, resume=True)
    after = SavedState(recipe.training.out)
    moved = {
        n for n, t in before.tensors.items() if n.startswith("parameter.") and not torch.equal(t, after.tensors[n])
    }
    assert moved == {name for name in before.tensors if name.startswith("parameter.")}


def test_training_learns_and_keeps_the_best_by_replay(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    recipe = make_recipe(steps=40, validate_every=10, replay_rows=4, data={"held_out": 3})
    result = train(recipe, target=target, source=source, rows=rows, console=quiet)
    losses = [record["loss"] for record in records(recipe.training.out, "train")]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    replayed = {record["step"]: record["replay_acceptance"] for record in records(recipe.training.out, "validation")}
    assert list(replayed) == [10, 20, 30, 40]
    assert result.acceptance == max(replayed.values())
    best = load_draft(result.best)
    assert best.config.training_length == max(len(row.ids) for row in split_rows(rows, recipe.data)[0])
    assert best.draft_ids.tolist() == SavedState(recipe.training.out).draft_ids


def test_bf16_compute_keeps_fp32_masters(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    recipe = make_recipe(compute_dtype="bf16")
    train(recipe, target=target, source=source, rows=rows, console=quiet)
    assert all(t.dtype == torch.float32 for n, t in SavedState(recipe.training.out).tensors.items() if n != "draft_ids")
    assert all(math.isfinite(record["loss"]) for record in records(recipe.training.out, "train"))


def test_a_run_is_not_overwritten(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    given = {"target": target, "source": source, "rows": rows, "console": quiet}
    train(make_recipe(), stop_after=2, **given)
    with pytest.raises(DsparkError, match="holds a run already"):
        train(make_recipe(), **given)
    with pytest.raises(DsparkError, match=r"training\.lr"):
        train(make_recipe(lr=5e-3), resume=True, **given)
    with pytest.raises(DsparkError, match=r"draft\.block_size"):
        train(make_recipe(draft={"block_size": 3}), resume=True, **given)
    with pytest.raises(DsparkError, match="other rows"):
        train(make_recipe(), resume=True, **{**given, "rows": rows[1:]})
    train(make_recipe(log_every=3), resume=True, **given)  # how often it reports is free to change


class _Poisoned:
    """Real features, except that from one row on they are broken."""

    def __init__(self, source: InProcessFeatures, bad: set[str]) -> None:
        self.source, self.bad, self.taps = source, bad, source.taps

    def get(self, row: Row) -> Features:
        features = self.source.get(row)
        if row.id in self.bad:
            features.taps[0] = float("nan")
        return features


def test_the_first_non_finite_value_stops_the_run_and_keeps_the_checkpoint(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    recipe = make_recipe(steps=6, accumulation=1, rows_per_step=1, save_every=1)
    train_rows, _ = split_rows(rows, recipe.data)
    order = Batches(train_rows, source, recipe.data, recipe.training, 4)
    bad = order.full_rows(3, 0)[0].id
    with pytest.raises(DsparkError, match=f"step 4 .*first in gradient of .*rows {bad}") as error:
        train(recipe, target=target, source=_Poisoned(source, {bad}), rows=rows, console=quiet)
    assert "last good checkpoint" in str(error.value)
    assert SavedState(recipe.training.out).step == 3
    load_draft(Path(recipe.training.out) / "last")


def test_a_reader_fault_reaches_the_caller(
    make_recipe: Make, target: TransformersTarget, rows: list[Row], quiet: Console, tmp_path: Path
) -> None:
    recipe = make_recipe(validation_rows=0, replay_rows=0)
    with FeatureWriter(tmp_path / "features", target, TAPS) as writer:
        writer.add(rows[0], InProcessFeatures(target, TAPS).get(rows[0]))
    with pytest.raises(DsparkError, match="has no row"):
        train(recipe, target=target, source=CachedFeatures(tmp_path / "features"), rows=rows, console=quiet)
    assert not [thread for thread in threading.enumerate() if thread.name == "reader"]


def test_an_interrupt_saves_and_the_run_goes_on(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    recipe = make_recipe(steps=100_000, validate_every=0, save_every=0)

    def interrupt_after_some_steps() -> None:
        metrics = Path(recipe.training.out) / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt_after_some_steps, daemon=True).start()
    before = signal.getsignal(signal.SIGINT)
    result = train(recipe, target=target, source=source, rows=rows, console=quiet)
    assert result.interrupted and 0 < result.steps < 100_000
    assert SavedState(recipe.training.out).step == result.steps
    assert signal.getsignal(signal.SIGINT) is before
    again = train(
        recipe, target=target, source=source, rows=rows, console=quiet, resume=True, stop_after=result.steps + 1
    )
    assert again.steps == result.steps + 1


def test_accumulation_pools_the_loss(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    recipe = make_recipe(rows_per_step=1, accumulation=3)
    train_rows, _ = split_rows(rows, recipe.data)
    parts = list(Batches(train_rows, source, recipe.data, recipe.training, 4).micro_batches(5))
    weight = sum(float(slot_weights(part.plan.anchors.mask, 4.0).sum()) for part in parts)
    assert [part.last for part in parts] == [False, False, True]
    assert [part.scale for part in parts] == pytest.approx([1 / weight] * 3)


def test_rows_and_anchors_depend_on_seed_and_step_only(
    make_recipe: Make, source: InProcessFeatures, rows: list[Row]
) -> None:
    recipe = make_recipe()
    train_rows, held = split_rows(rows, recipe.data)
    batches = Batches(train_rows, source, recipe.data, recipe.training, 4)
    straight = [b for step in range(6) for b in batches.micro_batches(step)]
    fresh = Batches(train_rows, source, recipe.data, recipe.training, 4)
    jumped = list(fresh.micro_batches(5))
    for a, b in zip(straight[-2:], jumped, strict=True):
        assert [r.id for r in a.plan.rows] == [r.id for r in b.plan.rows]
        assert torch.equal(a.plan.anchors.anchor_index, b.plan.anchors.anchor_index)
        assert torch.equal(a.taps, b.taps)
    other = Batches(train_rows, source, recipe.data, make_recipe(seed=1).training, 4)
    assert any(
        [r.id for r in a.plan.rows] != [r.id for r in b.plan.rows]
        for a, b in zip(straight[-2:], other.micro_batches(5), strict=True)
    )
    epoch = [row.id for step in range(3) for micro in range(2) for row in batches.full_rows(step, micro)]
    assert sorted(epoch[: len(train_rows)]) == sorted(row.id for row in train_rows)
    assert not {row.source for row in train_rows} & {row.source for row in held}


def test_packed_features_lie_under_their_tokens(make_recipe: Make, source: InProcessFeatures, rows: list[Row]) -> None:
    recipe = make_recipe(data={"max_length": 14})
    train_rows, _ = split_rows(rows, recipe.data)
    (batch, _) = Batches(train_rows, source, recipe.data, recipe.training, 4).micro_batches(0)
    start = 0
    for row in batch.plan.rows:
        whole = next(r for r in rows if r.id == row.id)
        assert len(row.ids) == min(14, len(whole.ids))
        expected = source.get(whole)
        length = len(row.ids) - 1
        assert torch.equal(batch.taps[start : start + length], expected.taps[:length])
        assert torch.equal(batch.lse[start : start + length], expected.lse[:length])
        assert not batch.last_hidden[start + length].any()
        start += length + 1
    assert int(batch.plan.anchors.label_positions[batch.plan.anchors.mask].max()) < start - 1


def test_cut_rows_have_no_stop_label(rows: list[Row]) -> None:
    row = rows[0].model_copy(update={"finish": "stop"})
    assert cut(row, len(row.ids)) is row
    short = cut(row, len(row.ids) - 2)
    assert short.finish == "length" and short.ids == row.ids[:-2]


def test_the_reader_stops_when_nobody_reads(make_recipe: Make, source: InProcessFeatures, rows: list[Row]) -> None:
    recipe = make_recipe()
    train_rows, _ = split_rows(rows, recipe.data)
    reader = Reader(Batches(train_rows, source, recipe.data, recipe.training, 4), 0, 1000)
    assert next(iter(reader)).step == 0
    reader.close()
    assert not reader._thread.is_alive()


def test_learning_rate_warms_up_and_decays(make_recipe: Make) -> None:
    training = make_recipe(steps=100, warmup=0.1, lr=1.0, min_lr_ratio=0.2).training
    rates = [learning_rate(step, training) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == 1.0 and rates[10] == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.2)
    assert learning_rate(4, make_recipe(steps=100, warmup=5, lr=1.0).training) == 1.0


def test_replay_acceptance_is_macro_over_prompts(rows: list[Row]) -> None:
    two_turns, single = rows[:2], rows[4]
    assert two_turns[0].source == two_turns[1].source
    records = [[Round(4, 4, 4), Round(4, 4, 2)], [Round(4, 4, 0)], [Round(4, 4, 1), Round(4, 2, 2)]]
    macro, slots = replay_acceptance([*two_turns, single], records)
    assert macro == pytest.approx(((4.0 + 1.0) / 2 + 2.5) / 2)
    assert slots == pytest.approx([4 / 5, 3 / 4, 1 / 2, 1 / 1])


def test_everything_from_files(
    make_recipe: Make, target: TransformersTarget, rows: list[Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No argument but the recipe: rows and features from disk, the features made on the way."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    recipe = make_recipe(data={"rows": str(path), "features": str(tmp_path / "features")}, init="target-layers")
    result = train(recipe, console=Console(width=200))
    told = capsys.readouterr().out
    for words in ("memory of one step", "agree with the target's own pass", "draft vocabulary: 40 of", "GiB free"):
        assert words in told
    assert len(CachedFeatures(tmp_path / "features").index["rows"]) == len(rows)
    assert result.acceptance is not None and load_draft(result.best).bound is False
    tuned = make_recipe("tuned", data={"rows": str(path)}, init=str(result.best))
    train(tuned, stop_after=1, console=Console(quiet=True))
    assert SavedState(tuned.training.out).draft_ids == SavedState(recipe.training.out).draft_ids
    assert (Path(tuned.training.out) / STATE_NAME).is_file()
