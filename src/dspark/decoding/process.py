"""What a request changes in logits before a law is made of them: grammar, least length, bias, penalties.

The draft's logits and the target's go through the same function, and each slot sees the drafts before it. State
changes with committed tokens only: a rejected token leaves no trace.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dspark.decoding.grammar import GrammarState
from dspark.decoding.request import SamplingSettings
from dspark.errors import DsparkError


class LogitsProcessor:
    """Order, as in vLLM: grammar and least length (excluded ids), logit_bias, repetition, frequency and presence
    penalties; temperature and filters follow in `sampling.log_distribution`.

    prompt_ids: seen by the repetition penalty (as in Transformers and vLLM), not by the other two (as in OpenAI's
    API); min_tokens: no stop id before so many tokens.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        prompt_ids: Iterable[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        grammar: GrammarState | None = None,
    ) -> None:
        self._settings, self._grammar, self._min_tokens = settings, grammar, min_tokens
        self._stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._prompt = frozenset(prompt_ids) if settings.repetition_penalty != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._bias_ids = torch.tensor([token for token, _ in settings.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([bias for _, bias in settings.logit_bias], dtype=torch.float32)

    @staticmethod
    def needed(settings: SamplingSettings, min_tokens: int, constrained: bool) -> bool:
        """Whether a request changes logits at all; without, its laws are made of the models' own."""
        return settings.shapes_logits or min_tokens > 0 or constrained

    @property
    def ended(self) -> bool:
        """Whether the grammar is complete, so that the answer is."""
        return self._grammar is not None and self._grammar.ended

    def commit(self, token: int) -> None:
        """A token became part of the answer."""
        self._counts[token] += 1
        if self._grammar is not None:
            self._grammar.commit(token)

    def __call__(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Logits [V] of the position after the committed tokens and `drafts`, changed: a new float32 [V], -inf for
        what cannot come there. Raises DsparkError when that is everything."""
        out = logits.to(torch.float32, copy=True)
        allowed = None if self._grammar is None else self._grammar.allowed(drafts)
        if allowed is not None:
            out.masked_fill_(~allowed, -math.inf)
        if self._counts.total() + len(drafts) < self._min_tokens:
            out[self._stops] = -math.inf
        if len(self._bias_ids):
            out[self._bias_ids] += self._bias
        self._penalise(out, drafts)
        if out.max() == -math.inf:
            raise DsparkError("request", "its settings", "exclude every token that could come next")
        return out

    def _penalise(self, out: Tensor, drafts: Sequence[int]) -> None:
        settings = self._settings
        if not settings.penalises:
            return
        counts = self._counts + Counter(drafts)
        if settings.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt | counts.keys()), dtype=torch.int64)
            scores = out[seen]
            factor = settings.repetition_penalty
            out[seen] = torch.where(scores > 0, scores / factor, scores * factor)
        if counts and (settings.frequency_penalty or settings.presence_penalty):
            made = torch.tensor(list(counts), dtype=torch.int64)
            often = torch.tensor(list(counts.values()), dtype=torch.float32)
            out[made] -= settings.frequency_penalty * often + settings.presence_penalty
