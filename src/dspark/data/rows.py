"""Token rows: what the target was shown and what it wrote, as the ids it emitted."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Row(BaseModel):
    """One turn: the rendered prompt and the target's answer to it.

    id: content-derived (hash of prompt ids, sampling settings), so that work resumes by id
    source: the id of the prompt it came from, e.g. "gsm8k-train/17"; turn: 0-based turn of it
    answer_ids: as emitted, up to and including the stop token when finish == "stop";
        finish == "length" rows were cut at the token limit and carry no stop label
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    source: str
    turn: int = 0
    prompt_ids: list[int]
    answer_ids: list[int]
    finish: Literal["stop", "length"]
    temperature: float = 0.0

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.answer_ids

    @property
    def loss_mask(self) -> list[bool]:
        return [False] * len(self.prompt_ids) + [True] * len(self.answer_ids)
