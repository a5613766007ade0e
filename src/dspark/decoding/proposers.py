"""Who proposes tokens: a DSpark, DFlash or EAGLE-3 draft, or nobody (plain decoding through the same engine)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dspark.decoding.compiled import CompiledDraft, compile_draft
from dspark.decoding.drafting import DraftProposer, Proposal
from dspark.decoding.eagle3 import Eagle3Proposer
from dspark.decoding.request import Active
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.targets.packed import fingerprint, pack_linears, packed

Scaling = Sequence[tuple[float, float]]
"""(scale, offset) of every slot's confidence."""


class Proposer(Protocol):
    """taps: the target layers it reads (0-based); n: draft tokens a round at most; bytes_per_token: what its context
    takes in memory."""

    taps: tuple[int, ...]
    n: int
    bytes_per_token: int

    def start(self, active: Active, capacity: int) -> None:
        """A request is admitted: make room for its context of `capacity` tokens, or more room than it had."""

    def resume(self, active: Active, context: Any, length: int) -> None:
        """The first `length` tokens of an admitted request are those of another one, whose context this is."""

    def observe(self, committed: Sequence[tuple[Active, Tensor]]) -> None:
        """The target has read tokens that stay: their taps [t, m * d], once per token, in order."""

    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        """One draft pass for the whole batch, of n tokens each (None: as many as a round has at most)."""


class NoProposer:
    """Plain decoding: every round is one target token. The honest baseline."""

    taps: tuple[int, ...] = ()
    n = 0
    bytes_per_token = 0

    def start(self, active: Active, capacity: int) -> None:
        return None

    def resume(self, active: Active, context: Any, length: int) -> None:
        return None

    def observe(self, committed: Sequence[tuple[Active, Tensor]]) -> None:
        return None

    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        return [Proposal() for _ in batch]


class DSparkProposer(DraftProposer):
    """Block drafting with sequential sampling (method: paper section 3; markov_rank 0 is plain DFlash).

    n: draft tokens a round, 1..gamma. mode "block" runs an n-slot block, as every engine does; "prefix" runs the
    full gamma-slot block and keeps its first n tokens (a diagnostic). confidence: fill in `Proposal.confidence` (for a
    draft with that head), sigmoid(scale * logit + offset) with the scaling of its slots (1 and 0 by default).
    Raises DsparkError when n is out of range, or for a scaling of fewer slots than n.
    """

    def __init__(
        self,
        draft: DSparkDraft,
        n: int | None = None,
        mode: Literal["block", "prefix"] = "block",
        confidence: bool = False,
        scaling: Scaling | None = None,
    ) -> None:
        super().__init__(draft, n)
        if mode not in ("block", "prefix"):
            raise DsparkError("draft_mode", mode, "must be block or prefix")
        self.draft, self.width = draft, draft.config.gamma if mode == "prefix" else self.n
        self.confidence = confidence and draft.confidence_head is not None
        heads, key_width, value_width = draft.config.cached_shape
        kept = key_width if draft.config.attention == "mla" else key_width + value_width
        self.bytes_per_token = draft.config.num_hidden_layers * heads * kept * draft.norm.weight.itemsize
        given = [(1.0, 0.0)] * self.n if scaling is None else list(scaling)
        if len(given) < self.n:
            raise DsparkError("scaling", f"{len(given)} slots", f"must have one pair for each of {self.n}")
        self._scales, self._offsets = torch.tensor(given).T

    @torch.no_grad()
    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        draft, n = self.draft, n or self.n
        width = n if self.width == self.n else self.width
        hidden = draft.block_hidden([(active.context, active.ids[-1]) for active in batch], width)
        base = draft.base_logits(hidden)
        self._check_logits(base)
        previous = torch.tensor([active.ids[-1] for active in batch])
        tokens = self._greedy_tokens(batch, base[:, :n], previous)
        if tokens is not None:
            proposals = [Proposal(row, [None] * n) for row in tokens.tolist()]
            self._rate(proposals, hidden, torch.cat((previous[:, None], tokens[:, :-1]), 1))
            return proposals
        state = draft.markov_start(len(batch))
        proposals = [Proposal() for _ in batch]
        before = []
        for slot in range(n):
            before.append(previous)
            logits, state = draft.slot_logits(base[:, slot], hidden[:, slot], previous, state)
            previous = self._choose(logits, batch, slot, proposals)
        self._rate(proposals, hidden, torch.stack(before, dim=1))
        return proposals

    def _greedy_tokens(self, batch: Sequence[Active], base: Tensor, previous: Tensor) -> Tensor | None:
        """Target ids [R, n] in one call, when every request only wants the largest logit and the draft is compiled."""
        if not isinstance(self.draft.compiled, CompiledDraft):
            return None
        if any(active.rule != "greedy" or active.processor is not None for active in batch):
            return None
        return self.draft.compiled.greedy_tokens(base, previous)

    def _rate(self, proposals: list[Proposal], hidden: Tensor, before: Tensor) -> None:
        """Fill in the confidences, if wanted, from hidden [R, >= n, d] and the tokens before each slot [R, n]."""
        if not self.confidence:
            return
        count = before.shape[1]
        survives = self.draft.confidence(hidden[:, :count], before)
        assert survives is not None  # a draft without the head gives none, and then none is asked for
        scaled = torch.addcmul(self._offsets[:count], survives.float(), self._scales[:count]).sigmoid_()
        for proposal, row in zip(proposals, scaled.tolist(), strict=True):
            proposal.confidence = row[: len(proposal.tokens)]


def draft_proposer(
    draft: Draft,
    n: int | None = None,
    mode: Literal["block", "prefix"] = "block",
    confidence: bool = False,
    scaling: Scaling | None = None,
) -> DraftProposer:
    """The proposer of this kind of draft, which must be bound before it proposes. mode, confidence, scaling:
    DSpark's.

    Raises DsparkError when n is out of range, or for a mode that an EAGLE-3 draft has not.
    """
    if isinstance(draft, DSparkDraft):
        return DSparkProposer(draft, n, mode, confidence, scaling)
    if mode != "block":
        raise DsparkError("draft_mode", mode, "is for blocks; an EAGLE-3 draft has only `block`, one pass a token")
    return Eagle3Proposer(draft, n)


def make_proposer(
    target: Target,
    draft: Draft | None,
    n: int | None = None,
    mode: Literal["block", "prefix"] = "block",
    confidence: bool = False,
    scaling: Scaling | None = None,
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
    if draft.packed is not None and draft.packed != fingerprint(draft):
        remedy = "its weights were changed after it was made ready to decode; load it again"
        raise DsparkError("draft", draft.config.target_name, remedy)
    if isinstance(draft, DSparkDraft):
        _pack_dspark(draft)
    elif draft.packed is None:
        pack_linears(draft)
    draft.packed = fingerprint(draft)
    return draft_proposer(draft, n, mode, confidence, scaling)


def _pack_dspark(draft: DSparkDraft) -> None:
    if draft.packed is None:
        draft.compiled = compile_draft(draft)
        for part in (draft.markov_head,) if draft.compiled else (draft,):  # what runs compiled is packed already
            if part is not None:
                pack_linears(part)
    elif draft.compiled is None:
        draft.compiled = compile_draft(draft)  # its vocabulary was set anew
    draft.head = packed(draft.head)  # lent by the target, so not inside the draft
