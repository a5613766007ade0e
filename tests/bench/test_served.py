"""Replay against served rounds: equal on a real pair, and every departure is found and judged."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.bench.compare import Comparison, Question, build_engines, modes_for
from dspark.bench.served import draft_gap, first_parting
from dspark.data.rows import Row
from dspark.decoding.proposers import DSparkProposer
from dspark.decoding.replay import replay
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget
from dspark.training.features import InProcessFeatures


@pytest.fixture(scope="module")
def proposers(target: TransformersTarget, draft: DSparkDraft) -> dict[str, DSparkProposer]:
    engines = build_engines(target, draft, modes_for([3, 7]))
    return {name: e.proposer for name, e in engines.items() if isinstance(e.proposer, DSparkProposer)}


def test_replay_gives_the_served_rounds(
    target: TransformersTarget,
    proposers: dict[str, DSparkProposer],
    questions: list[Question],
    comparison: Comparison,
) -> None:
    assert set(proposers) == {"n = 3", "n = 7"}
    for mode, proposer in proposers.items():
        rows = [row_of(question, comparison, index) for index, question in enumerate(questions)]
        features = InProcessFeatures(target, proposer.taps)
        walked = replay(proposer, [(row, features.get(row).taps.float()) for row in rows], 4, target.max_context)
        for row, run, rounds in zip(rows, comparison.runs[mode], walked, strict=True):
            assert first_parting(target, proposer, row, mode, run.rounds, rounds) is None


def row_of(question: Question, comparison: Comparison, index: int) -> Row:
    ids = comparison.runs["plain"][index].output_ids
    return Row(id=question.id, source=question.id, prompt_ids=list(question.ids), answer_ids=ids, finish="length")


def test_a_departure_is_found_and_is_no_tie(
    target: TransformersTarget,
    proposers: dict[str, DSparkProposer],
    questions: list[Question],
    comparison: Comparison,
) -> None:
    index = max(range(len(questions)), key=lambda i: len(comparison.runs["n = 7"][i].rounds))
    row, proposer = row_of(questions[index], comparison, index), proposers["n = 7"]
    walked = list(comparison.runs["n = 7"][index].rounds)
    place = next(i for i, one in enumerate(walked) if i and one.accepted > 0)
    served = [*walked]
    served[place] = dataclasses.replace(served[place], accepted=served[place].accepted - 1)
    parting = first_parting(target, proposer, row, "n = 7", served, walked)
    assert parting is not None
    assert (parting.mode, parting.round, parting.served) == ("n = 7", place + 1, served[place])
    assert not parting.tie and parting.gap is not None and parting.gap > 1e-3
    assert str(parting).startswith("REPLAY DIFFERS: ")

    parting = first_parting(target, proposer, row, "n = 7", walked[:-1], walked)
    assert parting is not None and parting.served is None and not parting.tie and "no round" in str(parting)


def test_a_tie_of_the_draft_is_one(
    target: TransformersTarget,
    proposers: dict[str, DSparkProposer],
    questions: list[Question],
    comparison: Comparison,
) -> None:
    """Lift a second id to the height of the proposed one: the two tie, a third does not."""
    run, proposer = comparison.runs["plain"][1], proposers["n = 3"]
    prompt = list(questions[1].ids)
    row = Row(id="x", source="x", prompt_ids=prompt, answer_ids=run.output_ids, finish="length")
    taps = InProcessFeatures(target, proposer.taps).get(row).taps
    anchor, draft = len(prompt), proposer.draft
    context = draft.new_context(64)
    draft.write_context([(context, taps[:anchor])])
    with torch.no_grad():
        hidden = draft.block_hidden([(context, row.ids[anchor])], proposer.width)
        base = draft.base_logits(hidden)[:, 0]
        logits, _ = draft.slot_logits(base, hidden[:, 0], torch.tensor([row.ids[anchor]]), None)
    first, second, third = logits[0].topk(3).indices.tolist()
    real = draft.slot_logits

    def lifted(*args: object) -> tuple[torch.Tensor, object]:
        out, state = real(*args)  # type: ignore[arg-type]
        out = out.clone()
        out[..., second] = out[..., first] - 1e-5
        return out, state

    for token, tied, tie in ((second, True, True), (third, True, False), (second, False, False)):
        ids = [*row.ids[: anchor + 1], token]
        draft.slot_logits = lifted if tied else real  # type: ignore[method-assign]
        try:
            gap, found = draft_gap(proposer, ids, taps, anchor, 0)
        finally:
            del draft.slot_logits
        assert found is tie and (gap < 1e-3) is tied
