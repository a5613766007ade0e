"""`dspark card`: what rows files hold, or the model card of a draft folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from dspark.checkpoints.native import CARD_FILE
from dspark.cli_output import printable
from dspark.data.card import data_card
from dspark.data.prompts import write_text
from dspark.errors import DsparkError
from dspark.publishing.card import card_of
from dspark.publishing.evaluation import FIGURES
from dspark.publishing.publish import check_repo


def card_command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="A draft's folder, or rows files of one target.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to write; without it, README.md of a draft; rows are printed.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Of a draft: report.json of a `dspark bench` with it.")] = None,
    licence: Annotated[
        str | None, typer.Option("--license", help="Of a draft: its licence, e.g. apache-2.0; else as its card has it.")
    ] = None,
    repo: Annotated[str | None, typer.Option(help="Of a draft: OWNER/NAME that it is published under.")] = None,
    sample: Annotated[int, typer.Option(min=0, help="Of rows: as text, that many, always the same ones.")] = 0,
) -> None:
    """A draft folder's card, README.md: shape, figures, serving, training. Or of rows files: what they hold."""
    if any(path.is_dir() for path in paths):
        card, out = _of_draft(paths, report, licence, repo, sample), out or paths[0] / CARD_FILE
        if report is None:
            _keep_figures(out)
    else:
        for name, value in (("report", report), ("license", licence), ("repo", repo)):
            if value is not None:
                raise DsparkError(name, str(value), "is for a draft's folder; leave it out with rows files")
        card = printable(data_card(paths, sample))
    if out is None:
        print(card, end="")
    else:
        write_text(out, card)
        typer.echo(f"written to {out}")


def _of_draft(paths: Sequence[Path], report: Path | None, licence: str | None, repo: str | None, sample: int) -> str:
    if len(paths) > 1:
        raise DsparkError("paths", " ".join(map(str, paths)), "must be one draft folder, or rows files only")
    if sample:
        raise DsparkError("sample", sample, "is for rows files; leave it out with a draft's folder")
    if repo is not None:
        check_repo(repo)
    return card_of(paths[0], report, licence, repo)


def _keep_figures(card: Path) -> None:
    """Raise DsparkError when a card without figures would take the place of one that has some."""
    if card.is_file() and FIGURES in card.read_text(encoding="utf-8", errors="replace"):
        remedy = "give the report.json: the card that is there has its figures; or take that card away"
        raise DsparkError("report", None, remedy)
