"""`dspark launch`: the command that serves a pair with vLLM, SGLang or llama.cpp; printed, or run."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder
from dspark.checkpoints.native import CALIBRATION_FILE
from dspark.checkpoints.read import GGUF_SUFFIX
from dspark.doctor.draft import read_draft
from dspark.doctor.facts import TargetFacts, target_facts
from dspark.doctor.findings import Finding
from dspark.doctor.static import findings_of
from dspark.errors import DsparkError
from dspark.serving.launch.command import Command, Wish, compose
from dspark.serving.launch.engines import ENGINES, Engine, engine
from dspark.serving.launch.flags import context_of, parse_flags
from dspark.serving.launch.notes import notes
from dspark.serving.launch.pair import Ready, known_recipe, ready_draft, ready_target
from dspark.targets.embedded import EMBEDDED
from dspark.training.recipe import Recipe, load_recipe

OWN_NOTES = ("engine-fault", "trained-length")
"""Checks of the doctor whose notes `notes` gives already, by the very flags of the command."""


def launch_command(
    name: Annotated[str, typer.Argument(metavar="ENGINE", help=f"{', '.join(ENGINES)}.")],
    recipe: Annotated[
        str | None, typer.Argument(help="Recipe of a published pair: its target, draft and flags.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Folder, hub name, or the embedded target; for llama.cpp a .gguf file.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="Draft folder, `embedded`, a hub name; for llama.cpp also a .gguf file.")
    ] = None,
    n: Annotated[int | None, typer.Option("-n", help="Draft tokens a round; without it the draft's gamma.")] = None,
    tp: Annotated[int | None, typer.Option(help="Devices that share the target (tensor parallelism).")] = None,
    context: Annotated[int | None, typer.Option(help="Tokens of a request at most, prompt and answer.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Let confidence choose what is verified.")] = False,
    exported: Annotated[
        Path | None, typer.Option(help="Folder that `dspark calibrate --export` wrote: temperatures and costs.")
    ] = None,
    flag: Annotated[
        list[str] | None, typer.Option(help="Further engine flag, NAME or NAME=VALUE; repeatable. Unknown: refused.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where a converted draft goes; without it the cache.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and change nothing.")] = False,
) -> None:
    """Serve a pair with another engine: its exact command, checked against the flags of the version known here.

    A draft in another form than the engine reads is converted first. What `doctor` finds broken is refused.
    """
    chosen = engine(name)
    published = _published(recipe, draft)
    target, draft = _pair(published, recipe, target, draft)
    wanted = parse_flags(flag or [])
    target = EMBEDDED if target == EMBEDDED_DRAFT else target
    if name == "llamacpp" and recipe is not None and Path(target).suffix != GGUF_SUFFIX and target != EMBEDDED:
        raise DsparkError("target", target, "llama.cpp needs the target as a file: give --target FILE.gguf")
    there = ready_target(name, target)
    prepared = ready_draft(name, there, draft, out)
    wish = Wish(there, prepared.path, n, tp, context, host, port, adaptive, exported, wanted)
    command = compose(chosen, wish, prepared.config, _flags(published, name))
    calibrated = (draft_folder(draft) / CALIBRATION_FILE).is_file()
    _say([*_unpublished(chosen, published), *notes(chosen, command, prepared.config, exported is not None, calibrated)])
    _doctor(chosen, target, draft, prepared, context_of(chosen, command.flags))
    if dry_run:
        first = f"{shlex.join(prepared.command)} &&\n" if prepared.convert is not None else ""
        typer.echo(first + command.text())
        return
    _run(chosen, command, prepared)


def _published(recipe: str | None, draft: str | None) -> Recipe | None:
    """The recipe named, or the one whose published draft is asked for."""
    if recipe is not None:
        return load_recipe(recipe)
    return None if draft is None else known_recipe(draft)


def _pair(published: Recipe | None, recipe: str | None, target: str | None, draft: str | None) -> tuple[str, str]:
    """Target and draft: as given, else the recipe's."""
    if published is not None:
        target = target or published.target
        draft = draft or (published.serve.draft if published.serve else None)
    if target is None:
        raise DsparkError("target", None, "give --target, or the recipe of a published pair, e.g. kimi-k3")
    if draft is None:
        where = f"recipe {recipe} names no published draft" if recipe else "a draft is needed"
        raise DsparkError("draft", None, f"{where}; give --draft")
    return target, draft


def _flags(published: Recipe | None, name: str) -> dict[str, Any] | None:
    return getattr(published.serve, name, None) if published is not None and published.serve is not None else None


def _unpublished(chosen: Engine, published: Recipe | None) -> list[str]:
    """A note where a recipe has commands, but none for this engine."""
    if published is None or published.serve is None or _flags(published, chosen.key):
        return []
    known = f"the recipe {published.name} has no published command for {chosen.name}"
    return [f"{known}; this one has only what the pair needs"]


def _doctor(chosen: Engine, target: str, draft: str, prepared: Ready, context: int | None) -> None:
    """Print what the static checks note, and refuse (exit code 2) what they find broken.

    A draft that is about to be converted is checked without the engine, whose form it has not yet; one that is not on
    this disk by its recipe, or not at all.
    """
    if prepared.config is None:
        return
    facts = _facts_for_gguf(prepared.config.target_name) if chosen.key == "llamacpp" else target_facts(target)
    if chosen.key != "llamacpp" and facts.depth is None and facts.width is None and facts.vocabulary is None:
        _say(["the target's config could not be read: depth, width and vocabulary were not compared"])
    pending = prepared.convert is not None
    known = known_recipe(draft)
    checked = known.name if known is not None else draft if pending else prepared.path
    found = findings_of(read_draft(checked, facts), facts, None if pending else chosen.key, context, None, pending)
    broken = [one for one in found if one.level == "broken"]
    said = [one for one in found if one.level == "loses" or (one.level == "note" and one.check not in OWN_NOTES)]
    _say(_line(one) for one in said)
    for one in broken:
        typer.secho(f"error: {_line(one)}", fg="red", err=True)
    if broken:
        raise typer.Exit(2)


def _facts_for_gguf(name: str) -> TargetFacts:
    """Of the target that a draft for llama.cpp names; the .gguf file itself is compared when the draft's is written."""
    try:
        return target_facts(name)
    except DsparkError as error:
        _say([f"the doctor did not compare the draft with its target: {error}"])
        return TargetFacts(name, missing=str(error), no_tokenizer=str(error))


def _line(finding: Finding) -> str:
    return f"doctor, {finding.check}: {finding.text}"


def _run(chosen: Engine, command: Command, prepared: Ready) -> None:
    """Become the engine's process."""
    program = shutil.which(chosen.executable)
    if program is None:
        remedy = f"is not on the PATH: install {chosen.name} {chosen.version}, or print the command with --dry-run"
        raise DsparkError("engine", chosen.executable, remedy)
    if prepared.convert is not None:
        typer.echo(f"writing {prepared.path}", err=True)
        prepared.convert()
    typer.echo(command.text(), err=True)
    os.execve(program, command.arguments(), {**os.environ, **command.environment})


def _say(lines: Any) -> None:
    """Notes go to stderr, so that stdout is the command alone."""
    for line in lines:
        typer.echo(f"note: {line}", err=True)
