"""Token rows: what the target was shown and what it wrote, as the ids it emitted."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from dspark.errors import DsparkError

LOOP_NGRAM = 16  # docs/method.md section 6: n-grams of up to 16 tokens ...
LOOP_REPEATS = 4  # ... repeated at least 4 times up to the end


class Row(BaseModel):
    """One turn: the rendered prompt and the target's answer to it.

    id: content-derived (hash of prompt ids, sampling settings), so that work resumes by id
    source: the id of the prompt it came from, e.g. "gsm8k-train/17"; turn: 0-based turn of it
    answer_ids: as emitted, up to and including the stop token when finish == "stop";
        finish == "length" rows were cut at the token limit and carry no stop label
    temperature: at which the answer was sampled, 0 for a greedy one
    prompt_hash: of the user turn that is answered (prompts.prompt_hash), None in rows made without it
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    source: str
    turn: int = 0
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: Literal["stop", "length"]
    temperature: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    prompt_hash: str | None = Field(default=None, pattern="^[0-9a-f]{16}$")

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids

    @property
    def loss_mask(self) -> list[bool]:
        return [False] * len(self.prompt_ids) + [True] * len(self.answer_ids)

    @property
    def text_ids(self) -> list[int]:
        """The answer without the stop token that ends it."""
        return self.answer_ids[:-1] if self.finish == "stop" else self.answer_ids


def row_id(prompt_ids: Sequence[int], settings: Mapping[str, object]) -> str:
    """Content-derived id of a row: the same prompt ids under the same settings give the same 24 hex digits."""
    content = json.dumps([list(prompt_ids), dict(settings)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def ids_hash(row: Row) -> str:
    """16 hex digits of the row's token ids and of where its answer begins: equal for an equal prompt and answer."""
    return hashlib.sha256(array("q", [len(row.prompt_ids), *row.ids]).tobytes()).hexdigest()[:16]


def check_row(row: Row, where: str = "row") -> Row:
    """Refuse a row in which no token or every token is supervised: a sure sign of a wrong mask."""
    if not row.answer_ids:
        raise DsparkError(f"{where}: answer_ids", row.id, "is empty, so no token of this row is supervised")
    if not row.prompt_ids:
        raise DsparkError(f"{where}: prompt_ids", row.id, "is empty, so every token of this row is supervised")
    return row


def _parse(line: bytes, where: str) -> Row:
    try:
        row = Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        if first["type"] == "missing":
            remedy = "is missing; rows are made from prompts by `dspark regenerate`"
            raise DsparkError(f"{where}: {field}", None, remedy) from None
        raise DsparkError(f"{where}: {field}", _short(first.get("input")), first["msg"]) from None
    check_row(row, where)
    bad = next((token for token in (min(row.ids), max(row.ids)) if not 0 <= token < 2**31), None)
    if bad is not None:
        raise DsparkError(f"{where}: token id", _short(bad), "must be at least 0 and below 2 ** 31")
    return row


def _short(value: object, limit: int = 80) -> object:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= limit else text[:limit] + "..."


def _read_lines(path: Path, repair: bool) -> tuple[list[Row], int]:
    """Rows of a file and the bytes they take. With `repair` a torn last line is left out."""
    rows, good = [], 0
    with path.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            torn = not line.endswith(b"\n")
            if line.strip():
                try:
                    rows.append(_parse(line, f"{path}:{number}"))
                except DsparkError:
                    if repair and torn:  # only an unfinished write lacks its newline
                        break
                    raise
            if torn and repair:
                rows = rows[:-1] if line.strip() else rows  # whole by luck: rewritten all the same
                break
            good += len(line)
    return rows, good


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a JSONL file. Raises DsparkError naming file, line and field; ids must be unique."""
    path = Path(path)
    if not path.is_file():
        raise DsparkError("rows", str(path), "no such file; make one with `dspark regenerate`")
    rows, _ = _read_lines(path, repair=False)
    if not rows:
        raise DsparkError("rows", str(path), "holds no row")
    _refuse_duplicates(rows, path)
    return rows


def _refuse_duplicates(rows: Iterable[Row], path: Path) -> None:
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise DsparkError(f"{path}: id", row.id, "appears twice; row ids must be unique")
        seen.add(row.id)


def unique_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows, in order, without those whose prompt and answer an earlier one has: a sampled answer may equal the
    greedy one, and two files may have answered equal prompts."""
    seen: set[str] = set()
    kept = []
    for row in rows:
        content = ids_hash(row)
        if content not in seen:
            seen.add(content)
            kept.append(row)
    return kept


def check_ids(rows: Iterable[Row], vocab_size: int) -> None:
    """Raises DsparkError naming the first row with a token id that the target does not have."""
    for row in rows:
        bad = next((token for token in (min(row.ids), max(row.ids)) if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise DsparkError(f"row {row.id}: token id", bad, f"this target's ids are 0..{vocab_size - 1}; regenerate")


def notes_path(path: str | Path) -> Path:
    """Where `regenerate` notes how a row file was made: beside it, <name>.meta.json."""
    path = Path(path)
    return path.with_name(path.name + ".meta.json")


def row_notes(path: str | Path) -> dict[str, Any]:
    """The notes beside a row file, {} when there are none. Raises DsparkError when they cannot be read."""
    notes = notes_path(path)
    if not notes.is_file():
        return {}
    try:
        found = json.loads(notes.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # thousands of brackets
        remedy = f"is not JSON ({error}); regenerate the rows under another name"
        raise DsparkError("rows", str(notes), remedy) from None
    if not isinstance(found, dict):
        raise DsparkError("rows", str(notes), "must hold one JSON object; regenerate the rows under another name")
    return found


def write_rows(path: str | Path, rows: Iterable[Row]) -> None:
    """Write a whole file at once: a temporary name first, then a rename."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as handle:
        for row in rows:
            handle.write(check_row(row).model_dump_json() + "\n")
    os.replace(temporary, path)


class RowWriter:
    """Appends rows to a JSONL file, one flushed line each, so that a kill loses at most the line being written.

    Opening an existing file reads it (`.existing`, by id) and cuts off a torn last line.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.existing: dict[str, Row] = {}
        if self.path.exists():
            rows, good = _read_lines(self.path, repair=True)
            _refuse_duplicates(rows, self.path)
            self.existing = {row.id: row for row in rows}
            if good != self.path.stat().st_size:
                os.truncate(self.path, good)
        self._handle = self.path.open("ab")

    def append(self, row: Row) -> None:
        self._handle.write(check_row(row).model_dump_json().encode() + b"\n")
        self._handle.flush()

    def close(self) -> None:
        self._handle.close()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class PackedRow:
    """Several rows on one flat line of S tokens, S = the sum of len(row.ids).

    ids [S] int64, loss_mask [S] bool, document_ids [S] int64 (0, 1, ...), positions [S] int64 (0.. in each document).
    document_ids rule everything that looks sideways: a label, an anchor or a context token counts only inside
    its own document, and positions restart with it.
    The target never reads the last token of a row, so the features of a document cover its first len(ids) - 1
    tokens; whoever lays features beside this line puts zeros under the last token of each document. Nothing
    reads those zeros: an anchor's context ends before it, and the last token can only be a label.
    """

    ids: Tensor
    loss_mask: Tensor
    document_ids: Tensor
    positions: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tokens of each document, [documents] int64."""
        return torch.bincount(self.document_ids)


def pack(rows: Sequence[Row]) -> PackedRow:
    """Lay rows end to end. Raises DsparkError when there is none, or when a row has a wrong mask."""
    if not rows:
        raise DsparkError("rows", [], "need at least one row to pack")
    lengths = torch.tensor([len(check_row(row).ids) for row in rows])
    return PackedRow(
        ids=torch.tensor([token for row in rows for token in row.ids], dtype=torch.int64),
        loss_mask=torch.tensor([flag for row in rows for flag in row.loss_mask], dtype=torch.bool),
        document_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        positions=torch.cat([torch.arange(int(length)) for length in lengths]),
    )


def group_rows(rows: Iterable[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Split rows, in order, into groups of at most `max_tokens` tokens to pack (a longer row is a group alone)."""
    group: list[Row] = []
    size = 0
    for row in rows:
        length = len(row.ids)
        if group and size + length > max_tokens:
            yield group
            group, size = [], 0
        group.append(row)
        size += length
    if group:
        yield group


def split_held_out(rows: Sequence[Row], share: float, seed: int = 0) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows). The hash of (seed, source) decides, so all turns of one prompt stay together
    and adding rows never moves one across. Neither side is left empty when 0 < share < 1 and there are two prompts."""
    if not 0.0 <= share < 1.0:
        raise DsparkError("held_out", share, "must be in [0, 1)")

    draw = {source: _unit_hash(f"{seed}/{source}") for source in {row.source for row in rows}}
    held = {source for source, value in draw.items() if value < share}
    if share > 0 and len(draw) > 1:
        if not held:
            held = {min(draw, key=lambda source: draw[source])}
        elif len(held) == len(draw):
            held.discard(max(draw, key=lambda source: draw[source]))
    return [row for row in rows if row.source not in held], [row for row in rows if row.source in held]


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that depends on the text alone (Python's own hash changes from run to run)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7]) / 2**56


def detect_loop(ids: Sequence[int]) -> bool:
    """True when an n-gram of up to 16 tokens is repeated at least 4 times up to the end (docs/method.md section 6).

    Give the answer without its stop token (`row.text_ids`).
    """
    for n in range(1, LOOP_NGRAM + 1):
        if len(ids) < n * LOOP_REPEATS:
            return False
        tail = ids[len(ids) - n * LOOP_REPEATS :]
        if all(tail[i] == tail[i + n] for i in range(n * (LOOP_REPEATS - 1))):
            return True
    return False
