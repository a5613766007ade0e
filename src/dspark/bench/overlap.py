"""Whether a draft was trained on the prompts it is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.bench.compare import Question
from dspark.checkpoints.native import PROMPTS_FILE
from dspark.data.prompts import prompt_hash, read_prompt_hashes

UNKNOWN = "unknown: this draft does not say which prompts it was trained on"
NAMED = 5


@dataclass(frozen=True)
class Overlap:
    """asked: prompts; trained_on: ids of those in the draft's training set, None when the draft does not tell."""

    asked: int
    trained_on: list[str] | None

    @property
    def warning(self) -> bool:
        return bool(self.trained_on)

    def __str__(self) -> str:
        if self.trained_on is None:
            return UNKNOWN
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
    path = Path(folder) / PROMPTS_FILE
    if not path.is_file():
        return Overlap(len(questions), None)
    known = read_prompt_hashes(path)
    return Overlap(len(questions), [one.id for one in questions if prompt_hash(one.text) in known])
