"""From samples to the figures of a report: acceptance, speed, means over suites. Pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np

from dspark.bench import metrics
from dspark.bench.metrics import Timing, paired_speedup, tokens_per_second
from dspark.bench.report import (
    Acceptance,
    Change,
    Column,
    DepthBucket,
    Drafter,
    LengthBucket,
    Overall,
    Ratio,
    Slot,
    Speed,
    Spread,
    SuiteReport,
)
from dspark.bench.samples import Sample, Source
from dspark.decoding.request import Round

K = 1024
LENGTH_EDGES = (0, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
DEPTH_EDGES = (0, 512, K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K, 512 * K)
Span = tuple[int, int | None]


def mean_or_none(values: Iterable[float | None]) -> float | None:
    """The plain mean; None when there is nothing, or one of them is None."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fmean(known) if known and len(known) == len(found) else None


def relative_change(low: float | None, high: float | None) -> float | None:
    """(high - low) / low, as the published table compares n = 3 with n = 7."""
    return None if low is None or high is None or low == 0 else high / low - 1


def macro_over_buckets(buckets: Sequence[LengthBucket]) -> float | None:
    """The mean over all questions from the means of the buckets that hold some."""
    full = [one for one in buckets if one.questions and one.macro_length is not None]
    total = sum(one.questions for one in full)
    return sum(one.questions * (one.macro_length or 0.0) for one in full) / total if total else None


def partition_mean(partitions: Mapping[str, float | None]) -> float | None:
    """Unweighted mean of the partitions of a long-context suite."""
    return mean_or_none(partitions.values())


# Acceptance


def acceptance(
    samples: Sequence[Sample], slots: int, source: Source, partitions: Mapping[str, str] | None = None
) -> Acceptance:
    """Every acceptance figure of one drafter's answers, drafted with up to `slots` tokens a round.

    partitions: question -> its partition, for a suite that has them. Failed requests are in no figure.
    """
    told = [one for one in samples if one.error is None and (one.rounds is not None or one.histogram is not None)]
    straight = [one for one in told if one.looping is False]
    known = all(one.looping is not None for one in told)
    rounds = [r for one in told for r in rounds_of(one, slots)]
    parts = partitions or {}
    by_part = {name: [one for one in told if parts.get(one.question) == name] for name in sorted(set(parts.values()))}
    return Acceptance(
        source=source,
        questions=len({one.question for one in told}),
        requests=len(told),
        without_rounds=sum(not rounds_of(one, slots) for one in told),
        looping=sum(one.looping is True for one in told),
        rounds=len(rounds),
        unscheduled_rounds=sum(one.scheduled == 0 for one in rounds),
        macro_length=macro_length(told),
        micro_length=metrics.acceptance_length(rounds),
        completion_per_round=completion_per_round(told),
        macro_length_without_loops=macro_length(straight) if known else None,
        micro_length_without_loops=(
            metrics.acceptance_length(r for one in straight for r in rounds_of(one, slots)) if known else None
        ),
        completion_per_round_without_loops=completion_per_round(straight) if known else None,
        histogram=metrics.histogram(rounds, slots),
        conditional=[
            Slot(slot=one.slot, accepted=one.accepted, verified=one.verified, rate=one.rate)
            for one in metrics.conditional_acceptance(rounds, slots)
        ],
        by_output_length=by_output_length(told),
        by_context_depth=by_context_depth(told),
        partitions={name: macro_length(inside) for name, inside in by_part.items()},
        partition_questions={name: len({one.question for one in inside}) for name, inside in by_part.items()},
    )


def rounds_of(sample: Sample, slots: int = 0) -> list[Round]:
    """Its rounds; where the engine tells only how many accepted k, those, in no order."""
    if sample.rounds is not None:
        return sample.rounds
    counts = sample.histogram or []
    width = max(slots, len(counts) - 1)
    return [Round(width, width, k) for k, count in enumerate(counts) for _ in range(count)]


def macro_length(samples: Iterable[Sample]) -> float | None:
    """Mean over questions (equal weight) of the mean over each one's requests; bonus counted."""
    return metrics.macro_acceptance_length(metrics.Answer(one.question, rounds_of(one)) for one in samples)


def completion_per_round(samples: Iterable[Sample]) -> float | None:
    """Output tokens / rounds: counts the prefill's token, loses what a stop cut off. No acceptance length."""
    counts = [(one.output_tokens, len(rounds_of(one))) for one in samples]
    rounds = sum(count for _, count in counts)
    return sum(tokens for tokens, _ in counts) / rounds if rounds else None


def by_output_length(samples: Sequence[Sample]) -> list[LengthBucket]:
    """Macro acceptance length by the length of the answer; a question of several turns counts as their mean length."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for one in samples:
        lengths[one.question].append(one.output_tokens)
    means = {question: fmean(found) for question, found in lengths.items()}
    table = []
    for low, high in _spans(LENGTH_EDGES):
        inside = [one for one in samples if low <= means[one.question] < (high or float("inf"))]
        tokens = [one.output_tokens for one in inside]
        table.append(
            LengthBucket(
                label=_label(low, high),
                low=low,
                high=high,
                questions=len({one.question for one in inside}),
                shortest=min(tokens, default=None),
                longest=max(tokens, default=None),
                macro_length=macro_length(inside),
            )
        )
    return table


def by_context_depth(samples: Sequence[Sample]) -> list[DepthBucket]:
    """Micro acceptance length by how many tokens lie before a round's anchor; from the samples whose rounds are known
    one by one."""
    inside: dict[Span, list[Round]] = {span: [] for span in _spans(DEPTH_EDGES)}
    for one in samples:
        depth = one.prompt_tokens
        for round_ in one.rounds or ():
            span = next(span for span in reversed(inside) if depth >= span[0])
            inside[span].append(round_)
            depth += round_.accepted + 1
    return [
        DepthBucket(
            label=_label(low, high),
            low=low,
            high=high,
            rounds=len(rounds),
            micro_length=metrics.acceptance_length(rounds),
        )
        for (low, high), rounds in inside.items()
        if rounds
    ]


def _spans(edges: Sequence[int]) -> Iterator[Span]:
    yield from pairwise(edges)
    yield edges[-1], None


def _label(low: int, high: int | None) -> str:
    """0-1K, 1-2K, 32K+; K is 1,024 tokens."""

    def said(value: int) -> str:
        return f"{value // K}" if value % K == 0 else f"{value}"

    if high is None:
        return f"{said(low)}K+"
    return f"{said(low)}-{said(high)}" + "K" * (high % K == 0)


# Speed


def speed(samples: Sequence[Sample], baseline: Sequence[Sample] | None) -> Speed | None:
    """Speed of one drafter's timed requests of one suite and batch; baseline: the same of what it is compared with,
    None for the baseline itself. Groups with a failed request on either side are in no ratio. None: nothing was timed.
    """
    timed = [one for one in samples if one.error is None and one.seconds is not None]
    if not timed:
        return None
    own = _groups(samples)
    latencies = [one.seconds or 0.0 for one in timed]
    alone = samples[0].batch == 1
    rounds = sum(len(rounds_of(one)) for one in timed)
    after = sum((one.seconds or 0.0) - _first(one) for one in timed)
    return Speed(
        batch=samples[0].batch,
        questions=len({one.question for one in timed}),
        requests=len(timed),
        failed=sum(one.error is not None for one in samples),
        tokens=sum(one.output_tokens for one in timed),
        tokens_per_s=tokens_per_second(own.values()),
        decode_tokens_per_s=tokens_per_second(_decoding(samples).values()) if alone else None,
        speedup=None if baseline is None else _ratio(_groups(baseline), own),
        decode_speedup=None if baseline is None or not alone else _ratio(_decoding(baseline), _decoding(samples)),
        first_token=_spread(_first(one) for one in timed if one.arrivals),
        time_per_token=_spread(
            ((one.seconds or 0.0) - _first(one)) / (one.output_tokens - 1) for one in timed if one.output_tokens > 1
        ),
        inter_token=_spread(b[0] - a[0] for one in timed if one.streamed for a, b in pairwise(one.arrivals)),
        latency=_spread(latencies),
        draft_seconds=_per(timed, "draft_seconds", rounds),
        verify_seconds=_per(timed, "verify_seconds", rounds),
        engine_share=_outside(timed, ("draft_seconds", "verify_seconds"), after),
        bench_share=_outside(timed, ("engine_seconds",), after),
    )


def _first(sample: Sample) -> float:
    """Seconds to the first token."""
    return sample.arrivals[0][0] if sample.arrivals else 0.0


def _whole(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    """The groups in which every request succeeded."""
    groups: dict[int, list[Sample]] = defaultdict(list)
    for one in samples:
        groups[one.group].append(one)
    return {
        group: inside
        for group, inside in groups.items()
        if all(one.error is None and one.seconds is not None for one in inside)
    }


def _groups(samples: Sequence[Sample]) -> dict[int, Timing]:
    """Tokens and wall-clock seconds of each group."""
    return {
        group: Timing(sum(one.output_tokens for one in inside), max(one.group_seconds or 0.0 for one in inside))
        for group, inside in _whole(samples).items()
    }


def _decoding(samples: Sequence[Sample]) -> dict[int, Timing]:
    """The same after the first token, for requests that ran alone."""
    return {
        group: Timing(
            sum(one.output_tokens - 1 for one in inside), sum((one.seconds or 0.0) - _first(one) for one in inside)
        )
        for group, inside in _whole(samples).items()
    }


def _ratio(baseline: Mapping[int, Timing], own: Mapping[int, Timing]) -> Ratio | None:
    shared = [group for group in baseline if group in own and baseline[group].tokens and own[group].tokens]
    if not shared:
        return None
    found = paired_speedup([baseline[group] for group in shared], [own[group] for group in shared])
    return Ratio(value=found.value, low=found.low, high=found.high, level=found.level)


def _spread(values: Iterable[float]) -> Spread | None:
    found = np.array(list(values), dtype=np.float64)
    if not len(found):
        return None
    p50, p99 = np.quantile(found, [0.5, 0.99])
    return Spread(mean=float(found.mean()), p50=float(p50), p99=float(p99))


def _per(samples: Sequence[Sample], name: str, rounds: int) -> float | None:
    values = [getattr(one, name) for one in samples]
    return sum(values) / rounds if rounds and all(value is not None for value in values) else None


def _outside(samples: Sequence[Sample], names: Sequence[str], after: float) -> float | None:
    """Share of `after` seconds that lies outside the named parts; None where one was not measured."""
    inside = [getattr(one, name) for one in samples for name in names]
    if after <= 0 or any(value is None for value in inside):
        return None
    return max(0.0, 1 - sum(inside) / after)


# Over suites


def overall(suites: Sequence[SuiteReport], drafters: Sequence[Drafter], baseline: str | None) -> list[Overall]:
    """Simple unweighted means over the suites that are not apart, end to end, at the smallest batch."""
    counted = [suite for suite in suites if not suite.apart]
    table = []
    for drafter in drafters:
        columns = [suite.columns.get(drafter.name, Column()) for suite in counted]
        accepted = [column.acceptance for column in columns]
        if drafter.kind == "transformers-dflash":  # on the timed prompts only
            accepted = [None for _ in accepted]
        first = [column.speed[0] if column.speed else None for column in columns]
        batches = {one.batch for one in first if one is not None}
        ends = [one.speedup.value if one and one.speedup else None for one in first]
        only = [one.decode_speedup.value if one and one.decode_speedup else None for one in first]
        table.append(
            Overall(
                drafter=drafter.name,
                suites=len(counted),
                batch=min(batches) if len(batches) == 1 else None,
                mean_speedup=None if drafter.name == baseline else mean_or_none(ends),
                mean_decode_speedup=None if drafter.name == baseline else mean_or_none(only),
                mean_macro_length=mean_or_none(one.macro_length if one else None for one in accepted),
                mean_macro_length_without_loops=mean_or_none(
                    one.macro_length_without_loops if one else None for one in accepted
                ),
            )
        )
    return table


def changes(drafters: Sequence[Drafter], table: Sequence[Overall]) -> list[Change]:
    """The published table: each draft's mean speedup at the smallest and the largest n of the run, where there are two
    widths at all."""
    speeds = {one.drafter: one.mean_speedup for one in table}
    drafting = [one for one in drafters if one.n and not one.kind.startswith("transformers")]
    widths = sorted({one.n for one in drafting if one.n})
    if len(widths) < 2:
        return []
    low_n, high_n = widths[0], widths[-1]
    found = []
    for name in dict.fromkeys(family(one) for one in drafting):
        low, high = (speeds.get(f"{name} n = {n}") for n in (low_n, high_n))
        change = relative_change(low, high)
        found.append(Change(draft=name, low_n=low_n, high_n=high_n, low=low, high=high, change=change))
    return found


def family(drafter: Drafter) -> str:
    """A drafter's name without its width."""
    return drafter.name.removesuffix(f" n = {drafter.n}")
