"""From the engine's events to the words of the two endpoints. Whole answers are joined from the same pieces that
a stream sends one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dspark.bench.metrics import acceptance_length, histogram
from dspark.decoding.engine import Step
from dspark.decoding.request import Result, TokenLogprob
from dspark.decoding.text import TextStream
from dspark.serving.convert import Asked
from dspark.serving.loop import Event
from dspark.serving.tokens import TokenTexts

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for (as in OpenAI's API)."""


@dataclass
class Piece:
    """What one pass, or the whole answer, adds to a choice. offsets: where each token begins in the text."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    result: Result | None = None

    def join(self, later: Piece) -> None:
        """Add what came after this."""
        self.text += later.text
        for name in ("ids", "logprobs", "offsets", "rounds"):
            getattr(self, name).extend(getattr(later, name))
        self.result = later.result


class Choice:
    """One choice of an answer while it is made."""

    def __init__(self, asked: Asked, index: int, tokens: TokenTexts) -> None:
        self.asked, self.index, self.whole = asked, index, Piece()
        self._texts = TextStream(tokens.tokenizer)
        self._offset = 0

    def take(self, event: Event) -> Piece:
        """The piece that a pass adds."""
        step, body = event.step, self.asked.body
        piece = Piece(step.text, list(step.new_ids), event.logprobs, result=event.result)
        if body.rounds or event.logprobs:
            texts = [self._texts.push([token]) for token in step.new_ids]
            if texts and event.result is not None:
                texts[-1] += self._texts.flush()
            for text in texts:
                piece.offsets.append(self._offset)
                self._offset += len(text)
            if body.rounds and texts:
                piece.rounds.append(_round(step, texts))
        self.whole.join(piece)
        return piece


def _round(step: Step, texts: Sequence[str]) -> dict[str, Any]:
    """The extension `rounds`: who wrote which token."""
    one = step.round
    accepted = 0 if one is None else one.accepted
    return {
        "proposed": None if one is None else one.proposed,
        "scheduled": None if one is None else one.scheduled,
        "accepted": None if one is None else one.accepted,
        "confidence": list(step.confidence),
        "tokens": [
            {"id": token, "text": text, "drafted": place < accepted}
            for place, (token, text) in enumerate(zip(step.new_ids, texts, strict=True))
        ],
    }


class Form(Protocol):
    """How an endpoint words its answers. prefix: of ids; whole, chunk: values of `object`."""

    prefix: str
    whole: str
    chunk: str

    def logprobs(self, piece: Piece, tokens: TokenTexts) -> dict[str, Any]:
        """Log-probabilities of a piece's tokens."""

    def choice(self, text: str) -> dict[str, Any]:
        """The text of a whole choice."""

    def delta(self, text: str) -> dict[str, Any]:
        """The text of a chunk's choice."""

    def opening(self) -> dict[str, Any] | None:
        """The first chunk of a choice, if it has one of its own."""

    def prompts(self, prompts: list[list[int]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Where the prompts' ids go when they are asked for: in the answer, and in each prompt's choices."""


class CompletionForm:
    """Of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def logprobs(self, piece: Piece, tokens: TokenTexts) -> dict[str, Any]:
        return {
            "tokens": [tokens.of(one.token)[0] for one in piece.logprobs],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in piece.logprobs],
            "top_logprobs": [
                {
                    tokens.of(token)[0]: max(value, LEAST_LOGPROB)
                    for token, value in [*reversed(one.top), (one.token, one.logprob)]
                }
                for one in piece.logprobs
            ],
            "text_offset": piece.offsets,
        }

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def opening(self) -> dict[str, Any] | None:
        return None

    def prompts(self, prompts: list[list[int]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return {}, [{"prompt_token_ids": prompt} for prompt in prompts]


class ChatForm:
    """Of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def logprobs(self, piece: Piece, tokens: TokenTexts) -> dict[str, Any]:
        def one(token: int, value: float) -> dict[str, Any]:
            text, raw = tokens.of(token)
            return {"token": text, "logprob": max(value, LEAST_LOGPROB), "bytes": list(raw)}

        content = [
            {**one(entry.token, entry.logprob), "top_logprobs": [one(*alternative) for alternative in entry.top]}
            for entry in piece.logprobs
        ]
        return {"content": content, "refusal": None}

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def prompts(self, prompts: list[list[int]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return {"prompt_token_ids": prompts[0]}, [{} for _ in prompts]


@dataclass(frozen=True)
class Answer:
    """One answer to one body: its id and what all of its parts say. draft_tokens: a round's, at most."""

    asked: Asked
    form: Form
    tokens: TokenTexts
    id: str
    created: int
    model: str
    draft_tokens: int

    def head(self, kind: str) -> dict[str, Any]:
        """What every object begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def part(self, choice: Choice, piece: Piece, words: dict[str, Any]) -> dict[str, Any]:
        """A choice of a chunk or of a whole answer."""
        body, result = self.asked.body, piece.result
        asked_for = self.asked.requests[choice.index].logprobs is not None
        part = {
            "index": choice.index,
            **words,
            "logprobs": self.form.logprobs(piece, self.tokens) if asked_for and piece.logprobs else None,
            "finish_reason": None if result is None else result.finish_reason,
            "stop_reason": None if result is None else result.stop_reason,
        }
        if body.return_token_ids:
            part["token_ids"] = piece.ids
        return part

    def complete(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer of a request that did not stream."""
        body = self.asked.body
        parts = [self.part(one, one.whole, self.form.choice(one.whole.text)) for one in choices]
        extra: dict[str, Any] = {}
        if body.rounds:
            for one, part in zip(choices, parts, strict=True):
                part["rounds"] = one.whole.rounds
        if body.return_token_ids:
            extra, each = self.form.prompts(self.asked.prompts)
            for index, part in enumerate(parts):
                part |= each[index // body.n]
        results = [one.whole.result for one in choices if one.whole.result is not None]
        return {**self.head(self.form.whole), "choices": parts, "usage": self.usage(results), **extra}

    def usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Tokens and acceptance. Each prompt counts once, however many choices it has."""
        asked = self.asked
        rounds = [one for result in results for one in result.rounds]
        prompt = sum(map(len, asked.prompts))
        made = sum(len(result.output_ids) for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in results[:: asked.body.n])},
            "speculation": {
                "rounds": len(rounds),
                "proposed": sum(one.proposed for one in rounds),
                "scheduled": sum(one.scheduled for one in rounds),
                "accepted": sum(one.accepted for one in rounds),
                "histogram": histogram(rounds, self.draft_tokens),
                "acceptance_length": acceptance_length(rounds),
            },
        }
