"""From a body to engine requests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dspark.data.chat import ChatRenderer
from dspark.decoding.grammar import Constraint, GrammarCompiler
from dspark.decoding.request import Request, SamplingSettings
from dspark.decoding.text import HALF_CHARACTER
from dspark.errors import DsparkError
from dspark.serving.constraints import constraint_of
from dspark.serving.refusals import TooLong, as_given, no_model, shown
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
        self.grammars = GrammarCompiler(tokenizer, target.vocab_size)
        self.renderer = ChatRenderer(tokenizer) if getattr(tokenizer, "chat_template", None) else None

    def completion(self, body: CompletionBody) -> Asked:
        """Raises DsparkError that names the parameter that cannot be served, and Refusal for another model."""
        self._check_model(body)
        prompts = [self._prompt_ids(prompt) for prompt in _prompts(body)]
        return self._asked(body, prompts, body.max_tokens, COMPLETION_TOKENS, body.logprobs, {})

    def chat(self, body: ChatBody) -> Asked:
        """Raises DsparkError that names the parameter that cannot be served, and Refusal for another model."""
        self._check_model(body)
        if self.renderer is None:
            remedy = f"{self.model} has no chat template; use /v1/completions"
            raise DsparkError("messages", body.given("messages"), remedy)
        if body.top_logprobs is not None and not body.logprobs:
            raise DsparkError("top_logprobs", body.top_logprobs, "needs logprobs: true")
        if body.max_tokens is not None and body.max_completion_tokens is not None:
            raise DsparkError("max_tokens", body.max_tokens, "give it or max_completion_tokens, not both")
        names = {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        try:
            prompt = self.renderer.prompt_ids([{"role": one.role, "content": one.text} for one in body.messages])
        except DsparkError as error:
            raise as_given(error, body, names) from None
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limit = body.max_tokens or body.max_completion_tokens
        return self._asked(body, [prompt], limit, self.max_context, logprobs, names)

    def _check_model(self, body: Body) -> None:
        if body.model is not None and body.model != self.model:
            raise no_model(body.model, self.model)

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        ids = list(self.tokenizer(prompt).input_ids) if isinstance(prompt, str) else prompt
        if not ids:
            raise DsparkError("prompt", prompt, "is empty; give at least one token")
        for token in ids:
            self._check_id("prompt", prompt, token)
        return ids

    def _check_id(self, name: str, value: object, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise DsparkError(name, value, f"{token} is no token id; they are 0..{self.vocab_size - 1}")

    def _asked(
        self,
        body: Body,
        prompts: list[list[int]],
        limit: int | None,
        default: int,
        logprobs: int | None,
        names: dict[str, str],
    ) -> Asked:
        """`n` requests for each prompt, of `limit` answer tokens, or `default` of them as far as they fit."""
        if body.stream_options is not None and not body.stream:
            raise DsparkError("stream_options", body.given("stream_options"), "needs stream: true")
        if len(prompts) * body.n > MAX_CHOICES:
            raise DsparkError("n", body.n, f"gives {len(prompts) * body.n} choices; at most {MAX_CHOICES} are allowed")
        constraint, source = constraint_of(body)
        names |= {"json_schema": source, "json_object": source, "regex": source, "constraint": source}
        try:
            if constraint is not None:
                self.grammars.compile(constraint)  # here, so that the engine's thread has only to copy it
            requests = []
            for prompt in prompts:
                request = self._request(body, prompt, limit, default, logprobs, constraint)
                for choice in range(body.n):
                    requests.append(replace(request, sampling=self._sampling(body, choice)))
        except DsparkError as error:
            raise as_given(error, body, names) from None
        return Asked(body, prompts, requests, names)

    def _request(
        self,
        body: Body,
        prompt: list[int],
        limit: int | None,
        default: int,
        logprobs: int | None,
        constraint: Constraint | None,
    ) -> Request:
        room = self.max_context - len(prompt)
        if room < 1:
            remedy = f"has {len(prompt)} tokens; with an answer of one at least, {self.max_context - 1} fit the context"
            raise TooLong("prompt", prompt, f"{remedy} of {self.max_context}")
        if limit is not None and limit > room:
            remedy = f"with a prompt of {len(prompt)} tokens, at most {room} fit the context of {self.max_context}"
            raise TooLong("max_tokens", limit, remedy)
        return Request(
            prompt_ids=prompt,
            max_tokens=limit or min(default, room),
            stop_ids=self._stop_ids(body),
            min_tokens=body.min_tokens,
            stop=_stops(body),
            include_stop=body.include_stop_str_in_output,
            logprobs=logprobs,
            constraint=constraint,
            timeout=self.timeout,
            speculate=body.speculate,
        )

    def _stop_ids(self, body: Body) -> frozenset[int]:
        for token in body.stop_token_ids:
            self._check_id("stop_token_ids", body.stop_token_ids, token)
        return frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self.stop_ids)

    def _sampling(self, body: Body, choice: int) -> SamplingSettings:
        return SamplingSettings(
            temperature=body.temperature,
            top_k=max(body.top_k, 0),  # vLLM's -1 is our 0: every token
            top_p=body.top_p,
            min_p=body.min_p,
            seed=None if body.seed is None else body.seed + choice,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=tuple(sorted((self._biased(key), bias) for key, bias in body.logit_bias.items())),
        )

    def _biased(self, key: str) -> int:
        if not re.fullmatch(r"0|[1-9][0-9]{0,8}", key) or int(key) >= self.vocab_size:
            remedy = f'{shown(key)} is no token id; keys are 0..{self.vocab_size - 1}, e.g. {{"40": -5}}'
            raise DsparkError("logit_bias", None, remedy)
        return int(key)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise DsparkError("prompt", prompt, "is empty; give at least one token")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [one for one in prompt if not isinstance(one, int)]


def _stops(body: Body) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stops) > MAX_STOPS:
        raise DsparkError("stop", body.stop, f"has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if len(stop) > MAX_STOP_LENGTH:
            remedy = f"a string has {len(stop)} characters; at most {MAX_STOP_LENGTH} are allowed"
            raise DsparkError("stop", body.stop, remedy)
        if HALF_CHARACTER in stop:
            remedy = "U+FFFD stands for bytes that are no character, and cannot be waited for; leave it out"
            raise DsparkError("stop", body.stop, remedy)
    return stops
