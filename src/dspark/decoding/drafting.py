"""What the proposers that draft with a model have in common: how tokens are chosen from logits, and the context."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dspark.decoding.request import Active
from dspark.decoding.verify import draft_token
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError


@dataclass
class Proposal:
    """Draft tokens of one request, the law each was drawn from (log q over V; None: a point mass), and where asked
    for the confidence of each slot: the draft's own probability that it survives, given that those before it did."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor | None] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    def cut(self, count: int) -> None:
        """Keep the first `count` tokens."""
        del self.tokens[count:], self.laws[count:], self.confidence[count:]


class DraftProposer(ABC):
    """A proposer that has a draft. n: draft tokens a round, 1..gamma; taps: the target layers it reads.

    Raises DsparkError when n is out of range.
    """

    confidence = False
    bytes_per_token: int

    def __init__(self, draft: Draft, n: int | None = None) -> None:
        gamma = draft.config.gamma
        self.n = gamma if n is None else n
        if not 1 <= self.n <= gamma:
            raise DsparkError("n", n, f"this draft was trained for blocks of {gamma} predictions; use 1..{gamma}")
        self.taps = tuple(draft.config.target_layer_ids)
        self._vocab_size = draft.config.vocab_size
        self._draft_ids: Tensor | None = draft.draft_ids if draft.config.reduced else None
        self._model = draft

    def start(self, active: Active, capacity: int) -> None:
        """See `Proposer.start`."""
        if active.context is None:
            active.context = self._model.new_context(capacity)
        else:
            active.context.grow(capacity)

    def resume(self, active: Active, context: Any, length: int) -> None:
        """See `Proposer.resume`."""
        active.context.copy_prefix(context, length)

    @torch.no_grad()
    def observe(self, committed: Sequence[tuple[Active, Tensor]]) -> None:
        """See `Proposer.observe`."""
        self._model.write_context([(active.context, taps) for active, taps in committed])

    @abstractmethod
    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        """See `Proposer.propose`."""

    def _check_logits(self, logits: Tensor) -> None:
        if not math.isfinite(logits.sum()):
            raise DsparkError("draft", str(logits.dtype), "gave non-finite logits; load it in float32 or bfloat16")

    def _choose(self, logits: Tensor, batch: Sequence[Active], slot: int, proposals: list[Proposal]) -> Tensor:
        """Pick one token a request from logits [R, K]; returns them as target ids [R].

        A request whose settings leave nothing to pick proposes no further.
        """
        greedy = logits.argmax(dim=-1)
        tokens = greedy if self._draft_ids is None else self._draft_ids[greedy]
        for row, (active, proposal) in enumerate(zip(batch, proposals, strict=True)):
            if len(proposal.tokens) < slot:
                continue
            law = None
            if active.rule != "greedy" or active.processor is not None:
                try:
                    tokens[row], law = self._draw(active, logits[row], proposal.tokens)
                except (
                    Exception
                ):  # what it asks for cannot be drafted here; whether it can be answered, verifying tells
                    continue
            proposal.laws.append(law)
            proposal.tokens.append(-1)  # filled in below, in one go
        for proposal, token in zip(proposals, tokens.tolist(), strict=True):
            if len(proposal.tokens) == slot + 1:
                proposal.tokens[slot] = token
        return tokens

    def _draw(self, active: Active, logits: Tensor, drafts: Sequence[int]) -> tuple[int, Tensor | None]:
        """One request's token after `drafts`, under its own settings, from logits [K]."""
        ids = self._draft_ids
        size = None if ids is None else self._vocab_size
        if active.processor is not None:
            if ids is not None and size is not None:
                logits = torch.full((size,), -math.inf).index_copy_(0, ids, logits.float())
            logits, ids, size = active.shaped(logits, drafts), None, None
        slot = len(drafts)
        position = len(active.ids) + slot
        return draft_token(
            logits, active.request.sampling, active.seed, active.round_index, slot, position, active.rule, ids, size
        )
