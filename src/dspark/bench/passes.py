"""What one pass costs: the target over a few new tokens, and the draft over one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from dspark.bench.metrics import Interval, PassRow, pass_table
from dspark.calibration.passes import Passes, time_in_turns
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.proposers import make_proposer
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
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


def measure_passes(
    target: Target,
    draft: Draft,
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
    assert isinstance(proposer, DraftProposer)  # a draft was given
    passes = Passes(target, proposer, ids, widest=max(widths))
    jobs: dict[int, Callable[[], None]] = {width: partial(passes.verify, [width]) for width in widths}
    jobs[0] = passes.draft
    samples = time_in_turns(jobs, repeats)
    draft_seconds = median(samples.pop(0))
    table = pass_table(samples)
    return PassTimes(len(ids), proposer.n, table, draft_seconds, draft_seconds / table[0].seconds)


def median_ratio(
    base: Sequence[float], other: Sequence[float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """median(other) / median(base), with a percentile bootstrap interval over turns.

    base[i] and other[i] were taken in the same turn, and a draw takes both or neither. No interval from fewer than two
    turns. Raises DsparkError when the two are not the same length, or empty.
    """
    if len(base) != len(other) or not base:
        raise DsparkError("samples", (len(base), len(other)), "the two sides need the same turns, at least 1")
    value = median(other) / median(base)
    if len(base) < 2:
        return Interval(value, None, None, level)
    chosen = np.random.default_rng(seed).integers(0, len(base), size=(resamples, len(base)))
    ratios = np.median(np.asarray(other)[chosen], axis=1) / np.median(np.asarray(base)[chosen], axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), level)
