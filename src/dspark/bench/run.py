"""`dspark bench` in process: drafters side by side on the same prompts.

Two kinds of figure. Acceptance: plain decoding answers every prompt once, its taps are kept, and each draft is walked
over the answer (`decoding/replay.py`), no target pass needed. Speed: the first few prompts of a suite are decoded anew
by every drafter, timed, one after the other in an order that rotates from group to group; there the ids are compared
with plain decoding's and the rounds with the replay's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch

from dspark.bench.compare import Question, Run, find_difference
from dspark.bench.contenders import PLAIN, Asked, BenchSettings, Captured, Contender, fill
from dspark.bench.prompts import Suite
from dspark.bench.samples import Journal, Sample, unit_key
from dspark.data.chat import ChatRenderer, Message
from dspark.data.prompts import Prompt
from dspark.data.rows import Row
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request, Result, Round
from dspark.errors import DsparkError
from dspark.targets.base import Target

WARM_UP_TOKENS = 16
CAPTURED = 8
"""Prompts answered side by side where only acceptance is wanted."""
Value = TypeVar("Value")


@dataclass
class Bench:
    """A target, those who answer (plain decoding first) and how; every finished unit goes to the journal.

    done: told after every unit, with the number of prompts it covered.
    """

    target: Target
    renderer: ChatRenderer
    contenders: list[Contender]
    settings: BenchSettings
    journal: Journal
    done: Callable[[str, int], None] = lambda suite, prompts: None

    def __post_init__(self) -> None:
        names = [one.drafter.name for one in self.contenders]
        if not names or names[0] != PLAIN or len(set(names)) < len(names):
            raise DsparkError("draft", names, "must be different names, and none of them `plain`")
        self.layers = tuple(sorted({layer for one in self.contenders for layer in one.taps}))
        self._capture = Engine(self.target, None, max_batch=CAPTURED, capture_taps=self.layers)
        self._warm: set[int] = set()
        self._columns = 1 + sum(bool(one.taps) for one in self.contenders)  # samples of a turn: plain's and the replays

    def run(self, suite: Suite) -> tuple[list[Sample], list[str]]:
        """Everything of one suite, asking what is not in the journal yet; its samples, and notes on what was left out.
        Raises what a request raises."""
        for prompts in parts(suite.prompts, CAPTURED):
            self._accept(suite.name, prompts)
        samples = [one for prompt in suite.prompts for one in self.journal.done[self._unit(suite.name, prompt.id)]]
        notes = self._unasked(suite, samples)
        timed = suite.prompts[: self.settings.speed_limit]
        for batch in self.settings.batches:
            left = sum(len(self._asked_again(suite.name, one)) for one in timed)
            for index, group in enumerate(self._groups(suite.name, timed, batch)):
                unit = unit_key(suite.name, "speed", batch, index, group[0].question)
                if unit not in self.journal.done:
                    self.journal.add(unit, self._time(suite.name, group, batch, index))
                samples += self.journal.done[unit]
                left -= len(group)
                if batch == 1:
                    self.done(suite.name, 1)
            if batch > 1:
                self.done(suite.name, len(timed))
            if left:
                notes.append(
                    f"{suite.name}: {left} timed requests do not fill a batch of {batch} and were left out of it"
                )
        return samples, notes

    def _unasked(self, suite: Suite, samples: Sequence[Sample]) -> list[str]:
        """Prompts of which a later turn did not fit the context."""
        asked = Counter(one.question for one in samples if one.drafter == PLAIN)
        short = [one.id for one in suite.prompts if asked[one.id] < len(one.turns)]
        if not short:
            return []
        listed = ", ".join(short[:5]) + (" ..." if len(short) > 5 else "")
        return [f"{suite.name}: {len(short)} prompts have later turns without room in the context, left out: {listed}"]

    # Acceptance

    def _accept(self, suite: str, prompts: Sequence[Prompt]) -> None:
        """Plain decoding's answers of some prompts, turn by turn, and every draft's rounds on them."""
        waiting = [one for one in prompts if self._unit(suite, one.id) not in self.journal.done]
        found: dict[str, list[Sample]] = {one.id: [] for one in waiting}
        histories: dict[str, list[Message]] = {one.id: self.settings.opening() for one in waiting}
        for turn in range(max((len(one.turns) for one in waiting), default=0)):
            asked: list[Asked] = []
            for prompt in waiting:
                if turn < len(prompt.turns) and len(found[prompt.id]) == turn * self._columns:
                    histories[prompt.id].append({"role": "user", "content": prompt.turns[turn]})
                    ids = self.renderer.prompt_ids(histories[prompt.id])
                    if len(ids) + self.settings.max_tokens <= self.target.max_context:
                        asked.append(Asked(prompt.id, turn, ids))
            for one, samples in zip(asked, self._answer(suite, asked) if asked else [], strict=True):
                found[one.question] += samples
                histories[one.question].append({"role": "assistant", "content": samples[0].text or ""})
        for prompt in waiting:
            self.journal.add(self._unit(suite, prompt.id), found[prompt.id])
        self.done(suite, len(prompts))

    def _unit(self, suite: str, question: str) -> str:
        return unit_key(suite, "acceptance", question)

    def _answer(self, suite: str, asked: Sequence[Asked]) -> list[list[Sample]]:
        """For each: plain decoding's sample, then every replayed draft's."""
        captured: dict[int, torch.Tensor] = {}
        requests = [Request(one.ids, self.settings.max_tokens, self.settings.sampling) for one in asked]
        results: dict[int, Result] = {}
        keep = self._capture.run(requests, lambda index, taps, _last: captured.__setitem__(index, taps.float()))
        for index, result in keep:
            results[index] = result
        table = []
        for index, one in enumerate(asked):
            sample = Sample(suite, one.question, PLAIN, "served", one.turn, prompt_tokens=len(one.ids))
            fill(sample, results[index], self.target)
            table.append([sample])
        rows = [
            Captured(one.ids, samples[0].output_ids, captured[index], self.layers)
            for index, (one, samples) in enumerate(zip(asked, table, strict=True))
        ]
        for contender in self.contenders[1:]:
            walked = contender.replay(rows, self.settings.sampling)
            for samples, rounds in zip(table, walked or [], strict=False):
                samples.append(_replayed(samples[0], contender.drafter.name, rounds))
        return table

    # Speed

    def _groups(self, suite: str, prompts: Sequence[Prompt], batch: int) -> Iterator[list[Asked]]:
        """What is timed together: all turns of a question one after the other, or `batch` requests at once."""
        asked = [self._asked_again(suite, one) for one in prompts]
        if batch == 1:
            yield from asked
        else:
            for group in parts([turn for turns in asked for turn in turns], batch):
                if len(group) == batch:
                    yield list(group)

    def _asked_again(self, suite: str, prompt: Prompt) -> list[Asked]:
        """Its turns with plain decoding's answers between them."""
        samples = self.journal.done[self._unit(suite, prompt.id)]
        answers = {one.turn: one.text or "" for one in samples if one.drafter == PLAIN}
        messages, asked = self.settings.opening(), []
        for turn, text in enumerate(prompt.turns[: len(answers)]):
            messages.append({"role": "user", "content": text})
            asked.append(Asked(prompt.id, turn, self.renderer.prompt_ids(messages)))
            messages.append({"role": "assistant", "content": answers[turn]})
        return asked

    def _time(self, suite: str, group: Sequence[Asked], batch: int, index: int) -> list[Sample]:
        """One group in every way, in the order of its turn."""
        contenders = [one for one in self.contenders if one.able(batch, self.settings)]
        if batch not in self._warm:
            for contender in contenders:
                contender.timed(group[:batch], batch, self._short())
            self._warm.add(batch)
        shift = index % len(contenders)
        found: dict[str, list[Sample]] = {}
        for contender in (*contenders[shift:], *contenders[:shift]):
            turns = [[one] for one in group] if batch == 1 else [group]
            samples = [sample for part in turns for sample in contender.timed(part, batch, self.settings)]
            wall = sum(one.group_seconds or 0.0 for one in samples) if batch == 1 else samples[0].group_seconds
            for sample in samples:
                sample.suite, sample.group, sample.group_seconds = suite, index, wall
            found[contender.drafter.name] = samples
        for name, samples in found.items():
            for asked, plain, sample in zip(group, found[PLAIN], samples, strict=True):
                self._check(suite, asked, plain, sample, name)
        return [sample for samples in found.values() for sample in samples]

    def _short(self) -> BenchSettings:
        return BenchSettings(min(WARM_UP_TOKENS, self.settings.max_tokens), sampling=self.settings.sampling)

    def _check(self, suite: str, asked: Asked, plain: Sample, sample: Sample, name: str) -> None:
        """Compare its ids with plain decoding's, and its rounds with the replay's of the same turn."""
        captured = self.journal.done[self._unit(suite, asked.question)]
        first = next(one for one in captured if one.drafter == PLAIN and one.turn == asked.turn)
        base = first if name == PLAIN else plain  # timed plain answers against the captured ones
        question = Question(asked.question, "", asked.ids)
        found = find_difference(self.target, question, _run(base, PLAIN), _run(sample, name))
        if found is not None:
            (sample.ties if found.tie else sample.faults).append(str(found))
            return
        contender = next(one for one in self.contenders if one.drafter.name == name)
        same = contender.replayed_as
        walked = next((one for one in captured if one.drafter == same and one.turn == asked.turn), None)
        if walked is None or name == PLAIN or sample.output_ids != first.output_ids:
            return
        sample.replay_checked = True
        row = Row(
            id=asked.question,
            source=asked.question,
            prompt_ids=asked.ids,
            answer_ids=first.output_ids,
            finish="stop" if first.finish == "stop" else "length",
        )
        parting = contender.parting(row, sample.rounds or [], walked.rounds or [])
        if parting is not None:
            (sample.replay_ties if parting.tie else sample.replay_faults).append(str(parting))


def parts(values: Iterable[Value], size: int) -> Iterator[list[Value]]:
    """The values in lists of `size`, the last one shorter."""
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part


def _replayed(plain: Sample, name: str, rounds: list[Round]) -> Sample:
    return Sample(
        plain.suite, plain.question, name, "replay", plain.turn,
        prompt_tokens=plain.prompt_tokens, output_tokens=plain.output_tokens, finish=plain.finish,
        looping=plain.looping, rounds=rounds,
    )  # fmt: skip


def _run(sample: Sample, name: str) -> Run:
    return Run(name, sample.question, sample.output_ids, sample.finish, sample.rounds or [], bool(sample.looping))
