"""Counts over rows: in all, by set of prompts, by temperature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any

from dspark.data.rows import Row, detect_loop

NO_SET = "other"


def prompt_set(source: str) -> str:
    """The set a prompt belongs to: the part of its id before the first "/", "other" for an id without one."""
    name, slash, _ = source.partition("/")
    return name if slash and name else NO_SET


@dataclass
class RowSummary:
    """Counts over a set of rows; sums only, so that two of them add up.

    loops: answers that end in a loop (they stay among the rows, at the share the target writes them).
    dropped_empty, too_long and duplicates count prompts that gave no row: the answer was empty, the prompt did not
    fit, or the same prompt ids were already asked.
    """

    rows: int = 0
    prompt_tokens: int = 0
    supervised_tokens: int = 0
    stop: int = 0
    length_cut: int = 0
    loops: int = 0
    dropped_empty: int = 0
    too_long: int = 0
    duplicates: int = 0

    def add(self, row: Row) -> None:
        self.rows += 1
        self.prompt_tokens += len(row.prompt_ids)
        self.supervised_tokens += len(row.answer_ids)
        self.stop += row.finish == "stop"
        self.length_cut += row.finish == "length"
        self.loops += detect_loop(row.text_ids)


def combine(parts: Iterable[RowSummary]) -> RowSummary:
    """The counts of all parts together."""
    return RowSummary(*(sum(counts) for counts in zip(*map(astuple, parts), strict=True)))


class Summaries:
    """Counts kept apart by (set, temperature), and their sums."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._cells: dict[tuple[str, float], RowSummary] = {}
        for row in rows:
            self.add(row)

    def cell(self, source: str, temperature: float) -> RowSummary:
        """The counts to which a prompt with this id, answered at this temperature, belongs."""
        return self._cells.setdefault((prompt_set(source), temperature), RowSummary())

    def add(self, row: Row) -> None:
        self.cell(row.source, row.temperature).add(row)

    @property
    def total(self) -> RowSummary:
        return combine(self._cells.values())

    def by_set(self) -> dict[str, RowSummary]:
        """{set: counts}, sorted by name."""
        names = sorted({name for name, _ in self._cells})
        return {name: combine(cell for (one, _), cell in self._cells.items() if one == name) for name in names}

    def by_temperature(self) -> dict[float, RowSummary]:
        """{temperature: counts}, ascending."""
        values = sorted({value for _, value in self._cells})
        return {value: combine(cell for (_, one), cell in self._cells.items() if one == value) for value in values}

    def record(self) -> dict[str, Any]:
        """What a rows file's notes hold: summary, summary_by_set, summary_by_temperature ({"0.7": counts})."""
        return {
            "summary": asdict(self.total),
            "summary_by_set": {name: asdict(counts) for name, counts in self.by_set().items()},
            "summary_by_temperature": {f"{value:g}": asdict(counts) for value, counts in self.by_temperature().items()},
        }
