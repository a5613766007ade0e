"""Drafts by name: `embedded` is the one shipped with the package, anything else is a folder.

    python -m dspark.checkpoints.builtin runs/mine/best

makes a trained draft the shipped one: its weights in BF16, without the head's rows (they are taken from the target at
load), training.json, training_prompts.txt and the model card that `dspark card` has written beside them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import torch

from dspark.checkpoints.native import CALIBRATION_FILE, CARD_FILE, PROMPTS_FILE, TRAINING_FILE, load_draft, save_draft
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError

EMBEDDED_DRAFT = "embedded"
_FOLDER = "assets/drafts/smollm2-135m"


def draft_folder(name: str) -> Path:
    """The folder of a named draft, or `name` itself as a path."""
    return Path(str(files("dspark").joinpath(_FOLDER))) if name == EMBEDDED_DRAFT else Path(name)


def load_named_draft(name: str, dtype: torch.dtype = torch.float32) -> Draft:
    """Load `embedded` or a draft folder (unbound). Raises DsparkError when it is missing or not a valid draft."""
    return load_draft(draft_folder(name), dtype)


def ship(folder: str | Path, destination: str | Path | None = None) -> Path:
    """Write the draft in `folder` over the shipped one (or to `destination`); returns where that is.

    Raises DsparkError when the draft cannot be read or has no card; then nothing is written.
    """
    folder = Path(folder)
    destination = draft_folder(EMBEDDED_DRAFT) if destination is None else Path(destination)
    draft, texts = load_draft(folder), dict[str, str | None]()
    for name in (CARD_FILE, TRAINING_FILE, PROMPTS_FILE, CALIBRATION_FILE):
        texts[name] = (folder / name).read_text(encoding="utf-8") if (folder / name).is_file() else None
    if texts[CARD_FILE] is None:
        remedy = f"has no {CARD_FILE}; write it: dspark card {folder} --report report.json"
        raise DsparkError("draft", str(folder), remedy)
    save_draft(draft, destination, lm_head=False, files=texts)
    for path in destination.iterdir():
        path.chmod(0o644)
    return destination


def main(argv: Sequence[str] | None = None) -> int:
    about = f"{__doc__}\nIt REPLACES the draft in {draft_folder(EMBEDDED_DRAFT)}"
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a trained draft, e.g. runs/mine/best")
    args = parser.parse_args(argv)
    try:
        print(ship(args.folder))
    except DsparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
