"""`dspark bench`: its options, what it prints, the files it writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.bench.contenders import BenchSettings
from dspark.bench.in_process import bench_in_process, engine_contenders, parse_draft, parse_numbers
from dspark.bench.longcontext import write_longcontext
from dspark.bench.markdown import report_markdown
from dspark.bench.prompts import Missing, Suite, load_suites
from dspark.bench.report import Report, write_report
from dspark.bench.report_page import write_report_page
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import write_text
from dspark.decoding.request import SamplingSettings
from dspark.errors import DsparkError
from dspark.locks import lock_for_writing
from dspark.targets.base import Target
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target

console = Console()
LONG = "ruler-v2"
SUITES = "gsm8k,math500,humaneval,mbpp,livecodebench,aime25"


def bench_command(
    suite: Annotated[str, typer.Option(help="Names with commas between them.")] = SUITES,
    data: Annotated[Path | None, typer.Option(help="Folder of <suite>.jsonl; without it, the public sets.")] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH, or NAME=PATH@3,7 for its own widths; again for more  [default: dspark=embedded]"),
    ] = None,
    n: Annotated[str, typer.Option("-n", "--n", help="Draft tokens a round, for drafts without their own.")] = "3,7",
    target: Annotated[str, typer.Option(help="Model folder, hub name, or the embedded target.")] = EMBEDDED,
    storage: Annotated[
        Literal["exact", "bfloat16", "float16", "int8"], typer.Option(help="How the target's weights are kept.")
    ] = "exact",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each suite, for acceptance.")] = 20,
    speed_limit: Annotated[int, typer.Option(min=0, help="Of these, how many are timed.")] = 5,
    shuffle: Annotated[int | None, typer.Option(help="Seed of their order; without it, file order.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Answer tokens at most.")] = 192,
    batch: Annotated[str, typer.Option(help="Requests in flight while timed: numbers with commas.")] = "1",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of sampled answers (needed for them).")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="Put before every conversation.")] = None,
    thinking: Annotated[Literal["on", "off"] | None, typer.Option(help="The template's own switch.")] = None,
    template: Annotated[Literal["chat", "none"], typer.Option(help="`none`: prompts as plain text.")] = "chat",
    long_tokens: Annotated[int | None, typer.Option(help="Prompt tokens of a ruler-v2 suite that is written.")] = None,
    long_questions: Annotated[int, typer.Option(min=1, help="Its questions a partition.")] = 50,
    texts: Annotated[int, typer.Option(min=0, help="Prompts a suite whose answers are shown as text.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for samples and reports; goes on where it stopped.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Drafters side by side on prompt suites: acceptance by replay, speed on the clock, a report."""
    sampling = SamplingSettings(temperature, top_k, top_p, min_p, seed)
    settings = BenchSettings(max_tokens, speed_limit, parse_numbers("batch", batch), sampling, system_prompt)
    drafts = [parse_draft(text, parse_numbers("n", n)) for text in draft or ["dspark=embedded"]]
    names = [name.strip() for name in suite.split(",")]
    suites, missing = load_suites(names, data, limit=limit, shuffle=shuffle)
    with lock_for_writing(out, "out"):
        loaded = load_target(target, storage=None if storage == "exact" else storage)
        renderer = ChatRenderer(loaded.tokenizer, thinking, template)
        if any(one.name == LONG for one in missing):
            suites, missing = _with_long(suites, missing, loaded, renderer, settings, long_tokens, long_questions)
        contenders = engine_contenders(loaded, drafts)
        chosen = {"suites": names, "limit": limit, "shuffle": shuffle, "storage": storage}
        with _progress(suites, settings) as advance:
            try:
                report = bench_in_process(
                    loaded, renderer, contenders, suites, missing, settings, out,
                    chosen=chosen, progress=advance, texts=texts,
                )  # fmt: skip
            except KeyboardInterrupt:
                Console(stderr=True).print("interrupted; the same command goes on from here")
                raise typer.Exit(130) from None
        write_reports(report, out)
    if any(one.not_lossless for one in report.suites):
        raise typer.Exit(1)


def write_reports(report: Report, out: Path) -> None:
    """report.json, report.md and report.html in `out`, and where they are."""
    write_report(report, out / "report.json")
    write_text(out / "report.md", report_markdown(report))
    write_report_page(report, out / "report.html")
    for name in ("report.json", "report.md", "report.html"):
        console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


def _with_long(
    suites: list[Suite],
    missing: list[Missing],
    target: Target,
    renderer: ChatRenderer,
    settings: BenchSettings,
    tokens: int | None,
    questions: int,
) -> tuple[list[Suite], list[Missing]]:
    """The long-context suite, written for this target, in place of the missing one."""
    tokens = tokens or min(2**20, target.max_context - settings.max_tokens)
    written = write_longcontext(renderer, tokens, questions, seed=0)
    lengths = [one.tokens for one in written]
    source = f"written here: {len(written)} prompts of {min(lengths):,} to {max(lengths):,} tokens"
    made = Suite(LONG, [one.prompt for one in written], source)
    return [*suites, made], [one for one in missing if one.name != LONG]


@contextmanager
def _progress(suites: Sequence[Suite], settings: BenchSettings) -> Iterator:
    """A bar a suite: its prompts for acceptance, then those timed, once a batch size."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        tasks = {}
        for one in suites:
            timed = min(len(one.prompts), settings.speed_limit) * len(settings.batches)
            tasks[one.name] = progress.add_task(one.name, total=len(one.prompts) + timed)
        yield lambda suite, count: progress.advance(tasks[suite], count)


__all__ = ["DsparkError", "bench_command", "write_reports"]
