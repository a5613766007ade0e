"""Acceptance and speed figures, as pure functions over round records (docs/method.md section 6).

Two words that are never mixed here:
  accepted           draft tokens kept in a round, bonus NOT counted (0..n)
  acceptance length  accepted + 1, the target's own token counted (1..n + 1)
Every name below that ends in `_length` counts the bonus. A figure over nothing is None, never 0 or NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from dspark.decoding.request import Round
from dspark.errors import DsparkError


@dataclass(frozen=True)
class SlotRate:
    """Conditional acceptance of one slot: `accepted` of the `verified` rounds in which every earlier slot was
    accepted and this one was verified."""

    slot: int
    accepted: int
    verified: int

    @property
    def rate(self) -> float | None:
        return self.accepted / self.verified if self.verified else None


@dataclass(frozen=True)
class Answer:
    """One finished request of a question (a question has one request per turn)."""

    question: str
    rounds: Sequence[Round]
    looping: bool = False


@dataclass(frozen=True)
class Acceptance:
    """All acceptance figures of a set of answers. Bonus counted in the four lengths.

    macro_length: mean over questions of the mean over their requests (equal weight a question)
    micro_length: 1 + total accepted / total rounds
    *_without_loops: the same over the answers that do not end in a loop
    histogram[k]: rounds in which k draft tokens were accepted (bonus not counted)
    unscheduled_rounds: rounds with nothing verified; they are rounds of length 1 in every figure
    without_rounds: requests that ended at the prefill's token; they are in no figure
    """

    questions: int
    requests: int
    without_rounds: int
    looping: int
    rounds: int
    unscheduled_rounds: int
    macro_length: float | None
    micro_length: float | None
    macro_length_without_loops: float | None
    micro_length_without_loops: float | None
    histogram: list[int]
    conditional: list[SlotRate]


@dataclass(frozen=True)
class Interval:
    """A ratio and its percentile bootstrap interval over prompts; no interval from fewer than two prompts."""

    value: float
    low: float | None
    high: float | None
    level: float = 0.95

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x"
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Timing:
    """Output tokens of one request and the wall-clock seconds they took."""

    tokens: int
    seconds: float


@dataclass(frozen=True)
class PassRow:
    """One line of a pass-time table: seconds of one pass over `tokens` new tokens, and T(tokens) / T(base)."""

    tokens: int
    seconds: float
    ratio: float


def histogram(rounds: Iterable[Round], slots: int = 0) -> list[int]:
    """h[k] = rounds with k accepted draft tokens (bonus not counted); at least `slots` + 1 bins."""
    counts = [0] * (slots + 1)
    for one in rounds:
        if one.accepted >= len(counts):
            counts += [0] * (one.accepted + 1 - len(counts))
        counts[one.accepted] += 1
    return counts


def acceptance_length(rounds: Iterable[Round]) -> float | None:
    """L(request) = 1 + sum_k k h[k] / sum_k h[k], bonus counted. None for a request without rounds."""
    counts = histogram(rounds)
    total = sum(counts)
    return 1.0 + sum(k * h for k, h in enumerate(counts)) / total if total else None


def macro_acceptance_length(answers: Iterable[Answer]) -> float | None:
    """Mean over questions (equal weight) of the mean over each question's requests, bonus counted."""
    by_question: dict[str, list[float]] = {}
    for answer in answers:
        length = acceptance_length(answer.rounds)
        if length is not None:
            by_question.setdefault(answer.question, []).append(length)
    return fmean(fmean(lengths) for lengths in by_question.values()) if by_question else None


def micro_acceptance_length(answers: Iterable[Answer]) -> float | None:
    """1 + total accepted / total rounds, bonus counted: a long answer weighs more than a short one."""
    return acceptance_length(one for answer in answers for one in answer.rounds)


def conditional_acceptance(rounds: Sequence[Round], slots: int) -> list[SlotRate]:
    """Slot k = 1..slots: rounds with k accepted, among those where 1..k-1 were accepted and k was verified."""
    return [
        SlotRate(
            slot=k,
            accepted=sum(one.accepted >= k for one in rounds),
            verified=sum(one.accepted >= k - 1 and one.scheduled >= k for one in rounds),
        )
        for k in range(1, slots + 1)
    ]


def summarise(answers: Sequence[Answer], slots: int) -> Acceptance:
    """Every acceptance figure of a set of answers drafted with up to `slots` tokens a round (0 = plain)."""
    rounds = [one for answer in answers for one in answer.rounds]
    straight = [answer for answer in answers if not answer.looping]
    return Acceptance(
        questions=len({answer.question for answer in answers}),
        requests=len(answers),
        without_rounds=sum(not answer.rounds for answer in answers),
        looping=len(answers) - len(straight),
        rounds=len(rounds),
        unscheduled_rounds=sum(one.scheduled == 0 for one in rounds),
        macro_length=macro_acceptance_length(answers),
        micro_length=micro_acceptance_length(answers),
        macro_length_without_loops=macro_acceptance_length(straight),
        micro_length_without_loops=micro_acceptance_length(straight),
        histogram=histogram(rounds, slots),
        conditional=conditional_acceptance(rounds, slots),
    )


def tokens_per_second(timings: Iterable[Timing]) -> float | None:
    """Pooled: all tokens over all seconds."""
    timings = list(timings)
    seconds = sum(timing.seconds for timing in timings)
    return sum(timing.tokens for timing in timings) / seconds if seconds > 0 else None


def paired_speedup(
    baseline: Sequence[Timing],
    candidate: Sequence[Timing],
    *,
    level: float = 0.95,
    resamples: int = 4000,
    seed: int = 0,
) -> Interval:
    """(candidate tokens / s) / (baseline tokens / s), a ratio of sums over the same prompts.

    baseline[i] and candidate[i] are the same prompt, and a bootstrap draw takes both or neither, so that
    prompts of different lengths and hardness do not widen the interval. Percentile interval, seeded.
    Raises DsparkError when the two are not the same length, or hold no time.
    """
    if len(baseline) != len(candidate) or not baseline:
        raise DsparkError("timings", (len(baseline), len(candidate)), "the two sides need the same prompts, at least 1")
    table = np.array(
        [[b.tokens, b.seconds, c.tokens, c.seconds] for b, c in zip(baseline, candidate, strict=True)], dtype=np.float64
    )
    total = table.sum(axis=0)
    if not (total > 0).all():
        raise DsparkError("timings", total.tolist(), "both sides need tokens and seconds above 0")
    value = float(_speed_ratio(total))
    if len(table) < 2:
        return Interval(value, None, None, level)
    generator = np.random.default_rng(seed)
    draws = table[generator.integers(0, len(table), size=(resamples, len(table)))].sum(axis=1)
    ratios = _speed_ratio(draws[(draws > 0).all(axis=1)])
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(low), float(high), level)


def _speed_ratio(sums: np.ndarray) -> np.ndarray:
    """[..., 4] of (baseline tokens, baseline seconds, candidate tokens, candidate seconds) -> [...]."""
    return np.asarray((sums[..., 2] / sums[..., 3]) / (sums[..., 0] / sums[..., 1]))


def pass_table(seconds_by_tokens: Mapping[int, Sequence[float]]) -> list[PassRow]:
    """Median seconds of a pass for each width, and its ratio to the narrowest: T(8) / T(1) and its like."""
    if not seconds_by_tokens or any(not samples for samples in seconds_by_tokens.values()):
        raise DsparkError("passes", {k: len(v) for k, v in seconds_by_tokens.items()}, "every width needs a sample")
    medians = {tokens: median(samples) for tokens, samples in sorted(seconds_by_tokens.items())}
    base = next(iter(medians.values()))
    return [PassRow(tokens, seconds, seconds / base) for tokens, seconds in medians.items()]
