"""Replay against served rounds: equal on a real pair, and every departure is found and judged."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dspark.bench.compare import Comparison, Difference, Question, Run, build_engines, modes_for
from dspark.bench.served import check_replay, draft_gap, replay_line
from dspark.data.rows import Row
from dspark.decoding.proposers import DSparkProposer
from dspark.decoding.request import Round
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget
from dspark.training.features import InProcessFeatures


@pytest.fixture(scope="module")
def proposers(target: TransformersTarget, draft: DSparkDraft) -> dict[str, DSparkProposer]:
    engines = build_engines(target, draft, modes_for([3, 7]))
    return {name: e.proposer for name, e in engines.items() if isinstance(e.proposer, DSparkProposer)}


def runs_of(comparison: Comparison, index: int) -> dict[str, Run]:
    return {name: runs[index] for name, runs in comparison.runs.items()}


def test_replay_gives_the_served_rounds(
    target: TransformersTarget,
    proposers: dict[str, DSparkProposer],
    questions: list[Question],
    comparison: Comparison,
) -> None:
    assert set(proposers) == {"n = 3", "n = 7"}
    for index, question in enumerate(questions):
        assert check_replay(target, proposers, question, runs_of(comparison, index), []) == []


def test_a_departure_is_found_and_is_no_tie(
    target: TransformersTarget,
    proposers: dict[str, DSparkProposer],
    questions: list[Question],
    comparison: Comparison,
) -> None:
    index = max(range(len(questions)), key=lambda i: len(comparison.runs["n = 7"][i].rounds))
    runs = runs_of(comparison, index)
    rounds = list(runs["n = 7"].rounds)
    place = next(i for i, one in enumerate(rounds) if i and one.accepted > 0)
    rounds[place] = dataclasses.replace(rounds[place], accepted=rounds[place].accepted - 1)
    runs["n = 7"] = dataclasses.replace(runs["n = 7"], rounds=rounds)
    (parting,) = check_replay(target, proposers, questions[index], runs, [])
    assert (parting.mode, parting.round, parting.served) == ("n = 7", place + 1, rounds[place])
    assert not parting.tie and parting.gap is not None and parting.gap > 1e-3
    assert str(parting).startswith("REPLAY DIFFERS: ")
    assert replay_line(3, [parting]) == "replay equals served on 2 of 3 answers, round by round; 0 ties, 1 FAULTS"

    short = dataclasses.replace(runs["n = 7"], rounds=list(comparison.runs["n = 7"][index].rounds)[:-1])
    (parting,) = check_replay(target, proposers, questions[index], {**runs, "n = 7": short}, [])
    assert parting.served is None and not parting.tie and "no round" in str(parting)


def test_ids_that_left_plain_decoding_are_listed(
    target: TransformersTarget,
    proposers: dict[str, DSparkProposer],
    questions: list[Question],
    comparison: Comparison,
) -> None:
    for tie in (True, False):
        left = Difference("n = 3", questions[0].id, 4, 5, 6, 1e-5, tie)
        (parting,) = check_replay(target, proposers, questions[0], runs_of(comparison, 0), [left])
        assert parting.mode == "n = 3" and parting.tie is tie and parting.round == 0
        assert "not plain decoding's" in str(parting)


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
    assert replay_line(2, []) == "replay equals served on 2 of 2 answers, round by round"
    assert Round(3, 3, 1) != Round(3, 2, 1)
