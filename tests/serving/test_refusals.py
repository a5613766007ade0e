"""What is refused names itself, in OpenAI's form; nothing is silently ignored."""

import json

import pytest

from dspark.decoding.request import Request, Result
from dspark.errors import DsparkError
from dspark.serving.refusals import ended_badly

BOTH = {  # parameter -> a value that cannot be served
    "temperature": [-1, "hot", True],
    "top_p": [0, 1.5],
    "top_k": [-2, 1.5],
    "min_p": [-0.1, 2],
    "presence_penalty": [3],
    "frequency_penalty": [-2.5],
    "repetition_penalty": [0, -1],
    "seed": [-1, 2**63, "one"],
    "n": [0, 129],
    "max_tokens": [0, -1, 2.5, 254],
    "min_tokens": [-1, 99],
    "stop": ["", ["a", ""], 5, [str(i) for i in range(17)], "x" * 513],
    "stop_token_ids": [[100], [-1], "2"],
    "include_stop_str_in_output": ["yes"],
    "ignore_eos": [1],
    "logit_bias": [{"a": 1}, {"05": 1}, {"100": 1}, {"5": 101}, [5]],
    "stream": ["true"],
    "stream_options": [{"include_usage": True}],
    "response_format": [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {"schema": {}}},
    ],
    "structured_outputs": [{"regex": "("}, {"choice": ["a"]}, {}, {"regex": None}, {"json_object": False}],
    "guided_regex": ["(", 5],
    "guided_json": ["{", {"type": "nonsense"}],
    "use_beam_search": [True],
    "best_of": [2],
    "echo": [True],
    "length_penalty": [0.5],
    "skip_special_tokens": [False],
    "guided_choice": [["a", "b"]],
    "store": [True],
    "priority": [1],
    "temprature": [1],
    "return_token_ids": ["yes"],
    "rounds": [7],
    "speculate": [0],
}
COMPLETIONS = {
    "prompt": ["", [], [[]], [100], [-1], {"a": 1}, 5, [5, "a"], "x" * 256, [[5], []]],
    "logprobs": [21, -1, True],
    "suffix": ["end"],
    "tools": [[]],
    "messages": [[]],
}
CHAT = {
    "messages": [[], "hello", [{"role": "robot", "content": "a"}], [{"content": "a"}], [{"role": "user", "content": 5}]]
    + [[{"role": "user"}], [{"role": "assistant", "content": "a"}], [{"role": "user", "content": "x" * 300}], [5]]
    + [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]]
    + [[{"role": "user", "content": "a", "name": "me"}], [{"role": "user", "content": "a", "size": 1}]],
    "logprobs": [5],
    "top_logprobs": [2],
    "max_completion_tokens": [0, 255],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required"],
    "functions": [[{"name": "f"}]],
    "modalities": [["audio"]],
    "reasoning_effort": ["high"],
    "prompt": ["abc"],
}


def cases():
    for path, own in (("completions", COMPLETIONS), ("chat/completions", CHAT)):
        for name, values in {**BOTH, **own}.items():
            for value in values:
                yield pytest.param(path, name, value, id=f"{path.split('/')[0]}-{name}-{str(value)[:30]}")


@pytest.mark.parametrize(("path", "name", "value"), list(cases()))
def test_a_refused_parameter_names_itself(live, path, name, value):
    prompt = {"prompt": [5, 6, 7]} if path == "completions" else {"messages": [{"role": "user", "content": "abc"}]}
    base = {"max_tokens": 5} if name != "max_completion_tokens" else {}
    reply = live.post(path, **{**prompt, **base, name: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"].replace("[", ".").split(".")[0] == name, error
    assert error["message"].startswith(f"{error['param']} = ") and "\n" not in error["message"]
    assert len(error["message"]) < 600
    streamed = live.post(path, **{**prompt, **base, "stream": True, name: value})
    if name not in ("stream", "stream_options"):
        assert (streamed.status_code, streamed.json()["error"]) == (400, error)


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("completions", {"prompt": "a", "max_completion_tokens": 3}, "here it is max_tokens"),
        ("completions", {"messages": []}, "it is one of /v1/chat/completions"),
        ("completions", {"prompt": ["a", 1]}, "must be a text, a list of texts, ids, or a list of ids"),
        ("completions", {"prompt": "a", "structured_outputs": {"choice": ["a"]}}, "is not implemented here"),
        ("completions", {"prompt": "a", "echo": True}, "only false is taken"),
        ("chat/completions", {"messages": []}, "messages = []: is empty"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "parts that are"),
    ],
)
def test_what_a_refusal_says(live, path, asked, said):
    message = live.post(path, **asked).json()["error"]["message"]
    assert said in message and "Input should" not in message and "Extra inputs" not in message


@pytest.mark.parametrize(
    ("path", "asked", "said"),
    [
        ("completions", {"seed": "one"}, 'seed = "one": must be an integer'),
        ("completions", {"temperature": True}, "temperature = true: must be a number"),
        ("completions", {"temperature": -1}, "temperature = -1: must be a finite number >= 0 (0 is greedy)"),
        ("completions", {"stream": 0}, "stream = 0: must be true or false"),
        ("completions", {"n": 0}, "n = 0: must be at least 1"),
        ("completions", {"n": 100}, "n = 100: gives 100 choices in all; this server holds 68 at once"),
        ("completions", {"prompt": [[5]] * 65, "n": 2}, "n = 2: gives 130 choices; at most 128 are allowed"),
        ("completions", {"prompt": [[5]] * 100}, "n = 1: gives 100 choices in all; this server holds 68 at once"),
        ("completions", {"prompt": {"a": 1}}, 'prompt = {"a": 1}: must be a text, a list of texts, ids, or a list of'),
        ("completions", {"prompt": [5, 100]}, "prompt = [5, 100]: 100 is no token id; they are 0..99"),
        ("completions", {"prompt": [5] * 256}, f"prompt = {str([5] * 256)[:77]}...: has 256 tokens"),
        ("completions", {"stop_token_ids": [3, -1]}, "stop_token_ids = [3, -1]: -1 is no token id; they are 0..99"),
        ("completions", {"stop": ["a"] * 17}, "has 17 strings; at most 16 are allowed"),
        ("completions", {"stop": ["a", "b\ufffd"]}, 'stop = ["a", "b\ufffd"]: U+FFFD stands for bytes that are no'),
        ("completions", {"stop": "x" * 513}, "a string has 513 characters; at most 512 are allowed"),
        ("completions", {"logit_bias": {"100": 1}}, 'logit_bias = {"100": 1}: "100" is no token id; keys are 0..99'),
        ("completions", {"logit_bias": {"5": 101}}, "logit_bias.5 = 101: must be at most 100"),
        ("completions", {"length_penalty": 2}, "length_penalty = 2: is not implemented here, leave it out; only 1 is"),
        ("completions", {"store": True}, "store = true: is not implemented here, leave it out; only false is taken"),
        ("completions", {"stream_options": {"include_usage": True}}, 'stream_options = {"include_usage": true}: needs'),
        ("completions", {"response_format": {"type": "xml"}}, 'must be "text", "json_object" or "json_schema"'),
        ("completions", {"structured_outputs": {}}, "structured_outputs = {}: asks for nothing; give regex, json or"),
        (
            "completions",
            {"guided_json": {"type": "x"}},
            'guided_json = {"type": "x"}: cannot be enforced: Invalid type: x',
        ),
        (
            "completions",
            {"structured_outputs": {"regex": "(a"}},
            'structured_outputs.regex = "(a": cannot be enforced: in a regular expression, unclosed group',
        ),
        ("completions", {"guided_regex": "a", "guided_json": {}}, "guided_json = {}: cannot be combined with guided_"),
        ("chat/completions", {"messages": 1}, "messages = 1: must be a list"),
        ("chat/completions", {"max_completion_tokens": 300}, "max_completion_tokens = 300: with a prompt of"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x" * 300}]},
            f'messages = [{{"role": "user", "content": "{"x" * 47}...: has 319 tokens',
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "content": "a"}]},
            'messages = [{"role": "assistant", "content": "a"}]: must end with the message to be answered',
        ),
    ],
)
def test_a_refusal_shows_what_was_given_and_says_what_would_be_right(live, path, asked, said):
    prompt = {"prompt": [5, 6, 7]} if path == "completions" else {"messages": [{"role": "user", "content": "abc"}]}
    reply = live.post(path, **{**prompt, **asked})
    message = reply.json()["error"]["message"]
    assert reply.status_code == 400
    assert said in message


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty; it must be a JSON object"),
        (b"{", "the body is not JSON: EOF while parsing an object at line 1 column 1"),
        (b"[1]", "body = [1]: must be a JSON object"),
        (b"null", "body = null: must be a JSON object"),
    ],
)
def test_what_a_body_that_is_no_object_is_told(live, body, said):
    reply = live.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.json()["error"]["message"] == said


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"prompt": "a", "temperature": 0, "temperature": 1}', "temperature"),
        ('{"prompt": "a", "n": null, "n": 2}', "n"),
        ('{"prompt": "a", "guided_json": {"properties": {"b": {}, "\\u0062": {}}}}', "b"),
        ('{"prompt": "a", "user": "a", "user": "a"}', "user"),
    ],
)
def test_a_key_that_is_given_twice(live, body, key):
    reply = live.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, key)
    assert error["message"] == f'"{key}" is given twice in one object; give it once'


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_another_model_is_not_found(live, path):
    asked = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    for name in ("gpt-4", ""):
        reply = live.post(path, model=name, **asked)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
        assert error["message"] == f'model = "{name}": is not served here; "{live.model}" is'
    assert live.post(path, model=live.model, **asked).status_code == 200


def test_where_in_a_message(live):
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": None}]
    assert live.post("chat/completions", messages=messages).json()["error"]["param"] == "messages[1].content"
    messages[1] = {"role": "user", "content": "a", "tool_calls": [{"id": "1"}]}
    assert live.post("chat/completions", messages=messages).json()["error"]["param"] == "messages[1].tool_calls"


def test_too_long_names_both_numbers(live):
    message = live.post(prompt=[5] * 100, max_tokens=200).json()["error"]["message"]
    assert "200" in message and "100 tokens" in message and "156" in message
    error = live.post("chat/completions", messages=[{"role": "user", "content": "x" * 230}], max_tokens=9).json()[
        "error"
    ]
    assert error["code"] == "context_length_exceeded"


def test_what_cannot_be_combined(live):
    two = {"guided_regex": "a", "response_format": {"type": "json_object"}}
    assert live.post(prompt="a", **two).json()["error"]["param"] == "guided_regex"
    assert live.post(prompt="a", guided_regex="a+", min_tokens=3).json()["error"]["param"] == "min_tokens"
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "max_completion_tokens": 4}
    assert live.post("chat/completions", **asked).json()["error"]["param"] == "max_tokens"
    assert live.post(prompt=[[5]] * 65, n=2, max_tokens=1).json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"prompt": "a"', b"[]", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"prompt": "\\ud800"}']
    + [b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}', b"[" * 100_000, b"\x00"],
)
def test_malformed_bodies(live, body):
    reply = live.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] in ("body", "temperature"), reply.text


def test_content_types(live):
    body = json.dumps({"prompt": "a", "max_tokens": 1})
    for media in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = live.client.post("/v1/completions", content=body, headers={"Content-Type": media} if media else {})
        assert reply.status_code == 415 and "application/json" in reply.json()["error"]["message"]
    media = {"Content-Type": "application/json; charset=utf-8"}
    assert live.client.post("/v1/completions", content=body, headers=media).status_code == 200


def test_unknown_paths_and_methods(live):
    assert live.client.get("/v1/embeddings").json()["error"]["type"] == "not_found_error"
    reply = live.client.get("/v1/completions")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")
    assert "GET /v1/completions" in reply.json()["error"]["message"]
    assert live.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_settings_that_leave_nothing_to_go_on_with():
    error = DsparkError("request", "its settings", "exclude every token that could come next")
    refusal = ended_badly(Result(Request([5]), finish_reason="error", error=error))
    assert (refusal.status, refusal.message) == (400, f"the settings of this request {error.remedy}")
