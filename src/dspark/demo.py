"""`dspark demo`: a real target and a real draft side by side, a table and a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dspark.bench.compare import Comparison, Run, build_engines, compare, modes_for, render_questions, warm_up
from dspark.bench.overlap import find_overlap
from dspark.bench.page import render_page, table_rows, write_page
from dspark.checkpoints.builtin import draft_folder
from dspark.cli_output import SPEED_NOTES, slot_percents
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, demo_prompts
from dspark.drafts.kinds import Draft
from dspark.machine import describe_machine
from dspark.targets.base import Target

MAX_TOKENS = 64
TIME_BUDGET = 300.0  # seconds of decoding; the demo is to end within 6 minutes on 2 cores
FEWEST_TOKENS = 16
WARM_UP_TOKENS = 12


def run_demo(
    target: Target,
    draft: Draft,
    out: Path,
    *,
    prompts: Sequence[Prompt] | None = None,
    ns: Sequence[int] = (3, 7),
    max_tokens: int = MAX_TOKENS,
    time_budget: float = TIME_BUDGET,
    draft_name: str = "draft",
    weights: str = "as loaded",
    console: Console | None = None,
) -> Comparison:
    """Decode the prompts (the shipped ones when None) plain and at each n, greedy, batch 1; table and page.

    draft_name: `embedded` or the draft's folder, where the prompts it was trained on are looked up.
    weights: how the target's are kept, for the report.
    max_tokens: for each answer; a machine too slow for `time_budget` seconds gets fewer, and is told so.
    Returns the comparison; the caller exits non-zero unless `.lossless`. Raises DsparkError for n > gamma.
    """
    console = console or Console()
    modes = modes_for(ns)
    questions = render_questions(demo_prompts() if prompts is None else prompts, ChatRenderer(target.tokenizer))
    engines = build_engines(target, draft, modes)
    with console.status("warming up (not counted)"):
        cost = warm_up(engines, questions[0], WARM_UP_TOKENS)
    fitting = fit_tokens(list(cost.values()), len(questions), max_tokens, time_budget)
    if fitting < max_tokens:
        console.print(f"This machine is slow for {max_tokens} tokens an answer; taking {fitting}.")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=len(questions) * len(modes))

        def show(run: Run) -> None:
            progress.update(task, advance=1, description=f"{run.question}, {run.mode}")

        comparison = compare(target, draft, questions, modes, fitting, engines=engines, on_run=show)
    machine, overlap = describe_machine(), find_overlap(draft_folder(draft_name), questions)
    settings = {
        "target": target.name,
        "weights": weights,
        "draft": draft_name,
        "decoding": f"greedy, batch 1, up to {fitting} tokens an answer",
        "prompts": str(overlap),
        "timing": "wall clock, one process, the modes' order rotated from prompt to prompt, warm-up not counted",
    }
    title = "dspark demo: plain decoding against speculation"
    page = render_page(comparison, target.tokenizer, title=title, settings=settings, machine=machine)
    write_page(out, page)
    console.print(demo_table(comparison))
    console.print(SPEED_NOTES, style="dim", highlight=False)
    for difference in comparison.differences:
        console.print(str(difference), style=None if difference.tie else "bold red", markup=False)
    console.print(str(overlap), style="bold red" if overlap.warning else None, markup=False, highlight=False)
    console.print(_verdict(comparison), style="green" if comparison.lossless else "bold red")
    console.print(f"{machine['processor']}, torch {machine['torch']}, {machine['torch threads']} threads", style="dim")
    console.print(f"target: {target.name}, {weights}", style="dim", markup=False, highlight=False)
    console.print(f"page: {out}", markup=False, soft_wrap=True)
    return comparison


def fit_tokens(cost: Sequence[tuple[float, float]], questions: int, max_tokens: int, budget: float) -> int:
    """How many tokens an answer may have so that all modes together stay within `budget` seconds.

    cost: for each mode (seconds to the first token, seconds per later token), as `warm_up` gives them.
    """
    first, later = (sum(column) for column in zip(*cost, strict=True))
    room = (budget / questions - first) / later if later > 0 else max_tokens
    return max(min(max_tokens, int(room)), min(max_tokens, FEWEST_TOKENS))


def demo_table(comparison: Comparison) -> Table:
    """The table of the page, made to fit 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("\nmode", no_wrap=True)
    for header in (
        "\ntokens/s",
        "speedup\nend to end, 95 %",
        "decode\nonly",
        "length\nmacro",
        "length\nmicro",
        "accepted at\nslot 1, 2, ..., %",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row, mode in zip(table_rows(comparison), comparison.modes, strict=True):
        slots = slot_percents(slot.rate for slot in comparison.acceptance(mode).conditional)
        only = row.decode_speedup.partition(" ")[0]
        table.add_row(row.mode, row.tokens_per_s, row.speedup, only, row.macro, row.micro, slots)
    return table


def _verdict(comparison: Comparison) -> str:
    if not comparison.lossless:
        return "NOT LOSSLESS: answers differ from plain decoding"
    if comparison.differences:
        return f"same tokens in every mode, but for {len(comparison.differences)} ties of the target itself"
    return f"same tokens in every mode, for all {len(comparison.questions)} prompts"
