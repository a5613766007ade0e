"""Errors as OpenAI's API words them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dspark.decoding.request import Result
from dspark.errors import DsparkError
from dspark.serving.loop import QueueFull, Unavailable

if TYPE_CHECKING:
    from dspark.serving.schemas import Body

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_SHOWN = 80
_OWN = {
    "request": "the settings of this request ",
    "constraint": "the grammar of this request: ",
}
"""Fields of the errors that a request's own settings bring about in its middle -> how the message begins."""


class TooLong(DsparkError):
    """Prompt and answer do not fit the context."""


class Refusal(Exception):
    """An answer that is an error. status: of HTTP; param: the request's parameter that is wrong, if it is one."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if status == 401:
            self.headers["WWW-Authenticate"] = "Bearer"
        if status in (408, 413):  # the rest of the body is not waited for
            self.headers["Connection"] = "close"

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shown(value: object) -> str:
    """A value as a message may show it: as JSON, and long ones are cut."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def as_given(error: DsparkError, body: Body, names: Mapping[str, str]) -> DsparkError:
    """The same error in the client's words: its name for the field (`names`: for each of the engine's), and the value
    that it gave."""
    field = names.get(error.field, error.field)
    return type(error)(field, body.given(field, error.value), error.remedy)


def no_model(name: str, served: str) -> Refusal:
    """For a model that is not the served one."""
    return Refusal(404, f"model = {shown(name)}: is not served here; {shown(served)} is", "model", "model_not_found")


def refused(error: Exception) -> Refusal:
    """What to answer when a request was not taken."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, DsparkError):
        message = f"{error.field} = {shown(error.value)}: {' '.join(error.remedy.split())}"
        code = "context_length_exceeded" if isinstance(error, TooLong) else "invalid_value"
        return Refusal(400, message, error.field, code)
    if isinstance(error, QueueFull):
        return Refusal(429, f"{error}; try again later", code="queue_full", retry_after=1)
    if isinstance(error, Unavailable):
        return Refusal(503, str(error), code="unavailable", retry_after=5)
    return Refusal(500, f"internal error: {type(error).__name__}", code="internal_error")


def ended_badly(result: Result) -> Refusal | None:
    """What to answer when a request ended as none should; None when it ended well."""
    if result.finish_reason in ("stop", "length"):
        return None
    if result.finish_reason == "timeout":
        seconds = result.request.timeout or 0
        message = f"the answer took longer than the {seconds:g} seconds that this server gives a request"
        return Refusal(504, message, code="timeout")
    if result.finish_reason == "cancelled":
        return Refusal(503, "the request was cancelled", code="cancelled")
    if isinstance(result.error, DsparkError) and result.error.field in _OWN:
        return Refusal(400, _OWN[result.error.field] + result.error.remedy, code="cannot_continue")
    return Refusal(500, f"the engine failed on this request: {result.error}", code="engine_error")
