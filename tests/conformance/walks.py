"""A greedy answer as a walk of rounds, by our engine and by another one, and what differs between the two.

Two engines add the same numbers in another order, so a choice between two nearly equal logits may fall differently.
Such a choice is a tie when OUR two largest logits there are less than `TIE` apart; every other difference is a fault.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.decoding.drafting import Proposal
from dspark.decoding.eagle3 import Eagle3Proposer
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import DSparkProposer, NoProposer, make_proposer
from dspark.decoding.request import Active, Request
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.kinds import Draft
from dspark.targets.base import Target

TIE = 1e-3


@dataclass(frozen=True)
class Seen:
    """One round: tokens of the answer before it, the draft's tokens (empty: not told), how many were kept, and by how
    much each drafted token's logit was the largest (ours only)."""

    at: int
    drafts: list[int]
    accepted: int
    margins: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Walk:
    """An answer's ids and rounds. margins: by how much each id's logit was the largest (ours only)."""

    ids: list[int]
    rounds: list[Seen]
    margins: list[float] = field(default_factory=list)


def length(walks: Sequence[Walk]) -> float:
    """Acceptance length over all rounds, bonus counted."""
    return 1 + sum(seen.accepted for one in walks for seen in one.rounds) / sum(len(one.rounds) for one in walks)


class _Noting(DSparkProposer):
    """Proposes as ever, and notes what and how clearly: request -> [(at, drafts, margins)]."""

    def __init__(self, draft: DSparkDraft, n: int) -> None:
        super().__init__(draft, n)
        self.noted: dict[int, list[tuple[int, list[int], list[float]]]] = {}

    @torch.no_grad()
    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        proposals = super().propose(batch, n)
        for active, proposal in zip(batch, proposals, strict=True):
            noted = len(active.result.output_ids), list(proposal.tokens), self._margins(active, proposal.tokens)
            self.noted.setdefault(active.index, []).append(noted)
        return proposals

    def _margins(self, active: Active, tokens: Sequence[int]) -> list[float]:
        hidden = self.draft.block_hidden([(active.context, active.ids[-1])], self.n)
        base, state = self.draft.base_logits(hidden), self.draft.markov_start(1)
        margins = []
        for slot, previous in enumerate([active.ids[-1], *tokens[:-1]]):
            logits, state = self.draft.slot_logits(base[:, slot], hidden[:, slot], torch.tensor([previous]), state)
            first, second = logits[0].topk(2).values.tolist()
            margins.append(first - second)
        return margins


class _NotingEagle3(Eagle3Proposer):
    """The same for an EAGLE-3 draft."""

    def __init__(self, draft: Eagle3Draft, n: int) -> None:
        super().__init__(draft, n)
        self.noted: dict[int, list[tuple[int, list[int], list[float]]]] = {}

    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        self._clear: list[list[float]] = []
        proposals = super().propose(batch, n)
        for row, (active, proposal) in enumerate(zip(batch, proposals, strict=True)):
            noted = len(active.result.output_ids), list(proposal.tokens), [slot[row] for slot in self._clear]
            self.noted.setdefault(active.index, []).append(noted)
        return proposals

    def _choose(self, logits: Tensor, batch: Sequence[Active], slot: int, proposals: list[Proposal]) -> Tensor:
        first, second = logits.topk(2).values.unbind(-1)
        self._clear.append((first - second).tolist())
        return super()._choose(logits, batch, slot, proposals)


def our_walks(
    target: Target, draft: Draft | None, n: int, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Walk]:
    """Our engine's greedy answers; draft None: plain decoding."""
    proposer: NoProposer | _Noting | _NotingEagle3 = NoProposer()
    if draft is not None:
        make_proposer(target, draft, n)  # binds and packs it
        proposer = _Noting(draft, n) if isinstance(draft, DSparkDraft) else _NotingEagle3(draft, n)
    engine = Engine(target, proposer, max_batch=len(prompts))
    requests = [Request(ids, max_tokens=max_tokens, logprobs=2) for ids in prompts]
    walks = {}
    for index, result in engine.run(requests):
        margins = [one.top[0][1] - one.top[1][1] for one in result.logprobs]
        noted = [] if isinstance(proposer, NoProposer) else proposer.noted[index]
        rounds = [
            Seen(at, drafts, one.accepted, clear)
            for (at, drafts, clear), one in zip(noted, result.rounds, strict=bool(noted))
        ]
        walks[index] = Walk(result.output_ids, rounds, margins)
    return [walks[index] for index in range(len(prompts))]


def their_walk(ids: list[int], rounds: Sequence[tuple[list[int], list[int]]]) -> Walk:
    """A walk from rounds of (draft tokens, tokens that came out), of which the answer may have cut the last ones."""
    at, seen = 1, []
    for drafts, made in rounds:
        if at < len(ids):
            seen.append(Seen(at, drafts, min(len(made) - 1, len(ids) - at)))
        at += len(made)
    return Walk(ids, seen)


@dataclass
class Comparison:
    """equal: rounds with the same drafts and the same accepted count; alone: rounds that one side has and the other
    has not, all after a tie of the same answer; faults: differences that no tie explains."""

    answers: int = 0
    same_answers: int = 0
    rounds: int = 0
    equal: int = 0
    alone: int = 0
    ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    ours: int = 0
    theirs: int = 0

    def differs(self, what: str, margins: Sequence[float], place: int) -> None:
        """Note a difference: a tie when our choice at `place` was that close."""
        margin = margins[place] if place < len(margins) else math.inf
        (self.ties if margin < TIE else self.faults).append(f"{what}, our margin {margin:.2g}")

    def __str__(self) -> str:
        ours, theirs = (1 + total / max(self.rounds, 1) for total in (self.ours, self.theirs))
        return (
            f"{self.same_answers} of {self.answers} answers equal, {self.rounds} rounds compared, {self.equal} equal, "
            f"{len(self.ties)} ties, {self.alone} rounds of one side after a tie, {len(self.faults)} faults; "
            f"acceptance length {theirs:.3f}, ours {ours:.3f}"
        )


def compare(ours: Sequence[Walk], theirs: Sequence[Walk]) -> Comparison:
    """Answers pairwise: ids, and at every position where both drafted, the draft tokens and the accepted count."""
    found = Comparison(answers=len(ours))
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        ties = len(found.ties)
        end = _compare_ids(f"answer {index}", mine, other, found)
        a = {one.at: one for one in mine.rounds if one.at < end}
        b = {one.at: one for one in other.rounds if one.at < end}
        for at in sorted(set(a) & set(b)):
            _compare_round(f"answer {index}, token {at}", a[at], b[at], end, found)
        found.alone += len(set(a) ^ set(b))
        if set(a) != set(b) and len(found.ties) == ties:
            found.faults.append(f"answer {index}: rounds at {sorted(set(a) ^ set(b))} on one side only")
    return found


def _compare_ids(where: str, mine: Walk, other: Walk, found: Comparison) -> int:
    """How far the two answers are the same."""
    if mine.ids == other.ids:
        found.same_answers += 1
        return len(mine.ids)
    both = zip(mine.ids, other.ids, strict=False)
    end = next((i for i, (a, b) in enumerate(both) if a != b), min(len(mine.ids), len(other.ids)))
    found.differs(f"{where}: other ids from token {end}", mine.margins, end)
    return end


def _compare_round(where: str, mine: Seen, other: Seen, end: int, found: Comparison) -> None:
    a, b = (min(one.accepted, end - one.at) for one in (mine, other))
    found.rounds, found.ours, found.theirs = found.rounds + 1, found.ours + a, found.theirs + b
    both = zip(mine.drafts, other.drafts, strict=True) if other.drafts else ()
    slot = next((i for i, (x, y) in enumerate(both) if x != y), None)
    if slot is not None:
        text = f"slot {slot + 1} is {other.drafts[slot]}, ours {mine.drafts[slot]}"
        found.differs(f"{where}: {text}", mine.margins, slot)
    elif a != b:  # not told what it drafted: another token after those that both accepted
        found.differs(f"{where}: {b} accepted, ours {a}", [] if other.drafts else mine.margins, min(a, b))
    else:
        found.equal += 1
