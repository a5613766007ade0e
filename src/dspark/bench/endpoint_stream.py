"""A streamed chat completion, read from bytes: text, tokens by chunk with the time they came, and how it ended.

Lines end at line feeds only: engines write U+2028 and its like into their JSON as they are. How many tokens a chunk
brought is told by `round` (dspark serve), by a `usage` in every chunk (vLLM and SGLang, `continuous_usage_stats`), or
not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from dspark.bench.endpoint_metrics import StreamFault, count, ids, told_by_request
from dspark.decoding.request import Round

Mark = tuple[float, int | None, int]
"""Of a chunk: seconds, tokens so far where the server tells, characters."""

GAVE_UP = ("abort", "error")
"""Finish reasons of an answer that is none (SGLang, vLLM)."""


MOST_TOKENS = 2**31
"""Tokens that no request has."""


def clean(text: str) -> str:
    """Text that can be written: halves of a character that came apart are joined, those without the other replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def error_message(payload: Any) -> str | None:
    """What an error of OpenAI's form says (vLLM, SGLang and dspark serve), or FastAPI's `detail`; None: no error."""
    if not isinstance(payload, dict):
        return None
    error = payload.get("error") or (payload if payload.get("object") == "error" else None)
    found = error.get("message") if isinstance(error, dict) else error
    found = found if found is not None else payload.get("detail")
    return None if found is None else clean(" ".join(str(found).split())[:300])


class Answering:
    """One answer while it comes. speculates: False where a plain server's rounds are none; asked: tokens that it may
    have."""

    def __init__(self, engine: str, speculates: bool | None = None, asked: int = MOST_TOKENS) -> None:
        self.engine, self.speculates, self.asked = engine, speculates, asked
        self.text = self.reasoning = ""
        self._rest = b""
        self._done = False
        self._finish = ""
        self._marks: list[Mark] = []
        self._ids: list[int] = []
        self._rounds: list[dict[str, Any]] = []
        self._usage: dict[str, Any] = {}
        self._extras: dict[str, Any] = {}

    @property
    def chunks(self) -> int:
        """Chunks with text so far."""
        return sum(characters > 0 for _, _, characters in self._marks)

    def take(self, part: bytes, seconds: float) -> None:
        """Bytes that came `seconds` after the request was handed over. Raises StreamFault."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                try:
                    self._event(data, seconds)
                except (AttributeError, KeyError, TypeError, ValueError):
                    raise StreamFault(f"the stream holds what is no chat completion chunk: {data[:80]!r}") from None

    def finished(self) -> dict[str, Any]:
        """The fields of a Reply. Raises StreamFault where the answer did not end as an answer does."""
        if self._rest:  # a last line that nothing ends
            self.take(b"\n", self._marks[-1][0] if self._marks else 0.0)
        if not self._finish:
            raise StreamFault("the stream ended without a finish_reason")
        if self._finish in GAVE_UP:
            raise StreamFault(f"the server gave up: finish_reason {self._finish}")
        if not self._done:
            raise StreamFault("the stream ended without [DONE]")
        prompt, total = self._usage.get("prompt_tokens"), self._usage.get("completion_tokens")
        if prompt is None or total is None:
            raise StreamFault("the stream told no usage, so how many tokens it brought is not known")
        prompt = count("usage.prompt_tokens", prompt, MOST_TOKENS)
        total = count("usage.completion_tokens", total, 2 * self.asked + 64)  # a last round may go beyond
        if any(told is not None and told > total for _, told, _ in self._marks):
            raise StreamFault(f"the server tells usage.completion_tokens = {total} at the end, and more before")
        exact = any(told for _, told, _ in self._marks) or total == 0
        arrivals = list(_counted(self._marks, total) if exact else _shared(self._marks, total))
        rounds, histogram = self._acceptance()
        found = self._ids or self._last_ids()
        return {
            "text": clean(self.text),
            "reasoning": clean(self.reasoning),
            "prompt_tokens": prompt,
            "cached_tokens": self._cached(prompt),
            "output_tokens": total,
            "output_ids": found if len(found) == total else None,
            "finish": clean(self._finish),
            "seconds": arrivals[-1][0] if arrivals else self._marks[-1][0],
            "arrivals": arrivals,
            "exact": exact,
            "rounds": rounds,
            "histogram": histogram,
        }

    def _acceptance(self) -> tuple[list[Round] | None, list[int] | None]:
        if self.speculates is False:
            return None, None
        try:
            return told_by_request(self._rounds, self._usage, self._extras)
        except (AttributeError, KeyError, TypeError, ValueError):  # of another form than we know: not told
            return None, None

    def _last_ids(self) -> list[int]:
        """SGLang's, which come with the last chunk."""
        extra = self._extras.get("sglext")
        found = extra.get("output_ids") if isinstance(extra, dict) else None
        return ids("sglext.output_ids", found[0]) if isinstance(found, list) and found else []

    def _cached(self, prompt: int) -> int | None:
        """Prompt tokens from the server's prefix cache, under the name that all engines give them; None: not told."""
        details = self._usage.get("prompt_tokens_details")
        found = details.get("cached_tokens") if isinstance(details, dict) else None
        if found is None:
            return None
        cached = count("usage.prompt_tokens_details.cached_tokens", found, MOST_TOKENS)
        return cached if cached <= prompt else None  # a count over several passes of the prompt

    def _event(self, data: bytes, seconds: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        payload = json.loads(data)
        if payload.get("error") or payload.get("object") == "error":
            raise StreamFault(f"the server ended it: {error_message(payload)}")
        usage = payload.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        self._extras |= {name: payload[name] for name in ("sglext", "metrics") if payload.get(name)}
        for choice in payload.get("choices") or ():
            self._choice(choice, usage if isinstance(usage, dict) else None, seconds)

    def _choice(self, choice: dict[str, Any], usage: dict[str, Any] | None, seconds: float) -> None:
        delta = choice.get("delta") or {}
        text = delta.get("content") or ""
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        self.text += text
        self.reasoning += thought
        told = None if usage is None else usage.get("completion_tokens")
        made = choice.get("round")
        if made:
            self._rounds.append(made)
            self._ids += ids("round.tokens", [one["id"] for one in made["tokens"]])
            told = len(self._ids)
        else:
            self._ids += ids("token_ids", choice.get("token_ids") or [])
        if told is not None:
            told = count("usage.completion_tokens", told, MOST_TOKENS)
        if choice.get("finish_reason"):
            self._finish = str(choice["finish_reason"])
        self._marks.append((seconds, told, len(text) + len(thought)))


def _counted(marks: Sequence[Mark], total: int) -> Iterator[tuple[float, int]]:
    """(seconds, tokens) of the chunks that brought some, by the server's running count. What it counts only at the end
    (a stop token, which has no text) came with the last chunk."""
    before = 0
    for seconds, told, _ in marks[:-1]:
        if told is not None and told > before:
            yield seconds, told - before
            before = told
    if total > before:
        yield marks[-1][0], total - before


def _shared(marks: Sequence[Mark], total: int) -> Iterator[tuple[float, int]]:
    """(seconds, tokens) by the share of all characters that had come by a chunk; the first one brought at least 1."""
    characters = sum(mark[2] for mark in marks)
    if not characters:
        yield marks[-1][0], total
        return
    before = seen = 0
    for seconds, _, more in marks:
        seen += more
        until = max(round(total * seen / characters), 1 if seen else 0)
        if until > before:
            yield seconds, until - before
            before = until
