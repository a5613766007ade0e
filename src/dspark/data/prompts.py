"""Prompts: what people ask, one conversation of user turns each."""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from dspark.errors import DsparkError

_HASH = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Prompt:
    """id: unique, e.g. "gsm8k/17"; turns: the user's messages, in order, none of them blank."""

    id: str
    turns: tuple[str, ...]


def read_prompts(path: str | Path, limit: int | None = None, seed: int | None = None) -> list[Prompt]:
    """Prompts of a JSONL file, of every *.jsonl in a folder (by name), or of a public set ("hub:gsm8k").

    A line is {"id": "...", "turns": ["...", ...]}. `limit` keeps the first ones. A `seed` shuffles all of them
    first, by the hash of (seed, id), so that any first part of the work (a limit, a run that was stopped) is a mixture.
    Raises DsparkError naming file, line, field and value: unreadable JSON, an unknown or missing field, a blank
    turn, an id used for two prompts.
    """
    if limit is not None and limit < 1:
        raise DsparkError("limit", limit, "must be at least 1")
    source = _hub(str(path)[4:]) if str(path).startswith("hub:") else _folder_or_file(Path(path))
    prompts = _unique(source)
    if seed is not None:
        prompts = iter(sorted(prompts, key=lambda one: hashlib.sha256(f"{seed}/{one.id}".encode()).digest()))
    found = list(islice(prompts, limit))
    if not found:
        raise DsparkError("prompts", str(path), "holds no prompt")
    return found


def shard_prompts(prompts: Iterable[Prompt], index: int, count: int) -> list[Prompt]:
    """Part `index` (0-based) of `count`: the prompts whose sha256(id) mod count is `index`, in their order.

    The parts are disjoint and make up the whole; which one a prompt is in depends on its id alone. A part may be
    empty. Raises DsparkError unless 0 <= index < count.
    """
    if not 0 <= index < count:
        raise DsparkError("shard", f"{index}/{count}", "must be I/N with 0 <= I < N, e.g. 0/2 and 1/2")
    return [one for one in prompts if int.from_bytes(hashlib.sha256(one.id.encode()).digest()) % count == index]


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON's \\ud800 and undecodable command-line bytes cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def prompt_hash(text: str) -> str:
    """16 hex digits that two prompts share when they differ in case, white space or Unicode form alone."""
    normal = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.sha256(normal.encode()).hexdigest()[:16]


def write_prompt_hashes(path: str | Path, hashes: Iterable[str]) -> None:
    """Write prompt hashes as a text file, each once, one a line, sorted. Raises DsparkError on what is no hash, or
    when there is none: an empty list would read as if no prompt had ever been trained on."""
    found = sorted(set(hashes))
    if not found:
        raise DsparkError("prompt hashes", str(path), "there is none to write")
    for one in found:
        if not _HASH.fullmatch(one):
            raise DsparkError("prompt hash", one, "must be 16 hex digits (prompt_hash)")
    write_text(path, "".join(f"{one}\n" for one in found))


def read_prompt_hashes(path: str | Path) -> frozenset[str]:
    """The hashes that `write_prompt_hashes` wrote. Raises DsparkError naming the file, and the line that is none; an
    empty file is refused too."""
    path = Path(path)
    if not path.is_file():
        raise DsparkError("prompt hashes", str(path), "no such file")
    lines = path.read_bytes().decode("utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        if not _HASH.fullmatch(line):
            raise DsparkError(f"{path}:{number}", line[:60], "must be 16 hex digits, one prompt hash a line")
    if not lines:
        raise DsparkError("prompt hashes", str(path), "is empty, which tells nothing; copy it again or remove it")
    return frozenset(lines)


def write_text(path: str | Path, text: str) -> None:
    """Write a whole UTF-8 file at once: a temporary name first, then a rename. Missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def demo_prompts() -> list[Prompt]:
    """The 15 prompts shipped with dspark: 5 maths, 5 code, 5 chat."""
    text = files("dspark").joinpath("assets/prompts/demo.jsonl").read_text(encoding="utf-8")
    return list(_unique(_parse_lines("demo.jsonl", text.splitlines())))


def _folder_or_file(path: Path) -> Iterator[tuple[str, Prompt]]:
    if path.is_dir():
        found = sorted(path.glob("*.jsonl"))
        if not found:
            raise DsparkError("prompts", str(path), "this folder holds no *.jsonl file")
    elif path.is_file():
        found = [path]
    else:
        raise DsparkError("prompts", str(path), "no such file or folder (a public set is written hub:gsm8k)")
    for file in found:
        try:
            with file.open(encoding="utf-8") as handle:
                yield from _parse_lines(str(file), handle)
        except UnicodeDecodeError as error:
            raise DsparkError("prompts", str(file), f"is not UTF-8 text ({error.reason})") from None


def _parse_lines(name: str, lines: Iterable[str]) -> Iterator[tuple[str, Prompt]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{name}:{number}"
            yield place, _parse(line, place)


def _parse(line: str, place: str) -> Prompt:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise DsparkError(place, line.strip()[:60], f"is not JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise DsparkError(place, line.strip()[:60], f"is no prompt ({error})") from None
    if not isinstance(fields, dict):
        raise DsparkError(place, line.strip()[:60], 'must be an object {"id": "...", "turns": ["..."]}')
    for field in fields:
        if field not in ("id", "turns"):
            raise DsparkError(f"{place}: {field}", str(fields[field])[:60], "unknown field; a prompt has id and turns")
    return _prompt(fields.get("id"), fields.get("turns"), place)


def _prompt(identity: Any, turns: Any, place: str) -> Prompt:
    if not isinstance(identity, str) or not identity.strip():
        raise DsparkError(f"{place}: id", identity, "must be a non-empty text")
    if not isinstance(turns, list) or not turns:
        raise DsparkError(f"{place}: turns", turns, "must be a list with at least one text")
    for number, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise DsparkError(f"{place}: turns[{number}]", turn, "must be a text that is not blank")
    for field, text in (("id", identity), *((f"turns[{number}]", turn) for number, turn in enumerate(turns))):
        if not is_unicode(text):
            raise DsparkError(f"{place}: {field}", text[:60], "holds half a surrogate pair, which is no character")
    return Prompt(identity, tuple(turns))


def _unique(placed: Iterable[tuple[str, Prompt]]) -> Iterator[Prompt]:
    """Each prompt once. An id may come again with the same turns (two invented sets share some), not with others."""
    seen: dict[str, tuple[str, tuple[str, ...]]] = {}
    for place, prompt in placed:
        if prompt.id not in seen:
            seen[prompt.id] = place, prompt.turns
            yield prompt
        elif seen[prompt.id][1] != prompt.turns:
            remedy = f"is already used at {seen[prompt.id][0]} for another prompt; ids must be unique"
            raise DsparkError(f"{place}: id", prompt.id, remedy)


def _hub(name: str) -> Iterator[tuple[str, Prompt]]:
    """A public data set through the `datasets` library."""
    from dspark.data.public import (  # which makes prompts, so it comes after this module
        TABLE,
        TRAINING,
        Unavailable,
        download,
    )

    if name not in TABLE and name not in TRAINING:
        raise DsparkError("prompts", f"hub:{name}", f"unknown set; known are {', '.join(sorted((*TABLE, *TRAINING)))}")
    try:
        prompts, _ = download(name)
    except Unavailable as reason:
        raise DsparkError("prompts", f"hub:{name}", str(reason)) from None
    for number, prompt in enumerate(prompts):
        yield f"hub:{name}:{number}", prompt
