"""Bounds that a report must reach, for one's own continuous integration: a figure that is missing is a failure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.bench.figures import mean_or_none
from dspark.bench.report import Drafter, Ratio, Report, SuiteReport
from dspark.bench.tables import at_batch, contestants, counted_suites, drafting, is_peer, overall_of
from dspark.bench.verdict import compared, differences, failures, replay_faults
from dspark.errors import DsparkError

Figure = Literal["acceptance length", "speedup", "speedup, lower bound", "lossless", "replay", "requests", "suite"]


@dataclass(frozen=True)
class Failure:
    """What is not as it must be. drafter, suite: None where it concerns the whole report, or the mean over suites;
    value: None where the figure is missing; remedy: what would be right; batch: of a speedup."""

    drafter: str | None
    suite: str | None
    figure: Figure
    value: float | None
    bound: float | None
    remedy: str
    batch: int | None = None

    def __str__(self) -> str:
        place = "the report" if self.drafter is None else f"{self.drafter}, {self.suite or 'mean over suites'}"
        place += "" if self.batch is None else f", {at_batch(self.batch)}"
        if self.bound is None:
            return f"{place}: {self.figure}: {self.remedy}"
        if self.value is None:
            return f"{place}: {self.figure} is missing; {self.remedy}"
        return f"{place}: {self.figure} {self._shown(self.value)} is below {self.bound:g}; {self.remedy}"

    def _shown(self, value: float) -> str:
        """With as many digits as it takes to read as below the bound."""
        return f"{value:.2f}" if float(f"{value:.2f}") < (self.bound or 0) else f"{value:.6g}"


def gate(
    report: Report,
    min_acceptance: float | None = None,
    min_speedup: float | None = None,
    drafter: str | None = None,
    suites: Sequence[str] = (),
    lower_bound: bool = False,
    allow_differences: bool = False,
    allow_failed: bool = False,
    allow_missing: bool = False,
    batch: int | None = None,
) -> list[Failure]:
    """Everything in which the report falls short; nothing when it holds.

    min_acceptance: acceptance length (macro, bonus counted) at least. min_speedup: end to end, at every batch that was
    timed (batch: at this one alone); with lower_bound, of the lower end of its interval over prompts (of the mean of
    the suites' lower ends for the mean over suites, which lies below the lower end of that mean's own interval).
    drafter: only this one; else every one but the baseline and other engines' columns. suites: these, each on its own;
    else the mean over the suites. allow_differences: let answers differ from plain decoding's, and a replay from its
    served rounds. allow_failed: let requests have failed. allow_missing: let suites that were asked for be missing from
    the mean.
    Raises DsparkError where there is nothing to check, or a name or a bound makes no sense.
    """
    _check_bounds(min_acceptance, min_speedup, lower_bound, batch)
    checked = _drafters(report, drafter)
    known = {suite.name for suite in report.suites} | {one.name for one in report.missing}
    for name in suites:
        if name not in known:
            raise DsparkError("suite", name, f"is not in the report; it has {', '.join(sorted(known)) or 'none'}")
    asked: list[str | None] = [*dict.fromkeys(suites)] or [None]
    found = [] if allow_differences else list(_output(report))
    found += [] if allow_missing or suites else list(_missing(report))
    named: Figure = "speedup, lower bound" if lower_bound else "speedup"
    for one in checked:
        batches = _batches(report, one, batch)
        for suite in asked:
            found += _below(one.name, suite, "acceptance length", _length(report, one.name, suite), min_acceptance)
            for size in batches:
                speedup = _speedup(report, one.name, suite, size, lower_bound)
                found += _below(one.name, suite, named, speedup, min_speedup, size)
    return found if allow_failed else [*found, *_failed(report, checked, suites)]


def notes(report: Report) -> list[str]:
    """What somebody who reads `passed` should know beside it."""
    unchecked = [] if compared(report) else ["no answer was set beside plain decoding's, so nothing tells of losses"]
    missing = [f"not in the means: {one.name}: {one.reason}" for one in report.missing]
    return [*unchecked, *missing, *failures(report), *report.notes]


def _check_bounds(
    min_acceptance: float | None, min_speedup: float | None, lower_bound: bool, batch: int | None
) -> None:
    if min_acceptance is None and min_speedup is None:
        raise DsparkError("bounds", None, "nothing to check; give --min-acceptance, --min-speedup or both")
    if min_acceptance is not None and not 1 <= min_acceptance < math.inf:
        remedy = "must be a number from 1: an acceptance length counts the target's own token (a rate does not)"
        raise DsparkError("min_acceptance", min_acceptance, remedy)
    if min_speedup is not None and not 0 < min_speedup < math.inf:
        raise DsparkError("min_speedup", min_speedup, "must be a number above 0, e.g. 1.2 for 1.2x")
    if lower_bound and min_speedup is None:
        raise DsparkError("lower_bound", lower_bound, "only speedups have intervals; give --min-speedup")
    if batch is not None and min_speedup is None:
        raise DsparkError("batch", batch, "only speedups have a batch; give --min-speedup")


def _drafters(report: Report, name: str | None) -> list[Drafter]:
    if name is None:
        if not contestants(report):
            raise DsparkError("drafter", None, "the report has no drafter beside its baseline, so nothing to check")
        return contestants(report)
    found = [one for one in report.drafters if one.name == name]
    names = ", ".join(one.name for one in drafting(report)) or "none"
    if not found:
        raise DsparkError("drafter", name, f"is not in the report; it has {names}")
    if found[0] not in drafting(report):
        raise DsparkError("drafter", name, f"is the baseline itself; name one of {names}")
    return found


def _batches(report: Report, drafter: Drafter, batch: int | None) -> list[int | None]:
    """The batches that a drafter's speedup is checked at: all that anybody was timed at (of another engine's column,
    its own), or the one that is named; [None] when nothing was timed."""
    columns = [
        suite.columns.get(one.name)
        for suite in report.suites
        for one in report.drafters
        if one == drafter or not (is_peer(drafter) or is_peer(one))
    ]
    timed = sorted({speed.batch for column in columns if column is not None for speed in column.speed})
    if batch is None:
        return [*timed] or [None]
    if batch not in timed:
        raise DsparkError("batch", batch, f"was not timed; the report has {', '.join(map(str, timed)) or 'none'}")
    return [batch]


def _suites(report: Report, suite: str | None) -> list[SuiteReport]:
    """The suite of that name, or those of the means."""
    return counted_suites(report) if suite is None else [one for one in report.suites if one.name == suite]


def _length(report: Report, drafter: str, suite: str | None) -> float | None:
    """Macro acceptance length."""
    if suite is None:
        mean = overall_of(report, drafter)
        return mean.mean_macro_length if mean is not None else None
    column = next((one.columns.get(drafter) for one in _suites(report, suite)), None)
    return column.acceptance.macro_length if column is not None and column.acceptance is not None else None


def _speedup(report: Report, drafter: str, suite: str | None, batch: int | None, lower: bool) -> float | None:
    """The suite's speedup at a batch or its lower end, or the mean over suites; None where a suite lacks it."""
    found = [_ratio(one, drafter, batch) for one in _suites(report, suite)]
    return mean_or_none(None if one is None else one.low if lower else one.value for one in found)


def _ratio(suite: SuiteReport, drafter: str, batch: int | None) -> Ratio | None:
    column = suite.columns.get(drafter)
    speeds = column.speed if column is not None else []
    return next((one.speedup for one in speeds if one.batch == batch), None)


def _below(
    drafter: str,
    suite: str | None,
    figure: Figure,
    value: float | None,
    bound: float | None,
    batch: int | None = None,
) -> Iterator[Failure]:
    if bound is None or (value is not None and value >= bound):
        return
    remedy = f"must be at least {bound:g}"
    if value is None:
        remedy = f"the report does not have it, so it cannot be at least {bound:g}; measure it, or name other suites"
    yield Failure(drafter, suite, figure, value, bound, remedy, batch)


def _output(report: Report) -> Iterator[Failure]:
    """Differences from plain decoding, faults of the replay: of the whole report, whatever else is asked about."""
    other = "plain decoding's without a tie" if report.kind == "in process" else "the baseline's"
    rules: list[tuple[Figure, list[str], str]] = [
        ("lossless", differences(report), f"answers that differ from {other}"),
        ("replay", replay_faults(report), "replays that leave their served rounds without a tie"),
    ]
    for figure, lines, said in rules:
        if lines:
            remedy = f"{said}: {len(lines):,}, where none may be; the first: {lines[0]}"
            yield Failure(None, None, figure, float(len(lines)), None, " ".join(remedy.split()))


def _missing(report: Report) -> Iterator[Failure]:
    """Suites that were asked for and are in no mean: a mean over fewer suites is another figure."""
    for one in report.missing:
        remedy = f"{one.name} could not be had ({one.reason}); get it, name other suites, or --allow-missing"
        yield Failure(None, one.name, "suite", None, None, " ".join(remedy.split()))


def _failed(report: Report, checked: Sequence[Drafter], suites: Sequence[str]) -> Iterator[Failure]:
    """Requests that ended in an error: figures over the rest may look better than the drafter is."""
    for one in checked:
        for suite in report.suites:
            column = suite.columns.get(one.name)
            if column is None or not (suite.name in suites if suites else not suite.apart):
                continue
            failed = max([column.failed, *(speed.failed for speed in column.speed)])
            if failed:
                remedy = f"{failed:,} failed, where none may (or --allow-failed); the figures are over the rest"
                yield Failure(one.name, suite.name, "requests", float(failed), None, remedy)
