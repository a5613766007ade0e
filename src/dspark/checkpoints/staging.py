"""Writing whole or not at all: in a temporary folder beside the place, then by one rename."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from dspark.errors import DsparkError

LEFT_BEHIND = 24 * 3600.0  # seconds: no write takes that long, so what is older is of a process that was killed


@contextmanager
def staged(place: Path, alone: bool = False) -> Iterator[Path]:
    """A new path on the same disk as `place` and of its name, for what shall be renamed to it; what is still there at
    the end is removed.

    alone: nobody else writes there, so whatever an earlier write left behind is removed at once.
    """
    prefix = f".{place.name}.writing"
    place.parent.mkdir(parents=True, exist_ok=True)
    for left in place.parent.glob(f"{escape(prefix)}*"):
        with suppress(FileNotFoundError):  # another write has removed it
            if alone or time.time() - left.stat().st_mtime > LEFT_BEHIND:
                shutil.rmtree(left, ignore_errors=True)
    room = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=place.parent))
    try:
        yield room / place.name
    finally:
        shutil.rmtree(room, ignore_errors=True)


def place_folder(made: Path, folder: Path) -> None:
    """Rename a folder to a new name or over an empty folder. Raises DsparkError when somebody was there first."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.exists():
            raise
        raise DsparkError("folder", str(folder), "exists already; give a new name or an empty folder") from None
