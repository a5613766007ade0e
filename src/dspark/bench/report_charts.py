"""The page's charts as plain shapes on a canvas; a template only has to write them down.

What is over all suites is pooled from their counts, which is exact: a slot's rate from accepted and verified rounds,
macro lengths of a bucket weighted by questions, micro lengths by rounds. Columns of other engines, whose rounds are of
a part of the prompts, are only among the speeds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dspark.bench.report import Acceptance, DepthBucket, LengthBucket, Ratio, Report, SuiteReport
from dspark.bench.tables import (
    DASH,
    contestants,
    counted_suites,
    drafting,
    first_speed,
    is_baseline,
    means_at,
    number,
    overall_of,
    percent,
    ratio,
    times,
)

WIDTH, HEIGHT = 400, 220
COLOURS = 10
NAME_WIDTH = 22
LETTER = 7.2
"""As wide as a figure of a label may be, in the units of the canvas."""


@dataclass(frozen=True)
class Box:
    """A bar; title: what a pointer over it is told."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    title: str


@dataclass(frozen=True)
class Rule:
    """A straight line; kind: grid, base (the value that is compared with) or whisker (an interval)."""

    x1: float
    y1: float
    x2: float
    y2: float
    kind: str


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    colour: int
    title: str


@dataclass(frozen=True)
class Words:
    x: float
    y: float
    text: str
    anchor: str = "start"
    soft: bool = False


@dataclass
class Chart:
    """lines: (colour, points) of each unbroken run of values."""

    title: str
    height: float = HEIGHT
    width: float = WIDTH
    boxes: list[Box] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    lines: list[tuple[int, str]] = field(default_factory=list)
    dots: list[Dot] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)


def colours(report: Report) -> dict[str, int]:
    """Each drafter's colour, the same everywhere: 0 for the baseline, then 1 to 10, and from 1 again."""
    table, free = {}, 0
    for drafter in report.drafters:
        if is_baseline(report, drafter):
            table[drafter.name] = 0
        else:
            table[drafter.name] = 1 + free % COLOURS
            free += 1
    return table


def speed_charts(report: Report) -> list[Chart]:
    """Speedups end to end at the smallest batch, one scale for all: the means, then every suite with intervals."""
    means: dict[str, Ratio | None] = {}
    for drafter in drafting(report):
        mean = overall_of(report, drafter.name)
        value = mean.mean_speedup if mean else None
        means[drafter.name] = None if value is None else Ratio(value=value)
    groups = [(f"mean of {len(counted_suites(report))} suites, {means_at(report)}", means)]
    groups += [(suite.name, _speedups(report, suite)) for suite in report.suites]
    groups = [(name, found) for name, found in groups if any(found.values())]
    largest = max([1.0, *(one.high or one.value for _, found in groups for one in found.values() if one)])
    return [_speed_chart(name, found, colours(report), largest) for name, found in groups]


def _speedups(report: Report, suite: SuiteReport) -> dict[str, Ratio | None]:
    speeds = {drafter.name: first_speed(suite.columns.get(drafter.name)) for drafter in drafting(report)}
    return {name: speed.speedup if speed else None for name, speed in speeds.items()}


def _speed_chart(name: str, found: Mapping[str, Ratio | None], colour: Mapping[str, int], largest: float) -> Chart:
    """Horizontal bars from 0, a line at 1x, a whisker for each interval; no label lies across the line."""
    top, step = 6, 22
    left = 10 + 6.8 * min(NAME_WIDTH, max(len(one) for one in found))
    scale = (WIDTH - left - 54) / largest
    end, one_x = top + step * len(found), left + scale
    chart = Chart(f"Speedup, {name}", height=end + 18)
    chart.words.append(Words(_tidy(one_x), end + 14, "1x", "middle", soft=True))
    for index, (drafter, one) in enumerate(found.items()):
        y, middle = top + index * step, top + index * step + 9
        chart.words.append(Words(0, middle + 4, _short(drafter)))
        if one is None:
            chart.words.append(Words(_clear_of(one_x, left + 6, DASH), middle + 4, DASH, soft=True))
            continue
        width = _tidy(one.value * scale)
        chart.boxes.append(Box(_tidy(left), y + 1, width, 16, colour[drafter], f"{drafter}, {name}: {ratio(one)}"))
        reach = left + width
        if one.low is not None and one.high is not None:
            low, reach = _tidy(left + one.low * scale), _tidy(left + one.high * scale)
            chart.rules.append(Rule(low, middle, reach, middle, "whisker"))
            chart.rules += [Rule(x, middle - 3, x, middle + 3, "whisker") for x in (low, reach)]
        at = _clear_of(one_x, max(reach, left + width) + 6, times(one.value))
        chart.words.append(Words(at, middle + 4, times(one.value)))
    chart.rules.insert(0, Rule(_tidy(one_x), 0, _tidy(one_x), end, "base"))
    return chart


def _clear_of(line: float, x: float, text: str) -> float:
    """Where a label that should begin at x begins so that the upright line does not run through it."""
    return _tidy(line + 6 if x - 3 < line < x + LETTER * len(text) + 3 else x)


Points = list[tuple[str, float | None, str]]
"""Of one drafter: (label on the x axis, value, what a pointer over it is told)."""


Weighed = Iterator[tuple[tuple[int, str], int, float]]
"""((low end of a bucket, its label), how much it weighs, its length)."""
Sums = dict[tuple[int, str], list[float]]
"""Of buckets, by (their low end, label): [weight, weighted sum]."""


def accepted_in(report: Report, drafter: str) -> Iterator[Acceptance]:
    """A drafter's acceptance figures on the suites that count."""
    for suite in counted_suites(report):
        column = suite.columns.get(drafter)
        if column is not None and column.acceptance is not None:
            yield column.acceptance


def slot_chart(report: Report) -> Chart | None:
    """Conditional acceptance against the slot, pooled over the suites; from 0 to 1."""
    series = {}
    for drafter in contestants(report):
        sums: dict[int, list[int]] = defaultdict(lambda: [0, 0])
        for one in accepted_in(report, drafter.name):
            for slot in one.conditional:
                sums[slot.slot][0] += slot.accepted
                sums[slot.slot][1] += slot.verified
        series[drafter.name] = [
            (
                str(slot),
                a / v if v else None,
                f"{drafter.name}, slot {slot}: {a:,} of {v:,} = {number(a / v if v else None)}",
            )
            for slot, (a, v) in sorted(sums.items())
        ]
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    return _line_chart("Conditional acceptance by slot, all suites (bonus not counted)", report, series, ticks)


def length_chart(report: Report) -> Chart | None:
    """Macro acceptance length by output length: every question of all suites counts the same. None with less than two
    buckets, which make no course."""
    title = "acc_len by output tokens, all suites (macro)"
    return _course(report, title, "questions", lambda one: _lengths(one.by_output_length))


def depth_chart(report: Report) -> Chart | None:
    """Micro acceptance length by the tokens before a round's anchor, over all rounds of all suites. None with less than
    two buckets."""
    title = "Acceptance length by context depth, all suites (micro)"
    return _course(report, title, "rounds", lambda one: _depths(one.by_context_depth))


def _lengths(buckets: Iterable[LengthBucket]) -> Weighed:
    return (((b.low, b.label), b.questions, b.macro_length) for b in buckets if b.macro_length is not None)


def _depths(buckets: Iterable[DepthBucket]) -> Weighed:
    return (((b.low, b.label), b.rounds, b.micro_length) for b in buckets if b.micro_length is not None)


def _course(report: Report, title: str, unit: str, buckets: Callable[[Acceptance], Weighed]) -> Chart | None:
    """Weighted means of every contestant's buckets over all suites, as lines."""
    sums_of: dict[str, Sums] = {}
    for drafter in contestants(report):
        sums: Sums = defaultdict(lambda: [0.0, 0.0])
        for one in accepted_in(report, drafter.name):
            for place, weight, length in buckets(one):
                sums[place][0] += weight
                sums[place][1] += weight * length
        sums_of[drafter.name] = sums
    series = _means(sums_of, unit)
    return None if len(_axis(series)) < 2 else _line_chart(title, report, series, _length_ticks(series))


def _means(found: Mapping[str, Sums], unit: str) -> dict[str, Points]:
    """Each drafter's means over the buckets that some drafter has something in; None where it has nothing itself."""
    buckets = sorted({key for sums in found.values() for key in sums})
    series: dict[str, Points] = {}
    for name, sums in found.items():
        series[name] = []
        for low, label in buckets:
            weight, total = sums.get((low, label), (0.0, 0.0))
            value = total / weight if weight else None
            series[name].append((label, value, f"{name}, {label}: {number(value)} over {weight:,.0f} {unit}"))
    return series


def _length_ticks(series: Mapping[str, Points]) -> list[float]:
    """From 1, the least acceptance length there is, to the whole number above the largest."""
    largest = max((value for points in series.values() for _, value, _ in points if value is not None), default=1.0)
    top = max(2, math.ceil(largest))
    step = math.ceil((top - 1) / 6)
    return [float(tick) for tick in range(1, top + step, step)]


def _line_chart(title: str, report: Report, series: Mapping[str, Points], ticks: Sequence[float]) -> Chart | None:
    """One line a drafter, broken where a figure is missing; None where no drafter has any."""
    if not any(value is not None for points in series.values() for _, value, _ in points):
        return None
    left, right, top, bottom = 36, 12, 8, HEIGHT - 22
    labels = _axis(series)
    step = (WIDTH - left - right) / len(labels)
    span = ticks[-1] - ticks[0]
    chart = _grid(title, {label: left + (at + 0.5) * step for at, label in enumerate(labels)}, ticks, top, bottom, left)
    shade = colours(report)
    for name, points in series.items():
        run: list[str] = []
        for label, value, told in points:
            if value is None:
                _end_line(chart, shade[name], run)
                continue
            x = _tidy(left + (labels.index(label) + 0.5) * step)
            y = _tidy(bottom - (value - ticks[0]) / span * (bottom - top))
            chart.dots.append(Dot(x, y, shade[name], told))
            run.append(f"{x},{y}")
        _end_line(chart, shade[name], run)
    return chart


def _end_line(chart: Chart, colour: int, run: list[str]) -> None:
    if len(run) > 1:
        chart.lines.append((colour, " ".join(run)))
    run.clear()


def _axis(series: Mapping[str, Points]) -> list[str]:
    """Every label, each drafter's in their order: the longest list first, what others add behind it."""
    longest = sorted(series.values(), key=len, reverse=True)
    return list(dict.fromkeys(label for points in longest for label, *_ in points))


def _grid(
    title: str, labels: Mapping[str, float], ticks: Sequence[float], top: float, bottom: float, left: float
) -> Chart:
    chart = Chart(title)
    for tick in ticks:
        y = _tidy(bottom - (tick - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - top))
        chart.rules.append(Rule(left, y, WIDTH - 12, y, "grid"))
        chart.words.append(Words(left - 6, y + 4, f"{tick:g}", "end", soft=True))
    chart.words += [Words(_tidy(x), HEIGHT - 6, label, "middle", soft=True) for label, x in labels.items()]
    return chart


def histogram_chart(report: Report) -> Chart | None:
    """Share of the rounds that accepted k draft tokens, all suites together: bars of the drafters side by side."""
    shares: dict[str, list[tuple[int, int]]] = {}
    for drafter in contestants(report):
        counts: dict[int, int] = defaultdict(int)
        for one in accepted_in(report, drafter.name):
            for k, count in enumerate(one.histogram):
                counts[k] += count
        if sum(counts.values()):
            shares[drafter.name] = [(count, sum(counts.values())) for _, count in sorted(counts.items())]
    if not shares:
        return None
    left, right, top, bottom = 36, 12, 8, HEIGHT - 22
    groups = max(len(found) for found in shares.values())
    step, shade = (WIDTH - left - right) / groups, colours(report)
    tallest = max(count / total for found in shares.values() for count, total in found)
    tick = next(one for one in (0.05, 0.1, 0.2, 0.25) if tallest / one <= 5 or one == 0.25)
    ticks = [index * tick for index in range(math.ceil(tallest / tick - 1e-9) + 1)]
    labels = {str(k): left + (k + 0.5) * step for k in range(groups)}
    chart = _grid("Share of rounds by accepted draft tokens, all suites", labels, ticks, top, bottom, left)
    width = step * 0.84 / len(shares)
    for index, (name, found) in enumerate(shares.items()):
        for k, (count, total) in enumerate(found):
            height = count / total / ticks[-1] * (bottom - top)
            x = left + k * step + step * 0.08 + index * width
            told = f"{name}: {count:,} of {total:,} rounds ({percent(count / total)}) accepted {k}"
            bar = Box(_tidy(x), _tidy(bottom - height), _tidy(max(width - 0.5, 0.5)), _tidy(height), shade[name], told)
            chart.boxes.append(bar)
    return chart


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def _tidy(value: float) -> float:
    return round(value, 1)
