"""`dspark serve`: options, the address, and a server that ends gracefully."""

from __future__ import annotations

import copy
import errno
import ipaddress
import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import typer
import uvicorn

from dspark.calibration.schedule import Chosen, choose_schedule
from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder, load_named_draft
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import draft_proposer, make_proposer
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.serving.api import Service, create_app
from dspark.serving.convert import Converter
from dspark.serving.loop import EngineLoop
from dspark.serving.metrics import Metrics
from dspark.serving.tokens import TokenTexts
from dspark.targets.base import Target
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS |= {f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power}
KEY_VARIABLE = "DSPARK_API_KEY"
LEAST_TOKENS = 64
"""Tokens of memory without which a server makes no sense."""


@dataclass(frozen=True)
class ServeSettings:
    """memory, max_body: bytes; timeout, watchdog, drain: seconds. Raises DsparkError for what makes no sense."""

    max_batch: int = 8
    max_waiting: int = 64
    memory: int = 2 << 30
    prefill_tokens: int = 256
    prefix_cache: bool = True
    api_key: str | None = None
    max_body: int = 1 << 20
    timeout: float = 600.0
    watchdog: float = 60.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_body", "prefill_tokens"):
            if getattr(self, name) < 1:
                raise DsparkError(name, getattr(self, name), "must be at least 1")
        if self.max_waiting < 0:
            raise DsparkError("max_waiting", self.max_waiting, "must be at least 0")
        for name in ("timeout", "watchdog"):
            if not 0 < getattr(self, name) < float("inf"):
                raise DsparkError(name, getattr(self, name), "must be a number of seconds above 0")
        if not 0 <= self.drain < float("inf"):
            raise DsparkError("drain", self.drain, "must be a number of seconds, 0 or more")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise DsparkError("api_key", "***", "must be printable ASCII without spaces")
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if self.memory > machine:
            raise DsparkError("memory", show_bytes(self.memory), f"this machine has {show_bytes(machine)}")


def parse_bytes(name: str, text: str) -> int:
    """Bytes in "2GiB", "512 MB" or "100000". Raises DsparkError under `name`."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise DsparkError(name, text, "must be a size like 2GiB or 512MiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def show_bytes(count: int) -> str:
    """Bytes for people."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            number = count / (1 << power)
            return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"
    return f"{count} bytes"


def build_service(
    target: Target,
    draft: Draft | None,
    n: int | None,
    draft_name: str | None,
    settings: ServeSettings,
    chosen: Chosen | None = None,
) -> Service:
    """An engine for this pair and all that the endpoints need; chosen: its schedule (None: all drafts are verified).
    Raises DsparkError where the two do not fit, or the memory is too little."""
    if target.tokenizer is None:
        raise DsparkError("target", target.name, "has no tokenizer, so it cannot be served")
    scaling = None if chosen is None else chosen.scaling
    proposer = make_proposer(target, draft, n, confidence=True, scaling=scaling)
    kv_tokens = settings.memory // (target.bytes_per_token + proposer.bytes_per_token)
    if kv_tokens < LEAST_TOKENS:
        need = show_bytes(LEAST_TOKENS * (target.bytes_per_token + proposer.bytes_per_token))
        raise DsparkError("memory", show_bytes(settings.memory), f"holds {kv_tokens} tokens; give at least {need}")
    engine = Engine(
        target,
        proposer,
        settings.max_batch,
        kv_tokens=kv_tokens,
        prefill_tokens=settings.prefill_tokens,
        prefix_cache=settings.prefix_cache,
        schedule=None if chosen is None else chosen.schedule,
    )
    tokenizer = copy.deepcopy(target.tokenizer)
    converter = Converter(target, tokenizer, engine.max_context, settings.timeout)
    engine.grammars = converter.grammars
    loop = EngineLoop(engine, Metrics(converter.model, proposer.n), settings.max_waiting, settings.watchdog)
    name = None if draft_name is None else Path(draft_name).name
    tokens = TokenTexts(tokenizer, target.vocab_size)
    return Service(loop, converter, tokens, name, settings.max_body, settings.api_key)


def bind(host: str, port: int) -> socket.socket:
    """A socket at that address, port 0 for any free one. Raises DsparkError when it cannot be had."""
    if not 0 <= port <= 65535:
        raise DsparkError("port", port, "must be in 0..65535")
    try:
        if not host:
            raise OSError("empty")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, address = found[0]
    except (OSError, UnicodeError):
        raise DsparkError("host", host, "is no address; use 127.0.0.1, or 0.0.0.0 for every interface") from None
    listening = socket.socket(family, kind, protocol)  # with the protocol: asyncio sends at once only on known TCP
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
    except OSError as error:
        listening.close()
        raise _no_address(host, port, error) from None
    return listening


def _no_address(host: str, port: int, error: OSError) -> DsparkError:
    if error.errno == errno.EADDRINUSE:
        return DsparkError("port", port, f"is in use on {host}; choose another one (0: any that is free)")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DsparkError("port", port, "needs the administrator's rights; use one above 1023")
    return DsparkError("host", host, f"cannot be listened on: {error.strerror}")


class Server(uvicorn.Server):
    """Says when it is ready; on a termination signal it takes no more requests and lets those that run end. A second
    one ends them at once, with an error."""

    def __init__(self, service: Service, drain: float, ready: str = "") -> None:
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http="h11",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(drain) + 5,
            )
        )
        self._service, self._drain, self._ready = service, drain, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready:
            print(self._ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = self._service.loop.unanswered
        if running:
            with suppress(OSError):  # the terminal may have gone
                what = "1 request" if running == 1 else f"{running} requests"
                print(f"finishing {what}; Ctrl-C again stops at once", file=sys.stderr, flush=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:  # not uvicorn's way out, which leaves the engine's thread running
            self._service.loop.drain(0)
            return
        self._service.loop.drain(self._drain)
        super().handle_exit(sig, frame)


def address_of(listening: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _as_typed(context: typer.Context) -> Iterator[None]:
    """Errors about an option name it, and show its value, as they were typed."""
    try:
        yield
    except DsparkError as error:
        options = {option.name: max(option.opts, key=len) for option in context.command.params}
        if error.field not in options:
            raise
        if error.field != "api_key":
            raise DsparkError(options[error.field], context.params[error.field], error.remedy) from error
        source = context.get_parameter_source("api_key")
        typed = source is not None and source.name == "COMMANDLINE"
        raise DsparkError(options["api_key"] if typed else KEY_VARIABLE, error.value, error.remedy) from error


def serve_command(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="Model folder, hub name, or the embedded target.")] = EMBEDDED,
    draft: Annotated[str, typer.Option(help="Draft folder, `embedded` (the shipped one), or `none`.")] = EMBEDDED_DRAFT,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding: --draft none.")] = False,
    n: Annotated[
        int | None, typer.Option("-n", "--n", help="Draft tokens a round, up to the draft's gamma (the default).")
    ] = None,
    schedule: Annotated[
        str, typer.Option(help="How many drafts are verified: auto, fixed (all n), early-stop or delayed.")
    ] = "auto",
    confidence_threshold: Annotated[
        float | None, typer.Option(help="Verify drafts up to the first less sure one: a diagnosis.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every interface.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes any free one.")] = 8000,
    max_batch: Annotated[int, typer.Option(help="Requests decoded together.")] = 8,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are told to come back.")] = 64,
    memory: Annotated[str, typer.Option(help="For keys and values, of requests and the prefix cache.")] = "2GiB",
    prefill_tokens: Annotated[int, typer.Option(help="Prompt tokens read in one pass.")] = 256,
    prefix_cache: Annotated[bool, typer.Option(help="Keep what prompts with the same beginning share.")] = True,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY_VARIABLE, help="Key that /v1 asks for; none by default.")
    ] = None,
    max_body: Annotated[str, typer.Option(help="Size of a request's body at most.")] = "1MiB",
    timeout: Annotated[float, typer.Option(help="Seconds that a request may take, waiting included.")] = 600.0,
    watchdog: Annotated[float, typer.Option(help="Seconds without a finished pass before all requests end.")] = 60.0,
    drain: Annotated[float, typer.Option(help="Seconds to finish in after SIGTERM or Ctrl-C.")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; left as it is when not given.")] = None,
) -> None:
    """Serve a target and its draft over an OpenAI-compatible API, with a page to try it at /."""
    with _as_typed(context):
        if api_key is None and os.environ.get(KEY_VARIABLE) == "":  # to Click it is as if it were not set
            raise DsparkError(KEY_VARIABLE, "", "is set but empty; give it a key, or unset it to serve without one")
        settings = ServeSettings(
            max_batch=max_batch,
            max_waiting=max_waiting,
            memory=parse_bytes("memory", memory),
            prefill_tokens=prefill_tokens,
            prefix_cache=prefix_cache,
            api_key=api_key,
            max_body=parse_bytes("max_body", max_body),
            timeout=timeout,
            watchdog=watchdog,
            drain=drain,
        )
        no_draft = no_draft or draft == "none"
        if no_draft and n is not None:
            raise DsparkError("n", n, "plain decoding has no draft tokens; leave it out")
        if no_draft and draft not in (EMBEDDED_DRAFT, "none"):
            raise DsparkError("draft", draft, "cannot be combined with --no-draft")
        processors = os.cpu_count()
        if threads is not None and processors is not None and threads > processors:
            raise DsparkError("threads", threads, f"this machine has {processors} processors")
        listening = bind(host, port)
        if api_key is None and not ipaddress.ip_address(listening.getsockname()[0]).is_loopback:
            typer.echo("no --api-key: whoever reaches this address may use the server", err=True)
        if threads is not None:
            torch.set_num_threads(threads)
        drafted = None if no_draft else load_named_draft(draft)
        if drafted is not None:
            draft_proposer(drafted, n)  # refuses a wrong n before the target takes its time
        loaded = load_target(target)
        chosen = choose_schedule(loaded, drafted, draft_folder(draft), n, schedule, confidence_threshold)
        service = build_service(loaded, drafted, n, None if no_draft else draft, settings, chosen)
        serve(service, listening, settings, chosen.line)


def ready_line(service: Service, settings: ServeSettings, url: str, schedule: str = "") -> str:
    """What is served where, in one line; schedule: how many drafts are verified."""
    engine = service.loop.engine
    drafted = "plain" if service.draft is None else f"draft {service.draft}, n = {engine.proposer.n}"
    return (
        f"serving {service.model} at {url} ({drafted}, {show_bytes(settings.memory)} of memory for "
        f"{engine.memory.budget:,} tokens, context {engine.max_context:,}, {engine.max_batch} at once"
        + (f"; {schedule})" if schedule and service.draft is not None else ")")
    )


def serve(service: Service, listening: socket.socket, settings: ServeSettings, schedule: str = "") -> None:
    """Serve until a signal ends it. Raises DsparkError when somebody else has taken the port meanwhile."""
    port = listening.getsockname()[1]
    try:
        Server(service, settings.drain, ready_line(service, settings, address_of(listening), schedule)).run([listening])
    except OSError as error:
        raise DsparkError("port", port, f"cannot be listened on: {error.strerror}") from None
    except KeyboardInterrupt:  # uvicorn gives the signal back once everything has ended
        pass
    finally:
        listening.close()
