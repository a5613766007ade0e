"""Clients that nobody here wrote, against the real pair: the official `openai` package, LangChain and curl run the same
questions, streamed and not, and get what the engine gives. Slow; `make test-slow`.

LangChain is not among the project's dependencies: `pip install langchain-openai`, or its part is skipped.
"""

import asyncio
import json
import math
import shutil
import subprocess
from dataclasses import dataclass, field

import openai
import pytest
from pydantic import BaseModel
from tests.serving.conftest import Live, events_of

from dspark.checkpoints.builtin import load_named_draft
from dspark.data.chat import ChatRenderer
from dspark.decoding.engine import Engine
from dspark.decoding.grammar import Constraint
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, SamplingSettings
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target

pytestmark = pytest.mark.slow

KEY = "a-key"
QUESTION = "A farmer packs 12 boxes of 24 eggs and sells 7 boxes. How many eggs are left?"
MESSAGES = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": QUESTION}]


class Eggs(BaseModel):
    eggs: int
    sure: bool


SCHEMA = {**Eggs.model_json_schema(), "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "eggs", "schema": SCHEMA, "strict": True}}
SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}

ASKED = {  # name -> parameters, SamplingSettings, Request fields; several choices stream only where the client can
    "greedy": ({"temperature": 0}, {}, {}),
    "seeded": (SEEDED, SEEDED, {}),
    "penalties": (
        {"temperature": 0, "presence_penalty": 0.6, "frequency_penalty": 0.3},
        {"presence_penalty": 0.6, "frequency_penalty": 0.3},
        {},
    ),
    "stop": ({"temperature": 0, "stop": ["eggs", "\n\n"]}, {}, {"stop": ("eggs", "\n\n")}),
    "logprobs": ({"temperature": 0, "logprobs": True, "top_logprobs": 2}, {}, {"logprobs": 2}),
    "schema": (
        {"temperature": 0, "response_format": FORMAT},
        {},
        {"constraint": Constraint("json_schema", json.dumps(SCHEMA))},
    ),
    "three": (SEEDED | {"n": 3}, SEEDED, {}),
}


@dataclass
class Said:
    """One choice, as a client shows it. None: the client does not show it."""

    text: str = ""
    finish: str | None = None
    ids: list[int] | None = None
    logprobs: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def target():
    return load_target(EMBEDDED)


@pytest.fixture(scope="module")
def draft():
    return load_named_draft("embedded")


@pytest.fixture(scope="module")
def live(target, draft):
    server = Live(target, draft, memory=512 << 20, api_key=KEY)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def expected(target, draft):
    """What the engine gives for each of the questions."""
    prompt, found = ChatRenderer(target.tokenizer).prompt_ids(MESSAGES), {}
    engine = Engine(target, make_proposer(target, draft), max_batch=4)
    for name, (sent, sampling, fields) in ASKED.items():
        requests = []
        for choice in range(sent.get("n", 1)):
            seed = {"seed": sampling["seed"] + choice} if "seed" in sampling else {}
            requests.append(Request(prompt, 32, SamplingSettings(**(sampling | seed)), **fields))
        found[name] = [result for _, result in sorted(engine.run(requests), key=lambda pair: pair[0])]
    return found


def check(said, results):
    assert len(said) == len(results)
    for one, result in zip(said, results, strict=True):
        assert (one.text, one.finish) == (result.text, result.finish_reason)
        assert one.ids is None or one.ids == result.output_ids
        if one.logprobs or result.logprobs:
            assert len(one.logprobs) == len(result.logprobs)
            for value, entry in zip(one.logprobs, result.logprobs, strict=True):
                assert math.isclose(value, entry.logprob, abs_tol=1e-3)


def body(live, name, **more):
    return {"model": live.model, "messages": MESSAGES, "max_tokens": 32, **ASKED[name][0], **more}


# The openai package


def whole(completion):
    return [
        Said(
            choice.message.content,
            choice.finish_reason,
            choice.model_extra["token_ids"],
            [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else [],
        )
        for choice in completion.choices
    ]


def joined(chunks):
    said, usage = {}, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            one = said.setdefault(choice.index, Said(ids=[]))
            one.text += choice.delta.content or ""
            one.finish = choice.finish_reason or one.finish
            one.ids += choice.model_extra["token_ids"]
            one.logprobs += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
    return [one for _, one in sorted(said.items())], usage


IDS = {"extra_body": {"return_token_ids": True}}


@pytest.mark.parametrize("name", ASKED)
def test_openai(live, expected, name):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
        completion = client.chat.completions.create(**body(live, name), **IDS)
        check(whole(completion), expected[name])
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        said, counted = joined(client.chat.completions.create(**body(live, name), **usage, **IDS))
        check(said, expected[name])
    ours = sum(len(result.output_ids) for result in expected[name])
    assert completion.usage.completion_tokens == counted.completion_tokens == ours
    assert counted.model_extra["speculation"]["rounds"] == sum(len(result.rounds) for result in expected[name])


def test_openai_async_all_at_once(live, expected):
    async def ask(client, name):
        completion = await client.chat.completions.create(**body(live, name), **IDS)
        stream = await client.chat.completions.create(**body(live, name), stream=True, **IDS)
        return whole(completion), joined([chunk async for chunk in stream])[0]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
            return await asyncio.gather(*(ask(client, name) for name in ASKED))

    for name, (completion, stream) in zip(ASKED, asyncio.run(ask_all()), strict=True):
        check(completion, expected[name])
        check(stream, expected[name])


def test_openai_structured_output(live, expected):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
        asked = {"model": live.model, "messages": MESSAGES, "max_completion_tokens": 32, "temperature": 0}
        parsed = client.chat.completions.parse(**asked, response_format=Eggs).choices[0].message.parsed
        assert parsed == Eggs.model_validate_json(expected["schema"][0].text)
        with client.chat.completions.stream(**asked, response_format=Eggs) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_openai_completions(live, target, draft):
    prompts = ["The capital of France is", "1, 2, 3, 4,"]
    requests = [Request(target.tokenizer(prompt).input_ids, 12, logprobs=2) for prompt in prompts]
    results = [r for _, r in sorted(Engine(target, make_proposer(target, draft)).run(requests), key=lambda p: p[0])]
    asked = {"model": live.model, "prompt": prompts, "max_tokens": 12, "temperature": 0, "logprobs": 2}
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY) as client:
        choices = client.completions.create(**asked).choices
        streamed = ["", ""]
        for chunk in client.completions.create(**asked, stream=True):
            for choice in chunk.choices:
                streamed[choice.index] += choice.text
    assert [choice.text for choice in choices] == streamed == [result.text for result in results]
    for choice, result in zip(choices, results, strict=True):
        for value, entry in zip(choice.logprobs.token_logprobs, result.logprobs, strict=True):
            assert math.isclose(value, entry.logprob, abs_tol=1e-3)
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)


def test_openai_errors(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [live.model]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**body(live, "greedy", temperature=-1))
        assert refused.value.param == "temperature" and "temperature = -1" in str(refused.value)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        with pytest.raises(openai.BadRequestError, match=r"tools = .* is not implemented here"):
            client.chat.completions.create(**body(live, "greedy"), tools=tools)
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=live.model, input="a")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()


# LangChain


@pytest.fixture
def chat(live):
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")

    def make(**parameters):
        settings = {"model": live.model, "base_url": f"{live.url}/v1", "api_key": KEY, "max_tokens": 32}
        return langchain.ChatOpenAI(**settings, **parameters)

    return make


@pytest.mark.parametrize("name", ASKED)
def test_langchain(chat, expected, name):
    sent = dict(ASKED[name][0])
    bound = {"response_format": sent.pop("response_format")} if "response_format" in sent else {}
    model, turns = chat(**sent), [(one["role"], one["content"]) for one in MESSAGES]

    def said(message):
        known = message.response_metadata
        entries = (known.get("logprobs") or {}).get("content") or []
        return Said(message.text, known["finish_reason"], None, [entry["logprob"] for entry in entries])

    generations = model.generate([model._convert_input(turns).to_messages()], **bound).generations[0]
    check([said(generation.message) for generation in generations], expected[name])
    if name != "three":
        whole = None
        for chunk in model.bind(**bound).stream(turns) if bound else model.stream(turns):
            whole = chunk if whole is None else whole + chunk
        check([said(whole)], expected[name])


def test_langchain_structured_output(chat, expected):
    model = chat(temperature=0).with_structured_output(Eggs, method="json_schema")
    found = model.invoke([(one["role"], one["content"]) for one in MESSAGES])
    assert found == Eggs.model_validate_json(expected["schema"][0].text)


# curl


@pytest.mark.skipif(
    shutil.which("curl") is None, reason="curl is not installed; the other clients cover the same requests"
)
@pytest.mark.parametrize("name", ASKED)
def test_curl(live, expected, name):
    def curl(**more):
        command = ["curl", "-sS", "--noproxy", "*", "-N", f"{live.url}/v1/chat/completions", "-d", "@-"]
        command += ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {KEY}"]
        sent = json.dumps(body(live, name, return_token_ids=True, **more)).encode()
        return subprocess.run(command, input=sent, capture_output=True, check=True, timeout=120).stdout

    def logprobs(choice):
        return [entry["logprob"] for entry in choice["logprobs"]["content"]] if choice["logprobs"] else []

    choices = json.loads(curl())["choices"]
    said = [Said(c["message"]["content"], c["finish_reason"], c["token_ids"], logprobs(c)) for c in choices]
    check(said, expected[name])
    parts = [Said(ids=[]) for _ in expected[name]]
    *events, done = events_of(curl(stream=True))
    assert done == "[DONE]"
    for event in events:
        (choice,) = json.loads(event)["choices"]
        one = parts[choice["index"]]
        one.text += choice["delta"]["content"]
        one.finish = choice["finish_reason"] or one.finish
        one.ids += choice["token_ids"]
        one.logprobs += logprobs(choice)
    check(parts, expected[name])
