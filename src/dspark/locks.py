"""One writer at a time: a lock file beside what is written, released by the system when the process ends."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout

from dspark.errors import DsparkError


def lock_for_writing(path: str | Path, field: str) -> FileLock:
    """Take the lock `.<name>.lock` beside a file or folder that is about to be written (the folder above is made).

    Use it in a `with` or call its `release`. Raises DsparkError naming `field` when another run holds it.
    """
    path = Path(path)
    place = path.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(place.with_name(f".{place.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        remedy = "is being written by another run; wait for it or choose another name"
        raise DsparkError(field, str(path), remedy) from None
    return lock
