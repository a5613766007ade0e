"""Plain decoding against speculation: same engine, same prompts, same process, ids checked.

Batch 1, greedy. The order of the modes is rotated from prompt to prompt, so that a machine that slows down
or speeds up in the meantime favours none of them; a warm-up of every mode is thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from dspark.bench.metrics import Acceptance, Answer, Interval, Timing, paired_speedup, summarise, tokens_per_second
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, read_prompts
from dspark.data.rows import detect_loop
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, Result, Round
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target

TIE_GAP = 1e-3  # docs/method.md section 6: plain decoding's top-two logit gap under which two ids are a tie


@dataclass(frozen=True)
class Mode:
    """A way to decode. n: draft tokens asked for each round; 0 is plain decoding, the baseline."""

    name: str
    n: int


PLAIN = Mode("plain", 0)


def modes_for(ns: Sequence[int]) -> list[Mode]:
    """Plain decoding first, then one mode per n."""
    return [PLAIN, *(Mode(f"n = {n}", n) for n in ns)]


@dataclass(frozen=True)
class Question:
    """`text` as a person wrote it, `ids` as the target reads it (chat template applied)."""

    id: str
    text: str
    ids: Sequence[int]


def render_questions(prompts: Sequence[Prompt], renderer: ChatRenderer) -> list[Question]:
    """The first turn of each prompt as the target reads it; later turns need answers first and are left out."""
    return [
        Question(prompt.id, prompt.turns[0], renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]))
        for prompt in prompts
    ]


def read_questions(
    data: Path, renderer: ChatRenderer, *, seed: int, limit: int, max_prompt_tokens: int
) -> Iterator[Question]:
    """The first `limit` prompts under `data`, shuffled by `seed`, that are at most max_prompt_tokens long."""
    fitting = (
        question
        for prompt in read_prompts(data, seed=seed)
        for question in render_questions([prompt], renderer)
        if len(question.ids) <= max_prompt_tokens
    )
    return islice(fitting, limit)


@dataclass
class Run:
    """One question decoded in one mode.

    seconds: wall clock from handing over the request to its last token (None when it was not timed)
    first_seconds: of which up to the first token (the prefill)
    """

    mode: str
    question: str
    output_ids: list[int]
    finish_reason: str
    rounds: list[Round]
    looping: bool
    seconds: float | None = None
    first_seconds: float | None = None

    @classmethod
    def of(cls, mode: Mode, question: Question, result: Result) -> Run:
        ids = list(result.output_ids)
        text_ids = ids[:-1] if result.finish_reason == "stop" else ids
        return cls(mode.name, question.id, ids, str(result.finish_reason), list(result.rounds), detect_loop(text_ids))

    @property
    def answer(self) -> Answer:
        return Answer(self.question, self.rounds, self.looping)

    @property
    def end_to_end(self) -> Timing:
        """All output tokens over all the request's time, prefill included."""
        return Timing(len(self.output_ids), self._timed()[0])

    @property
    def decode_only(self) -> Timing:
        """The tokens after the first one, over the time after it."""
        seconds, first = self._timed()
        return Timing(len(self.output_ids) - 1, seconds - first)

    def _timed(self) -> tuple[float, float]:
        if self.seconds is None or self.first_seconds is None:
            raise DsparkError("run", f"{self.mode}, {self.question}", "was not timed, so it has no speed")
        return self.seconds, self.first_seconds


@dataclass(frozen=True)
class Difference:
    """Where a mode's ids first differ from plain decoding's.

    gap: the target's top-two logit gap there, from one teacher-forced pass; None where one answer simply ended
    tie: the gap is under 1e-3 and both ids lie within it, so float noise decides between them
    """

    mode: str
    question: str
    position: int
    plain_id: int | None
    other_id: int | None
    gap: float | None
    tie: bool

    def __str__(self) -> str:
        verdict = "tie" if self.tie else "NOT LOSSLESS"
        gap = "none (one answer ended)" if self.gap is None else f"{self.gap:.2e}"
        return (
            f"{verdict}: {self.question}, {self.mode}, token {self.position}: "
            f"{self.other_id} where plain decoding gave {self.plain_id}, top-two gap {gap}"
        )


@dataclass
class Comparison:
    """runs[mode name][i] belongs to questions[i]. `lossless` is what a command's exit code depends on."""

    modes: list[Mode]
    questions: list[Question]
    max_tokens: int
    runs: dict[str, list[Run]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        return all(difference.tie for difference in self.differences)

    def acceptance(self, mode: Mode) -> Acceptance:
        return summarise([run.answer for run in self.runs[mode.name]], mode.n)

    def timings(self, mode: Mode, *, decode_only: bool = False) -> list[Timing]:
        return [run.decode_only if decode_only else run.end_to_end for run in self.runs[mode.name]]

    def tokens_per_second(self, mode: Mode, *, decode_only: bool = False) -> float | None:
        return tokens_per_second(self.timings(mode, decode_only=decode_only))

    def speedup(self, mode: Mode, *, decode_only: bool = False) -> Interval:
        """Over plain decoding of the same questions in the same run, paired."""
        return paired_speedup(self.timings(PLAIN, decode_only=decode_only), self.timings(mode, decode_only=decode_only))


def build_engines(target: Target, draft: Draft | None, modes: Sequence[Mode], max_batch: int = 1) -> dict[str, Engine]:
    """One engine per mode over the same target and draft. Raises DsparkError for a mode without a draft."""
    if PLAIN not in modes or len({mode.name for mode in modes}) != len(modes):
        raise DsparkError("modes", [mode.name for mode in modes], "need plain decoding once and no name twice")
    engines = {}
    for mode in modes:
        if mode.n and draft is None:
            raise DsparkError("draft", None, f"mode {mode.name} needs a draft")
        proposer = make_proposer(target, draft, mode.n) if mode.n else make_proposer(target, None)
        engines[mode.name] = Engine(target, proposer, max_batch=max_batch)
    return engines


def timed_run(engine: Engine, mode: Mode, question: Question, max_tokens: int) -> Run:
    """One greedy request alone in the engine, on the wall clock."""
    request = Request(prompt_ids=list(question.ids), max_tokens=max_tokens)
    first: float | None = None
    start = time.perf_counter()
    for _ in engine.stream(request):
        if first is None:
            first = time.perf_counter()
    end = time.perf_counter()
    run = Run.of(mode, question, engine.last_result)
    run.seconds, run.first_seconds = end - start, (first or end) - start
    return run


def warm_up(engines: dict[str, Engine], question: Question, tokens: int) -> dict[str, tuple[float, float]]:
    """Run every mode once and throw the answer away.

    Returns for each mode (seconds to the first token, seconds per later token): what a run will cost.
    """
    cost = {}
    for name, engine in engines.items():
        clock = [time.perf_counter()]
        made = 0
        for step in engine.stream(Request(prompt_ids=list(question.ids), max_tokens=tokens, ignore_eos=True)):
            clock.append(time.perf_counter())
            made += len(step.new_ids)
        cost[name] = (clock[1] - clock[0], (clock[-1] - clock[1]) / max(made - 1, 1))
    return cost


def rotated(modes: Sequence[Mode], turn: int) -> list[Mode]:
    """The order for question number `turn`: every mode comes first, second, ... equally often."""
    shift = turn % len(modes)
    return [*modes[shift:], *modes[:shift]]


@torch.inference_mode()
def find_difference(target: Target, question: Question, plain: Run, other: Run) -> Difference | None:
    """Compare ids; at the first difference measure the target's own certainty by a teacher-forced pass."""
    pairs = zip_longest(plain.output_ids, other.output_ids)
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if position is None:
        return None
    if position >= min(len(plain.output_ids), len(other.output_ids)):
        ids = [run.output_ids[position] if position < len(run.output_ids) else None for run in (plain, other)]
        return Difference(other.mode, question.id, position, ids[0], ids[1], gap=None, tie=False)
    plain_id, other_id = plain.output_ids[position], other.output_ids[position]
    context = torch.tensor([*question.ids, *plain.output_ids[:position]], dtype=torch.int64)
    logits = target.forward([(target.new_state(len(context)), context)], logits="last").logits[-1].double()
    top = logits.topk(2).values
    lowest = float(torch.minimum(logits[plain_id], logits[other_id]))
    gap = float(top[0] - top[1])
    return Difference(other.mode, question.id, position, plain_id, other_id, gap, tie=float(top[0]) - lowest < TIE_GAP)


def run_question(
    target: Target,
    engines: dict[str, Engine],
    modes: Sequence[Mode],
    question: Question,
    max_tokens: int,
    turn: int,
    on_run: Callable[[Run], Any] | None = None,
) -> tuple[dict[str, Run], list[Difference]]:
    """One question in every mode, in the order of its turn, timed; and where the ids differ from plain's."""
    done: dict[str, Run] = {}
    for mode in rotated(modes, turn):
        done[mode.name] = timed_run(engines[mode.name], mode, question, max_tokens)
        if on_run is not None:
            on_run(done[mode.name])
    found = [find_difference(target, question, done[PLAIN.name], done[mode.name]) for mode in modes]
    return done, [difference for difference in found if difference is not None]


def compare(
    target: Target,
    draft: Draft | None,
    questions: Sequence[Question],
    modes: Sequence[Mode],
    max_tokens: int,
    *,
    engines: dict[str, Engine] | None = None,
    warmup_tokens: int = 16,
    on_run: Callable[[Run], Any] | None = None,
) -> Comparison:
    """Decode every question in every mode, timed and checked. `on_run` sees each run as it is done.

    engines: from build_engines, when the caller has warmed them up already (no second warm-up then).
    Raises DsparkError for no questions, two of one id, or a mode without a draft.
    """
    if not questions or len({question.id for question in questions}) != len(questions):
        raise DsparkError("questions", [question.id for question in questions], "need at least one, each its own id")
    if engines is None:
        engines = build_engines(target, draft, modes)
        warm_up(engines, questions[0], warmup_tokens)
    comparison = Comparison(list(modes), list(questions), max_tokens, {mode.name: [] for mode in modes})
    for turn, question in enumerate(questions):
        runs, differences = run_question(target, engines, modes, question, max_tokens, turn, on_run)
        for mode in modes:
            comparison.runs[mode.name].append(runs[mode.name])
        comparison.differences += differences
    return comparison


Owner = Literal["draft", "target"]


def spans(run: Run) -> list[tuple[int | None, list[tuple[int, Owner]]]]:
    """Who made which token: (round number or None for the prefill, [(index into output_ids, owner), ...]).

    The first id is the prefill's, the target's own. A round then keeps its accepted draft tokens and, unless
    a stop or the limit cut it short, one token of the target. Raises DsparkError if the records do not add up.
    """
    out: list[tuple[int | None, list[tuple[int, Owner]]]] = [(None, [(0, "target")])] if run.output_ids else []
    at = len(out)
    for number, one in enumerate(run.rounds, start=1):
        members: list[tuple[int, Owner]] = [(at + i, "draft") for i in range(one.accepted)]
        at += one.accepted
        if at < len(run.output_ids):
            members.append((at, "target"))
            at += 1
        if not members:
            raise DsparkError("rounds", number, "this round comes after the answer's last token")
        out.append((number, members))
    if at != len(run.output_ids):
        raise DsparkError("rounds", at, f"account for {at} of the answer's {len(run.output_ids)} tokens")
    return out
