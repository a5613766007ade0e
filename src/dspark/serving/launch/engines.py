"""What each engine's command line knows: assets/engines/*.yaml, read from one version of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from dspark.errors import DsparkError

ENGINES = ("vllm", "sglang", "llamacpp")


@dataclass(frozen=True)
class Engine:
    """flags: its long flags without dashes. keys: those inside a flag whose value is JSON, by the flag's name (and the
    keys that lead there, with dots)."""

    key: str
    name: str
    version: str
    executable: str
    flags: frozenset[str]
    keys: Mapping[str, frozenset[str]]

    def unknown(self, flag: str, value: Any) -> Iterator[str]:
        """What of a flag and its JSON value this version does not have: `flag`, or `flag.key`."""
        if flag not in self.flags:
            yield flag
        elif isinstance(value, Mapping):
            yield from self._unknown_keys(flag, value)

    def _unknown_keys(self, place: str, value: Mapping[str, Any]) -> Iterator[str]:
        for key, inner in value.items() if place in self.keys else ():
            if key not in self.keys[place]:
                yield f"{place}.{key}"
            elif isinstance(inner, Mapping):
                yield from self._unknown_keys(f"{place}.{key}", inner)

    def check(self, flag: str, value: Any) -> None:
        """Raise DsparkError for a flag, or a key inside its value, that this version does not have."""
        for name in self.unknown(flag, value):
            place, _, key = name.rpartition(".")
            near = get_close_matches(key, self.keys[place] if place else self.flags, 3)
            hint = f"; it has {', '.join(near)}" if near else ""
            raise DsparkError("flag", name, f"is not known to {self.name} {self.version}{hint}")


@cache
def engine(key: str) -> Engine:
    """An engine by its key in ENGINES. Raises DsparkError."""
    if key not in ENGINES:
        raise DsparkError("engine", key, f"must be one of {', '.join(ENGINES)}")
    text = files("dspark").joinpath(f"assets/engines/{key}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    flags, keys = values.pop("flags"), values.pop("keys", {})
    known = {place: frozenset(names.split()) for place, names in keys.items()}
    return Engine(key, flags=frozenset(flags.split()), keys=known, **values)
