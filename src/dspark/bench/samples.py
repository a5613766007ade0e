"""What one request gave, in process or from a live engine; every figure of a report is a function of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pydantic import TypeAdapter

from dspark.decoding.request import Round

Source = Literal["replay", "served", "server"]


@dataclass
class Sample:
    """One request of one drafter.

    question, turn: which prompt, and which of its turns (0-based)
    batch: requests in flight beside it, itself included; group: those whose wall-clock time was taken together, the
        unit of pairing (a question at batch 1)
    rounds: its round records, None where the engine does not tell; histogram: rounds by accepted tokens where it tells
        only that
    seconds: wall clock from handing over the request to its last token, None when it was not timed; arrivals: (seconds
        since then, tokens) of every chunk, the first being the prefill's token
    group_seconds: wall clock of its group from the first request handed over to the last token
    draft_seconds, verify_seconds, engine_seconds: its share of time in draft passes, in the target's after the first
        token, and in the engine's steps after the first token
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
    looping: bool = False
    rounds: list[Round] | None = None
    histogram: list[int] | None = None
    seconds: float | None = None
    group_seconds: float | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    draft_seconds: float | None = None
    verify_seconds: float | None = None
    engine_seconds: float | None = None
    text: str | None = None
    error: str | None = None


SAMPLE = TypeAdapter(Sample)
