"""A live engine behind an OpenAI-compatible address: what it says of itself, and one streamed answer with its clock.

Nothing is tried twice: what goes wrong with an answer is in the answer. Field names are those of vLLM 0.32, of SGLang's
main branch in autumn 2026 (0.5.2x) and of `dspark serve`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import httpx

from dspark.bench.endpoint_metrics import StreamFault
from dspark.bench.endpoint_stream import Answering, clean, error_message
from dspark.decoding.request import Round
from dspark.errors import DsparkError

Engine = Literal["vllm", "sglang", "dspark", "openai"]
ENGINES: tuple[str, ...] = get_args(Engine)
ALL_TOKENS = -1
"""`top_k` of no filter, for all three engines."""
HERE = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0", "::"))
"""Names under which one server of this machine is reached."""
ABOUT_SECONDS = 10.0
"""Time in which a server answers questions about itself, and takes a connection."""
IDLE_SECONDS = 4.0
"""An idle connection is given up before the server does so (uvicorn: after 5 seconds)."""
SGLANG_SETTINGS = (
    "model_path", "revision", "tokenizer_path", "chat_template", "reasoning_parser", "dtype", "quantization",
    "kv_cache_dtype", "context_length", "tp_size", "dp_size", "pp_size", "ep_size", "attention_backend",
    "sampling_backend", "disable_radix_cache", "chunked_prefill_size", "max_running_requests", "mem_fraction_static",
    "schedule_policy", "disable_cuda_graph", "disable_overlap_schedule",
)  # fmt: skip
"""Of what SGLang says of itself, which holds its keys too: only these are kept, and what begins with `speculative_`."""


@dataclass(frozen=True)
class AskSettings:
    """How a server is to answer; each is sent, so that the model's generation_config.json changes nothing.

    top_k, min_p: filters beyond OpenAI's parameters, as `ignore_eos` is. thinking: the template's thinking mode, None
    leaves it at its default. Raises DsparkError for what makes no sense.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = ALL_TOKENS
    min_p: float = 0.0
    seed: int | None = None
    thinking: bool | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise DsparkError("max_tokens", self.max_tokens, "must be at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise DsparkError("temperature", self.temperature, "must be a number of 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise DsparkError("top_p", self.top_p, "must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise DsparkError("min_p", self.min_p, "must be in [0, 1]")
        if self.top_k != ALL_TOKENS and self.top_k < 1:
            raise DsparkError("top_k", self.top_k, f"must be at least 1, or {ALL_TOKENS} for all tokens")


@dataclass
class Reply:
    """One answer as the client saw it.

    text: what was said, reasoning: what the server keeps apart as thinking
    seconds: from handing over the request to the last token; arrivals: (seconds, tokens) of each chunk that brought
    some, their sum is output_tokens; exact: the server told how many tokens each brought, else they are the share of
    output_tokens that a chunk's characters are of all
    output_ids, rounds, histogram, cached_tokens (of the prompt, from the server's prefix cache): where the engine tells
    them
    error: why it failed; then only what had come by then is known
    """

    text: str = ""
    reasoning: str = ""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    output_ids: list[int] | None = None
    finish: str = ""
    seconds: float | None = None
    arrivals: list[tuple[float, int]] | None = None
    exact: bool = True
    rounds: list[Round] | None = None
    histogram: list[int] | None = None
    error: str | None = None


class Endpoint:
    """One server. `check()` comes first; answers are asked for inside `async with endpoint`.

    url: with or without /v1; model: None takes the only one that is served; timeout: seconds that an answer may take,
    waiting included; field: the option that the address came from, for errors.
    """

    def __init__(
        self,
        url: str,
        engine: str,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        field: str = "endpoint",
    ) -> None:
        if engine not in ENGINES:
            raise DsparkError("engine", engine, f"must be one of {', '.join(ENGINES)}")
        if not 0 < timeout < float("inf"):
            raise DsparkError("timeout", timeout, "must be a number of seconds above 0")
        self.url, host = _address(url, field)
        self.engine, self.model, self.timeout, self.field = engine, model, timeout, field
        self.speculates: bool | None = None
        self._card: dict[str, Any] = {}
        self._options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            "trust_env": not _is_here(host),  # a proxy must not stand between the clock and this machine
            "verify": self.url.startswith("https:"),  # reading the certificates takes time
        }
        self._client: httpx.AsyncClient | None = None

    # What the server says of itself

    def check(self) -> dict[str, Any]:
        """See that it is up, of this kind and serves the model, and what it says of itself (`describe`). Raises
        DsparkError naming the address, or listing the models."""
        models = self._get("/v1/models")
        if models.status_code in (401, 403):
            raise DsparkError(self.field, self.url, "asks for its API key, or refuses the one that was given")
        if models.status_code >= 400:
            raise DsparkError(self.field, self.url, f"/v1/models: {_status(models)}; is this the server's address?")
        cards = _cards(models)
        if cards is None:
            raise DsparkError(self.field, self.url, "/v1/models lists no models; is this an OpenAI-compatible server?")
        if self.model is None and len(cards) != 1:
            raise DsparkError("model", None, f"{self.url} serves several, name one of: {', '.join(cards) or 'none'}")
        if self.model is not None and self.model not in cards:
            raise DsparkError("model", self.model, f"{self.url} does not serve it but: {', '.join(cards) or 'none'}")
        self.model = self.model or next(iter(cards))
        self._card = cards[self.model]
        if self.engine != "openai":
            health = self._get("/health")
            if health.status_code >= 500:
                raise DsparkError(self.field, self.url, f"is not healthy: {_status(health)}")
        if self.engine in ("vllm", "sglang") and {"target", "n", "max_batch"} <= self._json("/v1/engine").keys():
            raise DsparkError("engine", self.engine, f"{self.url} is `dspark serve`; give --engine dspark")
        told = self.describe()
        self.speculates = _speculates(self.engine, told["speculative"])
        return told

    def is_same(self, other: Endpoint) -> bool:
        """Whether the other address leads to the same server."""
        return _place(self.url) == _place(other.url)

    def describe(self) -> dict[str, Any]:
        """What it says of itself: url, engine, model, root, max_model_len, version, `settings`, and `speculative`
        settings, which may differ between two servers that are compared. What it does not tell is None or absent."""
        settings: dict[str, Any] = {}
        speculative: dict[str, Any] = {}
        version: str | None = None
        if self.engine == "vllm":
            version = self._json("/version").get("version")
        elif self.engine == "sglang":
            told = self._json("/server_info") or self._json("/get_server_info")
            version = told.get("version")
            settings = {name: told[name] for name in SGLANG_SETTINGS if name in told}
            speculative = {name: value for name, value in told.items() if name.startswith("speculative_")}
        elif self.engine == "dspark":
            told = self._json("/v1/engine")
            settings = {name: told[name] for name in ("target", "max_batch") if name in told}
            speculative = {name: told[name] for name in ("draft", "n") if name in told}
        return {
            "url": self.url,
            "engine": self.engine,
            "model": self.model,
            "root": self._card.get("root"),
            "max_model_len": self._card.get("max_model_len"),
            "version": version,
            "settings": settings,
            "speculative": speculative,
        }

    def metrics(self) -> str | None:
        """Its counters in Prometheus' text format; None where it has none to show."""
        response = self._get("/metrics")
        return response.text if response.status_code == 200 else None

    def _get(self, path: str) -> httpx.Response:
        try:
            with httpx.Client(**self._options, timeout=ABOUT_SECONDS) as client:
                return client.get(path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            remedy = f"cannot be reached ({said(error)}); is the server running there?"
            raise DsparkError(self.field, self.url, remedy) from None

    def _json(self, path: str) -> dict[str, Any]:
        response = self._get(path)
        if response.status_code != 200:
            return {}
        try:
            found = response.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    # Answers

    async def __aenter__(self) -> Endpoint:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_SECONDS)
        waits = httpx.Timeout(None, connect=ABOUT_SECONDS)  # `ask` bounds the whole
        self._client = httpx.AsyncClient(**self._options, limits=limits, timeout=waits)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def ask(self, messages: Sequence[Mapping[str, str]], settings: AskSettings) -> Reply:
        """One streamed chat completion. Failures are in the reply: none is raised."""
        assert self._client is not None, "ask inside `async with endpoint`"
        body = self.body(messages, settings)
        started = time.perf_counter()
        answering = Answering(self.engine, self.speculates, settings.max_tokens)
        try:
            async with asyncio.timeout(self.timeout):
                async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                    if response.status_code >= 400:
                        await response.aread()
                        raise StreamFault(_status(response))
                    async for part in response.aiter_bytes():
                        answering.take(part, time.perf_counter() - started)
            return Reply(**answering.finished())
        except TimeoutError:
            fault = f"timeout: no end within {self.timeout:g} seconds"
        except httpx.HTTPError as error:
            fault = f"the connection broke: {said(error)}"
        except StreamFault as error:
            fault = str(error)
        after = f" (after {answering.chunks} chunks)" if answering.chunks else ""
        return Reply(text=clean(answering.text), reasoning=clean(answering.reasoning), error=clean(f"{fault}{after}"))

    def body(self, messages: Sequence[Mapping[str, str]], settings: AskSettings) -> dict[str, Any]:
        """What is sent. Beyond OpenAI's parameters only what this kind of engine knows, or was asked for."""
        options: dict[str, Any] = {"include_usage": True}
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [dict(message) for message in messages],
            "stream": True,
            "stream_options": options,
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
        }
        if self.engine != "openai":
            body |= {"top_k": settings.top_k, "min_p": settings.min_p, "repetition_penalty": 1.0}
        else:
            body |= {"top_k": settings.top_k} if settings.top_k != ALL_TOKENS else {}
            body |= {"min_p": settings.min_p} if settings.min_p else {}
        if settings.seed is not None:
            body["seed"] = settings.seed
        if settings.ignore_eos:
            body["ignore_eos"] = True
        if settings.thinking is not None:  # templates know it by one name or the other and ignore the rest
            body["chat_template_kwargs"] = {"enable_thinking": settings.thinking, "thinking": settings.thinking}
        if self.engine in ("vllm", "sglang"):
            options["continuous_usage_stats"] = True
        if self.engine == "vllm":
            body["return_token_ids"] = True
        elif self.engine == "sglang":
            body |= {"return_spec_tokens_details": True, "return_output_ids_in_sglext": True}
        elif self.engine == "dspark":
            body["rounds"] = True
        return body


def said(error: Exception) -> str:
    """An exception in one line, by its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def _address(url: str, field: str) -> tuple[str, str]:
    """(the address without /v1, its host). Raises DsparkError, which never shows a password."""
    remedy = "must be an address like http://127.0.0.1:8000"
    if "@" in url:
        shown = f"...@{url.rpartition('@')[2]}"
        raise DsparkError(field, shown, f"{remedy}, without a user or a password; a server's key is given by --api-key")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
        raise DsparkError(field, url, remedy)
    return url.rstrip("/").removesuffix("/v1").rstrip("/"), host


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _place(url: str) -> tuple[str, int, str]:
    """(host, port, path), the same for every name of this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return "here" if host in HERE else host, parts.port or (443 if parts.scheme == "https" else 80), parts.path


def _status(response: httpx.Response) -> str:
    """HTTP 404: what the server says about it."""
    try:
        message = error_message(response.json())
    except ValueError:
        message = None
    return f"HTTP {response.status_code}: {message or ' '.join(response.text.split())[:200] or response.reason_phrase}"


def _cards(response: httpx.Response) -> dict[str, dict[str, Any]] | None:
    """The models by id; None where there is no list of them."""
    try:
        return {str(card["id"]): card for card in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        return None


def _speculates(engine: str, speculative: Mapping[str, Any]) -> bool | None:
    """Whether it drafts at all; None where it does not say."""
    if engine == "dspark" and "n" in speculative:
        return bool(speculative["n"])
    if engine == "sglang" and "speculative_algorithm" in speculative:
        return speculative["speculative_algorithm"] is not None
    return None
