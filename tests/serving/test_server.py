"""A server under clients that leave, engines that fail and limits that are met: each request ends in a result or a
clear error, rows are freed, and health is honest."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.decoding.conftest import PROMPTS
from tests.serving.conftest import events_of, until

from dspark.decoding.request import Request

GREEDY = {"temperature": 0}
LONG = {"prompt": [40], "max_tokens": 250, "ignore_eos": True, **GREEDY}


class Held:
    """Keeps an engine's thread before its passes until it is let go; counts the passes."""

    def __init__(self, engine, monkeypatch):
        self._go, self._step = threading.Semaphore(0), engine.step
        self.passes, self.free = 0, False
        monkeypatch.setattr(engine, "step", self.step)

    def step(self):
        if not self.free:
            self._go.acquire()
        self.passes += 1
        return self._step()

    def let(self, passes=1):
        before = self.passes
        for _ in range(passes):
            self._go.release()
        until(lambda: self.passes >= before + passes)

    def release(self):
        self.free = True
        self._go.release()


@pytest.fixture
def held(started, monkeypatch):
    """A server whose engine makes a pass only when it is told to."""
    server = started()
    held = Held(server.engine, monkeypatch)
    yield server, held
    held.release()


def idle(server):
    engine = server.engine
    until(lambda: not engine.busy)
    return engine.memory.held([]) == engine.memory.prefixes.tokens


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row_before_the_next_pass(held, stream):
    server, passes = held
    ready = threading.Event()

    def read():
        with httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client:
            if not stream:
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/completions", json=LONG, timeout=0.5)
                return
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as reply:
                next(reply.iter_lines())
                ready.set()
        # leaving the block closes the connection in the middle of the answer

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: server.engine.waiting)
    active = server.engine.waiting[0]
    passes.let(1)
    if stream:
        assert ready.wait(10)
    thread.join(10)
    until(lambda: active.cancelled)
    passes.let(1)
    until(lambda: not server.engine.running)
    assert active.result.finish_reason == "cancelled" and len(active.result.output_ids) == 1
    passes.release()
    assert server.post(prompt=[40], max_tokens=3).status_code == 200
    assert idle(server)


def test_a_client_that_leaves_before_its_turn(held):
    server, passes = held
    with httpx.Client(base_url=server.url, trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=0.3)
    passes.release()
    until(lambda: server.metrics()['vllm:request_success_total[finished_reason="abort"]'] == 1)
    assert idle(server) and server.metrics()["vllm:generation_tokens_total"] <= 1


def test_the_queue_is_bounded(started, monkeypatch):
    server = started(max_batch=1, max_waiting=1)
    held = Held(server.engine, monkeypatch)
    with ThreadPoolExecutor(3) as pool:
        replies = [pool.submit(server.post, **LONG) for _ in range(2)]
        until(lambda: server.engine.busy)
        held.let(1)
        until(lambda: len(server.engine.running) + len(server.engine.waiting) + server.loop._commands.qsize() == 2)
        third = pool.submit(server.post, prompt=[40], max_tokens=3)
        until(lambda: server.loop._commands.qsize() == 1 or third.done())
        held.release()
        assert third.result().status_code == 429
        assert third.result().headers["retry-after"] == "1"
        assert third.result().json()["error"]["type"] == "rate_limit_error"
        said = "no room for 1 more: 2 of 2 requests run or wait already; try again later"
        assert third.result().json()["error"]["message"] == said
        assert [reply.result().status_code for reply in replies] == [200, 200]
    reply = server.post(prompt=[40], n=3)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "n"  # it could never be served
    assert server.post(prompt=[40], n=2).status_code == 200


def fail_once(engine, monkeypatch, name, error, after=3):
    """The engine's method `name` raises at its call number `after`, once."""
    original, calls = getattr(engine, name), []

    def method(*arguments):
        calls.append(1)
        if len(calls) == after:
            raise error
        return original(*arguments)

    monkeypatch.setattr(engine, name, method)


def test_a_failed_pass_ends_its_requests_and_nothing_else(started, monkeypatch):
    server = started()
    fail_once(server.engine, monkeypatch, "_pass", RuntimeError("planted"))
    reply = server.post(**LONG)
    assert reply.status_code == 500 and "planted" in reply.json()["error"]["message"]
    fail_once(server.engine, monkeypatch, "_pass", RuntimeError("planted"))
    streamed = server.post(**LONG, stream=True)
    *chunks, last = events_of(streamed.content)
    assert streamed.status_code == 200 and chunks and json.loads(last)["error"]["code"] == "engine_error"
    assert server.client.get("/health").status_code == 200
    assert server.post(prompt=[40], max_tokens=3).status_code == 200
    assert server.metrics()['vllm:request_success_total[finished_reason="error"]'] == 2
    assert idle(server)


def test_an_engine_that_is_broken_turns_health_red(started, monkeypatch):
    server = started()
    fail_once(server.engine, monkeypatch, "step", RuntimeError("planted"))
    reply = server.post(**LONG)
    assert reply.status_code == 503 and "planted" in reply.json()["error"]["message"]
    health = server.client.get("/health")
    assert health.status_code == 503 and "planted" in health.json()["reason"]
    assert server.post(prompt=[40]).status_code == 503
    assert server.client.get("/metrics").status_code == 200


def test_the_watchdog_ends_everything_and_health_is_red_until_passes_end_again(started, monkeypatch):
    server = started(watchdog=0.4)
    held = Held(server.engine, monkeypatch)
    assert server.client.get("/health").json() == {"status": "ok"}
    with ThreadPoolExecutor(2) as pool:
        whole, streamed = pool.submit(server.post, **LONG), pool.submit(server.post, **LONG, stream=True)
        until(lambda: server.engine.busy)
        held.let(1)
        assert "no pass has ended for 0.4 seconds" in whole.result(20).json()["error"]["message"]
        reply = streamed.result(20)
    said = json.loads(events_of(reply.content)[-1]) if reply.status_code == 200 else reply.json()
    assert said["error"]["code"] == "unavailable"
    assert server.client.get("/health").status_code == 503
    assert server.post(prompt=[40], max_tokens=2).headers["retry-after"] == "5"
    held.release()
    until(lambda: server.client.get("/health").status_code == 200)
    assert server.post(prompt=[40], max_tokens=2).status_code == 200
    assert idle(server)


def test_a_request_that_takes_too_long(started, monkeypatch):
    server = started(timeout=0.3)
    step = server.engine.step

    def slowly():
        time.sleep(0.05)
        return step()

    monkeypatch.setattr(server.engine, "step", slowly)
    reply = server.post(**LONG)
    assert reply.status_code == 504 and "0.3 seconds" in reply.json()["error"]["message"]
    *chunks, last = events_of(server.post(**LONG, stream=True).content)
    assert chunks and json.loads(last)["error"]["code"] == "timeout"
    assert idle(server)
    ends = {name: count for name, count in server.metrics().items() if name.startswith("vllm:request_success_total")}
    names = [f'vllm:request_success_total[finished_reason="{one}"]' for one in ("stop", "length", "abort", "error")]
    assert ends == dict(zip(names, (0, 0, 2, 0), strict=True))  # vLLM's names


def test_keys(started):
    server = started(api_key="s3cret")
    for shown in (None, "Bearer", "Bearer wrong", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer é"):
        headers = {} if shown is None else {"Authorization": shown.encode()}
        for path in ("/v1/models", "/v1/engine", "/v1/nothing"):
            reply = server.client.get(path, headers=headers)
            assert reply.status_code == 401 and reply.json()["error"]["type"] == "authentication_error"
            assert reply.headers["www-authenticate"] == "Bearer" and "s3cret" not in reply.text
        assert server.client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
    right = {"Authorization": "Bearer s3cret"}
    asked = {"prompt": "a", "max_tokens": 1}
    assert server.client.post("/v1/completions", json=asked, headers=right).status_code == 200
    for path in ("/health", "/metrics", "/"):
        assert server.client.get(path).status_code == 200


def test_bodies_have_a_limit(started):
    server = started(max_body=1000)
    assert server.post(prompt="a", max_tokens=1, user="x" * 800).status_code == 200
    reply = server.post(prompt="a", max_tokens=1, user="x" * 1000)
    assert reply.status_code == 413 and "1000 bytes" in reply.json()["error"]["message"]

    def parts():
        for _ in range(20):
            yield b"x" * 100

    media = {"Content-Type": "application/json"}
    assert server.client.post("/v1/completions", content=parts(), headers=media).status_code == 413


def test_a_client_that_leaves_while_it_sends(live, caplog):
    host, port = live.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    tasks = live.server.server_state.tasks
    logging.getLogger("uvicorn.error").addHandler(caplog.handler)
    try:
        with socket.create_connection((host, int(port))) as sent:
            sent.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            until(lambda: tasks)
        until(lambda: not tasks)
    finally:
        logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not caplog.records


@pytest.mark.parametrize("drip", [False, True])
def test_a_body_that_does_not_arrive_ends_the_connection(live, monkeypatch, drip):
    monkeypatch.setattr("dspark.serving.api.BODY_SECONDS", 0.3)
    host, port = live.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    began, received = time.monotonic(), b""
    with socket.create_connection((host, int(port)), timeout=0.1) as sent:
        sent.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
        while time.monotonic() - began < 3:
            try:
                if drip:
                    sent.sendall(b" ")
                part = sent.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            received += part
            if not part:
                break
    assert time.monotonic() - began < 3
    assert received.startswith(b"HTTP/1.1 408") and b"within 0.3 seconds" in received


def test_request_ids(live):
    reply = live.client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "my-id_7"})
    assert reply.headers["x-request-id"] == "my-id_7" and reply.json()["id"] == "cmpl-my-id_7"
    for bad in ("a b", "x" * 65, "é".encode(), "<script>"):
        reply = live.client.get("/health", headers={"X-Request-Id": bad})
        assert len(reply.headers["x-request-id"]) == 24
    assert len({live.client.get("/nothing").headers["x-request-id"] for _ in range(3)}) == 3


def test_models_engine_and_page(live):
    models = live.client.get("/v1/models").json()
    assert models["object"] == "list" and [model["id"] for model in models["data"]] == [live.model]
    assert "/" not in live.model
    assert live.client.get(f"/v1/models/{live.model}").json() == models["data"][0]
    live.post(prompt=[40], max_tokens=4, speculate=False)
    engine = live.client.get("/v1/engine").json()
    assert engine.pop("plain_tokens_per_s") > 0
    assert engine == {"target": live.model, "draft": "tiny-draft", "n": 7, "max_context": 256, "max_batch": 4}
    for path in ("/", "/health", "/metrics", "/v1/models"):
        head = live.client.head(path)
        assert (head.status_code, head.content) == (200, b"") and int(head.headers["content-length"]) > 0
    page = live.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and "<html" in page.text
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "http" not in policy


def test_metrics_are_the_sums_of_usages(started):
    server = started(prefix_cache=True)
    long = list(range(20, 60))
    usages = [server.post(prompt=p, max_tokens=25, **GREEDY).json()["usage"] for p in [*PROMPTS, long, long]]
    usages.append(server.post(prompt=PROMPTS[0], max_tokens=9, speculate=False).json()["usage"])
    until(lambda: server.metrics()["vllm:num_requests_running"] == 0)
    found = server.metrics()
    for name, field in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens")):
        assert found[f"vllm:{name}_total"] == sum(usage[field] for usage in usages)
    speculated = [usage["speculation"] for usage in usages]
    assert speculated[-1]["accepted"] == 0 and speculated[-1]["acceptance_length"] == 1
    assert found["vllm:spec_decode_num_drafts_total"] == sum(one["rounds"] for one in speculated[:-1])
    assert found["vllm:spec_decode_num_draft_tokens_total"] == sum(one["scheduled"] for one in speculated)
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == sum(one["accepted"] for one in speculated) > 5
    histogram = [sum(one["histogram"][k] for one in speculated[:-1]) for k in range(8)]
    for position in range(7):
        name = f'vllm:spec_decode_num_accepted_tokens_per_pos_total[position="{position}"]'
        assert found[name] == sum(histogram[position + 1 :])
        assert found[f'dspark:accepted_tokens_per_round_bucket[le="{position}.0"]'] == sum(histogram[: position + 1])
    assert found["vllm:prefix_cache_hits_total"] == sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages) > 0
    assert found["vllm:prefix_cache_queries_total"] == found["vllm:prompt_tokens_total"]
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 8
    assert (found["vllm:num_requests_waiting"], found["vllm:kv_cache_usage_perc"]) == (0, 0)
    assert found["dspark:prefix_cache_tokens"] > 0


def test_draining_takes_no_more_and_lets_those_that_run_end(held):
    server, passes = held
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, **LONG)
        until(lambda: server.engine.busy)
        server.loop.drain(30)
        assert server.post(prompt=[40]).status_code == 503
        assert "shutting down" in server.client.get("/health").json()["reason"]
        passes.release()
        assert running.result(30).json()["usage"]["completion_tokens"] == 250


def test_draining_has_an_end(held):
    server, _ = held
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, **LONG)
        until(lambda: server.engine.busy)
        server.loop.drain(0.2)
        assert running.result(30).status_code == 503


def test_sixteen_at_once_with_leavers_all_end(started, reference):
    """Clients of every kind against a small memory: whoever stays gets the answer of the engine alone."""

    server = started(memory=500 * 1000, max_waiting=64)
    expected = [result.text for result in reference(*(Request(p, 40) for p in PROMPTS))]

    def client(number):
        prompt = number % len(PROMPTS)
        asked = {"prompt": PROMPTS[prompt], "max_tokens": 40, "stream": number % 2 == 0, **GREEDY}
        with httpx.Client(base_url=server.url, trust_env=False, timeout=60) as own:
            if number % 3 == 2:
                with own.stream("POST", "/v1/completions", json={**asked, "stream": True}) as reply:
                    next(reply.iter_lines())
                return None
            reply = own.post("/v1/completions", json=asked)
        assert reply.status_code == 200
        if not asked["stream"]:
            return prompt, reply.json()["choices"][0]["text"]
        return prompt, "".join(json.loads(e)["choices"][0]["text"] for e in events_of(reply.content)[:-1])

    with ThreadPoolExecutor(16) as pool:
        for found in pool.map(client, range(32)):
            assert found is None or found[1] == expected[found[0]]
    assert idle(server)
