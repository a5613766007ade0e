"""The engine in a thread of its own, and what asyncio code sees of it.

The engine belongs to the thread: requests reach it through a queue, what its passes add comes back as events in each
group's own queue. Nothing but finished results and copies crosses over.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import torch

from dspark.decoding.engine import Engine, Step
from dspark.decoding.request import Active, Request, Result, TokenLogprob
from dspark.errors import DsparkError
from dspark.serving.metrics import Metrics

logger = logging.getLogger(__name__)

PAUSE = 0.01
"""Seconds between two passes that had nothing to do although requests wait."""


class QueueFull(Exception):
    """As many requests wait as may; the client can try again."""


class Unavailable(Exception):
    """The engine does not serve (any more): the message says why."""


@dataclass(frozen=True)
class Event:
    """What one pass added to request `index` of its group; `result` comes with the last one."""

    index: int
    step: Step
    logprobs: list[TokenLogprob]
    result: Result | None


class Group:
    """Requests that were submitted together: the choices of one answer."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.actives: list[Active] = []
        self.cancelled = False
        self.submitted = time.monotonic()
        self._queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue()

    def cancel(self) -> None:
        """Nobody waits for the answer any more: its rows are freed before the next pass. May be called twice, and
        after the end."""
        self.cancelled = True
        for active in self.actives:
            active.cancelled = True

    def put(self, item: Event | Exception | None) -> None:
        """Hand over an event, a failure, or None: the engine has taken the requests."""
        self._queue.put_nowait(item)

    async def accepted(self) -> None:
        """Wait until the engine has taken the requests. Raises what it refused them with."""
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item

    async def events(self) -> AsyncIterator[Event]:
        """Everything that happens until each request has its result. Raises Unavailable when the engine fails."""
        left = len(self.requests)
        while left:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            assert item is not None  # the engine takes a group once
            left -= item.result is not None
            yield item


class EngineLoop:
    """Runs one engine in one thread.

    max_waiting: requests that may wait besides the engine's batch; watchdog: seconds without a finished pass after
    which every request ends with an error and `health` says so.
    """

    def __init__(self, engine: Engine, metrics: Metrics, max_waiting: int = 64, watchdog: float = 60.0) -> None:
        if max_waiting < 0:
            raise DsparkError("max_waiting", max_waiting, "must be at least 0")
        if not watchdog > 0:
            raise DsparkError("watchdog", watchdog, "must be more than 0 seconds")
        self.engine, self.metrics, self.watchdog = engine, metrics, watchdog
        self.capacity = engine.max_batch + max_waiting
        self.failure: Exception | None = None
        self.plain_tokens_per_s: float | None = None
        self._drain_until: float | None = None
        self._beat: float | None = None  # when the last pass ended, or work came; None: idle
        self._commands: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._owners: dict[int, tuple[Group, int]] = {}  # by Active.index; the thread's own
        self._groups: set[Group] = set()  # asyncio's own
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # For asyncio code

    def start(self) -> None:
        """Start the thread and the watch; to be called on the event loop."""
        self._aio = asyncio.get_running_loop()
        self._thread.start()
        self._watch = self._aio.create_task(self._watch_over())

    async def stop(self) -> None:
        """End every request and the thread."""
        self._watch.cancel()
        self._fail_all(Unavailable("the server has stopped"))
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, self.watchdog)

    def drain(self, seconds: float) -> None:
        """Take no more requests; those that there are have `seconds` to end. May be called again, with less."""
        until = time.monotonic() + seconds
        self._drain_until = until if self._drain_until is None else min(self._drain_until, until)

    @property
    def unanswered(self) -> int:
        """How many answers are being made or waited for; each counts once, however many choices it has."""
        return len(self._groups)

    def stalled(self) -> bool:
        """Whether there is work, and no pass has ended for `watchdog` seconds."""
        beat = self._beat
        return beat is not None and time.monotonic() - beat > self.watchdog

    def health(self) -> str | None:
        """None when requests are served, else why they are not."""
        if self.failure is not None:
            return f"the engine has failed: {self.failure}"
        if self.stalled():
            return f"no pass has ended for {self.watchdog:g} seconds"
        if self._drain_until is not None:
            return "the server is shutting down"
        return None

    async def submit(self, requests: Sequence[Request]) -> Group:
        """Hand requests to the engine, all or none.

        Raises QueueFull, Unavailable, or DsparkError for what can never be served.
        """
        if len(requests) > self.capacity:
            remedy = f"gives {len(requests)} choices in all; this server holds {self.capacity} at once"
            raise DsparkError("n", len(requests), remedy)
        problem = self.health()
        if problem is not None:
            raise Unavailable(problem)
        group = Group(requests)
        self._groups.add(group)
        self._commands.put(group)
        try:
            await group.accepted()
        except BaseException:
            self.release(group)
            raise
        return group

    def release(self, group: Group) -> None:
        """The answer has been read to its end, or nobody wants it any more."""
        group.cancel()
        self._groups.discard(group)

    def _fail_all(self, error: Exception) -> None:
        for group in self._groups:
            group.cancel()
            group.put(error)
        self._groups.clear()

    async def _watch_over(self) -> None:
        while True:
            await asyncio.sleep(min(self.watchdog / 4, 0.5))
            if self.stalled():
                self._fail_all(Unavailable(f"no pass has ended for {self.watchdog:g} seconds"))
            if self._drain_until is not None and time.monotonic() > self._drain_until:
                self._fail_all(Unavailable("the server is shutting down"))

    def _deliver(self, events: list[tuple[Group, Event | Exception | None]]) -> None:
        for group, event in events:
            group.put(event)

    # In the thread

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._take_commands():
                    if self.engine.busy:
                        self._step()
            self.engine.drop_all()
        except Exception as error:
            logger.exception("the engine has failed")
            self.failure = error
            self._tell(self._fail_all, Unavailable(f"the engine has failed: {error}"))

    def _take_commands(self) -> bool:
        """Add what has been submitted, sleeping while there is nothing to do. False: stop."""
        if not self.engine.busy:
            self._beat = None
            group = self._commands.get()
            self._beat = time.monotonic()
            if group is None:
                return False
            self._add(group)
        while not self._commands.empty():
            group = self._commands.get()
            if group is None:
                return False
            self._add(group)
        return True

    def _add(self, group: Group) -> None:
        if group.cancelled:
            return
        outcome: Exception | None = None
        engine = self.engine
        try:
            held, new = len(engine.waiting) + len(engine.running), len(group.requests)
            if held + new > self.capacity:
                raise QueueFull(f"no room for {new} more: {held} of {self.capacity} requests run or wait already")
            for request in group.requests:
                group.actives.append(engine.add(request))
        except Exception as error:  # a request that cannot be served must not end the others
            outcome = error
            group.cancel()
        else:
            for index, active in enumerate(group.actives):
                self._owners[active.index] = group, index
            if group.cancelled:  # meanwhile
                group.cancel()
        self._tell(self._deliver, [(group, outcome)])

    def _step(self) -> None:
        steps = self.engine.step()
        now = time.monotonic()
        if steps or self.engine.running:
            self._beat = now
        else:
            time.sleep(PAUSE)
        events: list[tuple[Group, Event | Exception | None]] = []
        for active, step in steps:
            owner = self._owners.get(active.index)
            if owner is not None:
                events.append((owner[0], self._event(active, step, *owner, now)))
        self.metrics.passed(self.engine)
        self._tell(self._deliver, events)

    def _event(self, active: Active, step: Step, group: Group, index: int, now: float) -> Event:
        result = active.result
        first = len(result.output_ids) == len(step.new_ids) > 0
        self.metrics.step(active, step, now - group.submitted if first else None)
        made = result.logprobs[len(result.logprobs) - len(step.new_ids) :] if result.logprobs else []
        if active.finished:
            del self._owners[active.index]
            self.metrics.finished(result, now - group.submitted)
            if result.error is not None:
                logger.error("a request failed", exc_info=result.error)
            if not any(one.scheduled for one in result.rounds) and result.rounds and result.error is None:
                self.plain_tokens_per_s = len(result.output_ids) / (now - active.added)
        return Event(index, step, list(made), result if active.finished else None)

    def _tell(self, function: object, argument: object) -> None:
        try:
            self._aio.call_soon_threadsafe(function, argument)  # type: ignore[arg-type]
        except RuntimeError:  # the event loop is closed: nobody listens any more
            self._commands.put(None)
