"""Who proposes tokens: a DSpark or DFlash draft, or nobody (plain decoding through the same engine)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from dspark.decoding.request import Active
from dspark.decoding.verify import draft_token
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.targets.packed import pack_linears, packed


@dataclass
class Proposal:
    """Draft tokens of one request, and the law each was drawn from (log q over V; None: a point mass)."""

    tokens: list[int] = field(default_factory=list)
    laws: list[Tensor | None] = field(default_factory=list)


class Proposer(Protocol):
    """taps: the target layers it reads (0-based); n: draft tokens a round at most."""

    taps: tuple[int, ...]
    n: int

    def start(self, active: Active, capacity: int) -> None:
        """A request is admitted: make room for its context."""

    def observe(self, committed: Sequence[tuple[Active, Tensor]]) -> None:
        """The target has read tokens that stay: their taps [t, m * d], once per token, in order."""

    def propose(self, batch: Sequence[Active]) -> list[Proposal]:
        """One draft pass for the whole batch."""


class NoProposer:
    """Plain decoding: every round is one target token. The honest baseline."""

    taps: tuple[int, ...] = ()
    n = 0

    def start(self, active: Active, capacity: int) -> None:
        return None

    def observe(self, committed: Sequence[tuple[Active, Tensor]]) -> None:
        return None

    def propose(self, batch: Sequence[Active]) -> list[Proposal]:
        return [Proposal() for _ in batch]


class DSparkProposer:
    """Block drafting with sequential sampling (method: paper section 3; markov_rank 0 is plain DFlash).

    n: draft tokens a round, 1..gamma. mode "block" runs an n-slot block, as every engine does; "prefix" runs the
    full gamma-slot block and keeps its first n tokens (a diagnostic).
    Raises DsparkError when n is out of range.
    """

    def __init__(self, draft: DSparkDraft, n: int | None = None, mode: Literal["block", "prefix"] = "block") -> None:
        gamma = draft.config.gamma
        self.n = gamma if n is None else n
        if not 1 <= self.n <= gamma:
            raise DsparkError("n", n, f"this draft was trained for blocks of {gamma} predictions; use 1..{gamma}")
        if mode not in ("block", "prefix"):
            raise DsparkError("draft_mode", mode, "must be block or prefix")
        self.draft, self.width = draft, gamma if mode == "prefix" else self.n
        self.taps = tuple(draft.config.target_layer_ids)
        self._draft_ids: Tensor | None = draft.draft_ids if draft.config.reduced else None

    def start(self, active: Active, capacity: int) -> None:
        active.context = self.draft.new_context(capacity)

    @torch.no_grad()
    def observe(self, committed: Sequence[tuple[Active, Tensor]]) -> None:
        self.draft.write_context([(active.context, taps) for active, taps in committed])

    @torch.no_grad()
    def propose(self, batch: Sequence[Active]) -> list[Proposal]:
        draft = self.draft
        hidden = draft.block_hidden([(active.context, active.ids[-1]) for active in batch], self.width)
        base = draft.base_logits(hidden)
        if not bool(torch.isfinite(base).all()):
            raise DsparkError("draft", str(hidden.dtype), "gave non-finite logits; load it in float32 or bfloat16")
        previous = torch.tensor([active.ids[-1] for active in batch])
        state = draft.markov_start(len(batch))
        proposals = [Proposal() for _ in batch]
        for slot in range(self.n):
            logits, state = draft.slot_logits(base[:, slot], hidden[:, slot], previous, state)
            previous = self._choose(logits, batch, slot, proposals)
        return proposals

    def _choose(self, logits: Tensor, batch: Sequence[Active], slot: int, proposals: list[Proposal]) -> Tensor:
        """Pick one token a request from logits [R, K]; returns them as target ids [R]."""
        greedy = logits.argmax(dim=-1)
        tokens = greedy if self._draft_ids is None else self._draft_ids[greedy]
        for row, active in enumerate(batch):
            law = None
            if active.rule != "greedy":
                tokens[row], law = draft_token(
                    logits[row],
                    active.request.sampling,
                    active.seed,
                    active.round_index,
                    slot,
                    len(active.ids) + slot,
                    active.rule,
                    self._draft_ids,
                    None if self._draft_ids is None else self.draft.config.vocab_size,
                )
            proposals[row].laws.append(law)
        for row, token in enumerate(tokens.tolist()):
            proposals[row].tokens.append(token)
        return tokens


def make_proposer(
    target: Target, draft: DSparkDraft | None, n: int | None = None, mode: Literal["block", "prefix"] = "block"
) -> Proposer:
    """A proposer for this pair: checks that the draft was made for the target, lends it the target's embedding and
    head, and packs its linear layers for this machine. draft None is plain decoding.

    Raises DsparkError when the draft belongs to another target or n is out of range.
    """
    if draft is None:
        return NoProposer()
    draft.config.check_target(None, target.num_layers, target.hidden_size, target.vocab_size)
    draft.eval().requires_grad_(False)
    draft.bind(target.embedding_weight, target.head_weight)
    pack_linears(draft)
    draft.head = packed(draft.head)  # lent by the target, so not inside the draft
    return DSparkProposer(draft, n, mode)
