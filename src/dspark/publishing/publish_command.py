"""`dspark publish`: a draft folder checked, listed, and, when asked, sent to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import HfApi, get_token

from dspark.errors import DsparkError
from dspark.publishing.checks import faults, uploads
from dspark.publishing.publish import Publisher, check_repo


def publish_command(
    folder: Annotated[Path, typer.Argument(help="Draft folder in the native form, with its card.")],
    repo: Annotated[str, typer.Option(help="OWNER/NAME on the hub.")],
    report: Annotated[Path | None, typer.Option(help="report.json whose figures the card must have.")] = None,
    private: Annotated[bool, typer.Option("--private", help="A new repository is private.")] = False,
    push: Annotated[
        bool, typer.Option("--push/--dry-run", help="Send it (needs a token), or only check and list.")
    ] = False,
) -> None:
    """Check a draft folder and list what would be uploaded; with --push, upload it to the Hugging Face hub.

    One safetensors file, no weights of the target, no paths of this machine, a card with a licence that is true to the
    config, and nothing that `doctor` finds broken.
    """
    check_repo(repo)
    wrong = faults(folder, report)
    for line in wrong:
        typer.secho(f"error: {line}", fg="red", err=True)
    if wrong:
        raise typer.Exit(2)
    files = uploads(folder)
    for one in files:
        typer.echo(f"{one.sha256}  {one.size:>13,}  {one.name}")
    total = f"{len(files)} files, {sum(one.size for one in files):,} bytes"
    if not push:
        typer.echo(f"{total}, checked; nothing was sent: --push sends them to {repo}")
        return
    if get_token() is None:
        raise DsparkError("push", repo, "needs a token: set HF_TOKEN, or run `hf auth login`")
    typer.echo(f"{total} sent: {Publisher(HfApi()).push(folder, files, repo, private)}")
