"""From a body to engine requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.data.chat import ChatRenderer
from dspark.data.prompts import is_unicode
from dspark.decoding.grammar import Constraint
from dspark.decoding.request import Request, SamplingSettings
from dspark.errors import DsparkError
from dspark.serving.schemas import Body, ChatBody, CompletionBody
from dspark.targets.base import Target

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions when it is not given (OpenAI's)."""
MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 16, 512


@dataclass(frozen=True)
class Asked:
    """What a body asks for: `requests` in the order of its choices, `n` for each of `prompts`.

    names: what the client calls the engine's fields, for errors.
    """

    body: Body
    prompts: list[list[int]]
    requests: list[Request]
    names: dict[str, str] = field(default_factory=dict)


class Converter:
    """Makes requests for one target.

    tokenizer: not the engine's own object, which another thread uses; max_context: tokens of prompt and answer;
    timeout: seconds that every request has.
    """

    def __init__(self, target: Target, tokenizer: Any, max_context: int, timeout: float | None) -> None:
        self.model = Path(target.name).name  # a folder's path is nobody's business
        self.vocab_size, self.stop_ids = target.vocab_size, target.stop_ids
        self.tokenizer, self.max_context, self.timeout = tokenizer, max_context, timeout
        self.renderer = ChatRenderer(tokenizer) if getattr(tokenizer, "chat_template", None) else None

    def completion(self, body: CompletionBody) -> Asked:
        """Raises DsparkError that names the parameter that cannot be served."""
        prompts = [self._prompt_ids(prompt) for prompt in _prompts(body)]
        names = {"stop_ids": "stop_token_ids"}
        requests = self._requests(body, prompts, COMPLETION_TOKENS, "max_tokens", body.logprobs, names)
        return Asked(body, prompts, requests, names)

    def chat(self, body: ChatBody) -> Asked:
        """Raises DsparkError that names the parameter that cannot be served."""
        if self.renderer is None:
            raise DsparkError("messages", len(body.messages), f"{self.model} has no chat template; use /v1/completions")
        if body.top_logprobs is not None and not body.logprobs:
            raise DsparkError("top_logprobs", body.top_logprobs, "needs logprobs: true")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise DsparkError("max_tokens", body.max_tokens, "give it or max_completion_tokens, not both")
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        prompt = self.renderer.prompt_ids(messages)
        limit = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        names = {"prompt": "messages", "max_tokens": limit, "logprobs": "top_logprobs", "stop_ids": "stop_token_ids"}
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        return Asked(body, [prompt], self._requests(body, [prompt], None, limit, logprobs, names), names)

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not is_unicode(prompt):
            raise DsparkError("prompt", prompt[:60], "is not Unicode text")
        return list(self.tokenizer(prompt).input_ids)

    def _requests(
        self,
        body: Body,
        prompts: list[list[int]],
        default: int | None,
        limit: str,
        logprobs: int | None,
        names: dict[str, str],
    ) -> list[Request]:
        """`n` requests for each prompt; `limit`: the name of the parameter that bounds the answer."""
        if body.model is not None and body.model != self.model:
            raise DsparkError("model", body.model, f"is not served here; {self.model!r} is")
        if body.stream_options is not None and not body.stream:
            raise DsparkError("stream_options", "given", "needs stream: true")
        if len(prompts) * body.n > MAX_CHOICES:
            raise DsparkError("n", body.n, f"gives {len(prompts) * body.n} choices; at most {MAX_CHOICES} are allowed")
        constraint, source = _constraint(body)
        names |= {"json_schema": source, "json_object": source, "regex": source, "constraint": source}
        wanted = getattr(body, limit)
        stops = self._stop_ids(body)
        requests = []
        for prompt in prompts:
            room = self.max_context - len(prompt)
            if room < 1:
                raise DsparkError("prompt", f"{len(prompt)} tokens", f"the context is {self.max_context} tokens here")
            if wanted is not None and wanted > room:
                raise DsparkError(
                    "max_tokens",
                    wanted,
                    f"with a prompt of {len(prompt)} tokens, at most {room} fit the context of {self.max_context}",
                )
            for choice in range(body.n):
                requests.append(
                    Request(
                        prompt_ids=prompt,
                        max_tokens=wanted or (room if default is None else min(default, room)),
                        sampling=_sampling(body, choice),
                        stop_ids=stops,
                        min_tokens=body.min_tokens,
                        stop=_stops(body),
                        include_stop=body.include_stop_str_in_output,
                        logprobs=logprobs,
                        constraint=constraint,
                        timeout=self.timeout,
                        speculate=body.speculate,
                    )
                )
        return requests

    def _stop_ids(self, body: Body) -> frozenset[int]:
        for token in body.stop_token_ids:
            if not 0 <= token < self.vocab_size:
                raise DsparkError("stop_token_ids", token, f"token ids are 0..{self.vocab_size - 1}")
        return frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.stop_ids)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise DsparkError("prompt", prompt, "is empty; give at least one token")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def _sampling(body: Body, choice: int) -> SamplingSettings:
    return SamplingSettings(
        temperature=body.temperature,
        top_k=max(body.top_k, 0),  # vLLM's -1 is our 0: every token
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed + choice,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(sorted((_token(key), bias) for key, bias in body.logit_bias.items())),
    )


def _token(key: str) -> int:
    if not key.isdecimal() or str(int(key)) != key:
        raise DsparkError("logit_bias", key, 'keys are token ids, e.g. {"40": -5}')
    return int(key)


def _stops(body: Body) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stops) > MAX_STOPS:
        raise DsparkError("stop", f"{len(stops)} strings", f"at most {MAX_STOPS} are allowed")
    for stop in stops:
        if len(stop) > MAX_STOP_LENGTH:
            raise DsparkError("stop", f"{len(stop)} characters", f"at most {MAX_STOP_LENGTH} are allowed")
    return stops


def _constraint(body: Body) -> tuple[Constraint | None, str]:
    """The grammar that a body asks for, and the parameter that does."""
    found: dict[str, Constraint] = {}
    form, structured = body.response_format, body.structured_outputs
    if form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise DsparkError("response_format.json_schema", None, "is needed for this type")
        found["response_format"] = _schema(form.json_schema.schema_)
    elif form is not None:
        if form.json_schema is not None:
            raise DsparkError("response_format.json_schema", "given", 'needs type "json_schema"')
        if form.type == "json_object":
            found["response_format"] = Constraint("json_object")
    if structured is not None:
        if structured.regex is not None:
            found["structured_outputs.regex"] = Constraint("regex", structured.regex)
        if structured.json_ is not None:
            found["structured_outputs.json"] = _schema(structured.json_)
        if structured.json_object:
            found["structured_outputs.json_object"] = Constraint("json_object")
    if body.guided_regex is not None:
        found["guided_regex"] = Constraint("regex", body.guided_regex)
    if body.guided_json is not None:
        found["guided_json"] = _schema(body.guided_json)
    if len(found) > 1:
        first, second = list(found)[:2]
        raise DsparkError(second, "given", f"cannot be combined with {first}")
    return (next(iter(found.values())), next(iter(found))) if found else (None, "constraint")


def _schema(schema: dict[str, Any] | bool | str) -> Constraint:
    return Constraint("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
