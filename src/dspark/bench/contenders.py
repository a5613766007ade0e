"""Who answers the prompts of a bench: a proposer (or none) in our own engine, on the clock or by replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dspark.bench.report import Drafter
from dspark.bench.samples import Sample
from dspark.bench.served import Parting, first_parting
from dspark.data.chat import Message
from dspark.data.rows import Row, detect_loop
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import Proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Request, Result, Round, SamplingSettings
from dspark.decoding.text import decode
from dspark.errors import DsparkError
from dspark.targets.base import Target

PLAIN = "plain"
GREEDY = SamplingSettings()


@dataclass(frozen=True)
class Asked:
    """One turn of one prompt as the target reads it: ids with the chat template and the earlier turns applied."""

    question: str
    turn: int
    ids: list[int]


@dataclass(frozen=True)
class BenchSettings:
    """max_tokens: of an answer; speed_limit: prompts of a suite that are timed; batches: requests in flight while they
    are; sampling: greedy, or with a seed, so that any drafter must give the same ids."""

    max_tokens: int = 192
    speed_limit: int = 5
    batches: tuple[int, ...] = (1,)
    sampling: SamplingSettings = GREEDY
    system_prompt: str | None = None

    def opening(self) -> list[Message]:
        """How every conversation begins."""
        return [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise DsparkError("max_tokens", self.max_tokens, "must be at least 2: the first token has no round")
        if self.speed_limit < 0:
            raise DsparkError("speed_limit", self.speed_limit, "must be at least 0 (0: no speed)")
        if not self.batches or min(self.batches) < 1 or len(set(self.batches)) < len(self.batches):
            raise DsparkError("batch", list(self.batches), "must be different numbers of at least 1")
        if not self.sampling.greedy and self.sampling.seed is None:
            raise DsparkError("seed", None, "sampled answers can only be compared with a seed; give one")


@dataclass
class Captured:
    """Plain decoding's answer with the taps of the layers that the drafts read [T, m * d], by layer."""

    prompt_ids: list[int]
    answer_ids: list[int]
    taps: Tensor
    layers: tuple[int, ...]

    def columns(self, wanted: Sequence[int]) -> Tensor:
        """The taps of some of the layers, in their order."""
        width = self.taps.shape[1] // len(self.layers)
        places = [self.layers.index(layer) for layer in wanted]
        return torch.cat([self.taps[:, p * width : (p + 1) * width] for p in places], dim=1)


class Contender(Protocol):
    """Somebody who answers the prompts.

    known: hashes of the prompts its draft was trained on (None: it does not tell); taps: the target layers that its
    replay reads.
    """

    drafter: Drafter
    known: frozenset[str] | None

    @property
    def taps(self) -> tuple[int, ...]:
        """See above."""

    @property
    def replayed_as(self) -> str:
        """The drafter whose replay its served rounds are held against."""

    def able(self, batch: int, settings: BenchSettings) -> bool:
        """Whether it can answer so many at once, in this way."""

    def replay(self, rows: Sequence[Captured], sampling: SamplingSettings) -> list[list[Round]] | None:
        """Rounds of each captured answer; None for one who cannot be replayed."""

    def parting(self, row: Row, served: Sequence[Round], walked: Sequence[Round]) -> Parting | None:
        """Where its served rounds of an answer depart from the replayed ones."""

    def timed(self, asked: Sequence[Asked], batch: int, settings: BenchSettings) -> list[Sample]:
        """Answer these together, on the clock; a sample for each, in order."""


class Clock:
    """Stands in for a target or a proposer and adds up the seconds that its passes take."""

    def __init__(self, inner: Any, methods: Sequence[str]) -> None:
        self._inner, self.seconds = inner, 0.0
        for name in methods:
            setattr(self, name, self._timed(getattr(inner, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


@dataclass
class EngineContender:
    """A proposer (none: plain decoding) in our own engine."""

    drafter: Drafter
    target: Target
    proposer: Proposer
    known: frozenset[str] | None = None
    _engines: dict[int, tuple[Engine, Clock, Clock]] = field(default_factory=dict)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.proposer.taps

    @property
    def replayed_as(self) -> str:
        return self.drafter.name

    def able(self, batch: int, settings: BenchSettings) -> bool:
        """See `Contender`."""
        return True

    def replay(self, rows: Sequence[Captured], sampling: SamplingSettings) -> list[list[Round]] | None:
        """See `Contender`."""
        if not isinstance(self.proposer, DraftProposer):
            return None
        walked = ((row, row.columns(self.taps)) for row in rows)
        return replay(self.proposer, walked, len(rows), self.target.max_context, sampling)

    def parting(self, row: Row, served: Sequence[Round], walked: Sequence[Round]) -> Parting | None:
        """See `Contender`."""
        return first_parting(self.target, self.proposer, row, self.drafter.name, served, walked)

    def timed(self, asked: Sequence[Asked], batch: int, settings: BenchSettings) -> list[Sample]:
        """See `Contender`."""
        engine, draft_clock, verify_clock = self._engine(batch)
        requests = [Request(one.ids, settings.max_tokens, settings.sampling) for one in asked]
        samples = [
            Sample("", one.question, self.drafter.name, "served", one.turn, batch, prompt_tokens=len(one.ids))
            for one in asked
        ]
        inside, marks, start = 0.0, (0.0, 0.0, 0.0), time.perf_counter()
        active = [engine.add(request, index) for index, request in enumerate(requests)]
        while engine.busy:
            before = time.perf_counter()
            steps = engine.step()
            now = time.perf_counter()
            inside += now - before
            for one, step in steps:
                if step.new_ids:
                    arrivals = samples[one.index].arrivals
                    arrivals.append((now - start, len(step.new_ids)))
                    if len(arrivals) == 1 and batch == 1:
                        marks = inside, draft_clock.seconds, verify_clock.seconds
        wall = time.perf_counter() - start
        for sample, one in zip(samples, active, strict=True):
            if one.result.error is not None:
                raise one.result.error
            fill(sample, one.result, self.target)
            sample.seconds, sample.group_seconds = sample.arrivals[-1][0], wall
            if batch == 1:
                sample.engine_seconds = inside - marks[0]
                sample.draft_seconds = draft_clock.seconds - marks[1]
                sample.verify_seconds = verify_clock.seconds - marks[2]
        return samples

    def _engine(self, batch: int) -> tuple[Engine, Clock, Clock]:
        if batch not in self._engines:
            draft = Clock(self.proposer, ("propose", "observe"))
            verify = Clock(self.target, ("forward",))
            engine = Engine(verify, draft, max_batch=batch)
            self._engines[batch] = engine, draft, verify
        return self._engines[batch]


def fill(sample: Sample, result: Result, target: Target) -> None:
    """What an answer came to."""
    ids = list(result.output_ids)
    text_ids = ids[:-1] if result.finish_reason == "stop" else ids
    sample.output_ids, sample.output_tokens = ids, len(ids)
    sample.finish, sample.rounds, sample.looping = str(result.finish_reason), list(result.rounds), detect_loop(text_ids)
    sample.text = decode(target.tokenizer, text_ids)
