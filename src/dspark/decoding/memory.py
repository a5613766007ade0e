"""Who may hold how many tokens of memory: running requests and the prefix cache share one budget.

A request's memory begins with its tokens and room for some more, grows as its answer does, and can be given up: what
it held is a function of its tokens, so it is read again (or copied from the prefix cache) when there is room.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.decoding.prefixes import Prefix, PrefixCache
from dspark.decoding.proposers import Proposer
from dspark.decoding.request import Active
from dspark.errors import DsparkError
from dspark.targets.base import Target

GROWTH = 128
"""Tokens by which a request's memory grows, under a budget. Without one it is whole from the start."""


class Memory:
    """budget: tokens for all requests and prefixes (None: no limit); caches: whether prefixes are kept.

    One token takes `bytes_per_token` (target and draft). Raises DsparkError for a budget below one token.
    """

    def __init__(self, target: Target, proposer: Proposer, budget: int | None, caches: bool) -> None:
        if budget is not None and budget < 2:
            raise DsparkError("kv_tokens", budget, "must be at least 2 (a prompt token and an answer's)")
        self.target, self.proposer, self.budget, self.caches = target, proposer, budget, caches
        self.prefixes = PrefixCache()
        self.bytes_per_token = target.bytes_per_token + proposer.bytes_per_token

    def held(self, running: Sequence[Active]) -> int:
        """Tokens of memory that requests and prefixes take."""
        return self.prefixes.tokens + sum(active.state.capacity for active in running)

    def start(self, active: Active, running: Sequence[Active]) -> bool:
        """Give a request its first memory, with what the prefix cache knows of its tokens. False: no room now."""
        length = len(active.ids)
        first = active.longest if self.budget is None else min(active.longest, length + self.proposer.n + GROWTH)
        found = self.prefixes.find(active.ids[: length - 1]) if self.caches else None
        if not self._free(first, running, None if found is None else found[0]):
            found = None  # the prefix itself must go
            if not self._free(first, running):
                return False
        active.state = self.target.new_state(first)
        if active.request.speculate:
            self.proposer.start(active, first)
        if found is not None:
            prefix, common = found
            active.state.copy_prefix(prefix.state, common)
            if active.request.speculate:
                self.proposer.resume(active, prefix.context, common)
            if not active.result.output_ids:
                active.result.cached_tokens = common
        return True

    def extend(self, active: Active, running: Sequence[Active]) -> bool:
        """Make sure that a request has memory for its next block. False: no room now."""
        need = min(active.longest, len(active.ids) + self.proposer.n)
        if active.state.capacity >= need:
            return True
        capacity = min(active.longest, need + GROWTH)
        if not self._free(capacity - active.state.capacity, running):
            return False
        active.state.grow(capacity)
        if active.request.speculate:
            self.proposer.start(active, capacity)
        return True

    def _free(self, tokens: int, running: Sequence[Active], keep: Prefix | None = None) -> bool:
        """Evict prefixes until `tokens` more fit the budget; `keep` (about to be copied) goes last."""
        if self.budget is None:
            return True
        over = self.held(running) + tokens - self.budget
        while over > 0:
            freed = self.prefixes.evict(keep)
            if not freed:
                return False
            over -= freed
        return True

    def retire(self, active: Active) -> None:
        """A request is over: its memory is kept as a prefix, or freed. One without the draft's context is no prefix
        for those that speculate, and is freed; one whose context is behind is a prefix as far as that goes."""
        whole = active.request.speculate or not self.proposer.n
        length = active.state.length
        if self.proposer.n and active.context is not None:
            length = min(length, active.context.length)
        if self.caches and whole and active.result.error is None and length:
            self.prefixes.keep(active.ids[:length], active.state, active.context)
        active.release()

    def release(self, active: Active) -> None:
        """A request gives its memory up, to be read again later or never."""
        active.release()
