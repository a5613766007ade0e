"""Several reports side by side, and only what may stand side by side.

Acceptance lengths compare where target, prompts and every setting that reaches the tokens are the same; speeds where
the machine and all other settings are the same as well. What differs is said, shortly. Versions of software and weights
of drafts are what such a comparison is usually about: they are said and bar nothing. A drafter of another name with the
same weights and width is the same one.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from dspark.bench.figures import mean_or_none, relative_change
from dspark.bench.markdown import bullets, escape, markdown_table
from dspark.bench.report import Acceptance, Column, Drafter, Report, Speed, SuiteReport
from dspark.bench.tables import DASH, Table, change, drafting, number, ratio, setting, times
from dspark.errors import DsparkError

SAID_BY_PROMPTS = frozenset({"suites", "limit", "shuffle", "speed_limit", "batches", "texts", "target"})
"""Settings that bar nothing themselves: the prompts' hashes, the timed questions and the batch of a line tell."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
TOKENS = frozenset({"sampling", "max_tokens", "template", "thinking", "system_prompt", "ignore_eos"})
"""Settings that reach the tokens; all others reach the clock at most (but for ties)."""
LINES, SHOWN = 12, 60
"""At most so many lines of differences, and so many letters of a value."""
VERSIONS = frozenset({"python", "dspark", "torch", "transformers", "vllm", "sglang"})
"""Labels of the machine that name software."""
Values = list[str]
Show = Callable[[float | None], str]
Item = TypeVar("Item")


@dataclass
class Compared:
    """differences: what is not the same, a line each. refusals: what is therefore not shown, and why. acceptance,
    speed: a line a suite and drafter, a column a run; None where nothing may be compared."""

    names: list[str]
    differences: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    acceptance: Table | None = None
    speed: Table | None = None


def compare_reports(reports: Mapping[str, Report]) -> Compared:
    """Compare at least two runs, by name. Raises DsparkError for fewer."""
    if len(reports) < 2:
        raise DsparkError("reports", list(reports), "a comparison needs at least two reports")
    found = Compared(list(reports))
    reports = _under_one_name(found, reports)
    both, clock = _differences(found, reports)
    found.differences = _condensed(found.differences)
    suites = _shared_suites(found, reports)
    if both:
        found.refusals.append(f"acceptance lengths and speeds are not set side by side: {_and(both)} not the same")
        return found
    apart = frozenset(suite.name for report in reports.values() for suite in report.suites if suite.apart)
    lengths = _acceptances(reports, suites)
    title = "Acceptance length (macro, bonus counted)"
    found.acceptance = _table(title, found.names, lengths, apart, lambda value: number(value, 4))
    if clock:
        found.refusals.append(f"speeds are not set side by side: {_and(clock)} not the same")
        return found
    timed = [name for name in suites if _same_timed(found, reports, name)]
    title = "Speedup over each run's own baseline, end to end"
    found.speed = _table(title, found.names, _speeds(reports, timed), apart, times)
    return found


def runs_markdown(found: Compared) -> str:
    """The comparison as Markdown."""
    parts = [f"# dspark bench: {escape(', '.join(found.names))}"]
    for table in (found.acceptance, found.speed):
        if table is not None:
            parts += [f"## {escape(table.title)}", markdown_table(table), escape(table.note)]
    if found.refusals:
        parts += ["## Not compared", bullets(found.refusals)]
    parts += ["## What differs", bullets(found.differences) or "Nothing but the figures."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _differences(found: Compared, reports: Mapping[str, Report]) -> tuple[list[str], list[str]]:
    """Say all that differs; returns what of it bars acceptance and speed, and what bars speed alone."""
    both: list[str] = []
    clock: list[str] = []

    def note(label: str, values: Values, bars: list[str] | None = None) -> None:
        if len(set(values)) > 1:
            shown = [_short(value) for value in values]
            said = "; ".join(f"{one} in {name}" for name, one in zip(found.names, shown))
            found.differences.append(f"{label}: {said if len(set(shown)) > 1 else 'not the same; too long to show'}")
            if bars is not None:
                bars.append(label)

    every = list(reports.values())
    note("target", [one.target for one in every], both)
    note("kind of run", [one.kind for one in every], clock)
    note("baseline", [one.baseline or "none" for one in every], clock)
    note("dspark", [one.dspark for one in every])
    chosen = [_settings(one) for one in every]
    labels = _labels(chosen)
    for label in (*(one for one in labels if one in TOKENS), *(one for one in labels if one not in TOKENS)):
        free = label in SAID_BY_PROMPTS or label.startswith("server ")
        bars = None if free else both if label in TOKENS else clock
        note(label, [one.get(label, "not given") for one in chosen], bars)
    for label in _labels(one.machine for one in every):
        values = [one.machine.get(label, "not known") for one in every]
        if label != "dspark":
            note(f"machine, {label}", values, None if label in VERSIONS else clock)
    for name in _shared([one.name for one in drafting(report)] for report in every):
        note(f"drafter {name}", [_identity(report, name) for report in every])
    return both, clock


def _settings(report: Report) -> dict[str, str]:
    """What was chosen, in words, by label. How tokens are drawn is one label, however a run names its parts; what
    servers tell of themselves has one for each part."""
    found: dict[str, str] = {}
    for label, value in report.settings.items():
        if label not in SAMPLING:
            found.update(_flat(label, value))
    if "sampling" not in found and "temperature" in report.settings:
        known = [(name, report.settings.get(name)) for name in SAMPLING if name != "ignore_eos"]
        parts = [f"{name} {setting(value)}" for name, value in known if value is not None]
        found["sampling"] = ", ".join(parts) if report.settings["temperature"] else "greedy"
    if report.settings.get("ignore_eos"):
        found["ignore_eos"] = setting(True)
    return found


def _flat(label: str, value: object) -> Iterator[tuple[str, str]]:
    """A setting's value; of a table, given as such or as its text, each of its values."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            value = "as the server tells"
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flat(f"{label}: {key}", one)
    else:
        yield label, setting(value)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _condensed(lines: list[str]) -> list[str]:
    """The first ones, and the labels of the rest."""
    if len(lines) <= LINES:
        return lines
    kept, rest = lines[: LINES - 1], [line.split(": ")[0] for line in lines[LINES - 1 :]]
    return [*kept, f"and {len(lines) - len(kept)} more: {_short(', '.join(dict.fromkeys(rest)))}"]


def _under_one_name(found: Compared, reports: Mapping[str, Report]) -> dict[str, Report]:
    """The runs with each drafter under the name that it has in the first run with its kind, weights and width."""
    known: dict[tuple[str, str | None, int | None], str] = {}
    made = {}
    for run, report in reports.items():
        own = {one.name for one in report.drafters}
        names: dict[str, str] = {}
        for one in report.drafters:
            name = known.get(_weights(one), one.name)
            if one.weights_sha256 is not None and name not in own and name not in names.values():
                names[one.name] = name
                found.differences.append(f"drafter {name}: named {one.name} in {run} (same weights and width)")
        made[run] = _renamed(report, names)
        for one in made[run].drafters:
            if one.weights_sha256 is not None and one.name not in known.values():
                known.setdefault(_weights(one), one.name)
    return made


def _weights(drafter: Drafter) -> tuple[str, str | None, int | None]:
    return drafter.kind, drafter.weights_sha256, drafter.n


def _renamed(report: Report, names: Mapping[str, str]) -> Report:
    """A copy in which the figures of drafters stand under other names."""
    if not names:
        return report
    drafters = [one.model_copy(update={"name": names.get(one.name, one.name)}) for one in report.drafters]
    suites = [
        suite.model_copy(update={"columns": {names.get(name, name): one for name, one in suite.columns.items()}})
        for suite in report.suites
    ]
    baseline = None if report.baseline is None else names.get(report.baseline, report.baseline)
    return report.model_copy(update={"drafters": drafters, "suites": suites, "baseline": baseline})


def _identity(report: Report, name: str) -> str:
    one: Drafter = next(drafter for drafter in report.drafters if drafter.name == name)
    return f"{one.kind}, n {DASH if one.n is None else one.n}, weights {(one.weights_sha256 or DASH)[:12]}"


def _shared_suites(found: Compared, reports: Mapping[str, Report]) -> list[str]:
    """Suites that every run has with the same prompts; says which it leaves out."""
    tables = [{suite.name: suite for suite in report.suites} for report in reports.values()]
    kept = []
    for name in _labels(tables):
        inside = [table.get(name) for table in tables]
        if any(suite is None for suite in inside):
            missing = [run for run, suite in zip(found.names, inside) if suite is None]
            found.refusals.append(f"{name} is not compared: {', '.join(missing)} did not run it")
        elif len({suite.prompts_sha256 for suite in inside if suite is not None}) > 1:
            found.refusals.append(f"{name} is not compared: its prompts are not the same")
        else:
            kept.append(name)
    return kept


def _same_timed(found: Compared, reports: Mapping[str, Report], name: str) -> bool:
    """Whether the runs timed equally many of the suite's prompts (the first ones)."""
    counts = [_suite(report, name).speed_questions for report in reports.values()]
    if len(set(counts)) > 1:
        said = "; ".join(f"{count} in {run}" for run, count in zip(found.names, counts))
        found.refusals.append(f"{name}: speeds are not compared: other prompts were timed ({said})")
    return len(set(counts)) == 1 and counts[0] > 0


Line = tuple[str, str, list[float | None], Values]
"""Suite, drafter, the figures (for changes and means), and the figures as they are shown."""


def _acceptances(reports: Mapping[str, Report], suites: Iterable[str]) -> list[Line]:
    lines: list[Line] = []
    for name in suites:
        for drafter in _labels(_suite(report, name).columns for report in reports.values()):
            found = [_column(report, name, drafter).acceptance for report in reports.values()]
            if any(one is not None and one.macro_length is not None for one in found):
                values = [one.macro_length if one is not None else None for one in found]
                sources = {one.source for one in found if one is not None}
                lines.append((name, drafter, values, [_length(one, len(sources) > 1) for one in found]))
    return lines


def _length(acceptance: Acceptance | None, with_source: bool) -> str:
    if acceptance is None:
        return DASH
    return number(acceptance.macro_length, 4) + (f" ({acceptance.source})" if with_source else "")


def _speeds(reports: Mapping[str, Report], suites: Iterable[str]) -> list[Line]:
    """A line a batch; a batch beside the smallest one is named with the drafter."""
    lines: list[Line] = []
    for name in suites:
        for drafter in _labels(_suite(report, name).columns for report in reports.values()):
            tables = [{one.batch: one for one in _column(report, name, drafter).speed} for report in reports.values()]
            for batch in sorted(_shared(tables)):
                found: list[Speed] = [table[batch] for table in tables]
                values = [one.speedup.value if one.speedup else None for one in found]
                if any(value is not None for value in values):
                    label = f"{drafter}, batch {batch}" if batch else f"{drafter}, open loop"
                    label = drafter if batch == 1 else label
                    lines.append((name, label, values, [ratio(one.speedup) for one in found]))
    return lines


def _table(title: str, names: list[str], lines: list[Line], apart: frozenset[str], show: Show) -> Table | None:
    """None without lines. With two runs, how much the second differs from the first; a mean where it is over several
    suites and every run has them all."""
    if not lines:
        return None
    two = len(names) == 2
    rows = []
    for suite, drafter, values, cells in [*lines, *_means(lines, apart, show)]:
        rows.append([suite, drafter, *cells] + [change(relative_change(values[0], values[1]))] * two)
    note = "The mean is the simple unweighted one over these suites; those trained on are in none."
    return Table(title, ["suite", "drafter", *names] + ["change"] * two, rows, labels=2, note=note)


def _means(lines: list[Line], apart: frozenset[str], show: Show) -> list[Line]:
    suites = list(dict.fromkeys(suite for suite, *_ in lines if suite not in apart))
    means: list[Line] = []
    for drafter in dict.fromkeys(drafter for _, drafter, *_ in lines):
        own = [values for suite, name, values, _ in lines if name == drafter and suite in suites]
        if len(own) == len(suites) > 1:
            values = [mean_or_none(column) for column in zip(*own, strict=True)]
            means.append(("mean", drafter, values, [show(value) for value in values]))
    return means


def _suite(report: Report, name: str) -> SuiteReport:
    return next(suite for suite in report.suites if suite.name == name)


def _column(report: Report, suite: str, drafter: str) -> Column:
    """A drafter's column, empty where the run did not have it."""
    return _suite(report, suite).columns.get(drafter) or Column()


def _labels(parts: Iterable[Iterable[str]]) -> list[str]:
    """Every label, in the order of its first appearance."""
    return list(dict.fromkeys(label for part in parts for label in part))


def _shared(parts: Iterable[Iterable[Item]]) -> list[Item]:
    """What all have, in the first one's order."""
    first, *rest = [list(part) for part in parts]
    return [one for one in first if all(one in part for part in rest)]


def _and(labels: list[str], limit: int = 6) -> str:
    if len(labels) > limit:
        labels = [*labels[:limit], f"{len(labels) - limit} more"]
    return f"{', '.join(labels[:-1])} and {labels[-1]} are" if len(labels) > 1 else f"{labels[0]} is"
