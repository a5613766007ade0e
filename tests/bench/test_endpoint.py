"""One streamed answer and what a server says of itself, against servers shaped like each engine."""

import asyncio
import json
import time

import pytest
from tests.bench.endpoints import (
    DONE,
    IDS,
    MODEL,
    PROMPT_TOKENS,
    TEXT,
    chunk,
    openai_events,
    sglang_events,
    usage,
    vllm_events,
)

from dspark.bench.endpoint import AskSettings, Endpoint
from dspark.decoding.request import Round
from dspark.errors import DsparkError

HELLO = [{"role": "user", "content": "hello"}]
DETAILS = {  # SpecTokensDetails
    "spec_accept_rate": 4 / 9,
    "spec_accept_length": 7 / 3,
    "spec_num_correct_drafts": 4,
    "spec_num_proposed_drafts": 9,
    "spec_verify_ct": 3,
    "spec_correct_drafts_histogram": [1, 1, 0, 1],
    "spec_cap_lens_histogram": [],
}
SUMMARY = {  # SpeculativeDecodingMetrics, level `summary`
    "mean_acceptance_length": 7 / 3,
    "draft_acceptance_rate": 4 / 9,
    "acceptance_histogram": [1, 1, 0, 1],
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 9,
    "num_spec_tokens": 3,
}


def ask(server, engine, settings=None, **more):
    """One answer of a checked server."""
    endpoint = Endpoint(server.url, engine, timeout=more.pop("timeout", 30), **more)
    endpoint.check()

    async def once():
        async with endpoint:
            return await endpoint.ask(HELLO, settings or AskSettings(max_tokens=9))

    return asyncio.run(once())


# How many tokens each chunk brought


def test_vllm_tells_tokens_and_ids_of_every_chunk(fake):
    server = fake(vllm_events)
    reply = ask(server, "vllm")
    assert reply.error is None and reply.text == TEXT and reply.finish == "stop"
    assert [tokens for _, tokens in reply.arrivals] == [1, 3, 2, 1] and reply.exact
    assert reply.output_ids == IDS and reply.output_tokens == 7 and reply.prompt_tokens == PROMPT_TOKENS
    times = [seconds for seconds, _ in reply.arrivals]
    assert times == sorted(times) and reply.seconds == times[-1] > 0
    assert reply.rounds is None and reply.histogram is None
    assert server.bodies[-1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_vllm_tells_acceptance_with_the_answer_when_it_was_started_so(fake):
    assert ask(fake(lambda body: vllm_events(body, SUMMARY)), "vllm").histogram == [1, 1, 0, 1]
    detailed = SUMMARY | {"per_step_accepted": [3, 0, 1], "per_step_drafted": [3, 3, 2]}
    reply = ask(fake(lambda body: vllm_events(body, detailed)), "vllm")
    assert reply.rounds == [Round(3, 3, 3), Round(3, 3, 0), Round(2, 2, 1)] and reply.histogram is None
    reply = ask(fake(lambda body: vllm_events(body, {"acceptance_histogram": 3})), "vllm")
    assert reply.error is None and reply.histogram is None


def test_sglang_tells_tokens_of_every_chunk_and_acceptance_at_the_end(fake):
    server = fake(lambda body: sglang_events(body, DETAILS))
    reply = ask(server, "sglang")
    assert reply.error is None and reply.text == TEXT and reply.exact
    assert [tokens for _, tokens in reply.arrivals] == [1, 3, 2, 1]
    assert reply.histogram == [1, 1, 0, 1] and reply.rounds is None and reply.output_ids == IDS
    assert server.bodies[-1]["return_spec_tokens_details"] is True


@pytest.mark.parametrize("details", [None, DETAILS | {"spec_verify_ct": 4}, {"spec_correct_drafts_histogram": []}])
def test_sglang_of_another_time_leaves_a_gap(fake, details):
    reply = ask(fake(lambda body: sglang_events(body, details)), "sglang")
    assert reply.error is None and reply.histogram is None


def test_a_server_that_counts_only_at_the_end_gets_shares_by_characters(fake):
    server = fake(lambda body: openai_events())
    reply = ask(server, "openai")
    assert not reply.exact and sum(tokens for _, tokens in reply.arrivals) == 7
    assert [tokens for _, tokens in reply.arrivals] == [1, 3, 3]  # 3, 12 and 11 of 26 characters
    assert set(server.bodies[-1]) == {
        *("model", "messages", "stream", "stream_options", "max_tokens", "temperature", "top_p"),
    }
    assert server.bodies[-1]["stream_options"] == {"include_usage": True}


def test_thinking_is_kept_apart_and_its_tokens_are_tokens(fake):
    def events(body):
        yield chunk({"reasoning": "Hm."}, usage=usage(2))
        yield chunk({"reasoning_content": " Well."}, usage=usage(3))
        yield chunk({"content": "Yes."}, "stop", usage(5))
        yield chunk(usage=usage(5))
        yield DONE

    server = fake(events)
    reply = ask(server, "vllm", AskSettings(thinking=True))
    assert (reply.reasoning, reply.text) == ("Hm. Well.", "Yes.")
    assert [tokens for _, tokens in reply.arrivals] == [2, 1, 2]
    assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": True, "thinking": True}


def test_every_setting_is_sent(fake):
    server = fake(vllm_events)
    settings = AskSettings(5, 0.7, 0.9, 20, 0.1, seed=4, ignore_eos=True)
    ask(server, "vllm", settings, api_key="secret")
    sent = server.bodies[-1]
    expected = {"max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "seed": 4}
    assert {name: sent[name] for name in expected} == expected and sent["ignore_eos"] is True
    assert sent["repetition_penalty"] == 1.0 and sent["model"] == MODEL


def test_an_empty_answer_is_an_answer(fake):
    def events(body):
        yield chunk({"role": "assistant", "content": ""}, "stop")
        yield chunk(usage=usage(0))
        yield b"data: [DONE]"  # a last line that nothing ends

    reply = ask(fake(events), "openai")
    assert reply.error is None and reply.output_tokens == 0 and reply.arrivals == [] and reply.seconds > 0


def test_comments_and_split_bytes_make_no_difference(fake):
    def events(body):
        yield b": keep-alive\n\nevent: x\r\n"
        for event in (chunk({"content": "ü"}), chunk({}, "length"), chunk(usage=usage(1))):
            line = b"data:" + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
            yield from (line[i : i + 3] for i in range(0, len(line), 3))
        yield DONE

    reply = ask(fake(events), "openai")
    assert reply.error is None and reply.text == "ü" and reply.finish == "length"


def test_characters_that_came_apart_are_joined(fake):
    def events(body):
        for text in ("a\ud83d", "\ude00b\udc00"):
            yield b"data: " + json.dumps(chunk({"content": text})).encode() + b"\n\n"
        yield chunk({}, "stop")
        yield chunk(usage=usage(4))
        yield DONE

    reply = ask(fake(events), "openai")
    assert reply.error is None and reply.text == "a\U0001f600b\ufffd"


@pytest.mark.parametrize(("cached", "expected"), [(None, None), (0, 0), (5, 5), (PROMPT_TOKENS + 1, None)])
def test_the_share_of_the_prefix_cache_is_told(fake, cached, expected):
    assert ask(fake(lambda body: openai_events(cached=cached)), "openai").cached_tokens == expected


# What goes wrong


BROKEN = {
    "without a finish_reason": [chunk({"content": "a"}), DONE],
    "without [DONE]": [chunk({"content": "a"}, "stop"), chunk(usage=usage(1))],
    "told no usage": [chunk({"content": "a"}, "stop"), DONE],
    "no chat completion chunk": [b"data: {nonsense\n\n"],
    "no chat completion chunk: b'[1]'": [b"data: [1]\n\n"],
    "no chat completion chunk: b'{\"choices\": [3]}'": [b'data: {"choices": [3]}\n\n'],
    "the server ended it: out of memory": [chunk({"content": "a"}), {"error": {"message": "out\nof memory"}}, DONE],
    "the server ended it: too long": [{"object": "error", "message": "too long", "code": 400}],
    "finish_reason abort": [chunk({"content": "a"}, "abort"), chunk(usage=usage(1)), DONE],
    "the connection broke": [chunk({"content": "a"}), RuntimeError("killed")],
}


@pytest.mark.parametrize("expected", BROKEN)
def test_a_stream_that_breaks_is_an_error_with_its_reason(fake, expected):
    reply = ask(fake(lambda body: BROKEN[expected]), "openai")
    assert expected in reply.error and "\n" not in reply.error
    assert reply.arrivals is None and reply.output_tokens == 0
    if BROKEN[expected][0] == chunk({"content": "a"}):
        assert reply.text == "a" and reply.error.endswith("(after 1 chunks)")


def said_at_the_end(**more):
    return [chunk({"content": "a"}, "stop"), chunk(usage=usage(1) | more), DONE]


def counts(*values):
    return list(vllm_events({"stream_options": {}}, SUMMARY | {"acceptance_histogram": list(values)}))


LIES = {
    "usage.completion_tokens = -1,": said_at_the_end(completion_tokens=-1),
    "usage.completion_tokens = 1000000000,": said_at_the_end(completion_tokens=10**9),
    "usage.completion_tokens = 7,": said_at_the_end(completion_tokens="7"),
    "usage.completion_tokens = True,": said_at_the_end(completion_tokens=True),
    "usage.completion_tokens = nan,": said_at_the_end(completion_tokens=float("nan")),
    "usage.completion_tokens = many,": [chunk({"content": "a"}, usage=usage(1) | {"completion_tokens": "many"})],
    "usage.completion_tokens = 1 at the end": [chunk({"content": "a"}, usage=usage(5)), *said_at_the_end()],
    "usage.prompt_tokens = -3,": said_at_the_end(prompt_tokens=-3),
    "usage.prompt_tokens_details.cached_tokens = -2,": said_at_the_end(prompt_tokens_details={"cached_tokens": -2}),
    "token_ids = -4,": [chunk({"content": "a"}, token_ids=[-4])],
    "token_ids = ab,": [chunk({"content": "a"}, token_ids="ab")],
    "acceptance_histogram = -1,": counts(4, -1),
    "acceptance_histogram = 1.5,": counts(1.5, 1),
    "acceptance_histogram = None,": counts(1, None),
    "acceptance_histogram = 1000000000,": counts(10**9),
    "the sum of acceptance_histogram = 120,": counts(*[60, 60]),
    "the length of acceptance_histogram = 2000,": counts(*[0] * 2000),
}


@pytest.mark.parametrize("expected", LIES)
def test_numbers_that_cannot_be_are_an_error_that_names_them(fake, expected):
    reply = ask(fake(lambda body: LIES[expected]), "vllm")
    assert f"the server tells {expected}" in reply.error and "\n" not in reply.error
    assert reply.output_tokens == 0 and reply.histogram is None


def test_rounds_that_cannot_be_are_an_error(fake):
    steps = SUMMARY | {"per_step_accepted": [4], "per_step_drafted": [3]}
    assert "per_step_accepted = 4," in ask(fake(lambda body: vllm_events(body, steps)), "vllm").error
    details = DETAILS | {"spec_correct_drafts_histogram": [1, 1, 0, -1]}
    assert "histogram = -1," in ask(fake(lambda body: sglang_events(body, details)), "sglang").error


def test_a_status_of_400_or_more_is_an_error(fake):
    assert ask(fake(vllm_events, status=404), "vllm").error == "HTTP 404: no such thing"


def test_an_answer_that_takes_too_long_is_an_error(fake):
    def events(body):
        yield chunk({"content": "a"})
        time.sleep(1)
        yield chunk({"content": "a"}, "stop")

    reply = ask(fake(events), "openai", timeout=0.2)
    assert reply.error.startswith("timeout: no end within 0.2 seconds")


# Before anything is asked


def refusal(*given, **more):
    with pytest.raises(DsparkError) as error:
        Endpoint(*given, **more).check()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_addresses_and_kinds_are_checked():
    for url in ("127.0.0.1:8000", "ftp://x", "http://", "http://x:port", "http://u:p@x", "http://x?y"):
        with pytest.raises(DsparkError, match="must be an address like"):
            Endpoint(url, "vllm", field="baseline_endpoint")
    for url in ("http://:secret@x", "http://u:secret@x:1/v1", "secret@x", "http://u@x"):
        with pytest.raises(DsparkError, match=r"must be an address like .*--api-key") as error:
            Endpoint(url, "vllm")
        assert "secret" not in str(error.value) and error.value.value.startswith("...@x")
    with pytest.raises(DsparkError, match="must be one of vllm, sglang, dspark, openai"):
        Endpoint("http://x", "tgi")
    with pytest.raises(DsparkError, match="timeout"):
        Endpoint("http://x", "vllm", timeout=0)
    assert (
        Endpoint("http://x:1/v1/", "vllm").url == "http://x:1" and Endpoint("http://x/p/v1", "vllm").url == "http://x/p"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("temperature", -1), ("top_p", 0), ("min_p", 2), ("top_k", 0), ("temperature", float("nan"))],
)
def test_settings_are_checked(name, value):
    with pytest.raises(DsparkError, match=name):
        AskSettings(**{name: value})


def test_a_server_that_is_not_there(fake):
    server = fake(vllm_events)
    server.stop()
    assert refusal(server.url, "vllm", field="baseline_endpoint").startswith("baseline_endpoint = 'http://127.0.0.1")
    assert "cannot be reached" in refusal(server.url, "vllm")


def test_the_model_must_be_served(fake):
    server = fake(vllm_events, cards=[{"id": "a"}, {"id": "b"}])
    assert refusal(server.url, "vllm") == f"model = None: {server.url} serves several, name one of: a, b"
    assert refusal(server.url, "vllm", "c") == f"model = 'c': {server.url} does not serve it but: a, b"
    endpoint = Endpoint(server.url, "vllm", "b")
    endpoint.check()
    assert endpoint.describe()["model"] == "b"
    server.cards = "nonsense"
    assert "lists no models" in refusal(server.url, "vllm")


def test_our_own_server_is_asked_as_such(fake):
    about = {"target": "m", "draft": None, "n": 0, "max_batch": 4}
    server = fake(vllm_events, pages={"/v1/engine": about})
    for engine in ("vllm", "sglang"):
        assert refusal(server.url, engine) == (
            f"engine = '{engine}': {server.url} is `dspark serve`; give --engine dspark"
        )
    for engine in ("dspark", "openai"):
        Endpoint(server.url, engine).check()


def test_names_of_one_server_are_known():
    def same(one, other):
        return Endpoint(one, "vllm").is_same(Endpoint(other, "vllm"))

    assert same("http://127.0.0.1:8000", "http://localhost:8000/v1") and same("http://[::1]", "http://LOCALHOST:80/")
    assert not same("http://127.0.0.1:8000", "http://127.0.0.1:8001") and not same("http://a:1", "http://b:1")
    assert not same("http://a:1/one", "http://a:1/two")


def test_health_is_asked_for(fake):
    assert "is not healthy: HTTP 503" in refusal(fake(vllm_events, pages={"/health": 503}).url, "vllm")
    Endpoint(fake(vllm_events, pages={"/health": 503}).url, "openai").check()


def test_servers_describe_themselves(fake):
    endpoint = Endpoint(fake(vllm_events, pages={"/version": {"version": "0.32.0"}}).url, "vllm")
    endpoint.check()
    told = endpoint.describe()
    assert endpoint.check() == told
    assert (told["version"], told["max_model_len"], told["speculative"]) == ("0.32.0", 4096, {})
    assert endpoint.speculates is None
    info = {  # of server_args: http_server.py merges them with the version
        "model_path": MODEL,
        "api_key": "secret",
        "admin_api_key": "secret",
        "tp_size": 8,
        "speculative_algorithm": "DSPARK",
        "speculative_num_draft_tokens": 8,
        "version": "0.5.23",
        "internal_states": [{}],
    }
    for path in ("/server_info", "/get_server_info"):
        endpoint = Endpoint(fake(sglang_events, pages={path: info}).url, "sglang")
        endpoint.check()
        told = endpoint.describe()
        assert told["settings"] == {"model_path": MODEL, "tp_size": 8} and told["version"] == "0.5.23"
        assert told["speculative"] == {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": 8}
        assert endpoint.speculates and "secret" not in str(told)
