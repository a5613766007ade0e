"""Bodies of the two endpoints. Nothing is silently ignored: a parameter is implemented, or refused by name.

Parameters that OpenAI or vLLM know and we do not implement are taken at the value that asks for nothing (`NEUTRAL`),
and those that change no answer in OpenAI's API either (`NO_EFFECT`) at any value. null stands for "not given".
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, from_json

from dspark.errors import DsparkError
from dspark.serving.refusals import Refusal

NO_EFFECT = {"user", "metadata", "safety_identifier", "prompt_cache_key"}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "priority": (0,),
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "cache_salt": (),
    "request_id": (),
}
"""Name -> the values, besides null, at which a parameter that is not implemented may be given."""

NEUTRAL_COMPLETION: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "add_special_tokens": (True,),
    "prompt_embeds": (),
}

NEUTRAL_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "echo": (False,),
    "best_of": (1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "include_reasoning": (True, False),
}

NEUTRAL_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "function_call": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "reasoning_content": ("",),
}

ELSEWHERE = {
    "max_completion_tokens": "here it is max_tokens",
    "messages": "it is one of /v1/chat/completions",
    "prompt": "it is one of /v1/completions",
    "top_logprobs": "here logprobs is their number",
    "input": "here it is prompt, or messages of /v1/chat/completions",
}
"""Parameters of other endpoints, and what to do about them."""

SHAPES = {
    "prompt": "must be a text, a list of texts, ids, or a list of ids",
    "stop": "must be a text or a list of texts",
    "content": "must be a text, or a list of parts that are texts",
}
"""What a parameter of several types may be."""

WANTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
"""Pydantic's kinds of errors -> what it would have taken."""


class Part(BaseModel):
    """Of anything in a body: no other fields, no conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Part):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Part):
    """vLLM's: one of them."""

    regex: str | None = None
    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None


class Body(Part):
    """What both endpoints understand."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=128)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = Field(0, ge=-1)
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = {}
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_regex: str | None = None
    guided_json: dict[str, Any] | str | None = None
    return_token_ids: bool = False
    rounds: bool = False
    speculate: bool = True
    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    def given(self, path: str, otherwise: object = None) -> object:
        """What the client gave under a path like `messages[0].content`: the default of a parameter that it left out,
        `otherwise` where there is nothing of that name."""
        value: Any = self._raw
        try:
            for part in re.findall(r"[^.\[\]]+", path):
                value = value[int(part) if isinstance(value, list) else part]
        except (KeyError, IndexError, TypeError, ValueError):
            return getattr(self, path, otherwise)
        return value


class CompletionBody(Body):
    """Of /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None


class TextPart(Part):
    type: Literal["text"]
    text: str


class ChatMessage(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Body):
    """Of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = None


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """A body of this kind. Raises DsparkError that names the first parameter that is wrong, and Refusal for a body that
    is not JSON or gives a key twice."""
    try:
        raw = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        problem = f"is not JSON: {error}" if body.strip() else "is empty; it must be a JSON object"
        raise Refusal(400, f"the body {problem}", "body", "invalid_value") from None
    if not isinstance(raw, dict):
        raise DsparkError("body", raw, "must be a JSON object")
    json.loads(body.decode(), object_pairs_hook=_once, parse_int=str)  # the parser above keeps the last of two
    chat = issubclass(kind, ChatBody)
    neutral = {**NEUTRAL, **(NEUTRAL_CHAT if chat else NEUTRAL_COMPLETION)}
    raw = _given(raw, _names(kind), neutral, "")
    messages = raw.get("messages")
    if chat and isinstance(messages, list):
        raw["messages"] = [
            _given(message, _names(ChatMessage), NEUTRAL_MESSAGE, f"messages[{index}].")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    try:
        read = kind.model_validate(raw)
    except ValidationError as error:
        raise _first(error, raw) from None
    read._raw = raw
    return read


def _once(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            message = f"{json.dumps(key, ensure_ascii=False)} is given twice in one object; give it once"
            raise Refusal(400, message, key, "invalid_value")
        seen.add(key)


def _names(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


def _given(raw: dict[str, Any], known: set[str], neutral: dict[str, tuple[Any, ...]], where: str) -> dict[str, Any]:
    """What is left to read: without nulls and what asks for nothing. Raises DsparkError for a parameter that we do
    not implement or that nobody knows."""
    given = {}
    for name, value in raw.items():
        if name in known:
            if value is not None:
                given[name] = value
        elif name in neutral:
            allowed = neutral[name]
            if value is not None and not any(_same(value, one) for one in allowed):
                kept = f"; only {' or '.join(map(json.dumps, allowed))} is taken" if allowed else ""
                raise DsparkError(where + name, value, f"is not implemented here, leave it out{kept}")
        elif where or name not in NO_EFFECT:
            close = get_close_matches(name, known, 1)
            remedy = f"did you mean {close[0]}?" if close else "leave it out"
            remedy = remedy if where else ELSEWHERE.get(name, remedy)
            raise DsparkError(where + name, value, f"is no parameter of this endpoint: {remedy}")
    return given


def _same(value: object, one: object) -> bool:
    return value == one and isinstance(value, bool) == isinstance(one, bool)


def _first(error: ValidationError, raw: dict[str, Any]) -> DsparkError:
    """The first thing that is wrong, under its name in the body."""
    problems = error.errors(include_url=False)
    first = problems[0]
    value: Any = raw
    name, depth = "", 0
    for part in first["loc"]:  # the names of a union's members are in it too, and they are not in the body
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            if first["type"] == "missing":
                name += f".{part}"
                value, depth = None, depth + 1
            break
        depth += 1
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    wanted = list(dict.fromkeys(_wanted(one) for one in problems if one["loc"][:depth] == first["loc"][:depth]))
    shape = SHAPES.get(name.rpartition(".")[2].partition("[")[0])
    if first["type"] == "missing":
        remedy = "is needed"
    elif first["type"] == "extra_forbidden":
        remedy = "is not implemented here, leave it out"
    elif first["type"] == "too_short":
        remedy = "is empty"
    else:
        remedy = shape if len(wanted) > 1 and shape is not None else f"must be {' or '.join(wanted)}"
    return DsparkError(name.removeprefix("."), value, remedy)


def _wanted(problem: ErrorDetails) -> str:
    """What would be right there, in JSON's words."""
    context = problem.get("ctx", {})
    match problem["type"]:
        case "literal_error":
            return str(context["expected"]).replace("'", '"').replace("False", "false")
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case kind:
            return WANTED.get(kind, problem["msg"].removeprefix("Input should be "))
