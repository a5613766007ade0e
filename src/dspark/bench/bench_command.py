"""`dspark bench`: its options, what it prints, the files it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark.bench.contenders import BenchSettings
from dspark.bench.endpoint import ALL_TOKENS, AskSettings, Endpoint
from dspark.bench.in_process import (
    bench_in_process,
    engine_contenders,
    parse_draft,
    parse_numbers,
    transformers_contenders,
)
from dspark.bench.live import LiveSettings
from dspark.bench.live_report import bench_live
from dspark.bench.longcontext import LongPrompt, prompt_room, span, write_longcontext
from dspark.bench.markdown import report_markdown
from dspark.bench.prompts import Suite, load_suites
from dspark.bench.report import Report, write_report
from dspark.bench.report_commands import show_report
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
IN_PROCESS = (
    "draft", "n", "target", "storage", "speed_limit", "batch", "template", "long_tokens", "long_questions", "texts",
    "transformers",
)  # fmt: skip
LIVE = ("engine", "baseline_endpoint", "model", "api_key", "concurrency", "rate", "timeout")
"""Options of one kind of run only."""
LONG = "ruler-v2"
SUITES = "gsm8k,math500,humaneval,mbpp,livecodebench,aime25"


def bench_command(
    context: typer.Context,
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
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each suite.")] = 20,
    speed_limit: Annotated[int, typer.Option(min=0, help="Of these, how many are timed here.")] = 5,
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
    transformers: Annotated[
        str | None, typer.Option(help="NAME of a DFlash draft that Transformers itself decodes with, too.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Measure the server at this address, not this process.")] = None,
    engine: Annotated[Literal["vllm", "sglang", "dspark", "openai"], typer.Option(help="What answers there.")] = "vllm",
    baseline_endpoint: Annotated[str | None, typer.Option(help="The same engine without a draft.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name there; needed when several are served.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="DSPARK_BENCH_API_KEY", help="Sent to the servers.")] = None,
    concurrency: Annotated[int, typer.Option(help="Conversations at once, of a live engine.")] = 1,
    rate: Annotated[float | None, typer.Option(help="Conversations begun a second, in place of it.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a live answer may take.")] = 600.0,
    out: Annotated[Path, typer.Option(help="Folder for samples and reports; goes on where it stopped.")] = Path(
        "runs/bench"
    ),
) -> None:
    """Drafters side by side on prompt suites: acceptance by replay, speed on the clock, a report."""
    _refuse_strangers(context, live=endpoint is not None)
    names = [name.strip() for name in suite.split(",")]
    chosen: dict[str, Any] = {"suites": names, "limit": limit, "shuffle": shuffle}
    sampling = SamplingSettings(temperature, top_k, top_p, min_p, seed)
    settings = BenchSettings(max_tokens, speed_limit, parse_numbers("batch", batch), sampling, system_prompt)
    drafts = [parse_draft(text, parse_numbers("n", n)) for text in draft or ["dspark=embedded"]]
    suites, missing = load_suites(names, data, limit=limit, shuffle=shuffle)
    with lock_for_writing(out, "out"), _interruptible():
        if endpoint is not None:
            ask = AskSettings(max_tokens, temperature, top_p, top_k or ALL_TOKENS, min_p, seed, _switch(thinking))
            live = LiveSettings(ask, concurrency, rate, system_prompt=system_prompt)
            server = Endpoint(endpoint, engine, model, api_key, timeout)
            other = None
            if baseline_endpoint is not None:
                other = Endpoint(baseline_endpoint, engine, model, api_key, timeout, "baseline_endpoint")
            for one in (other, server) if other is not None else (server,):
                one.check()
            totals = {one.name: (1 + (other is not None)) * sum(len(p.turns) for p in one.prompts) for one in suites}
            with _progress(totals) as advance:
                report = bench_live(server, other, suites, missing, live, out, chosen=chosen, progress=advance)
        else:
            loaded = load_target(target, storage=None if storage == "exact" else storage)
            renderer = ChatRenderer(loaded.tokenizer, thinking, template)
            answers: dict[str, tuple[str, ...]] = {}
            if any(one.name == LONG for one in missing):
                written = _long(loaded, renderer, settings, long_tokens, long_questions)[:limit]
                chosen |= {"long_tokens": written[0].tokens, "long_questions": long_questions}
                suites, missing = [*suites, _suite(written)], [one for one in missing if one.name != LONG]
                answers = {one.prompt.id: one.answers for one in written}
            contenders = engine_contenders(loaded, drafts, transformers)
            if transformers is not None:
                contenders += transformers_contenders(loaded, drafts, contenders, transformers)
            chosen["storage"] = storage
            totals = {
                one.name: len(one.prompts) + min(len(one.prompts), speed_limit) * len(settings.batches)
                for one in suites
            }
            with _progress(totals) as advance:
                report = bench_in_process(
                    loaded, renderer, contenders, suites, missing, settings, out,
                    chosen=chosen, progress=advance, texts=texts, answers=answers,
                )  # fmt: skip
        write_reports(report, out)
    console.print()
    show_report(report)
    if endpoint is None and any(one.not_lossless or one.replay_faults for one in report.suites):
        raise typer.Exit(1)


def write_reports(report: Report, out: Path) -> None:
    """report.json, report.md and report.html in `out`, and where they are."""
    write_report(report, out / "report.json")
    write_text(out / "report.md", report_markdown(report))
    write_report_page(report, out / "report.html")
    for name in ("report.json", "report.md", "report.html"):
        console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


def _refuse_strangers(context: typer.Context, live: bool) -> None:
    """Raises DsparkError for an option that means nothing in this kind of run."""
    kind = "a live engine" if live else "this process"
    for name in IN_PROCESS if live else LIVE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise DsparkError(name, context.params[name], f"means nothing when {kind} is measured; leave it out")


def _switch(thinking: str | None) -> bool | None:
    return None if thinking is None else thinking == "on"


def _long(
    target: Target, renderer: ChatRenderer, settings: BenchSettings, tokens: int | None, questions: int
) -> list[LongPrompt]:
    """The prompts of the long-context suite, written for this target."""
    tokens = tokens or prompt_room(target.max_context, settings.max_tokens)
    with Console(stderr=True).status(f"writing {LONG}: {3 * questions} prompts of {tokens:,} tokens"):
        return write_longcontext(renderer, tokens, questions, seed=0)


def _suite(written: Sequence[LongPrompt]) -> Suite:
    shortest, longest = span(written)
    source = f"written here: {len(written)} prompts of {shortest:,} to {longest:,} tokens"
    return Suite(LONG, [one.prompt for one in written], source)


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; the same command goes on from here")
        raise typer.Exit(130) from None


@contextmanager
def _progress(totals: Mapping[str, int]) -> Iterator[Callable[[str, int], None]]:
    """A bar a suite."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        yield lambda suite, count: progress.advance(tasks[suite], count)
