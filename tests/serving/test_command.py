"""`dspark serve` as a process: what it says, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
from tests.serving.conftest import events_of, until

from dspark.checkpoints.native import save_draft
from dspark.errors import DsparkError
from dspark.serving import command
from dspark.serving.command import ServeSettings, address_of, bind, build_service, parse_bytes, ready_line

FINISHING = "finishing 1 request; Ctrl-C again stops at once\n"


@pytest.fixture(scope="module")
def arguments(tiny_llama_folder, draft, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drafts") / "tiny"
    save_draft(draft, folder)
    return ["--target", str(tiny_llama_folder), "--draft", str(folder), "--memory", "64MiB"]


class Process:
    """A running `dspark serve`."""

    def __init__(self, *arguments):
        line = [sys.executable, "-m", "dspark.cli", "serve", "--port", "0", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment.pop("DSPARK_API_KEY", None)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, stdout=pipe, stderr=pipe, text=True, env=environment)
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, self.line + self.process.stderr.read()
        self.client = httpx.Client(base_url=found[0], trust_env=False, timeout=60)

    def end(self, number=signal.SIGTERM, seconds=30):
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        return code, self.process.stdout.read(), self.process.stderr.read()


@pytest.fixture
def process(arguments):
    running = []

    def start(*more):
        running.append(Process(*arguments, *more))
        return running[-1]

    yield start
    for one in running:
        one.client.close()
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_says_what_it_serves_and_ends_gracefully(process, number):
    server = process("--max-batch", "2")
    assert re.fullmatch(
        r"serving tiny-llama\d* at http://127\.0\.0\.1:\d+ \(draft tiny, n = 7, 64 MiB of memory for [\d,]+ tokens, "
        r"context 256, 2 at once; fixed: all 7 drafts are verified \(.*no calibration\.json.*\)\)\n",
        server.line,
    )
    asked = {"prompt": [40], "max_tokens": 250, "ignore_eos": True, "temperature": 0, "stream": True}
    content, first = [], threading.Event()

    def read():
        with server.client.stream("POST", "/v1/completions", json=asked) as reply:
            for part in reply.iter_bytes():
                content.append(part)
                first.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert first.wait(20)
    code, out, err = server.end(number)
    assert (code, out) == (0, "") and err in ("", FINISHING)  # the answer may have ended in this moment
    thread.join(20)
    *chunks, done = events_of(b"".join(content))
    assert done == "[DONE]" and json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"


@pytest.mark.slow
def test_what_runs_longer_than_the_drain_ends_with_an_error(process):
    server = process("--drain", "0")
    asked = {"prompt": [40], "max_tokens": 200, "n": 60, "ignore_eos": True, "temperature": 0}
    replies = []
    thread = threading.Thread(target=lambda: replies.append(server.client.post("/v1/completions", json=asked)))
    thread.start()
    until(lambda: "num_requests_running" in (text := server.client.get("/metrics").text) and "ning{" in text)
    until(lambda: re.search(r"vllm:num_requests_running\{.*\} [1-9]", server.client.get("/metrics").text))
    assert server.end()[0] == 0
    thread.join(20)
    assert replies[0].status_code == 503 and "shutting down" in replies[0].json()["error"]["message"]


def test_a_second_signal_ends_everything_at_once(process):
    server = process("--prefill-tokens", "1")
    asked = {"prompt": [40], "max_tokens": 200, "n": 64, "ignore_eos": True, "temperature": 0}
    replies = []
    thread = threading.Thread(target=lambda: replies.append(server.client.post("/v1/completions", json=asked)))
    thread.start()
    until(lambda: re.search(r"vllm:num_requests_running\{.*\} [1-9]", server.client.get("/metrics").text))
    server.process.send_signal(signal.SIGINT)
    until(lambda: not listens(server.client.base_url.port))
    assert server.end(signal.SIGINT) == (0, "", FINISHING)
    thread.join(20)
    assert replies[0].status_code == 503 and "shutting down" in replies[0].json()["error"]["message"]


def listens(port):
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def test_plainly(target):
    settings = ServeSettings(memory=64 << 20, prefix_cache=False)
    service = build_service(target, None, None, None, settings)
    assert (service.loop.engine.proposer.n, service.draft) == (0, None)
    assert "(plain, 64 MiB of memory" in ready_line(service, settings, "http://a")


def test_a_port_in_use(run, arguments):
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("serve", *arguments, "--port", port)
    assert code == 2 and f"--port = {port}: is in use on 127.0.0.1" in err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--port", "70000"), "port"),
        (("--host", "no.such.host.invalid"), "host"),
        (("--host", ""), "host"),
        (("--host", "203.0.113.7"), "host"),
        (("--memory", "lots"), "memory"),
        (("--memory", "1KiB"), "memory"),
        (("--memory", "0"), "memory"),
        (("--memory", "900TiB"), "memory"),
        (("--max-body", "0"), "max-body"),
        (("--max-batch", "0"), "max-batch"),
        (("--max-waiting", "-1"), "max-waiting"),
        (("--prefill-tokens", "0"), "prefill-tokens"),
        (("--timeout", "0"), "timeout"),
        (("--timeout", "nan"), "timeout"),
        (("--watchdog", "-1"), "watchdog"),
        (("--drain", "-1"), "drain"),
        (("--api-key", "a b"), "api-key"),
        (("--api-key", ""), "api-key"),
        (("--n", "8"), "n"),
        (("--n", "3", "--no-draft"), "n"),
        (("--no-draft",), "draft"),
        (("--threads", "100000"), "threads"),
        (("--draft", "/no/such/draft"), "draft"),
    ],
)
def test_settings_that_make_no_sense(run, arguments, options, named):
    code, out, err = run("serve", *arguments, "--port", "0", *options)
    assert code == 2 and not out
    assert err.startswith(f"error: --{named} = ")
    assert "Traceback" not in err and "a b" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--memory", "1KiB"), "--memory = '1KiB': holds "),
        (("--max-body", "0"), "--max-body = '0': must be at least 1"),
        (("--max-batch", "0"), "--max-batch = 0: must be at least 1"),
        (("-n", "8"), "--n = 8: this draft was trained for blocks of 7 predictions; use 1..7"),
        (("--timeout", "nan"), "--timeout = nan: must be a number of seconds above 0"),
    ],
)
def test_an_option_is_named_and_shown_as_it_was_typed(run, arguments, options, said):
    _, _, err = run("serve", *arguments, "--port", "0", *options)
    assert err.startswith(f"error: {said}")


@pytest.mark.parametrize("options", [("--draft", "/no/such/draft"), ("--n", "8")])
def test_what_is_wrong_with_the_draft_is_said_before_the_target_is_loaded(run, arguments, monkeypatch, options):
    monkeypatch.setattr(command, "load_target", lambda name: pytest.fail("loaded"))
    assert run("serve", *arguments, "--port", "0", *options)[0] == 2


def test_the_command_starts_without_what_only_a_compiler_needs():
    assert "dspark.cli" in sys.modules and "llguidance.torch" not in sys.modules  # two seconds of every start


def test_a_key_from_the_environment(run, arguments, monkeypatch):
    monkeypatch.setenv("DSPARK_API_KEY", "")
    code, _, err = run("serve", *arguments, "--port", "0")
    assert code == 2 and err.startswith("error: DSPARK_API_KEY = '': is set but empty")
    code, _, err = run("serve", *arguments, "--port", "0", "--api-key", "right", "--n", "8")
    assert code == 2 and err.startswith("error: --n")  # the option goes first
    monkeypatch.setenv("DSPARK_API_KEY", "a b")
    code, _, err = run("serve", *arguments, "--port", "0")
    assert code == 2 and err == "error: DSPARK_API_KEY = '***': must be printable ASCII without spaces\n"


def test_help_shows_an_example(run):
    code, out, _ = run("serve", "--help")
    assert code == 0 and "Example" in out and "dspark serve --port" in out and "DSPARK_API_KEY" in out


def test_a_server_that_is_open_to_all_says_so(run, arguments):
    for host, said in (("0.0.0.0", True), ("127.0.0.1", False)):
        _, _, err = run("serve", *arguments, "--port", "0", "--host", host, "--n", "8")
        assert ("no --api-key: whoever reaches this address" in err) is said


def test_a_privileged_port(monkeypatch):
    def refuse(self, address):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(DsparkError, match="port = 80: needs the administrator's rights"):
        bind("127.0.0.1", 80)


def test_addresses():
    with bind("127.0.0.1", 0) as listening:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address_of(listening))
        assert listening.proto == socket.IPPROTO_TCP  # else every answer waits 40 ms: see `bind`
    if socket.has_ipv6:
        try:
            with bind("::1", 0) as listening:
                assert re.fullmatch(r"http://\[::1\]:\d+", address_of(listening))
        except DsparkError:
            pytest.skip("no IPv6 here")


@pytest.mark.parametrize(
    ("text", "count"),
    [("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("100", 100), ("5kb", 5000), ("2 gb", 2 * 10**9), ("7B", 7)],
)
def test_sizes(text, count):
    assert parse_bytes("memory", text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 GiB of it", "1e9", "nan", "1PiB", "٣"])
def test_no_sizes(text):
    with pytest.raises(DsparkError, match="memory = "):
        parse_bytes("memory", text)


def test_memory_bounds_the_context(target, draft):
    service = build_service(target, draft, 3, "x", ServeSettings(memory=100 * 1000))
    engine = service.loop.engine
    assert engine.memory.budget == 100 * 1000 // engine.memory.bytes_per_token
    assert service.converter.max_context == engine.max_context == engine.memory.budget < 256
