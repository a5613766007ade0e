"""Prompt suites by name: from a folder of JSONL files, or from their public data sets.

A suite that cannot be had is a `Missing` with its reason, never a smaller suite.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from dspark.data.prompts import Prompt, demo_prompts, read_prompts
from dspark.data.public import TABLE, Unavailable, download
from dspark.errors import DsparkError


@dataclass(frozen=True)
class Suite:
    """prompts: those to ask, in order, each with all its turns; source: where they came from and how many of how many,
    e.g. "folder: gsm8k.jsonl (20 of 1319 prompts)" or "openai/gsm8k main test (1319 prompts)"."""

    name: str
    prompts: list[Prompt]
    source: str


@dataclass(frozen=True)
class Missing:
    """A suite that was asked for and cannot be had from here."""

    name: str
    reason: str


SHIPPED = "demo"
"""The suite of the prompts that come with dspark, which is always there."""


def suite_names() -> list[str]:
    """The suites of the table, in its order; a folder may hold more."""
    return [*TABLE, SHIPPED]


def load_suites(
    names: Sequence[str], data: Path | None, *, limit: int | None, shuffle: int | None
) -> tuple[list[Suite], list[Missing]]:
    """(the suites that can be had, those that cannot), each in the order of `names`.

    data: a folder of <suite>.jsonl files, each line {"id": ..., "turns": [...]}. A suite found there is taken from
    there, and any file there is a suite by its name; others come from their public data sets. Where there is no network
    the hub's client tries each for some 25 s; HF_HUB_OFFLINE=1 spares that.
    limit: ask the first ones only; shuffle: a seed, prompts are then first put in the order of the hash of (seed, id).
    Raises DsparkError for a name that is neither in the table nor in the folder, a folder that holds no suite, an
    empty file, a malformed line (file and line named), an id used twice, and for no name, one given twice, limit < 1.
    """
    if limit is not None and limit < 1:
        raise DsparkError("limit", limit, "must be at least 1")
    if not names or len(set(names)) != len(names):
        raise DsparkError("suites", list(names), "name at least one suite, and none twice")
    files = {} if data is None else _files(data)
    known = suite_names()
    for name in names:
        if name not in known and name not in files:
            raise DsparkError("suite", name, _nearest(name, [*known, *(one for one in files if one not in known)]))
    found: list[Suite] = []
    missing: list[Missing] = []
    for name in names:
        try:
            prompts, source = _read(files[name]) if name in files else _download(name, data is not None)
        except Unavailable as reason:
            missing.append(Missing(name, str(reason)))
            continue
        chosen = _chosen(prompts, limit, shuffle)
        part = f"{len(chosen)} of " if len(chosen) < len(prompts) else ""
        count = f"{part}{len(prompts)} prompt{'s' if len(prompts) > 1 else ''}"
        found.append(Suite(name, chosen, f"{source} ({count})"))
    return found, missing


def _files(data: Path) -> dict[str, Path]:
    if not data.is_dir():
        raise DsparkError("data", str(data), "no such folder; give one that holds <suite>.jsonl files")
    found = {file.stem: file for file in sorted(data.glob("*.jsonl")) if file.is_file()}
    if not found:
        raise DsparkError("data", str(data), "this folder holds no <suite>.jsonl file")
    return found


def _nearest(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=3)
    return f"is no suite; did you mean {' or '.join(near)}?" if near else f"is no suite; there are {', '.join(known)}"


def _read(file: Path) -> tuple[list[Prompt], str]:
    prompts = read_prompts(file)
    seen: dict[str, int] = {}
    with file.open(encoding="utf-8") as lines:  # read_prompts has checked every line, and keeps one of two equal ones
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            identity = json.loads(line)["id"]
            if identity in seen:
                raise DsparkError(f"{file}:{number}: id", identity, f"is used on line {seen[identity]} already")
            seen[identity] = number
    return prompts, f"folder: {file.name}"


def _chosen(prompts: list[Prompt], limit: int | None, seed: int | None) -> list[Prompt]:
    """The order of `data.prompts.read_prompts`, so that a seed means the same prompts everywhere."""
    if seed is not None:
        prompts = sorted(prompts, key=lambda one: hashlib.sha256(f"{seed}/{one.id}".encode()).digest())
    return prompts[:limit]


def _download(name: str, has_folder: bool) -> tuple[list[Prompt], str]:
    if name == SHIPPED:
        return demo_prompts(), "shipped with dspark"
    try:
        return download(name)
    except Unavailable as reason:
        absent = f"the folder holds no {name}.jsonl, and " if has_folder else ""
        raise Unavailable(f"{absent}{reason}") from None
