"""Paths of a machine and access tokens in texts that go out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_PLACES = (
    "home|root|Users|Volumes|tmp|var|mnt|data|work|workspace|opt|srv|scratch|media|private|gpfs|nfs|raid|storage|lustre|"
    "content|kaggle|dev/shm|usr/local"
)
_URL = re.compile(r"\b(?!file:)[A-Za-z][A-Za-z0-9+.-]+://[^\s\"'`<>|)\]]*")
_REST = r"[^\s\"'`)|]*"
_PATHS = re.compile(
    rf"(?<![\w./~-])(?:~/+|/+(?:{_PLACES})/+)[^\s\"'`)|]{_REST}"
    rf"|\bfile:/+{_REST}"
    rf"|(?<![A-Za-z0-9])[A-Za-z]:[\\/]+\w{_REST}"
    rf"|(?<![\w\\])\\\\[\w.$-]+\\+[\w.$-]{_REST}"
)
_TOKEN = re.compile(r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|gh[opsu]_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,})")


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys too."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


def path_in(text: str, whole: bool) -> str | None:
    """The first path of a machine in a text. Addresses with a scheme (but file:) and OWNER/NAME are none.

    whole: the text is a value by itself, and so a path when it begins with a slash and has another.
    """
    if whole and text.startswith("/") and text.count("/") > 1:
        return text
    found = _PATHS.search(_URL.sub(" ", text))
    return found[0] if found else None


def token_in(text: str) -> str | None:
    """The first letters of the first access token in a text."""
    found = _TOKEN.search(text)
    return f"{found[0][:5]}..." if found else None
