"""The HTTP side: endpoints, limits, errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark.errors import DsparkError
from dspark.serving.answers import Answer, ChatForm, Choice, CompletionForm, Form
from dspark.serving.convert import Asked, Converter
from dspark.serving.loop import EngineLoop, Group
from dspark.serving.refusals import Refusal, as_given, ended_badly, no_model, refused, shown
from dspark.serving.schemas import AnyBody, ChatBody, CompletionBody, parse
from dspark.serving.stream import EventStream
from dspark.serving.tokens import TokenTexts

BODY_SECONDS = 30.0
"""Time in which a request's body must arrive."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """What the endpoints work with. draft: its name (None: plain decoding); max_body: bytes; api_key: None for a
    server that asks for none."""

    loop: EngineLoop
    converter: Converter
    tokens: TokenTexts
    draft: str | None
    max_body: int = 1 << 20
    api_key: str | None = None

    @property
    def model(self) -> str:
        """The name that clients call the target."""
        return self.converter.model


def create_app(service: Service) -> FastAPI:
    """The application; the engine's thread runs as long as it does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        yield
        await service.loop.stop()

    app = FastAPI(title="dspark", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, api_key=service.api_key)
    _add_errors(app)
    _add_answers(app, service)
    _add_status(app, service)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _read(request, CompletionBody, service.max_body)
        asked = await asyncio.to_thread(service.converter.completion, body)
        return await _answer(request, service, asked, CompletionForm())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await _read(request, ChatBody, service.max_body)
        asked = await asyncio.to_thread(service.converter.chat, body)
        return await _answer(request, service, asked, ChatForm())


def _add_status(app: FastAPI, service: Service) -> None:
    loop = service.loop
    engine, started = loop.engine, int(time.time())
    readable = partial(app.api_route, methods=["GET", "HEAD"])

    def model_card() -> dict[str, Any]:
        card = {"id": service.model, "object": "model", "created": started, "owned_by": "dspark"}
        return {**card, "max_model_len": engine.max_context}

    @readable("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model_card()]}

    @readable("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != service.model:
            raise no_model(name, service.model)
        return model_card()

    @readable("/v1/engine")
    async def about() -> dict[str, Any]:
        return {
            "target": service.model,
            "draft": service.draft,
            "n": engine.proposer.n,
            "max_context": engine.max_context,
            "max_batch": engine.max_batch,
            "plain_tokens_per_s": loop.plain_tokens_per_s,
        }

    @readable("/health")
    async def health() -> Response:
        problem = loop.health()
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "unavailable", "reason": problem}, 503)

    @readable("/metrics")
    async def metrics() -> Response:
        return Response(loop.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    @readable("/")
    async def page() -> Response:
        path = files("dspark").joinpath("assets/serve.html")
        headers = {"Content-Security-Policy": PAGE_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(path.read_text(encoding="utf-8"), headers={**headers, "Referrer-Policy": "no-referrer"})


# From a request to its answer


async def _read(request: Request, kind: type[AnyBody], limit: int) -> AnyBody:
    """The body, read and checked. Raises Refusal or DsparkError."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise Refusal(415, f"Content-Type = {shown(media)}: must be application/json", "Content-Type")
    too_large = Refusal(413, f"the body is larger than the {limit} bytes that this server takes", code="body_too_large")
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large
    except ClientDisconnect:
        raise _gone() from None
    except TimeoutError:
        raise Refusal(408, f"the body did not arrive within {BODY_SECONDS:g} seconds", code="body_timeout") from None
    return parse(kind, bytes(body))


async def _answer(request: Request, service: Service, asked: Asked, form: Form) -> Response:
    answer = Answer(
        asked,
        form,
        service.tokens,
        f"{form.prefix}-{request.state.request_id}",
        int(time.time()),
        service.model,
        service.loop.engine.proposer.n,
    )
    try:
        group = await _while_connected(request, service.loop.submit(asked.requests))
        if asked.body.stream:
            return EventStream(service.loop, group, answer)
        try:
            return JSONResponse(await _while_connected(request, _whole(group, answer)))
        finally:
            service.loop.release(group)
    except DsparkError as error:
        raise as_given(error, asked.body, asked.names) from error
    except Exception as error:
        raise refused(error) from error


async def _whole(group: Group, answer: Answer) -> dict[str, Any]:
    asked = answer.asked
    choices = [Choice(asked, index, answer.tokens) for index in range(len(asked.requests))]
    async for event in group.events():
        choices[event.index].take(event)
        problem = None if event.result is None else ended_badly(event.result)
        if problem is not None:
            raise problem
    return answer.complete(choices)


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of `work`, which is cancelled when the client goes away. Raises what it raises."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _gone()
        return task.result()
    finally:
        leaving.cancel()
        task.cancel()


def _gone() -> Refusal:
    """For the record only: nobody reads it."""
    return Refusal(499, "the client has closed the connection", code="cancelled")


# What holds for every request


class Gate:
    """Gives each request its id (a client's own `X-Request-Id`, or a new one) and asks for the key under /v1."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app, self.key = app, None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if re.fullmatch(r"[A-Za-z0-9_-]{1,64}", given) else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        if self.key is not None and scope["path"].startswith("/v1"):
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(shown.encode("latin-1"), self.key):
                message = "this server asks for its API key: Authorization: Bearer KEY"
                await _error(Refusal(401, message, code="invalid_api_key"))(scope, receive, send_with_id)
                return
        await self.app(scope, receive, send_with_id)


def _error(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


def _add_errors(app: FastAPI) -> None:
    async def on_refusal(_: Request, error: Exception) -> Response:
        return _error(refused(error))

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(Refusal(error.status_code, message).body(), error.status_code, error.headers)

    async def on_failure(request: Request, error: Exception) -> Response:
        response = _error(refused(error))
        response.headers["X-Request-Id"] = request.state.request_id  # this handler sits outside the gate
        return response

    app.add_exception_handler(Refusal, on_refusal)
    app.add_exception_handler(DsparkError, on_refusal)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_failure)
