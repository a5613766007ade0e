"""64 clients at once with random requests, of whom some leave and some send nonsense, and one pass that fails: each
request ends with a result or a clear error, no row and no memory leaks, and health tells the truth. Slow.

Memory is the process's own (RSS), and beside it what of it is in use (glibc's count): the first also grows while freed
pieces are not yet where the next request wants them, and levels off; the second would show a leak at once.

DSPARK_LOAD_SECONDS sets how long (60 when it is not set); `pytest -s` shows the report.
"""

import asyncio
import ctypes
import json
import os
import random
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import ClassVar

import httpx
import numpy as np
import pytest
from tests.serving.conftest import Live, events_of, until

from dspark.checkpoints.builtin import load_named_draft
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("DSPARK_LOAD_SECONDS", "60"))
CLIENTS = 64
GROWTH = 100.0
"""MiB by which the process may grow in the second half of the run."""
QUESTIONS = [f"What is {a} times {b}? Explain your answer in one sentence." for a in (3, 7, 12) for b in (4, 15, 20)]
MALFORMED = [b"", b"{", b"[]", b'{"messages": [{"role": "user"', b"\xff\xfe", b'{"messages": "hello"}', b"{}" * 1000]


class _Allocator(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def in_use():
    """MiB that the process has allocated and not freed; nan where the allocator is not glibc's."""
    try:
        count = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return float("nan")
    count.restype = _Allocator
    found = count()
    return (found.uordblks + found.hblkhd) / 2**20


class Load:
    """The clients and what became of their requests."""

    def __init__(self, live, seconds):
        self.live, self.until = live, time.monotonic() + seconds
        self.ends, self.wrong, self.texts = Counter(), [], defaultdict(Counter)
        self.health, self.memory = Counter(), []

    async def run(self):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self.live.url, trust_env=False, timeout=300, limits=limits
        ) as self.client:
            watch = asyncio.create_task(self.watch())
            await asyncio.gather(*(self.keep_asking(random.Random(number)) for number in range(CLIENTS)))
            watch.cancel()

    async def watch(self):
        page = os.sysconf("SC_PAGE_SIZE")
        while True:
            self.health[(await self.client.get("/health")).status_code] += 1
            rss = int(Path("/proc/self/statm").read_text().split()[1]) * page / 2**20
            self.memory.append((time.monotonic(), rss, in_use()))
            await asyncio.sleep(0.5)

    async def keep_asking(self, draw):
        while time.monotonic() < self.until:
            kind = draw.choices(["whole", "stream", "long", "leave", "malformed", "refused"], [5, 5, 1, 3, 1, 1])[0]
            try:
                end = await getattr(self, kind)(draw)
            except Exception as error:
                end = f"{kind}: {error!r}"
                self.wrong.append(end)
            self.ends[end] += 1

    def body(self, draw, **more):
        asked = {"messages": [{"role": "user", "content": draw.choice(QUESTIONS)}], "max_tokens": draw.randint(1, 16)}
        asked |= draw.choice([{"temperature": 0}, {"seed": draw.randint(0, 9)}, {"temperature": 0, "logprobs": True}])
        asked |= draw.choice([{}, {}, {"n": 2}, {"response_format": {"type": "json_object"}}, {"stop": "."}])
        return asked | more

    def keep(self, body, texts):
        if body["temperature"] == 0 if "temperature" in body else "seed" in body:
            name = json.dumps({k: v for k, v in body.items() if k not in ("stream", "logprobs")}, sort_keys=True)
            self.texts[name][tuple(texts)] += 1

    def failed(self, status, error):
        """How a request ended that has an error for an answer; it must be one of the planned ones."""
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        planned = (status == 500 and "planted" in error["message"]) or (status == 429 and error["code"] == "queue_full")
        assert planned, (status, error)
        return error["code"]

    async def long(self, draw):
        return await self.whole(draw, max_tokens=300, ignore_eos=True)

    async def whole(self, draw, **more):
        body = self.body(draw, **more)
        reply = await self.client.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            return self.failed(reply.status_code, reply.json()["error"])
        choices = reply.json()["choices"]
        assert len(choices) == body.get("n", 1) and {c["finish_reason"] for c in choices} <= {"stop", "length"}
        self.keep(body, [choice["message"]["content"] for choice in choices])
        return "answered"

    async def stream(self, draw):
        body = self.body(draw, stream=True)
        reply = await self.client.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            return self.failed(reply.status_code, reply.json()["error"])
        *events, last = events_of(reply.content)
        if last != "[DONE]":
            return self.failed(500, json.loads(last)["error"])
        texts, finished = [""] * body.get("n", 1), []
        for event in events:
            for choice in json.loads(event)["choices"]:
                texts[choice["index"]] += choice["delta"]["content"]
                finished += [choice["finish_reason"]] if choice["finish_reason"] else []
        assert len(finished) == len(texts) and set(finished) <= {"stop", "length"}
        self.keep(body, texts)
        return "answered"

    async def leave(self, draw):
        body = self.body(draw, stream=draw.random() < 0.7, max_tokens=400, ignore_eos=True)
        try:
            async with asyncio.timeout(draw.uniform(0, 4)):
                reply = await self.client.post("/v1/chat/completions", json=body)
        except TimeoutError:
            return "left"
        if reply.status_code != 200:
            return self.failed(reply.status_code, reply.json()["error"])
        return "answered"

    async def malformed(self, draw):
        media = {"Content-Type": "application/json"}
        reply = await self.client.post("/v1/chat/completions", content=draw.choice(MALFORMED), headers=media)
        assert reply.status_code == 400 and reply.json()["error"]["message"]
        return "refused"

    async def refused(self, draw):
        name, value = draw.choice([("temperature", -1), ("tools", [1]), ("max_tokens", 10**9), ("temprature", 1)])
        reply = await self.client.post("/v1/chat/completions", json=self.body(draw, **{name: value}))
        assert reply.status_code == 400 and reply.json()["error"]["param"] == name
        return "refused"


def plant(engine, after):
    """One pass fails, `after` seconds from now."""
    original, due = engine._pass, [time.monotonic() + after]

    def failing(*arguments):
        if due and time.monotonic() > due[0]:
            due.clear()
            raise RuntimeError("planted")
        return original(*arguments)

    engine._pass = failing


@pytest.mark.parametrize("mebibytes", [256, 40], ids=["roomy", "tight"])
def test_load(mebibytes):
    """tight: sixteen running requests outgrow the budget, so the youngest make way and are read again later."""
    settings = {"memory": mebibytes << 20, "max_batch": 16, "max_waiting": 56, "timeout": 280.0}
    live = Live(load_target(EMBEDDED), load_named_draft("embedded"), drain=30.0, **settings)
    load = Load(live, SECONDS)
    plant(live.engine, SECONDS / 2)
    began = time.monotonic()
    asyncio.run(load.run())
    until(lambda: not live.engine.busy, 60)
    took = time.monotonic() - began
    found = live.metrics()
    times, rss, used = (np.array(column) for column in zip(*load.memory, strict=True))
    half = times > times.mean()
    slope, leak = (60 * np.polyfit(times[half] - times[half][0], column[half], 1)[0] for column in (rss, used))
    ties = sum(sum(counts.values()) - max(counts.values()) for counts in load.texts.values())
    repeated = sum(sum(counts.values()) - 1 for counts in load.texts.values())
    print(
        f"\n{took:.0f} s: {dict(load.ends)}; {found['vllm:generation_tokens_total']:.0f} tokens, "
        f"{found['vllm:num_preemptions_total']:.0f} preemptions, "
        f"{found['vllm:prefix_cache_hits_total']:.0f} of {found['vllm:prefix_cache_queries_total']:.0f} prompt tokens "
        f"from the cache; {ties} of {repeated} repeated answers differ; memory {rss[half][0]:.0f} -> {rss[-1]:.0f} MiB "
        f"in the second half, {slope:+.1f} MiB a minute; in use {used[half][0]:.0f} -> {used[-1]:.0f} MiB, {leak:+.1f}"
    )
    assert not load.wrong, load.wrong[:5]
    assert load.ends["answered"] and load.ends["left"] and load.ends["refused"] and load.ends["engine_error"]
    assert set(load.ends) <= {"answered", "left", "refused", "engine_error", "queue_full"}
    assert set(load.health) == {200} and load.health[200] > SECONDS / 5
    assert not live.engine.running and not live.engine.waiting and not live.loop._owners and not live.loop._groups
    assert live.engine.memory.held([]) == live.engine.memory.prefixes.tokens <= live.engine.memory.budget
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert ties <= repeated / 100, "answers differ between mixes of requests"
    assert mebibytes > 40 or found["vllm:num_preemptions_total"] > 0
    assert rss[half].max() - rss[half][0] < GROWTH
    live.stop()
