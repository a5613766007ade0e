"""Timed comparison on a real (tiny) pair: equal ids, rotation, ties told from faults, who made which token."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.bench import compare as comparing
from dspark.bench.compare import PLAIN, Comparison, Mode, Question, Run, modes_for, spans
from dspark.decoding.request import Round
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget

MODES = modes_for([3, 7])


def test_every_mode_gives_the_same_ids_and_speculation_does_something(comparison: Comparison) -> None:
    assert comparison.differences == [] and comparison.lossless
    plain = [run.output_ids for run in comparison.runs["plain"]]
    assert any(len(ids) > 12 for ids in plain)
    for mode in MODES[1:]:
        assert [run.output_ids for run in comparison.runs[mode.name]] == plain
        assert sum(one.accepted for run in comparison.runs[mode.name] for one in run.rounds) > 10
    assert comparison.acceptance(PLAIN).macro_length == 1.0


def test_each_token_has_one_maker(comparison: Comparison) -> None:
    for runs in comparison.runs.values():
        for run in runs:
            members = [member for _, group in spans(run) for member in group]
            assert [index for index, _ in members] == list(range(len(run.output_ids)))
            assert sum(owner == "draft" for _, owner in members) == sum(one.accepted for one in run.rounds)


def test_records_that_do_not_add_up_are_refused() -> None:
    run = Run("n = 3", "q", [5, 6, 7, 8], "length", [Round(3, 3, 1)], False)
    with pytest.raises(DsparkError, match="rounds"):
        spans(run)
    with pytest.raises(DsparkError, match="rounds"):
        spans(dataclasses.replace(run, rounds=[Round(3, 3, 2), Round(3, 3, 0)]))
    cut = dataclasses.replace(run, rounds=[Round(3, 3, 3)])  # stopped on the last draft token: no bonus
    assert spans(cut)[1] == (1, [(1, "draft"), (2, "draft"), (3, "draft")])


def test_times_are_measured_and_consistent(comparison: Comparison) -> None:
    for mode in MODES:
        for run in comparison.runs[mode.name]:
            assert run.seconds is not None and run.first_seconds is not None
            assert 0 < run.first_seconds <= run.seconds
            assert run.decode_only.tokens == len(run.output_ids) - 1
    fastest = comparison.speedup(MODES[2])
    ratio = sum(t.seconds for t in comparison.timings(PLAIN)) / sum(t.seconds for t in comparison.timings(MODES[2]))
    assert fastest.value == pytest.approx(ratio)  # the ids are the same, so tokens cancel out


def test_every_mode_is_first_equally_often() -> None:
    orders = [comparing.rotated(MODES, turn) for turn in range(6)]
    assert all(sorted(mode.n for mode in order) == [0, 3, 7] for order in orders)
    for place in range(3):
        assert sorted(order[place].n for order in orders) == [0, 0, 3, 3, 7, 7]


def test_a_wrong_id_is_not_lossless(
    target: TransformersTarget, questions: list[Question], comparison: Comparison
) -> None:
    plain = comparison.runs["plain"][1]
    ids = list(plain.output_ids)
    ids[4] = (ids[4] + 1) % target.vocab_size
    found = comparing.find_difference(target, questions[1], plain, dataclasses.replace(plain, mode="x", output_ids=ids))
    assert found is not None and (found.position, found.plain_id, found.other_id) == (4, plain.output_ids[4], ids[4])
    assert found.gap is not None and found.gap >= 0 and not found.tie
    assert "NOT LOSSLESS" in str(found)


def test_an_answer_that_ends_early_is_not_lossless(
    target: TransformersTarget, questions: list[Question], comparison: Comparison
) -> None:
    plain = comparison.runs["plain"][1]
    short = dataclasses.replace(plain, mode="x", output_ids=plain.output_ids[:3])
    found = comparing.find_difference(target, questions[1], plain, short)
    assert found is not None and not found.tie and (found.position, found.other_id, found.gap) == (3, None, None)


def test_a_tie_is_only_between_the_ids_that_tie(
    target: TransformersTarget, questions: list[Question], comparison: Comparison
) -> None:
    """Make the head give two ids the same logit: choosing the other one is a tie, a third id is a fault."""
    plain = comparison.runs["plain"][1]
    context = torch.tensor([*questions[1].ids, *plain.output_ids[:2]])
    logits = target.forward([(target.new_state(len(context)), context)], logits="last").logits[-1]
    best, third = plain.output_ids[2], int(logits.argmin())
    twin = int(logits.topk(2).indices[1])
    head = target._head_module
    real, changed = type(head).forward, []

    def twinned(x: torch.Tensor) -> torch.Tensor:
        out = real(head, x)
        out[..., twin] = out[..., best] - 1e-5
        changed.append(out)
        return out

    head.forward = twinned
    try:
        for other, tie in ((twin, True), (third, False)):
            ids = [*plain.output_ids[:2], other]
            run = dataclasses.replace(plain, mode="x", output_ids=ids)
            found = comparing.find_difference(target, questions[1], plain, run)
            assert found is not None and found.position == 2 and found.tie is tie
            assert found.gap is not None and found.gap < 1e-3
    finally:
        del head.forward
    assert len(changed) == 2


@pytest.mark.parametrize("modes", [[Mode("n = 3", 3)], [PLAIN, PLAIN]])
def test_modes_need_one_baseline(
    target: TransformersTarget, draft: DSparkDraft, questions: list[Question], modes: list[Mode]
) -> None:
    with pytest.raises(DsparkError, match="modes"):
        comparing.compare(target, draft, questions, modes, 4)


def test_bad_input_is_refused(target: TransformersTarget, draft: DSparkDraft, questions: list[Question]) -> None:
    with pytest.raises(DsparkError, match="draft"):
        comparing.compare(target, None, questions, MODES, 4)
    with pytest.raises(DsparkError, match="n = 8"):
        comparing.compare(target, draft, questions, modes_for([8]), 4)
    with pytest.raises(DsparkError, match="questions"):
        comparing.compare(target, draft, [], MODES, 4)
    with pytest.raises(DsparkError, match="questions"):
        comparing.compare(target, draft, [questions[0], questions[0]], MODES, 4)


def test_an_untimed_run_has_no_speed() -> None:
    with pytest.raises(DsparkError, match="not timed"):
        _ = Run("plain", "q", [1], "stop", [], False).end_to_end
