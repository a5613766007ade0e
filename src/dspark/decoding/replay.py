"""Replay: the acceptance of a draft on rows the target wrote greedily, or with a seed, without running the target.

The walk uses the same proposer as serving: at every round's anchor the draft sees the taps of all tokens before it,
its tokens are compared with the row's, and the walk advances by accepted + 1. Round records therefore equal those of
a served run of the same row (argmax ties apart). That holds for rows that are a function of the target alone: greedy
ones, and those sampled with a seed, whose draft tokens are drawn with the same noise (accept rule `coupled`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from dspark.decoding.drafting import DraftProposer, Proposal
from dspark.decoding.process import LogitsProcessor
from dspark.decoding.request import Active, NoState, Request, Round, SamplingSettings, rule_of
from dspark.errors import DsparkError


class TokenRow(Protocol):
    """A row as ids (see `data/rows.py`)."""

    @property
    def prompt_ids(self) -> list[int]:
        """What the target was shown."""

    @property
    def answer_ids(self) -> list[int]:
        """What it wrote."""


def replay(
    proposer: DraftProposer,
    rows: Iterable[tuple[TokenRow, Tensor]],
    batch: int = 32,
    max_context: int | None = None,
    sampling: SamplingSettings | None = None,
    watch: Callable[[int, Proposal], None] | None = None,
) -> list[list[Round]]:
    """Round records of each row, in order.

    rows: (row, taps [T, m * d]) with T >= prompt + answer - 1, the taps being the draft's own, in its order.
    max_context: the target's context, where a round that would cross it is verified less deep, as in serving.
    sampling: how the target wrote all rows (None: greedily). watch: is given every proposal with its row's place, in
    the order of that row's rounds. Raises DsparkError when that leaves them to chance, or
    changes logits in more ways than temperature, top-k, top-p and min-p.
    """
    sampling = sampling or SamplingSettings()
    if rule_of(sampling) == "rejection":
        raise DsparkError("sampling.seed", None, "must be given: unseeded rows are not a function of the target alone")
    if LogitsProcessor.needed(sampling, 0, False):
        raise DsparkError("sampling", sampling, "may only have temperature, top_k, top_p, min_p and seed here")
    if batch < 1:
        raise DsparkError("batch", batch, "must be at least 1")
    waiting = enumerate(rows)
    running: list[_Walk] = []
    records: dict[int, list[Round]] = {}
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) < batch:
            entry = next(waiting, None)
            exhausted = entry is None
            if entry is not None:
                walk = _Walk(proposer, entry[0], *entry[1], max_context, sampling)
                records[walk.index] = walk.active.result.rounds
                running.append(walk)
        running = [walk for walk in running if not walk.done]
        if running:
            with torch.no_grad():
                proposer.observe([item for walk in running for item in walk.read()])
                for walk, proposal in zip(running, proposer.propose([w.active for w in running]), strict=True):
                    walk.advance(proposal.tokens)
                    if watch is not None:
                        watch(walk.index, proposal)
    return [records[index] for index in sorted(records)]


class _Walk:
    def __init__(
        self,
        proposer: DraftProposer,
        index: int,
        row: TokenRow,
        taps: Tensor,
        max_context: int | None,
        sampling: SamplingSettings,
    ) -> None:
        self.index, self.taps, self.row_ids = index, taps, [*row.prompt_ids, *row.answer_ids]
        self.max_context = max_context
        ids = self.row_ids[: len(row.prompt_ids) + 1]
        request = Request(row.prompt_ids, sampling=sampling)
        seed = sampling.seed or 0
        self.active = Active(index, request, rule_of(sampling), seed, ids, 0, frozenset(), NoState())
        proposer.start(self.active, len(self.row_ids) + proposer.n)
        self.seen = 0

    @property
    def done(self) -> bool:
        return len(self.active.ids) >= len(self.row_ids)

    def read(self) -> Iterator[tuple[Active, Tensor]]:
        """The taps of the tokens before the anchor that the draft has not seen."""
        before = len(self.active.ids) - 1
        yield self.active, self.taps[self.seen : before]
        self.seen = before

    def advance(self, tokens: list[int]) -> None:
        ids = self.active.ids
        start = len(ids)
        scheduled = tokens if self.max_context is None else tokens[: max(self.max_context - start, 0)]
        rest = self.row_ids[start:]
        accepted = 0
        while accepted < min(len(scheduled), len(rest)) and rest[accepted] == scheduled[accepted]:
            accepted += 1
        ids += rest[: accepted + 1]
        self.active.result.rounds.append(Round(len(tokens), len(scheduled), accepted))
