"""Whether a draft was trained on the prompts it is measured with: questions asked anew, or rows already answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bench.compare import Question
from dspark.checkpoints.native import PROMPTS_FILE
from dspark.data.prompts import prompt_hash, read_prompt_hashes
from dspark.data.rows import Row
from dspark.errors import DsparkError

UNKNOWN = "overlap with the training prompts: unknown, this draft does not list them"
NO_HASHES = "overlap with the training prompts: unknown, some rows carry no hash of theirs"
NAMED = 5


@dataclass(frozen=True)
class Overlap:
    """asked: prompts; trained_on: ids of those in the draft's training set, None when that is not known.

    why: the line for when it is not.
    """

    asked: int
    trained_on: list[str] | None
    why: str = UNKNOWN

    @property
    def warning(self) -> bool:
        return bool(self.trained_on)

    def __str__(self) -> str:
        if self.trained_on is None:
            return self.why
        count = len(self.trained_on)
        line = f"{count} of {self.asked} prompts are in the draft's training set"
        if not count:
            return line
        more = "" if count <= NAMED else f" and {count - NAMED} more"
        return f"WARNING: {line} ({', '.join(self.trained_on[:NAMED])}{more}): these figures flatter it"

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON has them; null where the draft does not tell."""
        count = None if self.trained_on is None else len(self.trained_on)
        return {"asked": self.asked, "in_training_set": count, "ids": self.trained_on}


def find_overlap(folder: str | Path, questions: Sequence[Question]) -> Overlap:
    """Compare the questions' texts with the prompt hashes in a draft folder. Raises DsparkError on a broken file."""
    known = _known(folder)
    if known is None:
        return Overlap(len(questions), None)
    return Overlap(len(questions), [one.id for one in questions if prompt_hash(one.text) in known])


def rows_overlap(folder: str | Path, rows: Sequence[Row]) -> Overlap:
    """The same for the prompts of rows. A prompt counts as trained on when any of its turns was."""
    known, sources = _known(folder), list(dict.fromkeys(row.source for row in rows))
    if known is None:
        return Overlap(len(sources), None)
    if any(row.prompt_hash is None for row in rows):
        return Overlap(len(sources), None, NO_HASHES)
    trained = {row.source for row in rows if row.prompt_hash in known}
    return Overlap(len(sources), [source for source in sources if source in trained])


def unseen_rows(folder: str | Path, rows: Sequence[Row]) -> list[Row]:
    """The rows of prompts that the draft was not trained on. Raises DsparkError when that is not known, or none is."""
    overlap = rows_overlap(folder, rows)
    if overlap.trained_on is None:
        raise DsparkError("unseen", str(folder), str(overlap))
    trained_on = set(overlap.trained_on)
    unseen = [row for row in rows if row.source not in trained_on]
    if not unseen:
        raise DsparkError("unseen", str(folder), "this draft was trained on every prompt of these rows; give others")
    return unseen


def _known(folder: str | Path) -> frozenset[str] | None:
    """Hashes of the prompts that a draft was trained on, None when it does not tell."""
    path = Path(folder) / PROMPTS_FILE
    return read_prompt_hashes(path) if path.is_file() else None
