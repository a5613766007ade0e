"""report.md: a report in the shape of the two published tables, so that a model card can quote it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from dspark.bench.report import Report
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
    verdict,
)

_MARKS = re.compile(r"[\\`*\[\]<>|#~$&]|(?<![^\W_])_|_(?![^\W_])")
SOURCES = {
    "replay": "replay: the draft walked over plain decoding's answers with the target's features",
    "served": "served: a decode's own rounds",
    "server": "server: what a live engine told of itself",
}


def report_markdown(report: Report) -> str:
    """The whole report as Markdown. Whatever it quotes (names, prompts, errors) is escaped."""
    parts = [
        *_heading(report),
        *_speed(report),
        *_acceptance(report),
        *_details(report),
        *_output(report),
        *_made_with(report),
    ]
    return "\n\n".join(parts) + "\n"


def escape(text: object) -> str:
    """One line of Markdown that shows this text: no line break, no column mark, no markup."""
    return _MARKS.sub(r"\\\g<0>", visible(" ".join(str(text).split())))


def visible(text: str) -> str:
    """Characters that a reader could not see, or a terminal would obey, as escapes; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def markdown_table(table: Table) -> str:
    """The table alone, words to the left and figures to the right."""
    ruler = ["---"] * table.labels + ["---:"] * (len(table.header) - table.labels)
    lines = [[escape(cell) for cell in table.header], ruler, *([escape(cell) for cell in row] for row in table.rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list of quoted texts."""
    return "\n".join(f"- {escape(line)}" for line in lines)


def fenced(text: str) -> str:
    """A block that shows any text as it is: its fence is longer than any row of backticks inside."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", text))])
    return f"{fence}text\n{visible(text)}\n{fence}"


def _section(level: int, table: Table) -> Iterator[str]:
    yield f"{'#' * level} {escape(table.title)}"
    yield markdown_table(table)
    if table.note:
        yield escape(table.note)


def _heading(report: Report) -> Iterator[str]:
    found = verdict(report)
    yield f"# dspark bench: {escape(report.target)}"
    yield (
        f"{escape(report.created)}, dspark {escape(report.dspark)}, {report.kind}; baseline: "
        f"{escape(report.baseline or 'none')}. **{found.headline}**: {escape(found.detail)}."
    )
    yield "\n".join(f"- **{one.figure}** {escape(one.said)}" for one in headlines(report)[1:])


def _speed(report: Report) -> Iterator[str]:
    yield "## Speed"
    for table in mean_tables(report):
        yield f"**{escape(table.title)}**"
        yield markdown_table(table)
    yield escape(means_note(report))
    if report.overall:
        yield f"### {escape(overall_table(report).title)}"
        yield markdown_table(overall_table(report))
    by_suite = speed_table(report)
    if by_suite.rows:
        yield from _section(3, by_suite)
    else:
        yield "Nothing was timed."


def _acceptance(report: Report) -> Iterator[str]:
    yield "## Acceptance length"
    used = {one.source for suite in report.suites for _, one in accepted(report, suite)}
    if not used:
        yield "No acceptance figures."
        return
    yield escape(LENGTHS)
    yield "Source of the figures: " + "; ".join(said for name, said in SOURCES.items() if name in used) + "."
    for drafter in drafting(report):
        table = acceptance_table(report, drafter)
        if table.rows:
            yield from _section(3, table)
            lines = partition_lines(report, drafter)
            if lines:
                yield escape(" ".join(lines))


def _details(report: Report) -> Iterator[str]:
    """Each suite's tables; the column notes stand once, behind the last of them."""
    notes: dict[str, None] = {}
    yield "## By suite"
    for suite in report.suites:
        tables = detail_tables(report, suite)
        yield f"### {escape(suite.name)}"
        yield f"{suite.questions:,} questions, {suite.speed_questions:,} of them timed; {escape(prompt_span(suite))}."
        for table in tables:
            yield f"**{escape(table.title.removeprefix(f'{suite.name}: '))}**"
            yield markdown_table(table)
            if table.note:
                notes[table.note] = None
    if notes:
        yield bullets(notes)


def _output(report: Report) -> Iterator[str]:
    found = verdict(report)
    yield "## The output and the prompts"
    yield f"{found.headline}: {escape(found.detail)}; {escape(replay_line(report))}."
    for title, lines in (
        (differences_title(report), differences(report)),
        ("Replay faults", replay_faults(report)),
        ("Ties", all_ties(report)),
        ("Rounds in Transformers", cross_check(report)),
        ("Prompts in the training set", training_lines(report)),
        ("Suites that could not be had", [f"{one.name}: {one.reason}" for one in report.missing]),
        ("Failures", failures(report)),
        ("Notes", report.notes),
    ):
        if lines:
            yield f"### {title}"
            yield bullets(lines)
    yield from _section(3, suite_table(report))


def _made_with(report: Report) -> Iterator[str]:
    yield "## Settings and machine"
    yield markdown_table(drafter_table(report))
    rows = [[label, setting(value)] for part in (report.settings, report.machine) for label, value in part.items()]
    yield markdown_table(Table("", ["setting", "value"], rows, labels=2))
    if report.rendered is not None:
        one = report.rendered
        yield f"One prompt as the target read it ({escape(one.suite)}, {escape(one.question)}, {one.tokens:,} tokens):"
        yield fenced(one.text)
