"""The notes beside a rows file, <name>.meta.json: how its rows were made, for a resume to check and a card to tell."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from dspark import __version__
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import write_text
from dspark.data.rows import notes_path, row_notes
from dspark.errors import DsparkError
from dspark.targets.base import Target

FORMAT = 1


class Part(BaseModel):
    """Which of the prompts a run was given. prompts: their file, folder or public set, by name; shuffle: a seed."""

    prompts: str
    limit: int | None = None
    shuffle: int | None = None
    shard: str | None = None

    def __str__(self) -> str:
        shard = f"part {self.shard} of " if self.shard else ""
        if self.limit is None:
            return (shard + "the prompts" if shard else "all prompts") + f" of {self.prompts}"
        order = "" if self.shuffle is None else f" in the order of seed {self.shuffle}"
        return f"{shard}the first {self.limit:,} prompts of {self.prompts}{order}"


class NotedSettings(BaseModel):
    """How the target answered; None: not noted."""

    model_config = ConfigDict(extra="allow")

    temperatures: list[float] | None = None
    max_tokens: int | None = None
    max_prompt_tokens: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_temperature(cls, value: Any) -> Any:
        """Files made before there could be several have `temperature`."""
        if isinstance(value, dict) and "temperature" in value:
            return {"temperatures": [value["temperature"]], **value}
        return value


class Notes(BaseModel):
    """What `regenerate` noted. None or empty: not noted, by a version before this one."""

    model_config = ConfigDict(extra="allow")

    format: int | None = None
    target: str | None = None
    target_dtype: str | None = None
    stop_ids: list[int] | None = None
    template_sha256: str | None = None
    thinking: str | None = None
    template_variables: dict[str, Any] | None = None
    settings: NotedSettings = NotedSettings()
    prompt_files: dict[str, str | None] = {}
    asked: list[Part] = []
    complete: bool = False
    versions: dict[str, str] = {}
    dropped: dict[str, str] = {}
    summary: dict[str, int] = {}
    summary_by_set: dict[str, dict[str, int]] | None = None


def read_notes(rows: str | Path) -> Notes | None:
    """The notes beside a rows file, None when there are none. Raises DsparkError naming the file and the field."""
    path = notes_path(rows)
    try:
        found = row_notes(rows)
        return Notes.model_validate(found) if found else None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        remedy = f"{first['msg']}; regenerate the rows under another name"
        raise DsparkError(f"{path}: {field}", repr(first.get("input"))[:80], remedy) from None


def describe(
    target: Target,
    renderer: ChatRenderer,
    settings: dict[str, Any],
    prompt_files: Sequence[str | Path],
    part: Part | None,
) -> dict[str, Any]:
    """The notes of a run that is about to begin."""
    hashes = {}
    for name in prompt_files:
        path = Path(name)
        for file in sorted(path.glob("*.jsonl")) if path.is_dir() else [path]:
            hashes[file.name] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None
    return {
        "format": FORMAT,
        "target": target.name,
        "target_dtype": str(target.dtype).removeprefix("torch."),
        "stop_ids": sorted(target.stop_ids),
        **renderer.recipe(),
        "template_variables": renderer.variables,
        "settings": settings,
        "prompt_files": hashes,
        "asked": [] if part is None else [part.model_dump()],
        "versions": {
            "dspark": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "dropped": {},
        "complete": False,
    }


# What must not change within one file; the prompts and the limit on their length may.
_FIXED = ("format", "target", "target_dtype", "stop_ids", "template_sha256", "thinking", "template_variables")


def open_notes(out: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Start new notes, or check that those there were made by the same settings and go on with them.

    wanted: from `describe`. Raises DsparkError when they were not, or when rows are there without notes.
    """
    path = notes_path(out)
    if out.exists() and out.stat().st_size and not path.exists():
        raise DsparkError("out", str(out), f"exists without its {path.name}, so it cannot be resumed; use another name")
    if path.exists():
        found = read_notes(out) or Notes()
        _refuse_changes(found, wanted, out)
        before = [part.model_dump() for part in found.asked]
        wanted["asked"] = before + [part for part in wanted["asked"] if part not in before]
        wanted["dropped"] = found.dropped
        wanted["prompt_files"] = {**found.prompt_files, **wanted["prompt_files"]}
    write_notes(out, wanted)
    return wanted


def _refuse_changes(found: Notes, wanted: Mapping[str, Any], out: Path) -> None:
    before = found.settings.model_dump()
    pairs = [(name, getattr(found, name), wanted[name]) for name in _FIXED]
    pairs += [(name, before.get(name), value) for name, value in wanted["settings"].items()]
    for name, was, value in pairs:
        if name != "max_prompt_tokens" and was != value:
            if name == "temperatures":  # said as the option takes them
                name, was, value = "temperature", _several(was or ()), _several(value)
            raise DsparkError(name, value, f"{out} was made with {was!r}; use another file")


def _several(temperatures: Sequence[float]) -> str:
    return ",".join(f"{one:g}" for one in temperatures)


def write_notes(rows: Path, notes: Mapping[str, Any]) -> None:
    """Write them at once, under a temporary name first."""
    write_text(notes_path(rows), json.dumps(notes, indent=2, sort_keys=True) + "\n")
