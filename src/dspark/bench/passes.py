"""What one pass costs: the target over a few new tokens, and the draft over one block."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from dspark.bench.metrics import PassRow, pass_table
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Active, Request
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.base import Target


@dataclass(frozen=True)
class PassTimes:
    """Medians at one context length, batch 1.

    verify: T_verify(w) for each width w (new tokens a pass) and its ratio to the narrowest
    draft_seconds: one draft pass of n slots (block, head, Markov, choosing), and writing the context of the
        tokens that a round commits
    draft_share: draft_seconds / T_verify(narrowest)
    """

    context: int
    n: int
    verify: list[PassRow]
    draft_seconds: float
    draft_share: float


@torch.inference_mode()
def measure_passes(
    target: Target,
    draft: DSparkDraft,
    ids: Sequence[int],
    widths: Sequence[int] = (1, 8),
    n: int | None = None,
    repeats: int = 30,
) -> PassTimes:
    """Time verification passes of each width and draft passes, interleaved, after reading `ids` (the context).

    Taps are captured as in a real round. Every pass is rolled back, so that all see the same context.
    Raises DsparkError for a draft of another target, n > gamma or a context without room.
    """
    proposer = make_proposer(target, draft, n)
    length, room = len(ids), max(*widths, proposer.n + 1)
    state = target.new_state(length + room)
    request = Request(prompt_ids=list(ids))
    active = Active(
        index=0,
        request=request,
        rule="greedy",
        seed=0,
        ids=list(ids),
        limit=room,
        stop_ids=frozenset(),
        state=state,
    )
    proposer.start(active, length + room)
    out = target.forward([(state, torch.tensor(active.ids))], proposer.taps, logits="last")
    assert out.taps is not None  # a draft always has taps
    proposer.observe([(active, out.taps)])
    active.commit([int(out.logits[-1].argmax())])
    committed = out.taps[-2:].contiguous()
    new_ids = torch.tensor([active.ids[-1]] * max(widths))

    def verify(width: int) -> None:
        target.forward([(state, new_ids[:width])], proposer.taps)
        state.truncate(length)

    def propose() -> None:
        proposer.propose([active])
        proposer.observe([(active, committed)])
        active.context.truncate(length)

    jobs: dict[int, Callable[[], None]] = {width: partial(verify, width) for width in widths}
    jobs[0] = propose
    samples: dict[int, list[float]] = {key: [] for key in jobs}
    for repeat in range(repeats + 2):
        for key, job in jobs.items():
            start = time.perf_counter()
            job()
            if repeat >= 2:  # the first two warm up
                samples[key].append(time.perf_counter() - start)
    draft_seconds = median(samples.pop(0))
    table = pass_table(samples)
    return PassTimes(length, proposer.n, table, draft_seconds, draft_seconds / table[0].seconds)
