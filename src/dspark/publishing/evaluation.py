"""What a model card says of a draft's figures: the part of a report.json (`dspark bench`) that is about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dspark.bench.markdown import SOURCES, escape, markdown_table
from dspark.bench.report import Drafter, Report, SuiteReport, read_report
from dspark.bench.tables import (
    DASH,
    LENGTHS,
    SLOTS,
    Table,
    acceptance_table,
    accepted,
    drafting,
    is_baseline,
    length_tables,
    overall_table,
    partition_lines,
    setting,
    slot_table,
    speed_table,
)
from dspark.bench.verdict import replay_line, verdict
from dspark.checkpoints.native import load_draft, weights_sha256
from dspark.errors import DsparkError
from dspark.publishing.words import UNKNOWN

OWN_KINDS = ("dspark", "dflash")
FIGURES = "### Settings and machine"
"""A heading that cards with figures have, and others not."""


def report_of(path: str | Path, folder: str | Path) -> Report:
    """The report at `path` with plain decoding and the columns of the draft in `folder` alone.

    Raises DsparkError when it has none: it is of another draft, or does not tell.
    """
    report = read_report(path)
    again = f"measure this draft: dspark bench --draft mine={folder} --data DIR"
    known = [one for one in report.drafters if one.weights_sha256]
    if not known:
        raise DsparkError("report", str(path), f"does not say which weights it measured; {again}")
    digest = weights_sha256(load_draft(folder))
    own = [one for one in known if one.weights_sha256 == digest and one.kind in OWN_KINDS]
    if not own:
        names = ", ".join(sorted({str(one.draft) for one in known}))
        raise DsparkError("report", str(path), f"holds figures of other weights, of {names}; {again}")
    return _only(report, [one for one in report.drafters if one in own or is_baseline(report, one)])


def _only(report: Report, drafters: list[Drafter]) -> Report:
    """The report of some of its drafters."""
    names = {one.name for one in drafters}
    return report.model_copy(
        update={
            "drafters": drafters,
            "suites": [_only_suite(suite, names) for suite in report.suites],
            "overall": [one for one in report.overall if one.drafter in names],
            "changes": [],
        }
    )


def _only_suite(suite: SuiteReport, names: set[str]) -> SuiteReport:
    columns = {name: column for name, column in suite.columns.items() if name in names}
    lines = {
        field: [line for line in getattr(suite, field) if any(f", {name}," in line for name in names)]
        for field in ("ties", "not_lossless", "replay_ties", "replay_faults")
    }
    checked = sum(column.replay_checked for column in columns.values())
    return suite.model_copy(update={"columns": columns, "replay_checked": checked, **lines})


def evaluation(report: Report | None) -> str:
    """The section `Evaluation Results`."""
    parts = ["## Evaluation Results"]
    if report is None:
        return "\n\n".join([*parts, f"Acceptance and speedup on public suites are {UNKNOWN}."])
    return "\n\n".join([*parts, *_acceptance(report), *_speed(report), *_made_with(report)])


def _acceptance(report: Report) -> Iterator[str]:
    used = {one.source for suite in report.suites for _, one in accepted(report, suite)}
    yield escape(LENGTHS)
    yield "Source of the figures: " + "; ".join(said for name, said in SOURCES.items() if name in used) + "."
    for drafter in drafting(report):
        found = acceptance_table(report, drafter)
        yield f"### n = {drafter.n}"
        yield markdown_table(found)
        lines = partition_lines(report, drafter)
        if lines:
            yield escape(" ".join(lines))
    for suite in report.suites:
        for found in length_tables(report, suite):
            if len(found.rows) > 1:
                yield f"### {escape(found.title)}"
                yield markdown_table(found)
    yield from _slots(report)


def _slots(report: Report) -> Iterator[str]:
    """Conditional acceptance by slot, all suites in one table."""
    found = [(suite, one) for suite in report.suites if (one := slot_table(report, suite)) is not None]
    if not found:
        return
    header = max((one.header for _, one in found), key=len)
    blanks = [[DASH] * (len(header) - len(one.header)) for _, one in found]
    rows = [[suite.name, *row, *more] for (suite, one), more in zip(found, blanks) for row in one.rows]
    yield "### Accepted by slot"
    yield markdown_table(Table("", ["suite", *header], rows, labels=2))
    yield escape(SLOTS)


def _speed(report: Report) -> Iterator[str]:
    yield "### Speed"
    for found in (speed_table(report), overall_table(report)):
        if not found.rows:
            yield "Nothing was timed." if found.title.startswith("Speed") else "No means."
            continue
        yield markdown_table(found)
        yield escape(found.note)


def _made_with(report: Report) -> Iterator[str]:
    """Settings and machine; of the settings not the files that the prompts lay in."""
    yield FIGURES
    kept = {label: value for label, value in report.settings.items() if label not in ("data", "out")}
    rows = [[label, setting(value)] for part in (kept, report.machine) for label, value in part.items()]
    yield markdown_table(Table("", ["setting", "value"], rows, labels=2))


def measured_limits(report: Report | None) -> list[str]:
    """Lines of the section `Limits`."""
    if report is None:
        return [f"What it gains on prompts of other kinds is {UNKNOWN}."]
    asked = sum(suite.questions for suite in report.suites)
    apart = sum(suite.questions for suite in report.suites if suite.apart)
    known = f"{apart} of {asked} prompts are in the draft's training set"
    if not all(one.trained_on for one in drafting(report)):
        known = "whether they are in the draft's training set is not recorded"
    found = verdict(report)
    return [
        "Speed holds for the machine and settings above; acceptance for these prompts and this length of answers.",
        f"{found.headline}: {found.detail}.",
        f"Measured prompts: {known}.",
        f"{replay_line(report).capitalize()}.",
    ]
