"""The pair at work: the target's plain greedy answers with the states of the layers that matter, kept once, and the
draft walked over them as often as needed without the target (replay equals serving, which is one of the checks)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from torch import Tensor

from dspark.bench.contenders import Captured
from dspark.bench.metrics import acceptance_length
from dspark.data.chat import ChatRenderer, Message
from dspark.data.rows import Row, detect_loop
from dspark.decoding.drafting import DraftProposer
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Request, Round
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target

BATCH = 16


@dataclass(frozen=True)
class Interval:
    """A mean over prompts with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def mean_interval(values: Sequence[float], resamples: int = 2000, seed: int = 0) -> Interval:
    """The mean of `values` (at least one) and its percentile interval, seeded."""
    table = np.asarray(values, dtype=np.float64)
    draws = table[np.random.default_rng(seed).integers(0, len(table), size=(resamples, len(table)))].mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(float(table.mean()), float(low), float(high))


@dataclass
class Answers:
    """Plain greedy answers of at least two tokens, with the outputs of `layers` at every token that was read.

    asked: which of the prompts each one answers.
    """

    layers: tuple[int, ...]
    asked: list[int]
    rows: list[Captured]
    looping: list[bool]

    def row(self, index: int) -> Row:
        """One answer as a row of ids."""
        one = self.rows[index]
        return Row(
            id=f"doctor/{index}",
            source=f"prompt {index + 1}",
            prompt_ids=one.prompt_ids,
            answer_ids=one.answer_ids,
            finish="length",
        )


def answer(target: Target, prompts: Sequence[Sequence[int]], tokens: int, layers: Sequence[int]) -> Answers:
    """Answer every prompt plainly, `tokens` tokens at most. Raises DsparkError when no answer has two tokens."""
    wanted = tuple(dict.fromkeys(layers))
    engine = Engine(target, None, max_batch=BATCH, capture_taps=wanted)
    found: dict[int, tuple[Captured, bool]] = {}
    taps: dict[int, Tensor] = {}
    requests = [Request(list(ids), max_tokens=tokens) for ids in prompts]
    for index, result in engine.run(requests, capture=lambda i, states, _last: taps.__setitem__(i, states)):
        ids = list(result.output_ids)
        text = ids[:-1] if result.finish_reason == "stop" else ids
        found[index] = Captured(list(prompts[index]), ids, taps.pop(index), wanted), detect_loop(text)
    kept = [index for index in sorted(found) if len(found[index][0].answer_ids) > 1]
    if not kept:
        raise DsparkError("prompts", len(prompts), "the target answers none with two tokens or more; give others")
    return Answers(wanted, kept, [found[i][0] for i in kept], [found[i][1] for i in kept])


def walk(
    target: Target, draft: Draft, answers: Answers, n: int | None = None, layers: Sequence[int] | None = None
) -> list[list[Round]]:
    """The rounds of every answer with this draft; layers: those handed over as its taps (None: its own).

    Raises DsparkError, also when the draft gives logits that are not finite.
    """
    proposer = make_proposer(target, draft, n)
    assert isinstance(proposer, DraftProposer)
    read = proposer.taps if layers is None else tuple(layers)
    pairs = ((answers.row(i), one.columns(read).float()) for i, one in enumerate(answers.rows))
    return replay(proposer, pairs, BATCH, target.max_context)


def lengths(rounds: Sequence[Sequence[Round]]) -> list[float]:
    """The acceptance length of every answer, bonus counted."""
    return [acceptance_length(one) or 1.0 for one in rounds]


def macro(rounds: Sequence[Sequence[Round]]) -> float:
    """Their plain mean: the macro acceptance length."""
    return fmean(lengths(rounds))


def render(renderer: ChatRenderer, texts: Sequence[str], room: int) -> tuple[list[list[int]], list[str]]:
    """Every text as one user turn, as the target reads it, and the texts: those of up to `room` tokens.

    Raises DsparkError when none is left.
    """
    found = [(renderer.prompt_ids([{"role": "user", "content": text}]), text) for text in texts]
    fitting = [one for one in found if len(one[0]) <= room]
    if not fitting:
        raise DsparkError("prompts", len(texts), f"all are longer than the {room} tokens that fit; give shorter ones")
    return [ids for ids, _ in fitting], [text for _, text in fitting]


def conversation(
    renderer: ChatRenderer, texts: Sequence[str], replies: Sequence[str], last: int, depth: int
) -> list[int]:
    """A conversation of at most `depth` tokens that ends with question `last`, after as many of the other questions and
    their answers as fit."""
    asked: Message = {"role": "user", "content": texts[last]}
    messages: list[Message] = []
    ids = renderer.prompt_ids([asked])
    for step in range(1, len(texts)):
        place = (last + step) % len(texts)
        more = [{"role": "user", "content": texts[place]}, {"role": "assistant", "content": replies[place]}]
        longer = renderer.prompt_ids([*messages, *more, asked])
        if len(longer) <= depth:
            messages, ids = [*messages, *more], longer
    return ids
