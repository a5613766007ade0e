"""`dspark convert`: a draft checkpoint in another form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.checkpoints.convert import FORMS, convert
from dspark.errors import DsparkError


def convert_command(
    src: Annotated[str, typer.Argument(help="Draft folder in any form that is read, or `embedded`.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")],
    to: Annotated[str, typer.Option(help=f"Form to write: {', '.join(FORMS)}.")],
    target: Annotated[
        str | None, typer.Option(help="The draft's target: its name and depth, and its head where the form needs it.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE that the source lacks, e.g. training_length=4096; repeatable.")
    ] = None,
    expand: Annotated[
        bool, typer.Option("--expand", help="For sglang: a reduced vocabulary as a whole one, same proposals.")
    ] = False,
) -> None:
    """Convert a draft: native (DeepSpec, vLLM, SGLang), speculators, SpecForge, z-lab or Transformers' form.

    Layer ids and counts are translated, the slot layout never changes. What the goal cannot express is refused.
    """
    stated = dict(_statement(text) for text in state or [])
    read = convert(src, to, out, target, expand, **stated)
    layout = "anchor-first" if read.config.sample_from_anchor else "bonus-anchor"
    typer.echo(f"{src} ({read.form}) -> {out} ({to}): {read.config.gamma} predictions, {layout}")
    for note in read.notes:
        typer.echo(f"note: {note}")


def _statement(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise DsparkError("state", text, "must be KEY=VALUE, e.g. training_length=4096")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
