"""The timed passes are those of a round, and leave every request as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dspark.calibration.passes import Passes, time_in_turns
from dspark.decoding.proposers import DSparkProposer, make_proposer
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget

IDS = list(range(5, 45))


def proposer(target: TransformersTarget, draft: DSparkDraft) -> DSparkProposer:
    made = make_proposer(target, draft, 3)
    assert isinstance(made, DSparkProposer)
    return made


def test_a_pass_reads_what_was_asked_and_is_rolled_back(
    target: TransformersTarget, draft: DSparkDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(target, proposer(target, draft), IDS, requests=3, widest=8)
    seen: list[Any] = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda batch, taps: (seen.append((batch, taps)), forward(batch, taps))[1])
    passes.verify([8])
    passes.verify([1, 4, 2])
    assert [[len(ids) for _, ids in batch] for batch, _ in seen] == [[8], [1, 4, 2]]
    assert all(taps == draft.config.target_layer_ids for _, taps in seen)
    passes.draft(2)
    assert [one.state.length for one in passes.active] == [one.context.length for one in passes.active] == [40] * 3
    assert all(one.ids[:40] == IDS and len(one.ids) == 41 and not one.result.rounds for one in passes.active)


def test_passes_of_one_context_repeat_themselves(target: TransformersTarget, draft: DSparkDraft) -> None:
    made = proposer(target, draft)
    passes = Passes(target, made, IDS, requests=2)
    with torch.inference_mode():
        before = [one.tokens for one in made.propose(passes.active)]
        passes.verify([4, 4])
        passes.draft(2)
        assert [one.tokens for one in made.propose(passes.active)] == before
    assert before[0] == before[1]  # the same context, the same anchor


@pytest.mark.parametrize(("ids", "message"), [([5], "context = '1 tokens': must be at least 2"), ([5] * 250, "256")])
def test_a_context_without_room_is_refused(
    target: TransformersTarget, draft: DSparkDraft, ids: list[int], message: str
) -> None:
    with pytest.raises(DsparkError, match=message):
        Passes(target, proposer(target, draft), ids)


def test_turns_go_both_ways_and_warm_ups_are_thrown_away() -> None:
    order: list[str] = []
    samples = time_in_turns({name: lambda n=name: order.append(n) for name in "abc"}, repeats=2, warm_up=1)
    assert "".join(order) == "abc" + "cba" + "abc"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 2, "b": 2, "c": 2}
    with pytest.raises(DsparkError, match="repeats = 0"):
        time_in_turns({}, repeats=0)
