"""Words of a card: values as text, tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.targets.embedded import EMBEDDED

Json = Mapping[str, Any]
UNKNOWN = "not recorded"
EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Of whose weights the embedded target is a copy in 4 bits."""


def dig(value: Any, *keys: str) -> Any:
    """value[key][key]..., None where one is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def said(value: Any, form: str = "") -> str:
    """A value as text; None is `not recorded`, a path is its last name."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name
    if isinstance(value, (list, tuple)):
        return ", ".join(said(one) for one in value)
    return format(value, form)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def hub_name(name: str) -> str | None:
    """OWNER/NAME when a target's name is one; the embedded target has its model's."""
    if name == EMBEDDED:
        return EMBEDDED_MODEL
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) else None
