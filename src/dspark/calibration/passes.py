"""The two passes of a round, ready to be repeated and timed: each is rolled back, so that all see the same context."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from dspark.decoding.drafting import DraftProposer
from dspark.decoding.request import Active, Request
from dspark.errors import DsparkError
from dspark.kernels.library import own_threads
from dspark.targets.base import Target

Key = TypeVar("Key")
COMMITTED = 2
"""Tokens a request commits in the rounds timed here: an ordinary acceptance length on a CPU."""


class Passes:
    """`requests` requests with the same context `ids`, read once and copied; widest: tokens a pass at most.

    Raises DsparkError for a context without room, or shorter than the tokens that a round commits.
    """

    @torch.inference_mode()
    def __init__(
        self, target: Target, proposer: DraftProposer, ids: Sequence[int], requests: int = 1, widest: int = 8
    ) -> None:
        if len(ids) < COMMITTED:
            raise DsparkError("context", f"{len(ids)} tokens", f"must be at least {COMMITTED} tokens")
        self.target, self.proposer, self.context, self.widest = target, proposer, len(ids), widest
        capacity = self.context + max(widest, proposer.n + 1, COMMITTED)
        first = self._start(0, ids, capacity)
        out = target.forward([(first.state, torch.tensor(first.ids))], proposer.taps, logits="last")
        assert out.taps is not None  # a draft always has taps
        proposer.observe([(first, out.taps)])
        self._taps, self._committed = out.taps, out.taps[-COMMITTED:].contiguous()
        self.active = [first, *(self._start(index, ids, capacity) for index in range(1, requests))]
        for active in self.active:
            if active is not first:
                active.state.copy_prefix(first.state, self.context)
                active.context.copy_prefix(first.context, self.context)
            active.commit([int(out.logits[-1].argmax())])
        self._new = torch.tensor([self.active[0].ids[-1]] * widest)

    def _start(self, index: int, ids: Sequence[int], capacity: int) -> Active:
        active = Active(
            index=index,
            request=Request(prompt_ids=list(ids)),
            rule="greedy",
            seed=0,
            ids=list(ids),
            limit=capacity,
            stop_ids=frozenset(),
            state=self.target.new_state(capacity),
        )
        self.proposer.start(active, capacity)
        return active

    @torch.inference_mode()
    def verify(self, counts: Sequence[int]) -> None:
        """One ragged pass of the target: counts[r] new tokens of request r, the draft's taps taken as in a round."""
        chosen = self.active[: len(counts)]
        batch = [(active.state, self._new[:count]) for active, count in zip(chosen, counts, strict=True)]
        with own_threads():
            self.target.forward(batch, self.proposer.taps)
        for active in chosen:
            active.state.truncate(self.context)

    @torch.inference_mode()
    def draft(self, requests: int = 1) -> None:
        """One draft pass for the first `requests` (block, heads, choosing), and writing what a round commits."""
        chosen = self.active[:requests]
        with own_threads():
            self.proposer.propose(chosen)
            self.proposer.observe([(active, self._committed) for active in chosen])
        for active in chosen:
            active.context.truncate(self.context)

    @torch.inference_mode()
    def write(self) -> None:
        """The whole context of one request's draft, written at once, as it was."""
        first = self.active[0]
        first.context.truncate(0)
        with own_threads():
            self.proposer.observe([(first, self._taps)])


def time_in_turns(jobs: Mapping[Key, Callable[[], None]], repeats: int, warm_up: int = 2) -> dict[Key, list[float]]:
    """Seconds of every job, `repeats` times, in turns, so that drift hits all alike; every second turn runs backwards.

    Raises DsparkError unless repeats >= 1.
    """
    if repeats < 1:
        raise DsparkError("repeats", repeats, "must be at least 1")
    samples: dict[Key, list[float]] = {key: [] for key in jobs}
    for turn in range(-warm_up, repeats):
        order = list(jobs.items())
        for key, job in order if turn % 2 else order[::-1]:
            start = time.perf_counter()
            job()
            if turn >= 0:
                samples[key].append(time.perf_counter() - start)
    return samples
