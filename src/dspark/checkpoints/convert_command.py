"""`dspark convert`: a draft checkpoint in another form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dspark.checkpoints.convert import FORMS, convert
from dspark.checkpoints.gguf import Kind
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError


def convert_command(
    src: Annotated[str, typer.Argument(help="Draft folder of any form, GGUF file, hub name, or `embedded`.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, for gguf a file; must be new, or empty.")],
    to: Annotated[str, typer.Option(help=f"Form to write: {', '.join(FORMS)}.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The draft's target: its name, depth and, where the form needs it, head; for gguf its GGUF file."
        ),
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE that the source lacks, e.g. training_length=4096; repeatable.")
    ] = None,
    expand: Annotated[
        bool, typer.Option("--expand", help="For sglang: a reduced vocabulary as a whole one, same proposals.")
    ] = False,
    kind: Annotated[Kind | None, typer.Option("--type", help="Of gguf's matrices; f16 if not given.")] = None,
) -> None:
    """Convert a draft for another engine or tool, or from one (docs/checkpoints.md has the matrix).

    Layer ids and counts are translated, the slot layout never changes. What the goal cannot express is refused.
    """
    read = convert(src, to, out, target, expand, kind, **statements(state))
    config = read.config
    if isinstance(config, Eagle3Config):
        layout = f"one by one ({config.attention})"
    else:
        layout = "anchor-first" if config.sample_from_anchor else "bonus-anchor"
    typer.echo(f"{src} ({read.form}) -> {out} ({to}): {config.gamma} predictions, {layout}")
    for note in read.notes:
        typer.echo(f"note: {note}")


def statements(texts: list[str] | None) -> dict[str, Any]:
    """KEY=VALUE options as a dictionary. Raises DsparkError."""
    return dict(_statement(text) for text in texts or [])


def _statement(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise DsparkError("state", text, "must be KEY=VALUE, e.g. training_length=4096")
    try:
        return name, json.loads(value)
    except RecursionError:
        raise DsparkError("state", name, "is nested too deeply") from None
    except ValueError:
        return name, value
