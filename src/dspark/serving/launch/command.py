"""The command line that serves a pair: an engine's flags in order, from a published command or from nothing."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.calibration.export import read_exported
from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import Config
from dspark.errors import DsparkError
from dspark.serving.launch.engines import Engine
from dspark.serving.launch.flags import DCP, PARALLEL, Flags, check_own, check_values, context_of, number

MODE = "SGLANG_RAGGED_VERIFY_MODE"


@dataclass(frozen=True)
class Wish:
    """What is to be served, and how. None: as the published command has it, or the engine's own default.

    target, draft: as the engine takes them. adaptive: verify by the draft's confidence. exported: folder of what
    `dspark calibrate --export` wrote. flags: further ones.
    """

    target: str
    draft: str
    n: int | None = None
    tp: int | None = None
    context: int | None = None
    host: str | None = None
    port: int | None = None
    adaptive: bool = False
    exported: Path | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """words: program and positional arguments. dropped: published flags that this version does not have."""

    words: tuple[str, ...]
    flags: Flags
    environment: Mapping[str, str]
    dropped: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """The arguments as a process gets them."""
        return [*self.words, *(word for words in self._flag_words() for word in words)]

    def text(self) -> str:
        """For a shell: one flag a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines += [shlex.join(words) for words in (self.words, *self._flag_words())]
        return " \\\n  ".join(lines)

    def _flag_words(self) -> list[list[str]]:
        return [[f"--{name}", *([] if value is True else [_word(value)])] for name, value in self.flags.items()]


def compose(engine: Engine, wish: Wish, config: Config | None, published: Mapping[str, Any] | None = None) -> Command:
    """The command for a wish. config: the draft's, None when it cannot be read here. published: flags to start from.

    Raises DsparkError naming what the draft or the engine cannot do.
    """
    n = _check(engine, wish, config)
    method = _method(config)
    words: tuple[str, ...]
    if engine.key == "vllm":
        words, wanted = ("vllm", "serve", wish.target), _vllm(wish, n, method)
    elif engine.key == "sglang":
        words, wanted = ("sglang", "serve"), _sglang(wish, n, method)
    else:
        words, wanted = (engine.executable,), _llamacpp(wish, n, method)
    check_own(engine, wish.flags)
    flags, dropped = _without_unknown(engine, published or {})
    for name, value in wanted.items():
        if value is not None:
            engine.check(name, value)
            flags[name] = _merged(flags.get(name), value)
    for name, path in _exported(engine, wish, n).items():
        engine.check(name, str(path))
        flags[name] = str(path)
    for name, value in wish.flags.items():
        engine.check(name, value)
        flags[name] = _merged(flags.get(name), value)
    check_values(engine, flags)
    _check_context(context_of(engine, flags), config)
    environment = {MODE: "compact"} if wish.adaptive and engine.key == "sglang" else {}
    _check_adaptive(engine, wish, config, flags)
    return Command(words, flags, environment, tuple(dropped))


def _vllm(wish: Wish, n: int, method: str) -> Flags:
    """fuse_allreduce_rms: on by itself where TP > 1 on Hopper and Blackwell; off as in the published commands."""
    speculation = {"model": wish.draft, "num_speculative_tokens": n, "method": method}
    if wish.adaptive:
        speculation["enable_adaptive_verification"] = True
    several = (wish.tp or 1) > 1
    return {
        "tensor-parallel-size": wish.tp,
        "max-model-len": wish.context,
        "host": wish.host,
        "port": wish.port,
        "compilation-config": {"pass_config": {"fuse_allreduce_rms": False}} if several else None,
        "speculative-config": speculation,
    }


def _sglang(wish: Wish, n: int, method: str) -> Flags:
    width = {
        "dspark": {"speculative-dspark-block-size": n},
        "dflash": {"speculative-dflash-block-size": n + 1},  # the verified window: the current token counts
        "eagle3": {"speculative-num-steps": n, "speculative-eagle-topk": 1, "speculative-num-draft-tokens": n + 1},
    }
    return {
        "model-path": wish.target,
        "tp-size": wish.tp,
        "context-length": wish.context,
        "host": wish.host,
        "port": wish.port,
        "speculative-algorithm": method.upper(),
        "speculative-draft-model-path": wish.draft,
        **width[method],
    }


def _llamacpp(wish: Wish, n: int, method: str) -> Flags:
    return {
        "model": wish.target,
        "ctx-size": wish.context,
        "host": wish.host,
        "port": wish.port,
        "model-draft": wish.draft,
        "spec-type": f"draft-{method}",
        "spec-draft-n-max": n,
    }


def _exported(engine: Engine, wish: Wish, n: int) -> dict[str, Path]:
    """SGLang's flags for exported files. Raises DsparkError where they cannot be passed."""
    if wish.exported is not None and not os.path.isdir(wish.exported):
        raise DsparkError("exported", str(wish.exported)[:80], "is no folder; dspark calibrate --export writes one")
    if wish.exported is None or engine.key == "vllm":
        return {}
    if engine.key == "llamacpp":
        raise DsparkError("exported", str(wish.exported), "llama.cpp has no scheduler that would read it")
    found = read_exported(wish.exported, n)
    for name in found:
        if name in wish.flags:
            raise DsparkError("flag", name, "is given by --exported; leave one of them out")
    return found


def _method(config: Config | None) -> str:
    if isinstance(config, Eagle3Config):
        return "eagle3"
    return "dflash" if isinstance(config, DraftConfig) and config.markov_rank == 0 else "dspark"


def _check(engine: Engine, wish: Wish, config: Config | None) -> int:
    """The draft tokens of a round. Raises DsparkError for numbers that cannot be."""
    for name, value in (("tp", wish.tp), ("context", wish.context)):
        if value is not None and value < 1:
            raise DsparkError(name, value, "must be at least 1")
    for name, place in (("target", wish.target), ("draft", wish.draft)):
        if place.startswith("-"):
            raise DsparkError(name, place, f"would be taken for a flag; write ./{place}")
    if engine.key not in PARALLEL and (wish.tp or 1) > 1:
        raise DsparkError("tp", wish.tp, f"{engine.name} splits a model with --flag tensor-split=...; leave --tp out")
    n = wish.n if wish.n is not None or config is None else config.gamma
    if n is None:
        raise DsparkError("n", None, "give -n: the draft is not on this disk, and no recipe names it")
    if config is not None:
        config.slots(n)  # raises when the draft has no such width
    elif n < 1:
        raise DsparkError("n", n, "must be at least 1")
    return n


def _check_context(context: int | None, config: Config | None) -> None:
    if config is not None and context is not None and context > config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise DsparkError("context", context, f"must be at most {limit}, the draft's max_position_embeddings")


def _check_adaptive(engine: Engine, wish: Wish, config: Config | None, flags: Flags) -> None:
    if not wish.adaptive:
        return
    if engine.key == "llamacpp":
        raise DsparkError("adaptive", True, "llama.cpp has no scheduler; --flag spec-draft-p-min=0.5 cuts its drafts")
    if _method(config) != "dspark":
        raise DsparkError("adaptive", True, "is for DSpark drafts")
    if engine.key == "sglang" and config is not None and not config.enable_confidence_head:
        raise DsparkError("adaptive", True, "SGLang schedules by the confidence head, which this draft has not")
    if engine.key == "sglang" and (number(DCP, flags.get(DCP)) or 1) > 1:
        raise DsparkError("adaptive", True, f"with {DCP} {flags[DCP]} SGLang verifies statically only")


def _without_unknown(engine: Engine, published: Mapping[str, Any]) -> tuple[Flags, list[str]]:
    """Published flags that this version has, and the names of the others; false and null are flags left out."""
    flags, dropped = Flags(), list[str]()
    for name, value in published.items():
        if value is None or value is False:
            continue
        unknown = list(engine.unknown(name, value))
        dropped += unknown
        if name not in unknown:
            flags[name] = _pruned(value, {one.removeprefix(f"{name}.") for one in unknown})
    return flags, dropped


def _pruned(value: Any, unknown: set[str], place: str = "") -> Any:
    """A value without the keys named in `unknown`, with dots."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _pruned(inner, unknown, f"{place}{key}.") for key, inner in value.items() if place + key not in unknown
    }


def _merged(old: Any, new: Any) -> Any:
    """A new value over an old one, JSON objects key by key."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, (Mapping, list)) else str(value)
