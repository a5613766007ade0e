"""Suites asked of live servers: our own, over the tiny target, plain and with a draft; and engine-shaped ones."""

import threading

import pytest
from tests.bench.endpoints import MODEL, VllmCounters, openai_events, sglang_events, vllm_events
from tests.bench.test_endpoint import DETAILS
from tests.serving.conftest import Live

from dspark.bench import figures
from dspark.bench.endpoint import AskSettings, Endpoint
from dspark.bench.live import LiveSettings, run_live
from dspark.bench.live_pairs import (
    cache_notes,
    check_prompt_tokens,
    check_same,
    check_unchanged,
    counted_figures,
    greedy_differences,
)
from dspark.bench.metrics import histogram
from dspark.bench.samples import Sample
from dspark.data.prompts import Prompt
from dspark.errors import DsparkError

SHORT = AskSettings(max_tokens=12)
ALONE = LiveSettings(SHORT)
TALK = Prompt("talk/0", ("hello there", "and then?"))
SUITES = {
    "letters": [Prompt(f"letters/{i}", (text,)) for i, text in enumerate(["2+2?", "abc", "write code"])],
    "mt-bench": [TALK],
}


@pytest.fixture(scope="module")
def plain(target):
    server = Live(target, None, None)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def drafted(target, draft):
    server = Live(target, draft, 3)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def alone(drafted):
    """All suites, one question at a time; no test may change it."""
    return run_live(SUITES, ours(drafted), None, ALONE)


def ours(server, **more):
    return Endpoint(server.url, "dspark", **more)


def refusal(*given, **more):
    with pytest.raises(DsparkError) as error:
        run_live(*given, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


# Our own server


@pytest.mark.parametrize("concurrency", [1, 4])
def test_acceptance_of_answers_is_that_of_the_counters(drafted, alone, concurrency):
    run = alone if concurrency == 1 else run_live(SUITES, ours(drafted), None, LiveSettings(SHORT, concurrency))
    assert not run.failures
    server, notes = counted_figures(run.samples, run.counted)
    assert notes == []  # the answers tell more
    for suite, prompts in SUITES.items():
        samples = [one for one in run.samples if one.suite == suite]
        told = figures.acceptance(samples, 3, "server")
        counted = server[suite, "endpoint"]
        rounds = [one for sample in samples for one in sample.rounds if one.scheduled]
        assert counted.rounds == len(rounds) > 0
        assert counted.micro_length == pytest.approx(1 + sum(one.accepted for one in rounds) / len(rounds))
        assert counted.histogram == [sum(one.accepted == k for one in rounds) for k in range(4)]
        assert sum(told.histogram) == told.rounds and counted.questions == told.questions == len(prompts)
        assert counted.requests == len(samples)
    assert any(one.accepted for sample in run.samples for one in sample.rounds)
    assert not [note for note in run.notes if "another client" in note or "estimated" in note or "loop" in note]


def test_samples_are_the_servers_answers(drafted, alone):
    run = alone
    asked = [("letters/0", 0, 0), ("letters/1", 0, 1), ("letters/2", 0, 2), ("talk/0", 0, 0), ("talk/0", 1, 0)]
    assert [(one.question, one.turn, one.group) for one in run.samples] == asked
    for sample in run.samples:
        assert sample.drafter == "endpoint" and sample.source == "server" and sample.batch == 1
        assert sum(tokens for _, tokens in sample.arrivals) == sample.output_tokens == len(sample.output_ids)
        assert sample.arrivals[0][1] == 1 and sample.finish in ("stop", "length")
        accepted = [one.accepted for one in sample.rounds]
        assert len(sample.arrivals) == len(accepted) + 1
        assert all(tokens <= more + 1 for (_, tokens), more in zip(sample.arrivals[1:], accepted))
        assert 0 < sample.seconds <= sample.group_seconds
    first, second = (one for one in run.samples if one.question == "talk/0")
    answer = drafted.post(
        "chat/completions",
        messages=[
            {"role": "user", "content": TALK.turns[0]},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": TALK.turns[1]},
        ],
        temperature=0,
        max_tokens=12,
    ).json()
    assert second.text == answer["choices"][0]["message"]["content"]
    assert second.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert histogram(second.rounds, 3) == answer["usage"]["speculation"]["histogram"]


def test_a_baseline_is_asked_the_same_in_turn_and_says_the_same(plain, drafted):
    order = []
    run = run_live(SUITES, ours(drafted), ours(plain), ALONE, journal=lambda group: order.append(group))
    assert not run.failures and greedy_differences(run.samples) == {}
    units = [(group[0].suite, group[0].group, group[0].drafter) for group in order]
    both = ["baseline", "endpoint"]
    for at in range(0, len(units), 2):
        suite, group, _ = units[at]
        turned = (list(SUITES).index(suite) + group) % 2
        assert [units[at][2], units[at + 1][2]] == (both[::-1] if turned else both)
    assert [one for group in order for one in group] == run.samples
    assert all(one.rounds is None for one in run.samples if one.drafter == "baseline")
    assert {name for _, _, name in run.counted} == {"endpoint"} and set(run.about) == set(both)
    assert run.about["endpoint"]["speculative"] == {"draft": "tiny-draft", "n": 3}
    speed = figures.speed(
        [one for one in run.samples if one.drafter == "endpoint" and one.suite == "letters"],
        [one for one in run.samples if one.drafter == "baseline" and one.suite == "letters"],
    )
    assert speed.speedup is not None and speed.speedup.low is not None  # three pairs


def test_what_is_done_is_not_asked_again(plain, drafted, alone):
    both = {(one.suite, one.group, name) for one in alone.samples for name in ("baseline", "endpoint")}
    asked = []
    done = both - {("letters", 2, "baseline"), ("letters", 2, "endpoint"), ("mt-bench", 0, "baseline")}
    rest = run_live(SUITES, ours(drafted), ours(plain), ALONE, on_progress=asked.append, done=done)
    left = [("letters", 2, "baseline"), ("letters", 2, "endpoint"), *([("mt-bench", 0, "baseline")] * 2)]
    assert [(one.suite, one.group, one.drafter) for one in rest.samples] == left
    assert sorted(map(id, asked)) == sorted(map(id, rest.samples))
    texts = {(one.question, one.turn): one.text for one in alone.samples}
    assert all(texts[one.question, one.turn] == one.text for one in rest.samples)
    assert run_live(SUITES, ours(drafted), None, ALONE, done=both).samples == []


def test_a_closed_loop_is_asked_in_blocks():
    assert LiveSettings(SHORT, 2).sizes(11) == [8, 3] and LiveSettings(SHORT, 2).sizes(9) == [9]
    assert LiveSettings(SHORT, 4).sizes(3) == [3] and LiveSettings(SHORT, 4).sizes(0) == []
    assert LiveSettings(SHORT, 4).sizes(48) == [16, 16, 16] and LiveSettings(SHORT, 4).sizes(35) == [16, 19]
    assert ALONE.sizes(3) == [1, 1, 1] and LiveSettings(SHORT, rate=1.0).sizes(40) == [40]


def test_blocks_are_asked_of_both_in_turn_and_give_an_interval(fake):
    suite = {"a": [Prompt(f"a/{i}", ("?",)) for i in range(11)]}
    plain, drafted = (Endpoint(fake(lambda body: openai_events()).url, "openai") for _ in range(2))
    order = []
    run = run_live(suite, drafted, plain, LiveSettings(SHORT, 2), journal=lambda group: order.append(group))
    units = [(group[0].group, group[0].drafter, len(group)) for group in order]
    assert units == [(0, "baseline", 8), (0, "endpoint", 8), (1, "endpoint", 3), (1, "baseline", 3)]
    sides = [[one for one in run.samples if one.drafter == name] for name in ("endpoint", "baseline")]
    assert figures.speed(*sides).speedup.low is not None
    assert any("2 conversations at once, in blocks of 4 times as many" in note for note in run.notes)
    done = {("a", 0, "baseline"), ("a", 0, "endpoint"), ("a", 1, "endpoint")}
    rest = run_live(suite, drafted, plain, LiveSettings(SHORT, 2), done=done)
    assert [(one.question, one.drafter) for one in rest.samples] == [(f"a/{i}", "baseline") for i in (8, 9, 10)]


def test_nothing_is_asked_where_all_is_done(fake):
    server = fake(lambda body: openai_events())
    run_live({"a": [TALK]}, Endpoint(server.url, "openai"), None, ALONE, done={("a", 0, "endpoint")})
    assert server.bodies == []


def test_a_suite_at_once_is_one_group(drafted, alone):
    run = run_live({"letters": SUITES["letters"]}, ours(drafted), None, LiveSettings(SHORT, 4, limit=2))
    assert [one.question for one in run.samples] == ["letters/0", "letters/1"]
    assert {(one.batch, one.group, one.group_seconds) for one in run.samples} == {(4, 0, run.samples[0].group_seconds)}
    assert [one.output_ids for one in run.samples] == [one.output_ids for one in alone.samples[:2]]


@pytest.mark.parametrize("arrivals", ["poisson", "constant"])
def test_an_open_loop_begins_at_its_rate(drafted, alone, arrivals):
    settings = LiveSettings(SHORT, rate=50.0, arrivals=arrivals, arrival_seed=3)
    run = run_live(SUITES, ours(drafted), None, settings)
    assert not run.failures and {one.batch for one in run.samples} == {0}
    assert [(one.question, one.output_ids) for one in run.samples] == [
        (one.question, one.output_ids) for one in alone.samples
    ]
    assert any("conversations were under way at once" in note for note in run.notes)


def test_a_seed_counts_up_by_question(drafted):
    ask = AskSettings(max_tokens=16, temperature=1.0, seed=5)
    run = run_live({"letters": SUITES["letters"]}, ours(drafted), None, LiveSettings(ask))
    third = run.samples[2]
    body = {"messages": [{"role": "user", "content": "write code"}], "temperature": 1.0, "seed": 7, "max_tokens": 16}
    answer = drafted.post("chat/completions", **body, return_token_ids=True).json()
    assert third.output_ids == answer["choices"][0]["token_ids"]


def test_a_system_prompt_is_asked_with(drafted, alone):
    run = run_live({"a": SUITES["letters"][:1]}, ours(drafted), None, LiveSettings(SHORT, system_prompt="be brief"))
    assert run.samples[0].prompt_tokens == alone.samples[0].prompt_tokens + len("Xsystem\nbe briefX\n")


def test_a_server_that_is_stopped_between_two_requests(target, draft):
    server = Live(target, draft, 3, drain=0.0)

    def stop(sample):
        if sample.question == "talk/0":
            server.stop()

    talks = {"mt-bench": [Prompt("letters/0", ("abc",)), TALK, Prompt("talk/1", ("tell me more", "why?"))]}
    run = run_live(talks, ours(server), None, ALONE, on_progress=stop)
    assert [(one.question, one.turn) for one in run.samples if one.error is None] == [("letters/0", 0), ("talk/0", 0)]
    failed = [one for one in run.samples if one.error is not None]
    assert len(failed) == 3 == len(run.failures) and "the connection broke" in run.failures[0]
    assert all(one.seconds is None and one.arrivals == [] and one.rounds is None for one in failed)
    assert failed[-1].error == "not asked: the turn before it failed"
    assert any("no counters" in note for note in run.notes)


def test_a_server_that_is_stopped_in_the_middle_of_a_stream(target, draft):
    server = Live(target, draft, 3, drain=0.0)
    answering = threading.Event()
    loop = server.loop.engine
    step = loop.step

    def slow_step(*given, **more):
        answering.set()
        return step(*given, **more)

    def stop():
        answering.wait(20)
        server.stop()

    loop.step = slow_step
    many = {"a": [Prompt(f"a/{i}", ("tell me",)) for i in range(12)]}
    stopping = threading.Thread(target=stop)
    settings = LiveSettings(AskSettings(max_tokens=100, ignore_eos=True))
    run = run_live(many, ours(server), None, settings, on_progress=lambda _: stopping.ident or stopping.start())
    stopping.join()
    assert run.failures and all("connection" in one or "HTTP 503" in one or "ended" in one for one in run.failures)
    assert len(run.samples) == 12 and all(one.output_tokens == 100 for one in run.samples if one.error is None)


def test_a_server_that_is_gone_before_the_next_suite_ends_the_run(target, draft):
    server = Live(target, draft, 3, drain=0.0)
    kept = []

    def keep(samples):
        kept.extend(samples)
        server.stop()

    said = refusal({"a": [TALK], "b": [TALK]}, ours(server), None, ALONE, journal=keep)
    assert "cannot be reached" in said and [one.error for one in kept] == [None, None]


# Other engines


def test_vllm_counters_are_read_around_a_suite(fake):
    counters = VllmCounters()

    def stream(body):
        yield from vllm_events(body)
        counters.answers += 1

    server = fake(stream, pages={"/metrics": counters.page, "/version": {"version": "0.32.0"}})
    run = run_live(SUITES, Endpoint(server.url, "vllm"), None, LiveSettings(SHORT, 2))
    server_figures, notes = counted_figures(run.samples, run.counted)
    for suite, requests in (("letters", 3), ("mt-bench", 2)):
        acceptance = server_figures[suite, "endpoint"]
        assert (acceptance.rounds, acceptance.requests) == (3 * requests, requests)
        assert acceptance.micro_length == pytest.approx(1 + 4 / 3)
    assert not any("another client" in note for note in notes)
    assert run.samples[0].rounds is None and run.samples[0].histogram is None
    counters.others += 1
    stream_of_another = server.stream
    server.stream = lambda body: [setattr(counters, "others", counters.others + 5), *stream_of_another(body)][1:]
    run = run_live({"a": [TALK]}, Endpoint(server.url, "vllm"), None, ALONE)
    _, notes = counted_figures(run.samples, run.counted)
    assert any("a, endpoint: it counted 24 tokens where 14 were received" in note for note in notes)
    run.counted.clear()
    assert counted_figures(run.samples, run.counted) == ({}, [])


def test_a_counter_that_goes_back_ends_the_run(fake):
    counters = VllmCounters()
    counters.answers = 40

    def stream(body):
        yield from vllm_events(body)
        counters.answers = 0

    server = fake(stream, pages={"/metrics": counters.page})
    counters_at_start = counters.page()
    server.pages["/metrics"] = lambda: counters_at_start if len(server.bodies) < 2 else counters.page()
    kept = []
    said = refusal({"a": [TALK]}, Endpoint(server.url, "vllm"), None, ALONE, journal=kept.append)
    assert "was restarted while it was measured" in said and kept == []


def test_a_baseline_that_began_anew_ends_the_run(fake):
    counters = VllmCounters()
    pages = {"/metrics": counters.page, "/v1/engine": {"target": "m", "draft": None, "n": 0, "max_batch": 4}}
    plain, drafted = fake(vllm_events, pages=pages), fake(vllm_events, pages={})
    assert run_live({"a": [TALK]}, Endpoint(plain.url, "dspark"), None, ALONE).counted == {}

    def restart(sample):
        counters.born += 1

    sides = Endpoint(drafted.url, "dspark"), Endpoint(plain.url, "dspark")
    assert "_created" in refusal({"a": [TALK]}, *sides, ALONE, on_progress=restart)


def test_a_server_that_is_another_one_in_the_next_suite_ends_the_run(fake):
    server = fake(vllm_events, pages={"/version": {"version": "0.32.0"}})
    kept = []

    def keep(samples):
        kept.append(samples)
        server.pages["/version"] = {"version": "0.33.0"}

    said = refusal({"a": [TALK], "b": [TALK]}, Endpoint(server.url, "vllm"), None, ALONE, journal=keep)
    assert said.startswith("endpoint version = '0.33.0': was '0.32.0' when the run began") and len(kept) == 1


def test_what_changed_is_named():
    about = {"url": "u", "engine": "e", "model": "m", "root": "r", "max_model_len": 9, "version": None}
    before = {**about, "settings": {"dtype": "auto"}, "speculative": {"n": 3}}
    check_unchanged("endpoint", before, {**before, "version": "1", "settings": {}})  # told once is no change
    for change, name in (
        ({"settings": {"dtype": "half"}}, "baseline settings dtype = 'half': was 'auto'"),
        ({"speculative": {"n": 7}}, "baseline speculative n = 7: was 3"),
        ({"root": "s"}, "baseline root = 's': was 'r'"),
    ):
        with pytest.raises(DsparkError, match=name):
            check_unchanged("baseline", before, {**before, **change})


def test_sglang_tells_with_every_answer(fake):
    info = {"version": "0.5.23", "speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 4}
    server = fake(lambda body: sglang_events(body, DETAILS), pages={"/server_info": info})
    run = run_live({"a": [TALK]}, Endpoint(server.url, "sglang"), None, ALONE)
    assert [one.histogram for one in run.samples] == [[1, 1, 0, 1]] * 2 and run.notes == []
    assert counted_figures(run.samples, run.counted) == ({}, [])
    acceptance = figures.acceptance(run.samples, 3, "server")
    assert acceptance.micro_length == pytest.approx(1 + 4 / 3)


def test_a_server_that_tells_nothing_leaves_named_gaps(fake):
    run = run_live({"a": [TALK]}, Endpoint(fake(lambda body: openai_events()).url, "openai"), None, ALONE)
    assert all(one.rounds is None and one.histogram is None and one.looping is None for one in run.samples)
    server, notes = counted_figures(run.samples, run.counted)
    gaps = ("estimated", "loop", "acceptance is not known")
    assert server == {} and len([*run.notes, *notes]) == len(gaps)
    assert all(gap in note for gap, note in zip(gaps, [*run.notes, *notes]))


# Two that cannot be compared


def test_servers_that_differ_are_refused(fake, plain, drafted):
    assert "gives another server" in refusal(SUITES, ours(drafted), ours(drafted), ALONE).replace("give ", "gives ")
    named = Endpoint(drafted.url.replace("127.0.0.1", "localhost"), "dspark", field="baseline_endpoint")
    assert "is the endpoint that is measured" in refusal(SUITES, ours(drafted), named, ALONE)
    one = fake(vllm_events, pages={"/version": {"version": "0.32.0"}})
    other = fake(vllm_events, pages={"/version": {"version": "0.31.0"}})
    said = refusal(SUITES, Endpoint(one.url, "vllm"), Endpoint(other.url, "vllm"), ALONE)
    assert said.startswith("version = '0.32.0': the baseline has '0.31.0'")
    other.pages["/version"] = {"version": "0.32.0"}
    other.cards = [{"id": MODEL, "max_model_len": 2048}]
    said = refusal(SUITES, Endpoint(one.url, "vllm"), Endpoint(other.url, "vllm"), ALONE)
    assert said.startswith("max_model_len = 4096: the baseline has 2048")
    other.cards = [{"id": "another", "max_model_len": 4096}]
    said = refusal(SUITES, Endpoint(one.url, "vllm"), Endpoint(other.url, "vllm"), ALONE)
    assert said.startswith(f"model = '{MODEL}': the baseline has 'another'")
    assert not one.bodies and not other.bodies
    said = refusal(SUITES, Endpoint(one.url, "vllm"), Endpoint(other.url, "openai"), ALONE)
    assert said.startswith("engine = 'vllm': the baseline has 'openai'")


def test_speculative_settings_may_differ_and_what_follows_from_them_is_noted():
    about = {"engine": "sglang", "model": "m", "root": "m", "max_model_len": 9, "version": None}
    one = {**about, "settings": {"tp_size": 8, "max_running_requests": 48}, "speculative": {}}
    other = {**about, "version": "1", "settings": {"tp_size": 8, "max_running_requests": 32, "dtype": "auto"}}
    other["speculative"] = {"speculative_algorithm": "DSPARK"}
    assert check_same(one, other) == ["max_running_requests differs between the servers: baseline 48, endpoint 32"]
    with pytest.raises(DsparkError, match="tp_size = 4: the baseline has 8"):
        check_same(one, {**other, "settings": {"tp_size": 4}})


def test_mixed_tokenizers_are_refused(fake):
    one, other = fake(lambda body: openai_events()), fake(lambda body: openai_events(prompt=11))
    said = refusal(SUITES, Endpoint(one.url, "openai"), Endpoint(other.url, "openai"), ALONE)
    assert "baseline 11, endpoint 9" in said and "warm-up" in said
    samples = [Sample("s", "q", name, "server", prompt_tokens=n) for name, n in (("baseline", 3), ("endpoint", 4))]
    with pytest.raises(DsparkError, match="baseline 3, endpoint 4"):
        check_prompt_tokens(samples)
    check_prompt_tokens([samples[0], Sample("s", "q", "endpoint", "server", turn=1, prompt_tokens=9)])


def test_warm_prompts_are_told_of(fake):
    def notes(baseline, endpoint):
        sides = [Endpoint(fake(lambda body, n=n: openai_events(cached=n)).url, "openai") for n in (endpoint, baseline)]
        return cache_notes(run_live({"a": SUITES["letters"]}, *sides, ALONE).samples)

    warm, strong = "prompt tokens came from the server's prefix cache", "NOT COMPARABLE END TO END"
    assert notes(0, 0) == []
    silent = notes(None, None)
    assert len(silent) == 2 and all("tells of no prompt tokens from its prefix cache" in note for note in silent)
    both = notes(6, 6)
    assert [f"a, {name}: 18 of 27 {warm}" in note for name, note in zip(("baseline", "endpoint"), both)] == [True] * 2
    assert len(both) == 2 and "--no-enable-prefix-caching" in both[0]
    one_sided = notes(0, 6)
    assert len(one_sided) == 2 and strong in one_sided[1] and "0% of the baseline's" in one_sided[1]
    assert any(strong in note for note in notes(6, None))


def test_greedy_answers_that_differ_are_listed():
    def pair(question, turn, one, other):
        for name, text in (("baseline", one), ("endpoint", other)):
            yield Sample("s", question, name, "server", turn, text=text)

    samples = [*pair("a", 0, "same", "same"), *pair("a", 1, "abc", "abd"), *pair("b", 0, "long", "longer")]
    samples += [*pair("b", 1, "x", "y"), *pair("c", 0, "x", "x")]
    assert greedy_differences(samples) == {
        "s": ["s a turn 2: texts differ from character 2 on", "s b turn 1: texts differ from character 4 on"]
    }
    for sample, ids in zip(samples[-2:], ([1, 2], [1, 3])):
        sample.output_ids = ids
    assert greedy_differences(samples[-2:]) == {"s": ["s c turn 1: ids differ from token 1 on"]}
    samples[3].error = "it failed"
    assert greedy_differences(samples[:4]) == {}


def test_a_key_is_sent_and_asked_for(target):
    server = Live(target, None, None, api_key="secret")
    try:
        assert "asks for its API key" in refusal(SUITES, ours(server), None, ALONE)
        run = run_live({"a": SUITES["letters"][:1]}, ours(server, api_key="secret"), None, ALONE)
        assert not run.failures and "secret" not in str(run.about)
    finally:
        server.stop()


def test_a_server_that_refuses_what_is_asked_is_found_out_at_once(fake, drafted):
    server = fake(vllm_events, status=400)
    assert "does not answer: HTTP 400: no such thing" in refusal(SUITES, Endpoint(server.url, "vllm"), None, ALONE)
    assert "model = 'other'" in refusal(SUITES, ours(drafted, model="other"), None, ALONE)
    thinking = LiveSettings(AskSettings(thinking=True))
    assert refusal(SUITES, ours(drafted), None, thinking).startswith("thinking = True")


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0}, {"rate": 0.0}, {"rate": float("nan")}, {"rate": 1.0, "concurrency": 2}, {"limit": 0},
        {"arrivals": "often"}, {"arrival_seed": -1},
    ],
)  # fmt: skip
def test_settings_are_checked(wrong):
    with pytest.raises(DsparkError):
        LiveSettings(**wrong)
