"""Drafts by name: `embedded` is the one shipped with the package, anything else is a folder.

`python -m dspark.checkpoints.builtin FOLDER` makes a trained draft the shipped one: its weights in BF16, without the
head's rows, which are taken from the target at load.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path

import torch

from dspark.checkpoints.native import load_draft, save_draft
from dspark.drafts.dspark import DSparkDraft

EMBEDDED_DRAFT = "embedded"
_FOLDER = "assets/drafts/smollm2-135m"


def draft_folder(name: str) -> Path:
    """The folder of a named draft, or `name` itself as a path."""
    return Path(str(files("dspark").joinpath(_FOLDER))) if name == EMBEDDED_DRAFT else Path(name)


def load_named_draft(name: str, dtype: torch.dtype = torch.float32) -> DSparkDraft:
    """Load `embedded` or a draft folder (unbound). Raises DsparkError when it is missing or not a valid draft."""
    return load_draft(draft_folder(name), dtype)


def ship(folder: str | Path) -> Path:
    """Write the draft in `folder` over the shipped one; returns where that is."""
    destination = draft_folder(EMBEDDED_DRAFT)
    destination.parent.mkdir(parents=True, exist_ok=True)
    save_draft(load_draft(folder), destination, lm_head=False)
    return destination


if __name__ == "__main__":
    print(ship(sys.argv[1]))
