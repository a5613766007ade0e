"""Figures of prompt suites: what one question gave, kept on disk as it comes, and what a suite comes to."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dspark.bench.compare import PLAIN, Comparison, Difference, Mode, Question, Run
from dspark.bench.metrics import Acceptance
from dspark.bench.served import Parting, replay_line
from dspark.errors import DsparkError

LENGTHS = ("macro_length", "macro_length_without_loops")
BUCKETS = (64, 128)  # output tokens: below the first, between them, from the last on


@dataclass
class Record:
    """One finished question: its runs by mode (timed or from a batch), where ids differ from plain's, and where the
    replay of plain's answer departs from the served rounds (None: not replayed)."""

    suite: str
    question: str
    timed: bool
    runs: dict[str, Run]
    differences: list[Difference] = field(default_factory=list)
    partings: list[Parting] | None = None


RECORD = TypeAdapter(Record)


def prompts_sha256(suites: Mapping[str, Sequence[Question]]) -> str:
    """Which prompts were asked: sha256 over suite, id, text and the ids that the target reads of each, in order."""
    asked = {suite: [[one.id, one.text, list(one.ids)] for one in questions] for suite, questions in suites.items()}
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


class Journal:
    """Records on disk, one JSON line each under a header of settings; a torn last line is dropped on opening.

    Every record has a run of each of `modes`. Raises DsparkError when the file holds the results of other settings, or
    is damaged; then it is left as it is.
    """

    def __init__(self, path: Path, settings: dict[str, Any], modes: Sequence[Mode]) -> None:
        self.path, self.records = path, dict[tuple[str, str], Record]()
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            self._append(settings)
            return
        header, *lines = path.read_bytes().split(b"\n")
        if not lines:
            raise self._damaged(1)
        self._check_header(header, settings)
        torn = lines.pop()
        for number, line in enumerate(lines, start=2):
            try:
                record = RECORD.validate_json(line)
            except ValidationError:
                raise self._damaged(number) from None
            if set(record.runs) != {mode.name for mode in modes}:
                raise self._damaged(number)
            self.records[record.suite, record.question] = record
        if torn:
            path.write_bytes(b"\n".join([header, *lines, b""]))

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

    def add(self, record: Record) -> None:
        self.records[record.suite, record.question] = record
        self._append(RECORD.dump_python(record, mode="json"))

    def _append(self, value: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")


def summarise_suite(questions: Sequence[Question], modes: Sequence[Mode], records: Sequence[Record]) -> dict[str, Any]:
    """Acceptance over all questions, speed over the timed ones; records[i] belongs to questions[i]."""
    timed = [record for record in records if record.timed]
    everything, fast = _comparison(questions, modes, records), _comparison(questions, modes, timed)
    differences = [one for record in records for one in record.differences]
    return {
        "questions": len(records),
        "timed_questions": len(timed),
        "looping_answers": sum(record.runs[PLAIN.name].looping for record in records),
        "ids_equal": not differences,
        "ties": [str(one) for one in differences if one.tie],
        "not_lossless": [str(one) for one in differences if not one.tie],
        "replay": replay_summary(records),
        "modes": {
            mode.name: {
                "n": mode.n,
                "acceptance": acceptance_json(everything.acceptance(mode)),
                "speed": speed_json(fast, mode) if timed else None,
                "by_output_tokens": by_length(questions, modes, records, mode),
            }
            for mode in modes
        },
    }


def _comparison(questions: Sequence[Question], modes: Sequence[Mode], records: Sequence[Record]) -> Comparison:
    runs = {mode.name: [record.runs[mode.name] for record in records] for mode in modes}
    return Comparison(list(modes), list(questions), 0, runs)


def replay_summary(records: Iterable[Record]) -> dict[str, Any]:
    """On how many answers the replay gives the served rounds, in numbers, in words, and every exception."""
    checked = [record for record in records if record.partings is not None]
    partings = [one for record in checked for one in record.partings or ()]
    return {
        "answers": len(checked),
        "equal": sum(not record.partings for record in checked),
        "line": replay_line(len(checked), partings) if checked else "replay was not compared with served rounds",
        "ties": [str(one) for one in partings if one.tie],
        "faults": [str(one) for one in partings if not one.tie],
    }


def by_length(
    questions: Sequence[Question], modes: Sequence[Mode], records: Sequence[Record], mode: Mode
) -> dict[str, Any]:
    """Acceptance length (bonus counted, macro) and speedup of one mode by the length of plain decoding's answer."""
    table = {}
    for low, high in pairwise((0, *BUCKETS, sys.maxsize)):
        inside = [one for one in records if low <= len(one.runs[PLAIN.name].output_ids) < high]
        timed = _comparison(questions, modes, [one for one in inside if one.timed])
        table[f"{low}-{high - 1}" if high < sys.maxsize else f"{low}-"] = {
            "questions": len(inside),
            "macro_length": _comparison(questions, modes, inside).acceptance(mode).macro_length,
            "speedup_end_to_end": asdict(timed.speedup(mode)) if mode.n and timed.runs[mode.name] else None,
        }
    return table


def acceptance_json(acceptance: Acceptance) -> dict[str, Any]:
    """Lengths count the bonus; histogram and conditional acceptance do not."""
    value = asdict(acceptance)
    value["conditional"] = [{**asdict(slot), "rate": slot.rate} for slot in acceptance.conditional]
    return value


def speed_json(comparison: Comparison, mode: Mode) -> dict[str, Any]:
    """Tokens per second, and the speedup over plain with its interval over questions."""
    value: dict[str, Any] = {}
    for label, decode_only in (("end_to_end", False), ("decode_only", True)):
        value[f"tokens_per_s_{label}"] = comparison.tokens_per_second(mode, decode_only=decode_only)
        if mode != PLAIN:
            value[f"speedup_{label}"] = asdict(comparison.speedup(mode, decode_only=decode_only))
    return value


def mean_speedups(suites: Mapping[str, Any], modes: Sequence[Mode]) -> dict[str, float | None]:
    """Simple unweighted mean over the suites, end to end."""
    means = {}
    for mode in modes[1:]:
        speeds = [result["modes"][mode.name]["speed"] for result in suites.values()]
        means[mode.name] = fmean(s["speedup_end_to_end"]["value"] for s in speeds) if all(speeds) else None
    return means


def mean_acceptance(suites: Mapping[str, Any], modes: Sequence[Mode]) -> dict[str, dict[str, float | None]]:
    """Simple unweighted mean over the suites of the macro acceptance length (bonus counted), with and without loops."""
    means: dict[str, dict[str, float | None]] = {}
    for mode in modes[1:]:
        found = [result["modes"][mode.name]["acceptance"] for result in suites.values()]
        means[mode.name] = {
            key: fmean(one[key] for one in found) if all(one[key] is not None for one in found) else None
            for key in LENGTHS
        }
    return means


def best_speedups(suites: Mapping[str, Any], modes: Sequence[Mode]) -> dict[str, Any]:
    """The fastest n of each suite with its speedup over plain (end to end), and their unweighted mean.

    Picked by the very figures it reports, so a little above what that n would give again.
    """
    best: dict[str, Any] = {}
    for suite, result in suites.items():
        found = {mode: result["modes"][mode.name]["speed"] for mode in modes[1:]}
        if not found or not all(found.values()):
            return {"suites": {}, "mean": None}
        fastest = max(found, key=lambda mode: found[mode]["speedup_end_to_end"]["value"])
        best[suite] = {"n": fastest.n, **found[fastest]["speedup_end_to_end"]}
    return {"suites": best, "mean": fmean(one["value"] for one in best.values()) if best else None}
