"""Which rows are trained on, and what becomes of an init draft's vocabulary when these rows have another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dspark.checkpoints.native import load_draft, save_draft
from dspark.data.rows import Row
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training.batches import split_rows
from dspark.training.recipe import Recipe
from dspark.training.setup import build_draft, finished_config

Make = Callable[..., Recipe]


@pytest.fixture
def mixed(rows: list[Row]) -> list[Row]:
    """Every prompt once greedily and once sampled."""
    sampled = [row.model_copy(update={"id": "s" + row.id, "temperature": 0.7}) for row in rows]
    return [*rows, *sampled]


def test_answers_choose_training_rows_and_leave_the_held_out_ones(make_recipe: Make, mixed: list[Row]) -> None:
    everything, held = split_rows(mixed, make_recipe().data)
    parts = {kind: split_rows(mixed, make_recipe(data={"answers": kind}).data) for kind in ("greedy", "sampled")}
    assert {row.temperature for row in parts["greedy"][0]} == {0.0}
    assert {row.temperature for row in parts["sampled"][0]} == {0.7}
    assert len(parts["greedy"][0]) + len(parts["sampled"][0]) == len(everything)
    assert all(other == held for _, other in parts.values())
    with pytest.raises(DsparkError, match=r"data\.answers = 'sampled': none of"):
        split_rows(mixed[: len(mixed) // 2], make_recipe(data={"answers": "sampled"}).data)


def test_a_number_of_training_rows_does_not_depend_on_their_order(make_recipe: Make, mixed: list[Row]) -> None:
    data = make_recipe(data={"training_rows": 9}).data
    chosen, held = split_rows(mixed, data)
    again, _ = split_rows(mixed[::-1], data)
    assert len(chosen) == 9 and {row.id for row in chosen} == {row.id for row in again}
    assert held == split_rows(mixed, make_recipe().data)[1]
    with pytest.raises(DsparkError, match="training_rows = 99"):
        split_rows(mixed, make_recipe(data={"training_rows": 99}).data)


@pytest.fixture
def trained(make_recipe: Make, target: TransformersTarget, rows: list[Row], tmp_path: Path) -> tuple[Path, DSparkDraft]:
    """A draft whose vocabulary was counted in three rows; all of its weights are its own."""
    recipe = make_recipe(seed=5)
    draft = build_draft(recipe, finished_config(recipe, target, rows), target, rows[:3], None, lambda _: None)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    save_draft(draft, tmp_path / "trained")
    return tmp_path / "trained", load_draft(tmp_path / "trained")  # as stored, in bf16


@pytest.mark.parametrize("size", [40, 52, 21])
def test_a_recounted_vocabulary_keeps_what_the_shared_ids_learned(
    size: int, make_recipe: Make, target: TransformersTarget, rows: list[Row], trained: tuple[Path, DSparkDraft]
) -> None:
    folder, old = trained
    told: list[str] = []
    recipe = make_recipe(draft={"draft_vocab_size": size}, init=str(folder), init_vocabulary="recount")
    config = finished_config(recipe, target, rows)
    new = build_draft(recipe, config, target, rows, None, told.append)
    fresh = make_recipe(draft={"draft_vocab_size": size})
    wanted = build_draft(fresh, config, target, rows, None, lambda _: None).draft_ids.tolist()
    assert new.draft_ids.tolist() == wanted != old.draft_ids.tolist()
    shared = set(wanted) & set(old.draft_ids.tolist())
    assert 0 < len(shared) < size
    w2, before = new.markov_head.markov_w2.weight, old.markov_head.markov_w2.weight
    for place, token in enumerate(wanted):
        if token in shared:
            assert torch.equal(w2[place], before[old.draft_ids.tolist().index(token)])
        else:
            assert not w2[place].any()
    rest = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        assert name == "markov_head.markov_w2.weight" or torch.equal(parameter, rest[name]), name
    assert any(f"{len(shared)} ids as in" in line and f"{size - len(shared)} new ones" in line for line in told)


def test_without_recounting_the_vocabulary_is_kept(
    make_recipe: Make, target: TransformersTarget, rows: list[Row], trained: tuple[Path, DSparkDraft]
) -> None:
    folder, old = trained
    recipe = make_recipe(init=str(folder))
    new = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, lambda _: None)
    assert new.draft_ids.tolist() == old.draft_ids.tolist()
    other = make_recipe(init=str(folder), draft={"draft_vocab_size": 52})
    with pytest.raises(DsparkError, match=r"draft\.draft_vocab_size = 52"):
        build_draft(other, finished_config(other, target, rows), target, rows, None, lambda _: None)
    deeper = make_recipe(
        init=str(folder),
        init_vocabulary="recount",
        draft={"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    )
    with pytest.raises(DsparkError, match=r"draft\.num_hidden_layers"):
        build_draft(deeper, finished_config(deeper, target, rows), target, rows, None, lambda _: None)
