"""Values of engine flags: as a user types them, as numbers, and those that `dspark launch` sets itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dspark.errors import DsparkError
from dspark.serving.launch.engines import Engine

Flags = dict[str, Any]
"""Long flags without dashes -> value: True for a flag alone, a mapping for JSON."""

CONTEXT = {"vllm": "max-model-len", "sglang": "context-length", "llamacpp": "ctx-size"}
PARALLEL = {"vllm": "tensor-parallel-size", "sglang": "tp-size"}
DCP = "dcp-size"
_NO_LIMIT = {"vllm": ("auto", "-1"), "llamacpp": ("0",)}
"""Contexts that leave the choice to the engine."""
_SUFFIX = dict(zip("kmgtKMGT", [*(1000**i for i in range(1, 5)), *(1024**i for i in range(1, 5))], strict=True))
"""As vLLM reads them: 32k is 32,000, 32K is 32,768."""

_ALL = {"host": "--host", "port": "--port"}
OWN = {
    "vllm": {
        **_ALL,
        "model": "--target",
        "tensor-parallel-size": "--tp",
        "spec-model": "--draft",
        "spec-tokens": "-n",
        "spec-method": "--draft",
        "speculative-config.model": "--draft",
        "speculative-config.method": "--draft",
        "speculative-config.num_speculative_tokens": "-n",
        "speculative-config.enable_adaptive_verification": "--adaptive",
    },
    "sglang": {
        **_ALL,
        "model": "--target",
        "model-path": "--target",
        "tp-size": "--tp",
        "tensor-parallel-size": "--tp",
        "decode-context-parallel-size": "--flag dcp-size",
        "speculative-algorithm": "--draft",
        "speculative-draft-model": "--draft",
        "speculative-draft-model-path": "--draft",
        "speculative-dspark-block-size": "-n",
        "speculative-dflash-block-size": "-n",
        "speculative-num-steps": "-n",
        "speculative-num-draft-tokens": "-n",
        "speculative-eagle-topk": "-n",
    },
    "llamacpp": {
        **_ALL,
        **dict.fromkeys(("model", "model-url", "hf-repo", "hf-file", "docker-repo"), "--target"),
        **dict.fromkeys(("model-draft", "spec-draft-model", "spec-draft-hf", "hf-repo-draft", "spec-type"), "--draft"),
        "spec-draft-n-max": "-n",
    },
}
"""Engine -> what launch sets itself (a flag, or a key inside its JSON) -> the option that it is asked for with."""


def parse_flags(texts: Sequence[str]) -> Flags:
    """`NAME` or `NAME=VALUE`, dashes before it or not; a value that is a JSON object is one.

    Raises DsparkError.
    """
    flags = Flags()
    for text in texts:
        name, equals, value = text.strip().lstrip("-").partition("=")
        if not name or any(one.isspace() for one in name):
            raise DsparkError("flag", text, "must be NAME or NAME=VALUE, e.g. max-num-seqs=32")
        flags[name] = _value(name, value) if equals else True
    return flags


def _value(name: str, text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DsparkError(name, text[:80], f"is not JSON ({error})") from None


def check_own(engine: Engine, flags: Mapping[str, Any]) -> None:
    """Raise DsparkError for a flag of the user, or a key inside its JSON, that an option of launch is for."""
    own = OWN[engine.key]
    for name, value in flags.items():
        inside = [f"{name}.{key}" for key in value] if isinstance(value, Mapping) else []
        for one in (name, *inside):
            if one in own:
                raise DsparkError("flag", one, f"is set by launch itself; use {own[one]}")


def check_values(engine: Engine, flags: Mapping[str, Any]) -> None:
    """Raise DsparkError for numbers that are none or cannot be, and for text where JSON belongs."""
    for name in (PARALLEL.get(engine.key), DCP):
        if name is not None and (found := number(name, flags.get(name))) is not None and found < 1:
            raise DsparkError(name, found, "must be at least 1")
    port = number("port", flags.get("port"))
    if port is not None and not 1 <= port <= 65535:
        raise DsparkError("port", port, "must be 1..65535")
    for name in engine.keys:
        if name in flags and not isinstance(flags[name], Mapping):
            raise DsparkError(name, flags[name], 'must be a JSON object, e.g. {"KEY": "VALUE"}')
    context_of(engine, flags)


def context_of(engine: Engine, flags: Mapping[str, Any]) -> int | None:
    """The context that a command states, None when the engine chooses. Raises DsparkError."""
    name = CONTEXT[engine.key]
    value = flags.get(name)
    if str(value) in _NO_LIMIT.get(engine.key, ()):
        return None
    found = number(name, value, engine.key == "vllm")
    if found is not None and found < 1:
        raise DsparkError("context", found, "must be at least 1")
    return found


def number(name: str, value: Any, suffixes: bool = False) -> int | None:
    """The whole number of a flag, None when it is not there. suffixes: 32k and 32K are read too. Raises DsparkError."""
    if value is None:
        return None
    match = re.fullmatch(r"(-?[0-9]{1,18})([kmgtKMGT]?)", str(value))
    if isinstance(value, bool) or match is None or (match[2] and not suffixes):
        shown = None if value is True else value
        raise DsparkError(name, shown, "must be a whole number" + (", 32k, 32K or auto" if suffixes else ""))
    return int(match[1]) * _SUFFIX.get(match[2], 1)
