"""Bounds that a report must reach, for one's own continuous integration: a figure that is missing is a failure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from dspark.bench.figures import mean_or_none
from dspark.bench.report import Drafter, Overall, Report
from dspark.bench.tables import counted_suites, drafting, first_speed, overall_of
from dspark.bench.verdict import compared, differences, failures, replay_faults
from dspark.errors import DsparkError

Figure = Literal["acceptance length", "speedup", "speedup, lower bound", "lossless", "replay", "requests"]


@dataclass(frozen=True)
class Failure:
    """What is not as it must be. drafter, suite: None where it concerns the whole report, or the mean over suites;
    value: None where the figure is missing; remedy: what would be right."""

    drafter: str | None
    suite: str | None
    figure: Figure
    value: float | None
    bound: float | None
    remedy: str

    def __str__(self) -> str:
        place = "the report" if self.drafter is None else f"{self.drafter}, {self.suite or 'mean over suites'}"
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
) -> list[Failure]:
    """Everything in which the report falls short; nothing when it holds.

    min_acceptance: acceptance length (macro, bonus counted) at least. min_speedup: end to end, at the smallest batch;
    with lower_bound, of the lower end of its interval over prompts (of the mean of the suites' lower ends for the mean
    over suites, which lies below the lower end of that mean's own interval). drafter: only this one; else every one but
    the baseline. suites: these, each on its own; else the mean over the suites. allow_differences: let answers differ
    from plain decoding's, and a replay from its served rounds. allow_failed: let requests have failed.
    Raises DsparkError where there is nothing to check, or a name or a bound makes no sense.
    """
    _check_bounds(min_acceptance, min_speedup, lower_bound)
    checked = _drafters(report, drafter)
    known = {suite.name for suite in report.suites} | {one.name for one in report.missing}
    for name in suites:
        if name not in known:
            raise DsparkError("suite", name, f"is not in the report; it has {', '.join(sorted(known)) or 'none'}")
    asked: list[str | None] = [*dict.fromkeys(suites)] or [None]
    found = [] if allow_differences else list(_output(report))
    for one in checked:
        for suite in asked:
            length, speedup = _figures(report, one.name, suite, lower_bound)
            named: Figure = "speedup, lower bound" if lower_bound else "speedup"
            found += _below(one.name, suite, "acceptance length", length, min_acceptance)
            found += _below(one.name, suite, named, speedup, min_speedup)
    return found if allow_failed else [*found, *_failed(report, checked, suites)]


def notes(report: Report) -> list[str]:
    """What somebody who reads `passed` should know beside it."""
    unchecked = [] if compared(report) else ["no answer was set beside plain decoding's, so nothing tells of losses"]
    return [*unchecked, *(f"not in the means: {one.name}: {one.reason}" for one in report.missing), *failures(report)]


def _check_bounds(min_acceptance: float | None, min_speedup: float | None, lower_bound: bool) -> None:
    if min_acceptance is None and min_speedup is None:
        raise DsparkError("bounds", None, "nothing to check; give --min-acceptance, --min-speedup or both")
    if min_acceptance is not None and not 1 <= min_acceptance < math.inf:
        remedy = "must be a number from 1: an acceptance length counts the target's own token (a rate does not)"
        raise DsparkError("min_acceptance", min_acceptance, remedy)
    if min_speedup is not None and not 0 < min_speedup < math.inf:
        raise DsparkError("min_speedup", min_speedup, "must be a number above 0, e.g. 1.2 for 1.2x")
    if lower_bound and min_speedup is None:
        raise DsparkError("lower_bound", lower_bound, "only speedups have intervals; give --min-speedup")


def _drafters(report: Report, name: str | None) -> list[Drafter]:
    if name is None:
        if not drafting(report):
            raise DsparkError("drafter", None, "the report has no drafter beside its baseline, so nothing to check")
        return drafting(report)
    found = [one for one in report.drafters if one.name == name]
    names = ", ".join(one.name for one in drafting(report)) or "none"
    if not found:
        raise DsparkError("drafter", name, f"is not in the report; it has {names}")
    if found[0] not in drafting(report):
        raise DsparkError("drafter", name, f"is the baseline itself; name one of {names}")
    return found


def _figures(report: Report, drafter: str, suite: str | None, lower: bool) -> tuple[float | None, float | None]:
    """(macro acceptance length, speedup or its lower end); None where one is missing."""
    if suite is None:
        mean = overall_of(report, drafter) or Overall(drafter=drafter, suites=0)
        if lower:
            return mean.mean_macro_length, _mean_of_lower_ends(report, drafter)
        return mean.mean_macro_length, mean.mean_speedup
    column = next((one.columns.get(drafter) for one in report.suites if one.name == suite), None)
    length = column.acceptance.macro_length if column is not None and column.acceptance is not None else None
    speed = first_speed(column)
    ratio = speed.speedup if speed is not None else None
    return length, (None if ratio is None else ratio.low if lower else ratio.value)


def _mean_of_lower_ends(report: Report, drafter: str) -> float | None:
    return mean_or_none(_figures(report, drafter, suite.name, True)[1] for suite in counted_suites(report))


def _below(
    drafter: str, suite: str | None, figure: Figure, value: float | None, bound: float | None
) -> Iterator[Failure]:
    if bound is None or (value is not None and value >= bound):
        return
    remedy = f"must be at least {bound:g}"
    if value is None:
        remedy = f"the report does not have it, so it cannot be at least {bound:g}; measure it, or name other suites"
    yield Failure(drafter, suite, figure, value, bound, remedy)


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
