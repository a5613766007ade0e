"""Every parameter does over HTTP what the engine does with the same request, and a stream says what the whole says."""

import json
import math
from itertools import chain

import pytest
from tests.decoding.conftest import PROMPTS
from tests.serving.conftest import chat_ids

from dspark.decoding.grammar import Constraint
from dspark.decoding.request import Request, SamplingSettings

GREEDY = {"temperature": 0}
SEEDED = {"temperature": 0.9, "seed": 11}
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
REGEX = "[a-f]{3,9}[0-9]+x"
STOP = frozenset({2})

CASES = {  # name -> what is sent, SamplingSettings, Request fields
    "greedy": (GREEDY, {}, {}),
    "seeded": (SEEDED, SEEDED, {}),
    "top_k": (SEEDED | {"top_k": 6}, SEEDED | {"top_k": 6}, {}),
    "top_k -1": (SEEDED | {"top_k": -1}, SEEDED, {}),
    "top_p": (SEEDED | {"top_p": 0.8}, SEEDED | {"top_p": 0.8}, {}),
    "min_p": (SEEDED | {"min_p": 0.05}, SEEDED | {"min_p": 0.05}, {}),
    "presence": (GREEDY | {"presence_penalty": 1.5}, {"presence_penalty": 1.5}, {}),
    "frequency": (GREEDY | {"frequency_penalty": 0.7}, {"frequency_penalty": 0.7}, {}),
    "repetition": (GREEDY | {"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}, {}),
    "bias": (
        GREEDY | {"logit_bias": {"40": 6, "41": -100, "33": 5.0}},
        {"logit_bias": ((33, 5.0), (40, 6.0), (41, -100.0))},
        {},
    ),
    "eos": (GREEDY | {"logit_bias": {"2": 5}}, {"logit_bias": ((2, 5.0),)}, {}),
    "min_tokens": (
        GREEDY | {"logit_bias": {"2": 5}, "min_tokens": 9},
        {"logit_bias": ((2, 5.0),)},
        {"min_tokens": 9},
    ),
    "ignore_eos": (
        GREEDY | {"logit_bias": {"2": 5}, "ignore_eos": True},
        {"logit_bias": ((2, 5.0),)},
        {"ignore_eos": True},
    ),
    "stop_token_ids": (
        GREEDY | {"stop_token_ids": list(range(30, 45))},
        {},
        {"stop_ids": STOP | frozenset(range(30, 45))},
    ),
    "stop ids without eos": (
        GREEDY | {"stop_token_ids": [30, 31, 32, 33, 34, 35], "ignore_eos": True, "logit_bias": {"2": 4}},
        {"logit_bias": ((2, 4.0),)},
        {"stop_ids": frozenset(range(30, 36))},
    ),
    "regex": (GREEDY | {"structured_outputs": {"regex": REGEX}}, {}, {"constraint": Constraint("regex", REGEX)}),
    "guided": (SEEDED | {"guided_regex": REGEX}, SEEDED, {"constraint": Constraint("regex", REGEX)}),
    "json_object": (
        GREEDY | {"response_format": {"type": "json_object"}, "frequency_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"constraint": Constraint("json_object")},
    ),
    "json_schema": (
        GREEDY | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {},
        {"constraint": Constraint("json_schema", json.dumps(SCHEMA))},
    ),
    "text": (GREEDY | {"response_format": {"type": "text"}}, {}, {}),
    "plainly": (SEEDED | {"speculate": False}, SEEDED, {"speculate": False}),
}


def same(choice, result):
    assert choice["token_ids"] == result.output_ids
    assert (choice["text"] if "text" in choice else choice["message"]["content"]) == result.text
    assert (choice["finish_reason"], choice["stop_reason"]) == (result.finish_reason, result.stop_reason)


def joined(parts):
    return list(chain.from_iterable(parts))


def speculation(results):
    rounds = [one for result in results for one in result.rounds]
    accepted = sum(one.accepted for one in rounds)
    return {
        "rounds": len(rounds),
        "proposed": sum(one.proposed for one in rounds),
        "scheduled": sum(one.scheduled for one in rounds),
        "accepted": accepted,
        "histogram": [sum(one.accepted == k for one in rounds) for k in range(8)],
        "acceptance_length": 1 + accepted / len(rounds) if rounds else None,
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_parameter_does_what_the_engine_does(live, reference, target, case, path):
    sent, sampling, fields = CASES[case]
    prompt = PROMPTS[0] if path == "completions" else chat_ids(target, "abc")
    given = {"prompt": prompt} if path == "completions" else {"messages": [{"role": "user", "content": "abc"}]}
    reply = live.post(path, **given, **sent, max_tokens=30, return_token_ids=True)
    assert reply.status_code == 200, reply.text
    expected = reference(Request(prompt, 30, SamplingSettings(**sampling), **fields))[0]
    answer = reply.json()
    same(answer["choices"][0], expected)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(expected.output_ids))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["speculation"] == speculation([expected])
    chunks = live.stream(path, **given, **sent, max_tokens=30, return_token_ids=True)
    assert joined(chunk["choices"][0]["token_ids"] for chunk in chunks) == expected.output_ids


def test_the_cases_differ(reference):
    """A case that changes nothing proves nothing."""
    outputs = {}
    for case, (_, sampling, fields) in CASES.items():
        outputs[case] = reference(Request(PROMPTS[0], 30, SamplingSettings(**sampling), **fields))[0].output_ids
    same_as = {"top_k -1": "seeded", "plainly": "seeded", "text": "greedy"}
    for case, ids in outputs.items():
        base = "seeded" if "seed" in CASES[case][1] else "greedy"
        assert case == base or (ids == outputs[base]) == (case in same_as), case


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(live, reference, include):
    text = reference(Request(PROMPTS[0], 30))[0].text
    for stop in (text[6:8], text[11], text[3:9]):
        expected = reference(Request(PROMPTS[0], 30, stop=(stop, "never"), include_stop=include))[0]
        assert expected.finish_reason == "stop" and expected.text.endswith(stop) == include
        sent = {"stop": [stop, "never"], "include_stop_str_in_output": include, **GREEDY}
        reply = live.post(prompt=PROMPTS[0], max_tokens=30, return_token_ids=True, **sent).json()
        same(reply["choices"][0], expected)
        chunks = live.stream(prompt=PROMPTS[0], max_tokens=30, **sent)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected.text
        one = live.post(prompt=PROMPTS[0], max_tokens=30, **(sent | {"stop": stop})).json()
        assert one["choices"][0]["text"] == expected.text


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_says_what_the_whole_answer_says(live, path, sampling):
    chat = path.startswith("chat")
    asked = {"messages": [{"role": "user", "content": "abc"}]} if chat else {"prompt": PROMPTS[2]}
    asked |= {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    asked |= {**sampling, "max_tokens": 40, "n": 3, "return_token_ids": True, "rounds": True}
    whole = live.post(path, **asked).json()
    chunks = live.stream(path, **asked, stream_options={"include_usage": True})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]} and chunks[0]["id"] != whole["id"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1]) and chunks[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens", "speculation")
    assert {name: chunks[-1]["usage"][name] for name in counts} == {name: whole["usage"][name] for name in counts}
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        if chat:
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(part["delta"]["content"] for part in parts)
            assert text == choice["message"]["content"]
        else:
            text = "".join(part["text"] for part in parts)
            assert text == choice["text"]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert joined(part["token_ids"] for part in parts) == choice["token_ids"]
        assert [part["round"] for part in parts if "round" in part] == choice["rounds"]
        streamed = [part["logprobs"] for part in parts if part["logprobs"]]
        for name in ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            close(joined(one[name] for one in streamed), choice["logprobs"][name])


def close(ours, theirs):
    """Equal, numbers up to the last bits that the batch decides."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for key in theirs:
            close(ours[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            close(one, other)
    elif isinstance(theirs, float):
        assert math.isclose(ours, theirs, abs_tol=1e-4)
    else:
        assert ours == theirs


def test_logprobs_are_the_engines(live, reference, target):
    result = reference(Request(PROMPTS[0], 20, logprobs=4))[0]
    tokens = target.tokenizer.convert_ids_to_tokens
    said = live.post(prompt=PROMPTS[0], max_tokens=20, logprobs=4, **GREEDY).json()["choices"][0]["logprobs"]
    close(said["token_logprobs"], [one.logprob for one in result.logprobs])
    assert said["tokens"] == [tokens(one.token) for one in result.logprobs]
    for top, one in zip(said["top_logprobs"], result.logprobs, strict=True):
        close(top, {tokens(token): value for token, value in [*one.top, (one.token, one.logprob)]})
    for token, start in zip(said["tokens"], said["text_offset"], strict=True):
        assert token.startswith("<|") or token == result.text[start : start + len(token)]


def test_chat_logprobs_have_bytes(live, reference, target):
    result = reference(Request(chat_ids(target, "abc"), 12, logprobs=2))[0]
    asked = {"messages": [{"role": "user", "content": "abc"}], "max_completion_tokens": 12, **GREEDY}
    said = live.post("chat/completions", **asked, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    for entry, one in zip(said["content"], result.logprobs, strict=True):
        close(entry["logprob"], one.logprob)
        assert bytes(entry["bytes"]).decode() == entry["token"] == target.tokenizer.convert_ids_to_tokens(one.token)
        close([alternative["logprob"] for alternative in entry["top_logprobs"]], [value for _, value in one.top])
    bare = live.post("chat/completions", **asked, logprobs=True).json()["choices"][0]["logprobs"]
    assert all(entry["top_logprobs"] == [] for entry in bare["content"])


def test_n_choices_have_seeds_of_their_own(live, reference):
    reply = live.post(prompt=PROMPTS[0], max_tokens=25, n=5, **SEEDED, return_token_ids=True).json()
    requests = [Request(PROMPTS[0], 25, SamplingSettings(0.9, seed=11 + i)) for i in range(5)]
    results = reference(*requests)
    assert [choice["index"] for choice in reply["choices"]] == list(range(5))
    for choice, result in zip(reply["choices"], results, strict=True):
        same(choice, result)
    assert len({tuple(result.output_ids) for result in results}) == 5
    assert reply["usage"]["prompt_tokens"] == len(PROMPTS[0])
    assert reply["usage"]["speculation"]["accepted"] == speculation(results)["accepted"]


@pytest.mark.parametrize("kind", ["ids", "texts"])
def test_several_prompts(live, reference, target, kind):
    prompts = PROMPTS if kind == "ids" else ["abc", "Hello, you", "12 * 3"]
    ids = prompts if kind == "ids" else [target.tokenizer(prompt).input_ids for prompt in prompts]
    reply = live.post(prompt=prompts, max_tokens=10, n=2, **SEEDED, return_token_ids=True).json()
    requests = [Request(prompt, 10, SamplingSettings(0.9, seed=11 + i)) for prompt in ids for i in range(2)]
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(prompts)))
    for choice, request, result in zip(reply["choices"], requests, reference(*requests), strict=True):
        assert choice["prompt_token_ids"] == request.prompt_ids
        same(choice, result)
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_defaults(live, reference, target):
    """16 tokens for a completion, the rest of the context for a chat; OpenAI's temperature of 1."""
    bias = {"logit_bias": {"2": -100}}
    reply = live.post(prompt="abc", seed=3, return_token_ids=True, **bias).json()
    sampling = SamplingSettings(1.0, seed=3, logit_bias=((2, -100.0),))
    same(reply["choices"][0], reference(Request(target.tokenizer("abc").input_ids, 16, sampling))[0])
    prompt = chat_ids(target, "abc")
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}], "seed": 3, **bias}
    reply = live.post("chat/completions", **asked, return_token_ids=True).json()
    assert reply["prompt_token_ids"] == prompt
    same(reply["choices"][0], reference(Request(prompt, 256 - len(prompt), sampling))[0])
    assert len(reply["choices"][0]["token_ids"]) == 256 - len(prompt)


def test_rounds_say_who_wrote_which_token(live, reference):
    result = reference(Request(PROMPTS[0], 30))[0]
    rounds = live.post(prompt=PROMPTS[0], max_tokens=30, rounds=True, **GREEDY).json()["choices"][0]["rounds"]
    first, others = rounds[0], rounds[1:]
    assert (first["proposed"], first["scheduled"], first["accepted"]) == (None, None, None)
    assert [t["id"] for one in rounds for t in one["tokens"]] == result.output_ids
    assert "".join(t["text"] for one in rounds for t in one["tokens"]) == result.text
    for said, record in zip(others, result.rounds, strict=True):
        assert (said["proposed"], said["scheduled"], said["accepted"]) == (
            record.proposed,
            record.scheduled,
            record.accepted,
        )
        assert sum(t["drafted"] for t in said["tokens"]) == record.accepted
        assert len(said["confidence"]) == record.scheduled and all(0 < p < 1 for p in said["confidence"])
    assert not any(t["drafted"] for t in first["tokens"])


def test_a_prefix_that_is_known_is_not_read_again(live):
    prompt = list(range(20, 80))
    first = live.post(prompt=prompt, max_tokens=20, **GREEDY).json()
    second = live.post(prompt=prompt, max_tokens=20, **GREEDY).json()
    assert second["choices"] == first["choices"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1
    assert second["usage"]["speculation"] == first["usage"]["speculation"]


def test_parameters_at_the_value_that_asks_for_nothing_are_taken(live):
    nothing = {"user": "me", "metadata": {"a": "b"}, "store": False, "use_beam_search": False, "stop": None}
    plain = live.post(prompt=PROMPTS[0], **GREEDY).json()["choices"]
    sent = {**GREEDY, **nothing, "echo": False, "best_of": 1, "suffix": None, "model": live.model}
    assert live.post(prompt=PROMPTS[0], **sent).json()["choices"] == plain
    asked = {"messages": [{"role": "user", "content": "abc", "name": None}], "max_tokens": 5, **GREEDY, **nothing}
    asked |= {"tools": [], "tool_choice": "none", "parallel_tool_calls": False, "functions": None}
    assert live.post("chat/completions", **asked).status_code == 200
