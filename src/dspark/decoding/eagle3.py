"""Drafting with an EAGLE-3 draft: n passes of one layer for n tokens, each fed the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.decoding.drafting import DraftProposer, Proposal
from dspark.decoding.request import Active
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.errors import DsparkError


class Eagle3Proposer(DraftProposer):
    """Autoregressive drafting. The first pass also writes the pairs of the tokens committed since the last round: the
    state of the last token read goes with the anchor, which follows it.

    Raises DsparkError when n is out of range.
    """

    def __init__(self, draft: Eagle3Draft, n: int | None = None) -> None:
        super().__init__(draft, n)
        self.draft = draft
        heads, key_width, value_width = draft.config.cached_shape
        kept = key_width + (value_width if draft.config.attention == "gqa" else 0)
        self.bytes_per_token = (heads * kept + draft.config.hidden_size) * draft.norm.weight.itemsize

    @torch.no_grad()
    def propose(self, batch: Sequence[Active], n: int | None = None) -> list[Proposal]:
        """See `Proposer.propose`. Raises DsparkError for a context that is not that of all tokens but the anchor."""
        for active in batch:
            if len(active.ids) != active.context.length + 1:
                remedy = f"must be {len(active.ids) - 1}: all tokens of the request but its anchor"
                raise DsparkError("context", active.context.length, remedy)
        draft, proposals = self.draft, [Proposal() for _ in batch]
        contexts = [active.context for active in batch]
        hidden = draft.first_step([(a.context, a.ids[a.context.written + 1 :]) for a in batch])
        tokens = self._pick(hidden, batch, 0, proposals)
        for step in range(1, n or self.n):
            hidden = draft.next_step(contexts, tokens, hidden, step)
            tokens = self._pick(hidden, batch, step, proposals)
        return proposals

    def _pick(self, hidden: Tensor, batch: Sequence[Active], step: int, proposals: list[Proposal]) -> Tensor:
        """The tokens [R] of one pass, from its outputs [R, d]."""
        logits = self.draft.logits(hidden)
        self._check_logits(logits)
        return self._choose(logits, batch, step, proposals)
