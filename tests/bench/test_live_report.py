"""Reports of live servers: going on, typed again, refused, and what they say was chosen."""

import json

import pytest
from tests.bench.endpoints import IDS, VllmCounters, openai_events, usage, vllm_events

from dspark.bench.endpoint import AskSettings, Endpoint
from dspark.bench.in_process import known_prompts
from dspark.bench.live import LiveSettings
from dspark.bench.live_report import bench_live
from dspark.bench.prompts import Suite
from dspark.bench.samples import unit_key
from dspark.data.prompts import Prompt, prompt_hash
from dspark.errors import DsparkError

ALONE = LiveSettings(AskSettings(max_tokens=12))
SUITES = [
    Suite("a", [Prompt(f"a/{i}", (f"question {i}",)) for i in range(4)], "folder: a.jsonl"),
    Suite("b", [Prompt("b/0", ("hello", "and then?"))], "folder: b.jsonl"),
]


@pytest.fixture
def counters():
    return VllmCounters()


@pytest.fixture
def counting(fake, counters):
    """A server like vLLM whose answers tell nothing of their rounds."""

    def stream(body):
        yield from vllm_events(body)
        counters.answers += 1

    return fake(stream, pages={"/metrics": counters.page, "/version": {"version": "0.32.0"}})


def bench(out, server, baseline=None, engine="vllm", settings=ALONE, suites=SUITES, progress=None, **chosen):
    """The report, but for when it was made."""
    other = None if baseline is None else Endpoint(baseline.url, engine, field="baseline_endpoint")
    report = bench_live(
        Endpoint(server.url, engine), other, suites, [], settings, out,
        chosen=chosen, progress=progress or (lambda suite, count: None),
    )  # fmt: skip
    return report.model_copy(update={"created": ""})


def stopped_after(requests):
    """Progress that is interrupted at a request."""
    left = [requests]

    def progress(suite, count):
        left[0] -= count
        if left[0] < 0:
            raise KeyboardInterrupt

    return progress


def acceptance(report, suite):
    return next(one for one in report.suites if one.name == suite).columns["endpoint"].acceptance


def test_a_finished_run_typed_again_gives_the_same_report(tmp_path, counting):
    first = bench(tmp_path, counting)
    found = acceptance(first, "a")
    assert (found.rounds, found.requests, found.questions) == (12, 4, 4) and found.histogram == [4, 4, 0, 4]
    assert found.micro_length == pytest.approx(1 + 4 / 3) and [one.verified for one in found.conditional] == [12, 8, 4]
    assert any("leave out rounds that drafted nothing" in note for note in first.notes)
    asked, held = len(counting.bodies), (tmp_path / "samples.jsonl").read_bytes()
    assert bench(tmp_path, counting) == first
    assert len(counting.bodies) == asked and (tmp_path / "samples.jsonl").read_bytes() == held


def test_a_run_that_was_taken_up_covers_every_request(tmp_path, counting):
    whole = bench(tmp_path / "whole", counting)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path / "parts", counting, progress=stopped_after(2))
    held = (tmp_path / "parts" / "samples.jsonl").read_text()
    assert held.count('"samples"') == 2
    parts = bench(tmp_path / "parts", counting)
    for suite in ("a", "b"):
        assert acceptance(parts, suite) == acceptance(whole, suite)
    assert parts.notes == whole.notes


def test_answers_without_counters_are_told_of(tmp_path, counting, counters):
    pages = dict(counting.pages)

    def page():
        if len(counting.bodies) == 1 + 2:  # warm-up and two questions
            counting.pages["/metrics"] = 500
        return counters.page()

    counting.pages["/metrics"] = page
    with pytest.raises(DsparkError, match="was restarted"):  # counters that are gone
        bench(tmp_path / "gone", counting)
    counting.pages |= pages
    bench(tmp_path, counting)
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("fact") != unit_key("a", "counted", 1, "endpoint")]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept))
    report = bench(tmp_path, counting)
    assert acceptance(report, "a").requests == 3
    assert "a, endpoint: its counters cover 3 of 4 answers" in report.notes


def test_a_restart_is_not_forgotten(tmp_path, counting, counters):
    counters.answers = 100

    def restarted(suite, count):
        counters.answers = 0

    errors = []
    for progress in (restarted, None):
        with pytest.raises(DsparkError, match="was restarted while it was measured") as error:
            bench(tmp_path, counting, progress=progress)
        errors.append(str(error.value))
    assert errors[0] == errors[1] and "give another --out or remove it" in errors[0]
    assert bench(tmp_path / "new", counting).suites


def test_another_server_is_refused_by_what_differs(tmp_path, counting):
    bench(tmp_path, counting)
    counting.pages["/version"] = {"version": "0.33.0"}
    with pytest.raises(DsparkError, match=r"endpoint version = '0.33.0': .* holds results of '0.32.0'"):
        bench(tmp_path, counting)


def test_another_draft_is_refused(tmp_path, fake):
    about = {"target": "m", "draft": "one", "n": 3, "max_batch": 4}
    server = fake(lambda body: openai_events(cached=0), pages={"/v1/engine": about})
    report = bench(tmp_path, server, engine="dspark")
    assert report.drafters[0].draft == "draft one, n 3" and report.drafters[0].trained_on is None
    server.pages["/v1/engine"] = about | {"draft": "two"}
    with pytest.raises(DsparkError, match=r"endpoint speculative draft = 'two': .* holds results of 'one'"):
        bench(tmp_path, server, engine="dspark")


def test_the_draft_that_comes_with_the_package_lists_its_prompts(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(
        "dspark.bench.live_report.known_prompts", lambda name: frozenset((prompt_hash("question 2"), name))
    )
    about = {"target": "m", "draft": "embedded", "n": 3, "max_batch": 4}
    server = fake(lambda body: openai_events(cached=0), pages={"/v1/engine": about})
    plain = fake(lambda body: openai_events(cached=0), pages={"/v1/engine": about | {"draft": None, "n": 0}})
    report = bench(tmp_path, server, plain, engine="dspark")
    assert [(one.name, one.trained_on) for one in report.drafters] == [("baseline", None), ("endpoint", True)]
    assert [(one.name, one.flagged) for one in report.suites if one.apart] == [("a (trained on)", ["a/2"])]


def test_it_does_list_them():
    assert known_prompts("embedded")


def test_only_what_means_something_is_said_to_be_chosen(tmp_path, fake):
    server = fake(lambda body: openai_events())
    settings = bench(tmp_path / "one", server, engine="openai", limit=20).settings
    assert (settings["limit"], settings["top_k"], settings["concurrency"]) == (20, 0, 1)
    assert not {"rate", "arrivals", "arrival_seed"} & settings.keys()
    ask = AskSettings(max_tokens=12, top_k=40)
    live = LiveSettings(ask, rate=100.0, arrival_seed=5, limit=2)
    settings = bench(tmp_path / "two", server, engine="openai", settings=live, limit=20).settings
    assert (settings["limit"], settings["top_k"], settings["rate"]) == (2, 40, 100.0)
    assert (settings["arrivals"], settings["arrival_seed"]) == ("poisson", 5) and "concurrency" not in settings


def test_servers_that_read_prompts_differently_are_refused_each_time(tmp_path, fake):
    other = fake(lambda body: openai_events())
    server = fake(lambda body: openai_events(prompt=9 if len(server.bodies) < 2 else 11))
    said = []
    for _ in range(2):
        with pytest.raises(DsparkError, match="different numbers of tokens") as error:
            bench(tmp_path, server, other, engine="openai")
        said.append(str(error.value))
        server.bodies.clear()
    assert "baseline 9, endpoint 11" in said[0] and "endpoint 11" in said[1]


def test_numbers_that_cannot_be_fail_and_the_journal_can_be_read_again(tmp_path, fake):
    def lying(body):
        for event in vllm_events(body):
            told = isinstance(event, dict) and not event["choices"] and len(server.bodies) == 3
            yield event | {"usage": usage(-len(IDS))} if told else event

    server = fake(lying)
    first = bench(tmp_path, server)
    assert first.suites[0].columns["endpoint"].failed == 1
    assert any("a a/1 turn 1, endpoint: the server tells usage.completion_tokens = -7" in one for one in first.notes)
    assert bench(tmp_path, server) == first


def test_warm_prompts_are_in_the_notes(tmp_path, fake):
    server, plain = fake(lambda body: openai_events(cached=6)), fake(lambda body: openai_events(cached=0))
    notes = bench(tmp_path, server, plain, engine="openai").notes
    assert any(note.startswith("a, endpoint: 24 of 36 prompt tokens came from") for note in notes)
    assert any(note.startswith("b: NOT COMPARABLE END TO END") for note in notes)
