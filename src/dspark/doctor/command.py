"""`dspark doctor`: this machine, or a pair."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dspark.doctor.diagnose import STEPS, Settings, diagnose, save_costs
from dspark.doctor.facts import target_name
from dspark.doctor.report import show
from dspark.errors import DsparkError
from dspark.kernels.library import explain
from dspark.machine import describe_machine
from dspark.targets.embedded import EMBEDDED

console = Console()


def doctor_command(
    target: Annotated[str | None, typer.Option(help="`embedded`, a model folder, or a hub name.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="`embedded`, a draft folder of any form, a .gguf file, or a recipe's name.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm, sglang or llamacpp, who is to serve it; ==VERSION for another release.")
    ] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest request.")] = None,
    n: Annotated[int | None, typer.Option("-n", help="Draft tokens a round that are planned.")] = None,
    static: Annotated[bool, typer.Option("--static", "--quick", help="Files only; nothing is run.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer, of those that it is measured on.")] = 64,
    prompts: Annotated[str | None, typer.Option(help="JSONL of {id, turns} to ask; else those of dspark.")] = None,
    profile: Annotated[str | None, typer.Option(help="Costs from a file (--save-costs, or a cost profile).")] = None,
    engine_python: Annotated[str | None, typer.Option(help="A Python with xllamacpp, to measure llama.cpp.")] = None,
    engine_target: Annotated[str | None, typer.Option(help="The target's .gguf file, for llama.cpp.")] = None,
    save: Annotated[Path | None, typer.Option("--save-costs", help="Keep the measured costs in this file.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also what is as it should be.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """What this machine runs passes with; with --target and --draft, whether the pair works and what it would gain.

    Exit code 0: good. 1: works but will lose. 2: broken.
    """
    if draft is None and engine is not None:
        raise DsparkError("draft", None, "is needed beside --engine: a draft folder, or `embedded`")
    if target is None and draft is None:
        _machine(as_json)
        return
    if draft is None:
        raise DsparkError("draft", None, "is needed beside the target: a draft folder, or `embedded`")
    settings = Settings(
        target_name(target or EMBEDDED),
        draft,
        engine,
        context,
        n,
        static,
        tokens,
        prompts,
        profile,
        engine_python,
        engine_target,
    )
    with _progress(static) as say:
        found = diagnose(settings, say)
    if save is not None:
        save_costs(found, save)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        show(console, found, every)
    raise typer.Exit(found.code)


def _machine(as_json: bool) -> None:
    state = {**describe_machine(), "kernels": explain()}
    if as_json:
        print(json.dumps(state))
        return
    for label, value in state.items():
        console.print(f"{label:<15}{value}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(static: bool) -> Iterator[Callable[[str], None]]:
    """A bar on stderr of the steps that are run; one line a step where stderr is no terminal."""
    if static:
        yield lambda step: None
        return
    if not sys.stderr.isatty():
        yield lambda step: typer.echo(step, err=True)
        return
    columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("reading the files", total=STEPS + 1)

        def say(step: str) -> None:
            progress.update(task, advance=1, description=step)

        yield say
