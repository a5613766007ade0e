"""Server-sent events: one chunk for what a pass adds to a choice. Everything is ASCII, so that no split of the bytes
can fall inside a character and no line break of Unicode's inside a line."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dspark.serving.answers import Answer, Choice, Piece
from dspark.serving.loop import EngineLoop, Group
from dspark.serving.refusals import ended_badly, refused

DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """A streamed answer; its requests end with it, also when the client leaves before the first chunk."""

    def __init__(self, loop: EngineLoop, group: Group, answer: Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(chunks(group, answer), media_type="text/event-stream", headers=headers)
        self._loop, self._group = loop, group

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._loop.release(self._group)


async def chunks(group: Group, answer: Answer) -> AsyncIterator[str]:
    """The events of a streamed answer. What goes wrong is an event with an error, and the last one."""
    asked, form = answer.asked, answer.form
    options = asked.body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    head = {**answer.head(form.chunk), **({"usage": None} if with_usage else {})}
    choices = [Choice(asked, index, answer.tokens) for index in range(len(asked.requests))]
    extra, each = form.prompts(asked.prompts) if asked.body.return_token_ids else ({}, [{} for _ in asked.prompts])
    opened: set[int] = set()
    try:
        async for event in group.events():
            problem = None if event.result is None else ended_badly(event.result)
            if problem is not None:
                raise problem
            choice = choices[event.index]
            piece = choice.take(event)
            if choice.index not in opened:
                opened.add(choice.index)
                opening = form.opening()
                if opening is not None:
                    yield sse({**head, "choices": [answer.part(choice, Piece(), opening)], **extra})
                first = each[choice.index // asked.body.n]
            else:
                first = {}
            part = {**answer.part(choice, piece, form.delta(piece.text)), **first}
            if asked.body.rounds and piece.rounds:
                part["round"] = piece.rounds[0]
            if _says_something(piece, asked.body.return_token_ids):
                yield sse({**head, "choices": [part]})
    except Exception as error:
        yield sse(refused(error).body())
        return
    if with_usage:
        results = [choice.whole.result for choice in choices if choice.whole.result is not None]
        yield sse({**head, "choices": [], "usage": answer.usage(results)})
    yield DONE


def _says_something(piece: Piece, ids: bool) -> bool:
    return bool(piece.text or piece.result or piece.logprobs or piece.rounds or (ids and piece.ids))


def sse(value: dict[str, Any]) -> str:
    """One event."""
    return f"data: {json.dumps(value, ensure_ascii=True, separators=(',', ':'))}\n\n"
