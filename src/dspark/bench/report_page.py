"""report.html: one file that needs nothing else. Inline CSS, SVG and the script that sorts tables, each let in by its
own hash; whatever the report quotes is escaped."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2

from dspark.bench.markdown import SOURCES
from dspark.bench.page import write_page
from dspark.bench.report import Answer, Piece, Report
from dspark.bench.report_charts import (
    Chart,
    colours,
    depth_chart,
    histogram_chart,
    length_chart,
    slot_chart,
    speed_charts,
)
from dspark.bench.tables import (
    LENGTHS,
    Table,
    acceptance_table,
    accepted,
    detail_tables,
    drafter_table,
    drafting,
    mean_tables,
    means_note,
    overall_table,
    partition_lines,
    prompt_span,
    setting,
    speed_table,
    suite_table,
)
from dspark.bench.verdict import (
    all_ties,
    cross_check,
    differences,
    differences_title,
    failures,
    headlines,
    replay_faults,
    replay_line,
    training_lines,
)

TEMPLATE = "report.html.j2"
_HIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a page does not show, or what turns the order of the letters around; tabs and line ends stay."""


@dataclass(frozen=True)
class Segment:
    """Text of one round, by owner: (owner, text)."""

    label: str
    shade: int
    parts: list[tuple[str, str]]


def render_report(report: Report) -> str:
    """The whole page as text."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=shown_text)
    environment.undefined = jinja2.StrictUndefined
    environment.filters["csp_hash"] = csp_hash
    template = environment.from_string(files("dspark").joinpath("assets", TEMPLATE).read_text(encoding="utf-8"))
    shown = [one.name for one in drafting(report) if any(answer.drafter == one.name for answer in report.answers)]
    return template.render(
        report=report,
        headlines=headlines(report),
        colours=colours(report),
        drafters=drafting(report),
        speed_charts=speed_charts(report),
        charts=list(_charts(report)),
        tables=list(_tables(report)),
        partitions=[line for drafter in drafting(report) for line in _partitions(report, drafter)],
        suites=[(suite, prompt_span(suite), detail_tables(report, suite)) for suite in report.suites],
        answers=list(_answers(report, shown)),
        shown=shown,
        findings=[(title, lines) for title, lines in _findings(report) if lines],
        replay=replay_line(report),
        about=[drafter_table(report), suite_table(report)],
        settings={str(label): setting(value) for label, value in report.settings.items()},
    )


def write_report_page(report: Report, path: Path) -> Path:
    """Write the page atomically. Raises DsparkError where it cannot be written."""
    return write_page(path, render_report(report))


def shown_text(value: Any) -> Any:
    """What is quoted, with control and direction characters as escapes; markup of ours, and figures, as they are."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _HIDDEN.sub(lambda found: f"\\x{ord(found[0]):02x}", value)


def csp_hash(text: str) -> str:
    """The source expression of a Content-Security-Policy that lets in exactly this inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(str(text).encode()).digest()).decode()}'"


def _charts(report: Report) -> Iterator[Chart]:
    for make in (slot_chart, histogram_chart, length_chart, depth_chart):
        chart = make(report)
        if chart is not None:
            yield chart


def _tables(report: Report) -> Iterator[Table]:
    """The tables that span the suites."""
    for table in mean_tables(report):
        yield Table(table.title, table.header, table.rows, table.labels, means_note(report))
    means = overall_table(report)
    yield Table(means.title, means.header, means.rows, means.labels)
    yield speed_table(report)
    yield _acceptance(report)


def _acceptance(report: Report) -> Table:
    """The drafters' acceptance tables as one, to be sorted."""
    header, rows = ["Dataset", "drafter"], []
    for drafter in drafting(report):
        table = acceptance_table(report, drafter)
        header = ["Dataset", "drafter", *table.header[1:]]
        rows += [[row[0], drafter.name, *row[1:]] for row in table.rows]
    used = {one.source for suite in report.suites for _, one in accepted(report, suite)}
    said = "; ".join(text for name, text in SOURCES.items() if name in used)
    return Table("Acceptance length", header, rows, labels=2, note=f"{LENGTHS} Source: {said}.")


def _partitions(report: Report, drafter: Any) -> list[str]:
    return [f"{drafter.name}, {line}" for line in partition_lines(report, drafter)]


def _answers(report: Report, shown: list[str]) -> Iterator[dict[str, Any]]:
    """Answers by prompt; each drafter's has the number of its button."""
    prompts: dict[tuple[str, str], list[Answer]] = {}
    for answer in report.answers:
        if answer.drafter in shown:
            prompts.setdefault((answer.suite, answer.question), []).append(answer)
    for (suite, question), members in prompts.items():
        views = [{"key": shown.index(one.drafter), "answer": one, "segments": segments(one.pieces)} for one in members]
        yield {"suite": suite, "question": question, "prompt": members[0].prompt, "answers": views}


def segments(pieces: list[Piece]) -> list[Segment]:
    """An answer's pieces by round; joined, their texts are the answer's text."""
    made = []
    for number_, members in groupby(pieces, key=lambda piece: piece.round):
        inside = list(members)
        label = f"round {number_}: {inside[0].accepted} of {inside[0].scheduled} draft tokens accepted"
        if number_ == 0:
            label = "prompt pass: the target's first token"
        made.append(Segment(label, number_ % 2, [(piece.owner, piece.text) for piece in inside]))
    return made


def _findings(report: Report) -> Iterator[tuple[str, list[str]]]:
    yield differences_title(report), differences(report)
    yield "Replay faults", replay_faults(report)
    yield "Ties", all_ties(report)
    yield "Rounds in Transformers", cross_check(report)
    yield "Prompts in the training set", training_lines(report)
    yield "Suites that could not be had", [f"{one.name}: {one.reason}" for one in report.missing]
    yield "Failures", failures(report)
    yield "Notes", report.notes
