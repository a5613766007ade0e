"""Blocks of several widths in one run: each trained as the block it is, drawn by seed and step alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dspark.data.rows import Row
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training.batches import Batches, block_width, split_rows
from dspark.training.features import InProcessFeatures
from dspark.training.loss import LossStats, dense_loss, slot_weights
from dspark.training.recipe import Recipe
from dspark.training.setup import build_draft, finished_config
from dspark.training.state import SavedState
from dspark.training.trainer import train
from dspark.training.validation import micro_loss, target_log_p

Make = Callable[..., Recipe]


@pytest.fixture
def source(target: TransformersTarget) -> InProcessFeatures:
    return InProcessFeatures(target, (1, 3))


def test_widths_are_drawn_by_seed_step_and_micro_batch(make_recipe: Make) -> None:
    training = make_recipe(block_widths=[1, 3, 4]).training
    drawn = [block_width(training, 4, step, micro) for step in range(200) for micro in range(2)]
    counts = Counter(drawn)
    assert set(counts) == {1, 3, 4} and min(counts.values()) > 90
    assert drawn == [block_width(training, 4, step, micro) for step in range(200) for micro in range(2)]
    other = make_recipe(block_widths=[1, 3, 4], seed=1).training
    assert drawn != [block_width(other, 4, step, micro) for step in range(200) for micro in range(2)]
    assert block_width(make_recipe().training, 4, 0, 0) == 4


def mixed_batches(make_recipe: Make, source: InProcessFeatures, rows: list[Row]):
    recipe = make_recipe(block_widths=[2, 4], accumulation=4)
    train_rows, _ = split_rows(rows, recipe.data)
    step = 0
    while True:
        batches = list(Batches(train_rows, source, recipe.data, recipe.training, 4).micro_batches(step))
        if len({batch.plan.anchors.labels.shape[1] for batch in batches}) == 2:
            return recipe, batches
        step += 1


def test_the_scale_pools_over_widths(make_recipe: Make, source: InProcessFeatures, rows: list[Row]) -> None:
    _, batches = mixed_batches(make_recipe, source, rows)
    weight = sum(float(slot_weights(batch.plan.anchors.mask, 4.0).sum()) for batch in batches)
    assert [batch.scale for batch in batches] == pytest.approx([1 / weight] * 4)


def test_a_narrow_block_is_a_block_of_its_own(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row]
) -> None:
    """Its loss is the one of w slots, as serving runs them; that of the first w of gamma slots is another."""
    recipe, batches = mixed_batches(make_recipe, source, rows)
    draft = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, lambda _: None)
    total, expected = LossStats(4), 0.0
    for batch in batches:
        plan, width = batch.plan, batch.plan.anchors.labels.shape[1]
        features = (batch.taps, batch.last_hidden, batch.lse)
        stats = micro_loss(draft, target, plan, *features, recipe, batch.scale, backward=False)
        assert (stats.gamma, len(stats.slots)) == (4, 4) and bool(stats.slots[width:].any()) is False
        total = total + stats
        anchors = plan.anchors
        where = (plan.packed.positions, anchors.anchor_index, anchors.anchor_ids, anchors.doc_start)
        log_p = target_log_p(target, draft, batch.last_hidden, batch.lse)
        own = draft.train_hidden(batch.taps, *where, width)
        settings = recipe.training.loss.settings()
        loss = float(dense_loss(draft, own, anchors, log_p, settings, batch.scale).detach())
        assert stats.total * batch.scale == pytest.approx(loss, rel=1e-4)
        expected += loss
        if width < 4:
            prefix = draft.train_hidden(batch.taps, *where, 4)[:, :width]
            assert not torch.allclose(prefix, own, atol=1e-4)
    assert total.total / total.weight == pytest.approx(expected, rel=1e-4)
    assert int(total.slots[3]) < int(total.slots[0])


def test_a_run_of_several_widths_resumes_exactly(
    make_recipe: Make, target: TransformersTarget, source: InProcessFeatures, rows: list[Row], quiet: Console
) -> None:
    given = {"target": target, "source": source, "rows": rows, "console": quiet}
    whole, parts = make_recipe("whole", block_widths=[1, 2, 4]), make_recipe("parts", block_widths=[1, 2, 4])
    train(whole, **given)
    train(parts, stop_after=1, **given)
    train(parts, resume=True, **given)
    a, b = SavedState(whole.training.out), SavedState(parts.training.out)
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    lines = [json.loads(line) for line in (Path(whole.training.out) / "metrics.jsonl").read_text().splitlines()]
    assert all("acceptance/4" in line for line in lines if line["kind"] == "validation")


def test_all_widths_are_those_up_to_gamma(make_recipe: Make) -> None:
    training = make_recipe(block_widths="all").training
    assert {block_width(training, 4, step, 0) for step in range(60)} == {1, 2, 3, 4}


@pytest.mark.parametrize("widths", [[0, 4], [5], []])
def test_widths_the_draft_cannot_have_are_refused(widths: list[int], make_recipe: Make) -> None:
    with pytest.raises((DsparkError, ValueError), match=r"block_widths"):
        make_recipe(block_widths=widths).check()
