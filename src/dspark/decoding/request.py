"""A request as a user states it, and the state the engine keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from dspark.errors import DsparkError
from dspark.targets.base import TargetState


@dataclass(frozen=True)
class SamplingSettings:
    """temperature 0 is greedy. seed None: accept rule `rejection`; a seed: `coupled`."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0 or self.temperature == float("inf"):
            raise DsparkError("temperature", self.temperature, "must be a finite number >= 0 (0 is greedy)")
        if self.top_k < 0:
            raise DsparkError("top_k", self.top_k, "must be >= 0 (0 keeps every token)")
        if not 0.0 < self.top_p <= 1.0:
            raise DsparkError("top_p", self.top_p, "must be in (0, 1]")
        if not 0.0 <= self.min_p <= 1.0:
            raise DsparkError("min_p", self.min_p, "must be in [0, 1]")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise DsparkError("seed", self.seed, "must be an integer in [0, 2**63)")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True)
class Request:
    """One prompt as ids. stop_ids: ids that end it (the target's own when None)."""

    prompt_ids: Sequence[int]
    max_tokens: int = 256
    sampling: SamplingSettings = SamplingSettings()
    stop_ids: frozenset[int] | None = None
    ignore_eos: bool = False


@dataclass(frozen=True)
class Round:
    """One draft pass and one verification pass.

    proposed: tokens the draft gave; scheduled: how many of them the target verified;
    accepted: how many became part of the output (bonus not counted; a run cut by a stop id or
    the token limit counts only what was kept).
    """

    proposed: int
    scheduled: int
    accepted: int


@dataclass
class Result:
    """A finished request. output_ids include the stop id when finish_reason is "stop"."""

    request: Request
    output_ids: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    rounds: list[Round] = field(default_factory=list)


Rule = Literal["greedy", "rejection", "coupled"]


@dataclass
class Active:
    """A request being served. Only committed tokens are in `ids`; the last of them, the anchor, is not yet read.

    state: the target's K/V of ids[:-1]; context: whatever the proposer keeps (a draft's context K/V)
    """

    index: int
    request: Request
    rule: Rule
    seed: int
    ids: list[int]
    limit: int
    stop_ids: frozenset[int]
    state: TargetState
    context: Any = None
    result: Result = field(init=False)
    captured: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.result = Result(self.request)

    @property
    def round_index(self) -> int:
        """Rounds done so far; the prefill's token was made in round 0."""
        return len(self.result.rounds) + 1

    def commit(self, tokens: Sequence[int]) -> list[int]:
        """Take tokens one at a time until a stop id or the limit; returns those kept."""
        kept: list[int] = []
        for token in tokens:
            kept.append(token)
            self.ids.append(token)
            self.result.output_ids.append(token)
            if token in self.stop_ids:
                self.result.finish_reason = "stop"
            elif len(self.result.output_ids) >= self.limit:
                self.result.finish_reason = "length"
            if self.result.finish_reason is not None:
                break
        return kept


def rule_of(sampling: SamplingSettings) -> Rule:
    """greedy at temperature 0, `coupled` when the request gives a seed, `rejection` otherwise."""
    if sampling.greedy:
        return "greedy"
    return "rejection" if sampling.seed is None else "coupled"
