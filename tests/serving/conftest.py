"""Real servers on loopback ports, over the small target and the draft that guesses it."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise

import httpx
import pytest
from tests.decoding.conftest import PROMPTS, bigram_draft

from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request
from dspark.serving.command import Server, ServeSettings, address_of, bind, build_service
from dspark.targets.transformers import load_target


@pytest.fixture(scope="session")
def target(tiny_llama_folder):
    return load_target(str(tiny_llama_folder))


@pytest.fixture(scope="session")
def draft(target):
    """A bigram draft that knows the target's greedy successors."""
    known = {}
    requests = [Request(prompt, max_tokens=60, ignore_eos=True) for prompt in [*PROMPTS, chat_ids(target, "abc")]]
    for _, result in Engine(target, None, max_batch=32).run(requests):
        known.update(pairwise([*result.request.prompt_ids, *result.output_ids]))
    return bigram_draft(known)


def chat_ids(target, content):
    """The ids that the small target's template makes of one user message."""
    return target.tokenizer(f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n").input_ids


class Live:
    """A server in a thread, and a client for it."""

    def __init__(self, target, draft, n=7, drain=5.0, **settings):
        chosen = ServeSettings(**{"memory": 64 << 20, "max_batch": 4, **settings})
        self.service = build_service(target, draft, n, "tiny-draft", chosen)
        self.engine, self.loop = self.service.loop.engine, self.service.loop
        self.model = self.service.model
        listening = bind("127.0.0.1", 0)
        self.server, self.url = Server(self.service, drain), address_of(listening)
        self._thread = threading.Thread(target=self.server.run, args=([listening],), daemon=True)
        self._thread.start()
        until(lambda: self.server.started)
        self.client = httpx.Client(base_url=self.url, timeout=60, trust_env=False)

    def post(self, path="completions", **body):
        return self.client.post(f"/v1/{path}", json=body)

    def stream(self, path="completions", **body):
        """The chunks of a streamed answer; the marker that ends them is checked."""
        events = events_of(self.post(path, stream=True, **body).content)
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def metrics(self):
        """Name (with what tells its samples apart) -> value."""
        found = {}
        for line in self.client.get("/metrics").text.splitlines():
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                name, _, labels = name.partition("{")
                kept = [one for one in labels.rstrip("}").split(",") if not one.startswith(("engine=", "model_name="))]
                found[name + "".join(f"[{one}]" for one in kept if one)] = float(value)
        return found

    def stop(self):
        self.client.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()


def events_of(content):
    """The data of server-sent events, split as the standard says."""
    events = content.decode().split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    return [event.removeprefix("data: ") for event in events]


def until(true, seconds=20.0):
    """Wait for a condition; fails when it does not come."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def live(target, draft):
    server = Live(target, draft)
    yield server
    server.stop()


@pytest.fixture
def started(target, draft):
    """Starts servers of a test's own; they are stopped after it."""
    servers = []

    def start(**settings):
        servers.append(Live(target, draft, **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def reference(target, draft):
    """What the engine itself gives for requests."""

    def run(*requests):
        engine = Engine(target, make_proposer(target, draft, 7))
        return [result for _, result in sorted(engine.run(requests), key=lambda pair: pair[0])]

    return run
