"""`dspark bench --endpoint`: the suites asked of live servers, on the client's clock.

A closed loop keeps `concurrency` conversations going, in blocks of a few times as many; an open loop begins them at a
fixed rate, whatever the server does. With a baseline endpoint every group of prompts is asked of both, never at the
same time, in an order that rotates. A prompt of several turns is one conversation on the server's own answers. Nothing
is asked twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import numpy as np

from dspark.bench.endpoint import AskSettings, Endpoint, Reply
from dspark.bench.endpoint_metrics import Counters, difference, read_counters
from dspark.bench.live_pairs import (
    BASELINE,
    ENDPOINT,
    Unit,
    check_counts,
    check_prompt_tokens,
    check_same,
    check_unchanged,
    place,
)
from dspark.bench.samples import Sample
from dspark.data.prompts import Prompt
from dspark.data.rows import detect_loop
from dspark.errors import DsparkError

WARM_UP = "Count from one to ten."
WARM_UP_TOKENS = 16
BLOCK = 4
"""Conversations of a block, in units of the concurrency: enough to keep it up for most of the time."""
SETTLE_SECONDS = 0.1
"""Counters are read again after so long, until two readings agree: engines write them behind the answers."""


@dataclass(frozen=True)
class LiveSettings:
    """How a run asks. concurrency: conversations at once; rate: conversations begun a second, in place of it;
    arrivals: of the open loop, drawn with arrival_seed; limit: the first prompts of each suite only.

    A seed in `ask` is that of a suite's first prompt, the others count up from it.
    Raises DsparkError for what makes no sense.
    """

    ask: AskSettings = field(default_factory=AskSettings)
    concurrency: int = 1
    rate: float | None = None
    arrivals: Literal["poisson", "constant"] = "poisson"
    arrival_seed: int = 0
    limit: int | None = None
    system_prompt: str | None = None

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise DsparkError("concurrency", self.concurrency, "must be at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise DsparkError("rate", self.rate, "must be a number of conversations a second above 0")
        if self.rate is not None and self.concurrency != 1:
            raise DsparkError("concurrency", self.concurrency, "cannot be combined with a rate; give one of them")
        if self.arrivals not in ("poisson", "constant"):
            raise DsparkError("arrivals", self.arrivals, "must be poisson or constant")
        if self.arrival_seed < 0:
            raise DsparkError("arrival_seed", self.arrival_seed, "must be 0 or more")
        if self.limit is not None and self.limit < 1:
            raise DsparkError("limit", self.limit, "must be at least 1")

    @property
    def batch(self) -> int:
        """What `Sample.batch` says: 0 stands for the open loop, where no number of requests is kept."""
        return self.concurrency if self.rate is None else 0

    @property
    def one_by_one(self) -> bool:
        """Whether each question is a group of its own, and a pair of figures."""
        return self.batch == 1

    def sizes(self, prompts: int) -> list[int]:
        """How many conversations each group of a suite has: 1, a block of a closed loop, or all of an open one. A last
        block that cannot fill the loop goes into the one before it."""
        if self.rate is not None:
            return [prompts] if prompts else []
        size = 1 if self.one_by_one else BLOCK * self.concurrency
        full, rest = divmod(prompts, size)
        sizes = [size] * full + [rest] * (rest > 0)
        if full and 0 < rest < self.concurrency:
            sizes[-2:] = [size + rest]
        return sizes


@dataclass
class LiveRun:
    """What a run gave. counted: what counters counted while a group was asked (`live_pairs.counted_figures`);
    about: drafter -> what the server says of itself; on_note: told of every note."""

    samples: list[Sample] = field(default_factory=list)
    counted: dict[Unit, Counters] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    on_note: Callable[[str], None] = lambda text: None

    @property
    def failures(self) -> list[str]:
        """Every request that failed, and why."""
        return [f"{place(one)}, {one.drafter}: {one.error}" for one in self.samples if one.error is not None]

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)
            self.on_note(text)


def run_live(
    suites: Mapping[str, Sequence[Prompt]],
    endpoint: Endpoint,
    baseline: Endpoint | None,
    settings: LiveSettings,
    on_progress: Callable[[Sample], None] = lambda sample: None,
    journal: Callable[[list[Sample]], None] = lambda samples: None,
    done: Collection[Unit] = frozenset(),
    told: Callable[[Unit, Counters], None] = lambda unit, counted: None,
    noted: Callable[[str], None] = lambda text: None,
) -> LiveRun:
    """Ask the suites. on_progress: told of every request that ended; journal: given every finished group at once;
    done: groups of an earlier run, which are not asked again and not in the result; told: given what was counted while
    a group was asked, before the journal has the group; noted: given every note.

    Raises DsparkError when a server is not there, two servers differ in more than speculation or they read the same
    request as different numbers of tokens; ServerChanged when one is not the same any more on the way.
    """
    sides = {BASELINE: baseline, ENDPOINT: endpoint}
    run = LiveRun(on_note=noted)
    servers = {name: server for name, server in sides.items() if server is not None}
    if baseline is not None and baseline.is_same(endpoint):
        raise DsparkError(baseline.field, baseline.url, "is the endpoint that is measured; give another server")
    for name, server in servers.items():
        if settings.ask.thinking is not None and server.engine == "dspark":
            raise DsparkError("thinking", settings.ask.thinking, "`dspark serve` takes no chat_template_kwargs")
        run.about[name] = server.check()
    if baseline is not None:
        for text in check_same(run.about[BASELINE], run.about[ENDPOINT]):
            run.note(text)
        if baseline.speculates:
            run.note("the baseline drafts, too: ratios are over it and not over plain decoding")
    if settings.concurrency > 1:
        run.note(
            f"{settings.concurrency} conversations at once, in blocks of {BLOCK} times as many: tokens a second "
            "include the end of each block, where fewer are under way"
        )
    asyncio.run(_Asker(servers, settings, on_progress, journal, done, run, told).all(suites))
    return run


@dataclass
class _Asker:
    """One run under way. servers: by drafter, the baseline first."""

    servers: dict[str, Endpoint]
    settings: LiveSettings
    on_progress: Callable[[Sample], None]
    journal: Callable[[list[Sample]], None]
    done: Collection[Unit]
    run: LiveRun
    told: Callable[[Unit, Counters], None]
    _busy: int = 0
    _most: int = 0

    async def all(self, suites: Mapping[str, Sequence[Prompt]]) -> None:
        if not any(self._left(suite, prompts[: self.settings.limit]) for suite, prompts in suites.items()):
            return
        async with AsyncExitStack() as stack:
            for server in self.servers.values():
                await stack.enter_async_context(server)
            await self._warm_up()
            for number, (suite, prompts) in enumerate(suites.items()):
                await self._suite(number, suite, prompts[: self.settings.limit])

    async def _warm_up(self) -> None:
        """One request of each server that is in no figure; it shows whether the server takes what is asked."""
        ask = replace(self.settings.ask, max_tokens=min(WARM_UP_TOKENS, self.settings.ask.max_tokens))
        counts = {}
        for name, server in self.servers.items():
            reply = await server.ask([*self._opening(), {"role": "user", "content": WARM_UP}], ask)
            if reply.error is not None:
                raise DsparkError(server.field, server.url, f"does not answer: {reply.error}")
            counts[name] = reply.prompt_tokens
        check_counts("the warm-up", counts)

    def _opening(self) -> list[dict[str, str]]:
        system = self.settings.system_prompt
        return [] if system is None else [{"role": "system", "content": system}]

    async def _suite(self, number: int, suite: str, prompts: Sequence[Prompt]) -> None:
        """Every group of a suite that was not asked yet, of every server in turn, and its counters around each."""
        if not self._left(suite, prompts):
            return
        for name, server in self.servers.items():
            check_unchanged(name, self.run.about[name], await asyncio.to_thread(server.check))
        before = {name: await self._counters(name) for name in self.servers}
        for index, questions in self._groups(prompts):
            found: list[Sample] = []
            names = list(self.servers)
            for name in names if (number + index) % 2 == 0 else reversed(names):
                if (suite, index, name) in self.done:
                    continue
                samples = await self._group(name, suite, index, questions)
                found += samples
                check_prompt_tokens(found)
                before[name] = await self._count((suite, index, name), before[name], samples)
                self.run.samples += samples
                self.journal(samples)

    def _left(self, suite: str, prompts: Sequence[Prompt]) -> bool:
        """Whether anything of a suite was not asked yet."""
        units = ((suite, index, name) for index, _ in self._groups(prompts) for name in self.servers)
        return any(unit not in self.done for unit in units)

    def _groups(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, list[tuple[int, Prompt]]]]:
        """(group, its (place in the suite, prompt))."""
        numbered = iter(enumerate(prompts))
        for group, size in enumerate(self.settings.sizes(len(prompts))):
            yield group, list(islice(numbered, size))

    # Requests

    async def _group(self, name: str, suite: str, group: int, questions: Sequence[tuple[int, Prompt]]) -> list[Sample]:
        """Ask a group of one server; samples in the order of the questions and their turns."""
        found: dict[int, list[Sample]] = {}
        ends: list[float] = []
        self._busy = self._most = 0
        began = time.perf_counter()

        async def converse(index: int, prompt: Prompt) -> None:
            self._busy += 1
            self._most = max(self._most, self._busy)
            found[index] = await self._converse(name, suite, group, index, prompt, ends)
            self._busy -= 1

        if self.settings.rate is None:
            waiting = iter(questions)

            async def work() -> None:
                for index, prompt in waiting:
                    await converse(index, prompt)

            await asyncio.gather(*(work() for _ in range(min(self.settings.concurrency, len(questions)))))
        else:

            async def later(at: float, index: int, prompt: Prompt) -> None:
                await asyncio.sleep(began + at - time.perf_counter())
                await converse(index, prompt)

            starts = self._starts(len(questions))
            await asyncio.gather(*(later(at, *one) for at, one in zip(starts, questions, strict=True)))
            self.run.note(f"{suite}, {name}: at most {self._most} conversations were under way at once")
        samples = [sample for index, _ in questions for sample in found[index]]
        for sample in samples:
            sample.group_seconds = max(ends) - began if ends and sample.error is None else None
        return samples

    def _starts(self, count: int) -> list[float]:
        """Seconds at which the conversations of an open loop begin, the first at once."""
        assert self.settings.rate is not None
        gaps = np.full(count, 1.0 / self.settings.rate)
        if self.settings.arrivals == "poisson":
            gaps = np.random.default_rng(self.settings.arrival_seed).exponential(gaps)
        return [float(at) for at in np.cumsum(gaps) - gaps[0]]

    async def _converse(
        self, name: str, suite: str, group: int, index: int, prompt: Prompt, ends: list[float]
    ) -> list[Sample]:
        """All turns of a prompt on the server's own answers; when the last token of each came goes to `ends`. After a
        failed turn the later ones fail unasked."""
        messages, samples, failed = self._opening(), list[Sample](), False
        seed = self.settings.ask.seed
        ask = replace(self.settings.ask, seed=None if seed is None else seed + index)
        for turn, text in enumerate(prompt.turns):
            sample = Sample(suite, prompt.id, name, "server", turn, self.settings.batch, group)
            samples.append(sample)
            messages.append({"role": "user", "content": text})
            if failed:
                sample.error = "not asked: the turn before it failed"
            else:
                began = time.perf_counter()
                reply = await self.servers[name].ask(messages, ask)
                if reply.seconds is not None:
                    ends.append(began + reply.seconds)
                messages.append({"role": "assistant", "content": reply.text})
                self._fill(sample, reply)
            failed = sample.error is not None
            self.on_progress(sample)
        return samples

    def _fill(self, sample: Sample, reply: Reply) -> None:
        """A reply's figures; none from one that failed."""
        if reply.error is not None:
            sample.error = reply.error
            return
        sample.prompt_tokens, sample.output_tokens = reply.prompt_tokens, reply.output_tokens
        sample.cached_tokens = reply.cached_tokens
        sample.finish, sample.text = reply.finish, reply.reasoning + reply.text
        sample.rounds, sample.histogram = reply.rounds, reply.histogram
        sample.seconds, sample.arrivals = reply.seconds, reply.arrivals or []
        if not reply.exact:
            self.run.note(f"{sample.drafter}: tokens of a chunk are estimated by its share of the answer's characters")
        if reply.output_ids is None:
            sample.looping = None
            self.run.note(f"{sample.drafter}: the server tells no token ids, so answers that loop are not recognised")
            return
        sample.output_ids = reply.output_ids
        sample.looping = detect_loop(reply.output_ids[:-1] if reply.finish == "stop" else reply.output_ids)

    # Counters

    async def _counters(self, name: str) -> Counters:
        """A reading that has come to rest. Raises DsparkError when the server is gone."""
        server = self.servers[name]
        if server.engine == "openai":
            return Counters({}, {})
        last = read_counters(await asyncio.to_thread(server.metrics))
        for _ in range(10):
            await asyncio.sleep(SETTLE_SECONDS)
            now = read_counters(await asyncio.to_thread(server.metrics))
            if now == last:
                break
            last = now
        return last

    async def _count(self, unit: Unit, before: Counters, samples: Sequence[Sample]) -> Counters:
        """The next reading; what was counted since the one before is kept of a server that may draft. Raises
        ServerChanged for a restart."""
        suite, _, name = unit
        server = self.servers[name]
        if all(one.error is not None for one in samples):
            return before
        try:
            after = await self._counters(name)
        except DsparkError as error:
            self.run.note(f"{suite}, {name}: no counters after an answer ({error})")
            return before
        delta = difference(before, after, server.url)
        if server.speculates is not False:
            self.run.counted[unit] = delta
            self.told(unit, delta)
        return after
