"""Replay against serving: the same rows must give the same rounds, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from dspark.bench.compare import TIE_GAP
from dspark.data.rows import Row
from dspark.decoding.proposers import DSparkProposer, Proposer
from dspark.decoding.request import Round
from dspark.targets.base import Target
from dspark.training.features import InProcessFeatures


@dataclass(frozen=True)
class Parting:
    """Where the replay of an answer first departs from the served rounds.

    round: 1-based
    gap: the draft's top-two logit gap at the slot they judge differently; None where it cannot be put down to one
    tie: the gap is under 1e-3 and the row's token within it, so float noise decides what the draft proposes
    """

    mode: str
    question: str
    round: int
    served: Round | None
    replayed: Round | None
    gap: float | None
    tie: bool

    def __str__(self) -> str:
        place = f"{self.question}, {self.mode}"
        verdict = "tie" if self.tie else "REPLAY DIFFERS"
        said = [f"{one.accepted} of {one.scheduled}" if one else "no round" for one in (self.served, self.replayed)]
        gap = "none" if self.gap is None else f"{self.gap:.2e}"
        return (
            f"{verdict}: {place}, round {self.round}: served {said[0]}, replayed {said[1]}, draft's top-two gap {gap}"
        )


def first_parting(
    target: Target, proposer: Proposer, row: Row, mode: str, served: Sequence[Round], walked: Sequence[Round]
) -> Parting | None:
    """Where the served rounds of an answer first depart from its replay's. The features that judge it come from one
    pass of the target in this process; the drafts of other kinds than DSpark's have no gap."""
    anchor = len(row.prompt_ids)  # the prefill's token
    for number, (one, other) in enumerate(zip_longest(served, walked), start=1):
        if one == other:
            anchor += one.accepted + 1
            continue
        comparable = one is not None and other is not None and one.accepted != other.accepted
        if not comparable or not isinstance(proposer, DSparkProposer):
            return Parting(mode, row.id, number, one, other, None, False)
        taps = InProcessFeatures(target, proposer.taps).get(row).taps.float()
        gap, tie = draft_gap(proposer, row.ids, taps, anchor, min(one.accepted, other.accepted))
        return Parting(mode, row.id, number, one, other, gap, tie)
    return None


@torch.no_grad()
def draft_gap(proposer: DSparkProposer, ids: Sequence[int], taps: Tensor, anchor: int, slot: int) -> tuple[float, bool]:
    """(the draft's top-two logit gap at a slot of the block at `anchor`, whether the row's token lies within a tie).

    taps [T, m * d]; slots before it are taken to have proposed the row's tokens.
    """
    draft = proposer.draft
    context = draft.new_context(len(ids) + proposer.n)
    draft.write_context([(context, taps[:anchor])])
    hidden = draft.block_hidden([(context, ids[anchor])], proposer.width)
    base = draft.base_logits(hidden)
    state = draft.markov_start(1)
    for k in range(slot + 1):
        previous = torch.tensor([ids[anchor + k]])
        logits, state = draft.slot_logits(base[:, k], hidden[:, k], previous, state)
    values = logits[0].double()
    top = values.topk(2).values
    gap, wanted = float(top[0] - top[1]), values[draft.draft_ids == ids[anchor + slot + 1]]
    return gap, gap < TIE_GAP and bool((top[0] - wanted < TIE_GAP).any())
