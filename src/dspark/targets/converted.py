"""A folder that is built once, kept in the user's cache and never seen half done.

A build goes to a hidden folder beside the final one and is renamed when it is complete, under a lock: several
processes may ask at the same time, one builds and the others wait for it; a killed builder leaves nothing behind that
could be mistaken for the result. A manifest inside records every file's size and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dspark.errors import DsparkError

MANIFEST = "manifest.json"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fault(folder: Path, verify: bool = False) -> str | None:
    """What is wrong with a built folder, None when it is whole.

    Every call compares sizes. A file whose modification time is not the recorded one (a copied cache, or an altered
    file) is hashed, every file is with `verify`.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        moved = False
        for name, record in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            stat = path.stat()
            if stat.st_size != record["bytes"]:
                return f"{name} has {stat.st_size} bytes instead of {record['bytes']}"
            touched = stat.st_mtime_ns != record["mtime_ns"]
            if (touched or verify) and sha256(path) != record["sha256"]:
                return f"{name} does not match its SHA-256"
            record["mtime_ns"], moved = stat.st_mtime_ns, moved or touched
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or unreadable"
    if moved:
        with suppress(OSError):  # a read-only cache is as good, it is only hashed again next time
            _write_json(folder / MANIFEST, manifest)
    return None


def build_once(
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
    notice: Callable[[str], None],
    verify: bool = False,
    bytes_needed: int = 0,
) -> Path:
    """Return `folder`, built by `build(empty folder)` unless a whole one is already there.

    build: fills the folder it is given and returns what the manifest should say about the source
    notice: receives one line when a damaged folder is replaced or another process is waited for
    bytes_needed: free disk asked for before building

    Raises DsparkError when the cache cannot be written or the disk is short; what `build` raises passes through.
    """
    if fault(folder, verify) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, notice):
            if folder.exists():
                if (found := fault(folder, verify)) is None:
                    return folder
                notice(f"the cached copy {folder} is damaged ({found}): building it again")
            _build(folder, build, bytes_needed)
    except OSError as error:
        raise DsparkError(
            "DSPARK_CACHE", str(folder.parent), f"cannot be written ({error}); set it to a folder that can"
        ) from error
    return folder


@contextmanager
def _locked(folder: Path, notice: Callable[[str], None]) -> Iterator[None]:
    """Hold the folder's lock (the operating system releases it when its holder is killed)."""
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        notice(f"waiting for another process that builds {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, build: Callable[[Path], dict[str, Any]], bytes_needed: int) -> None:
    """Build beside `folder` and put the result in its place. The caller holds the lock."""
    hidden = f".{folder.name}."
    for leftover in folder.parent.glob(hidden + "*.partial"):  # of killed builders: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < bytes_needed:
        raise DsparkError(
            "DSPARK_CACHE",
            str(folder.parent),
            f"has {free / 1e6:.0f} MB free, {bytes_needed / 1e6:.0f} MB are needed; free some or choose another disk",
        )
    partial = folder.parent / f"{hidden}{os.getpid()}.partial"
    partial.mkdir()
    try:
        source = build(partial)
        _write_json(partial / MANIFEST, {"source": source, "files": _records(partial)})
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _records(folder: Path) -> dict[str, dict[str, Any]]:
    records: dict[str, dict[str, Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        stat = path.stat()
        records[path.relative_to(folder).as_posix()] = {
            "bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "sha256": sha256(path),
        }
    return records


def _write_json(path: Path, value: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    temporary.replace(path)
