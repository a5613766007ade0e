"""What one request gave, in process or from a live engine; every figure of a report is a function of these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from dspark.decoding.request import Round
from dspark.errors import DsparkError

Source = Literal["replay", "served", "server"]


@dataclass
class Sample:
    """One request of one drafter.

    question, turn: which prompt, and which of its turns (0-based)
    batch: requests in flight beside it, itself included; group: those whose wall-clock time was taken together, the
        unit of pairing (a question at batch 1)
    rounds: its round records, None where the engine does not tell; histogram: rounds by accepted tokens where it tells
        only that
    looping: whether the answer ends in a loop, None where its ids are not told
    cached_tokens: prompt tokens that the engine had read before, where it tells
    seconds: wall clock from handing over the request to its last token, None when it was not timed; arrivals: (seconds
        since then, tokens) of every chunk, the first being the prefill's token; streamed: whether chunks came as they
        were made
    group_seconds: wall clock of its group from the first request handed over to the last token
    draft_seconds, verify_seconds, engine_seconds: its share of time in draft passes, in the target's after the first
        token, and in the engine's steps after the first token
    ties, faults: where its ids leave plain decoding's, at a tie of the target or without one; replay_ties,
        replay_faults: where the replay of plain's answer leaves its served rounds
    error: why it failed; then it has no figures
    """

    suite: str
    question: str
    drafter: str
    source: Source
    turn: int = 0
    batch: int = 1
    group: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    output_ids: list[int] = field(default_factory=list)
    finish: str = ""
    looping: bool | None = False
    rounds: list[Round] | None = None
    histogram: list[int] | None = None
    seconds: float | None = None
    group_seconds: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    streamed: bool = True
    cached_tokens: int | None = None
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    engine_seconds: float | None = None
    text: str | None = None
    ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    replay_ties: list[str] = field(default_factory=list)
    replay_faults: list[str] = field(default_factory=list)
    replay_checked: bool = False
    error: str | None = None


SAMPLES = TypeAdapter(list[Sample])


def unit_key(suite: str, kind: str, *rest: str | int) -> str:
    """The name of a unit of work in the journal; no two units share one, whatever their parts hold."""
    return json.dumps([suite, kind, *rest])


class Journal:
    """Samples on disk as they come, one JSON line a unit of work under a header of settings; a run that was stopped
    goes on behind the last whole line. `facts`: what else a run must not forget, by name.

    Raises DsparkError when the file holds the results of other settings, or is damaged; then it is left as it is.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.done, self.facts = path, dict[str, list[Sample]](), dict[str, Any]()
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.read_bytes() if path.exists() else b""
        if json.dumps(settings).encode().startswith(begun):  # nothing, or killed while the header was written
            path.write_text(json.dumps(settings) + "\n", encoding="utf-8")
            return
        header, *lines = begun.split(b"\n")
        if not lines:
            raise self._damaged(1)
        self._check_header(header, settings)
        torn = lines.pop()
        for number, line in enumerate(lines, start=2):
            try:
                unit = json.loads(line)
                if "fact" in unit:
                    self.facts[str(unit["fact"])] = unit["value"]
                else:
                    self.done[str(unit["unit"])] = SAMPLES.validate_python(unit["samples"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise self._damaged(number) from None
        if torn:
            path.write_bytes(b"\n".join([header, *lines, b""]))

    def add(self, unit: str, samples: list[Sample]) -> None:
        """Keep what a finished unit of work gave."""
        self.done[unit] = samples
        self._append({"unit": unit, "samples": SAMPLES.dump_python(samples, mode="json")})

    def keep(self, name: str, value: Any) -> None:
        """Keep a fact (as JSON has it); it replaces an earlier one of that name."""
        self.facts[name] = value
        self._append({"fact": name, "value": value})

    def samples(self) -> Iterator[Sample]:
        """All of them, in the order they came."""
        return (one for samples in self.done.values() for one in samples)

    def _check_header(self, header: bytes, settings: dict[str, Any]) -> None:
        try:
            found = json.loads(header)
        except (ValueError, RecursionError):
            raise self._damaged(1) from None
        if not isinstance(found, dict):
            raise self._damaged(1)
        for name in (*settings, *found):
            if found.get(name) != settings.get(name):
                remedy = f"{self.path} holds results of {found.get(name)!r}; give another --out or remove it"
                raise DsparkError(name, settings.get(name), remedy)

    def _damaged(self, number: int) -> DsparkError:
        return DsparkError("out", f"{self.path}:{number}", f"is damaged; remove {self.path}, or give another --out")

    def _append(self, value: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
