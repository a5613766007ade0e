"""What finished requests leave behind: the target's K/V and the draft's context of a run of tokens, for requests that
begin with the same ones. A hit without the draft's context would accept nothing, so the two are one entry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dspark.targets.base import TargetState

SHORTEST = 16
"""Tokens in common that are worth a copy."""


@dataclass(eq=False)
class Prefix:
    """Tokens [T] whose K/V `state` holds, and the draft's `context` of the same tokens (None: no draft)."""

    ids: NDArray[np.int64]
    state: TargetState
    context: Any

    @property
    def capacity(self) -> int:
        """Tokens of memory it takes."""
        return self.state.capacity

    def common(self, ids: NDArray[np.int64]) -> int:
        """How many leading ids are the same."""
        length = min(len(self.ids), len(ids))
        differs = np.flatnonzero(self.ids[:length] != ids[:length])
        return int(differs[0]) if len(differs) else length


class PrefixCache:
    """Prefixes, the least recently used first. It has no limit of its own: the engine evicts to make room."""

    def __init__(self) -> None:
        self._entries: list[Prefix] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of memory that all entries take."""
        return sum(entry.capacity for entry in self._entries)

    def keep(self, ids: Sequence[int], state: TargetState, context: Any) -> None:
        """Keep a finished request's memory; entries that it contains whole are dropped for it."""
        entry = Prefix(np.asarray(ids, dtype=np.int64), state, context)
        if len(entry.ids) < SHORTEST:
            return
        if any(held.common(entry.ids) == len(entry.ids) for held in self._entries):
            return
        self._entries = [held for held in self._entries if held.common(entry.ids) < len(held.ids)]
        self._entries.append(entry)

    def find(self, ids: Sequence[int]) -> tuple[Prefix, int] | None:
        """The entry with the longest beginning in common with `ids`, and its length, at least SHORTEST."""
        wanted = np.asarray(ids, dtype=np.int64)
        best = max(self._entries, key=lambda entry: entry.common(wanted), default=None)
        length = 0 if best is None else best.common(wanted)
        if best is None or length < SHORTEST:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        return best, length

    def evict(self, keep: Prefix | None = None) -> int:
        """Drop the least recently used entry but `keep`; the tokens that it took, 0 when there is none."""
        for entry in self._entries:
            if entry is not keep:
                self._entries.remove(entry)
                return entry.capacity
        return 0
