"""`dspark report` and `dspark gate`: reports read again, compared, and held against bounds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from dspark.bench.gate import Failure, gate, notes
from dspark.bench.markdown import report_markdown, visible
from dspark.bench.report import Report, read_report
from dspark.bench.report_page import write_report_page
from dspark.bench.runs import compare_reports, runs_markdown
from dspark.bench.tables import (
    DASH,
    Table,
    drafting,
    is_baseline,
    mean_tables,
    means_note,
    number,
    overall_table,
    ratio,
)
from dspark.bench.tables import batch as size_of
from dspark.bench.verdict import (
    all_ties,
    cross_check,
    differences,
    differences_title,
    failures,
    headlines,
    replay_faults,
    verdict,
)
from dspark.data.prompts import write_text
from dspark.errors import DsparkError

WIDTH = 80


def report_command(
    reports: Annotated[list[Path], typer.Argument(help="report.json, or its folder; several are compared.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report.md and report.html (else the report's own), or comparison.md."),
    ] = None,
) -> None:
    """A report's table, its Markdown and its page; of several reports, what may be compared."""
    if len(reports) == 1:
        report = read_report(reports[0])
        folder = out or (reports[0] if reports[0].is_dir() else reports[0].parent)
        show_report(report)
        try:
            write_text(folder / "report.md", report_markdown(report))
        except OSError as error:
            raise DsparkError("out", str(folder), f"cannot be written here ({error.strerror})") from None
        write_report_page(report, folder / "report.html")
        _print(f"written to {folder / 'report.md'} and {folder / 'report.html'}")
        return
    found = compare_reports(_named(reports))
    for table in (found.acceptance, found.speed):
        if table is not None:
            _show(table)
    _listed("not compared", found.refusals)
    _listed("what differs", found.differences or ["nothing but the figures"])
    if out is not None:
        try:
            write_text(out / "comparison.md", runs_markdown(found))
        except OSError as error:
            raise DsparkError("out", str(out), f"cannot be written here ({error.strerror})") from None
        _print(f"written to {out / 'comparison.md'}")


def gate_command(
    report: Annotated[Path, typer.Argument(help="report.json, or its folder.")],
    min_acceptance: Annotated[
        float | None, typer.Option(help="Acceptance length at least (macro, bonus counted), e.g. 2.5.")
    ] = None,
    min_speedup: Annotated[
        float | None, typer.Option(help="Speedup at least, end to end, at every batch, e.g. 1.2.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Only this one; else all but the baseline and other engines.")
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option(help="This suite on its own (again for more); else the means over suites.")
    ] = None,
    lower_bound: Annotated[
        bool, typer.Option("--lower-bound", help="The lower end of the speedup's interval must reach the bound.")
    ] = False,
    allow_differences: Annotated[
        bool, typer.Option("--allow-differences", help="Let answers differ from plain decoding's.")
    ] = False,
    allow_failed: Annotated[bool, typer.Option("--allow-failed", help="Let requests have failed.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Let suites that could not be had be missing from the means.")
    ] = False,
    batch: Annotated[int | None, typer.Option(help="Speedup at this batch only; else at every one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Hold a report against bounds, for continuous integration: exit code 0 if it holds, 1 if not, 2 for bad input."""
    read = read_report(report)
    allowed = (allow_differences, allow_failed, allow_missing)
    found = gate(read, min_acceptance, min_speedup, drafter, suite or [], lower_bound, *allowed, batch=batch)
    if as_json:
        failed = [{**asdict(one), "message": str(one)} for one in found]
        print(json.dumps({"passed": not found, "failures": failed, "notes": notes(read)}))
    else:
        _verdict(found, read)
    if found:
        raise typer.Exit(1)


def _verdict(found: list[Failure], report: Report) -> None:
    """One line a failure, however long; what else is worth knowing behind it."""
    for failure in found:
        print(visible(f"failed: {failure}"))
    for note in notes(report):
        print(visible(f"note: {' '.join(note.split())}"))
    if not found:
        print("passed")


def terminal_table(report: Report) -> Table:
    """What fits on 80 columns: speed and acceptance of every drafter by suite, a line a batch."""
    rows = []
    for suite in report.suites:
        for drafter in report.drafters:
            column = suite.columns.get(drafter.name)
            if column is None or (column.acceptance is None and not column.speed):
                continue
            length = number(column.acceptance.macro_length if column.acceptance else None)
            if not column.speed:
                rows.append([suite.name, drafter.name, DASH, DASH, DASH, length])
            for index, speed in enumerate(column.speed):
                speedup = "1 (baseline)" if is_baseline(report, drafter) else ratio(speed.speedup)
                figures = [size_of(speed), number(speed.tokens_per_s, 1), speedup]
                rows.append([suite.name, drafter.name, *figures, DASH if index else length])
    return Table("By suite", ["suite", "drafter", "batch", "tokens/s", "speedup", "acc_len"], rows, labels=2)


def show_report(report: Report) -> None:
    """The report in the terminal, in 80 columns."""
    found = verdict(report)
    _print(f"{report.target}, {report.kind}, {report.created}: {found.headline} ({found.detail})")
    for one in headlines(report)[1:]:
        _print(f"{one.figure} {one.said}")
    means = mean_tables(report)
    narrow = [Table(one.title, one.header[:-1], [row[:-1] for row in one.rows], one.labels) for one in means]
    for table in (*narrow, overall_table(report), terminal_table(report)):
        if table.rows:
            _show(table)
    if drafting(report):
        _print(means_note(report))
    _listed(differences_title(report).upper(), [*differences(report), *replay_faults(report)])
    _listed("ties", all_ties(report))
    _listed("rounds in Transformers", cross_check(report))
    _listed("could not be had", [f"{one.name}: {one.reason}" for one in report.missing])
    _listed("failures", failures(report))


def _named(paths: Iterable[Path]) -> dict[str, Report]:
    """Reports by their folder's name (a file's own, if it is no report.json), with a number where two are the same."""
    found: dict[str, Report] = {}
    for path in paths:
        file = path / "report.json" if path.is_dir() else path
        name = file.resolve().parent.name if file.name == "report.json" else file.stem
        same = sum(one == name or one.startswith(f"{name} #") for one in found)
        found[f"{name} #{same + 1}" if same else name] = read_report(path)
    return found


def _console() -> Console:
    return Console(width=min(Console().width, WIDTH), markup=False, highlight=False, emoji=False)


def _print(line: str) -> None:
    _console().print(Text(visible(line)))


def _listed(title: str, lines: list[str]) -> None:
    if lines:
        _print("\n".join([f"{title}:", *(f"  {' '.join(line.split())}" for line in lines)]))


def _show(table: Table) -> None:
    """The table on at most 80 columns; what does not fit is folded within its cell."""
    grid = Grid(title=Text(visible(table.title)), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(table.header):
        figure = index >= table.labels
        grid.add_column(Text(visible(name)), justify="right" if figure else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*(Text(visible(cell)) for cell in row))
    _console().print(grid)
