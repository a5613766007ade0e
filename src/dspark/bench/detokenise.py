"""Ids to text piece by piece, without ever showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HALF_CHARACTER = "\ufffd"  # what a tokenizer gives for UTF-8 bytes that are not complete (yet)


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer: special tokens left out, spaces as the model wrote them."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Stable text of a growing id list.

    The whole list is decoded every time, since the text of a token depends on its neighbours; what is not
    yet certain (replacement characters at the end: the first bytes of a longer character) waits for the
    ids that complete it. The pieces of any split of the ids join to `decode(all ids)`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: Sequence[int]) -> str:
        """Take new ids; give the text that became certain with them ("" when none did)."""
        self._ids.extend(ids)
        return self._advance(decode(self._tokenizer, self._ids).rstrip(HALF_CHARACTER))

    def flush(self) -> str:
        """The end of the answer: whatever was held back, replacement characters included."""
        return self._advance(decode(self._tokenizer, self._ids))

    def _advance(self, text: str) -> str:
        if not text.startswith(self._shown):
            return ""  # a tokenizer that rewrites its last character: wait until the text grows past it
        piece, self._shown = text[len(self._shown) :], text
        return piece


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One piece of text per id; a character made by several ids belongs to the last of them."""
    stream = TextStream(tokenizer)
    pieces = [stream.push([one]) for one in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces
