"""Ids to text piece by piece: never half a character, never the beginning of a stop string, cut at the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HALF_CHARACTER = "\ufffd"  # what a tokenizer gives for UTF-8 bytes that are not complete (yet)
WAIT = 32
"""Ids without certain text after which it is seen whether they wait for anything."""


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer: special tokens left out, spaces as the model wrote them."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class TextStream:
    """Stable text of a growing id list.

    The text of a token depends on its neighbours, so a window that begins with the last piece of certain text is
    decoded with the new ids after it. What is not yet certain (a replacement character at the end: the first bytes of
    a longer character) waits for the ids that complete it. The pieces of any split of the ids join to
    `decode(all ids)`. The work an id takes does not grow with the answer: see `_shorten`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # the window: the ids of the last certain piece, then those after it
        self._certain = 0  # how many of them have their text out
        self._shown = ""  # the text of those

    def push(self, ids: Sequence[int]) -> str:
        """Take new ids; give the text that became certain with them ("" when none did)."""
        return "".join(self._push_one(one) for one in ids)

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = decode(self._tokenizer, self._ids)
        if text.endswith(HALF_CHARACTER) or not text.startswith(self._shown):
            return self._shorten()  # half a character, or a tokenizer that rewrites its last one: wait for what follows
        piece = text[len(self._shown) :]
        if not piece:
            return self._shorten()
        del self._ids[: self._certain]
        self._certain = len(self._ids)
        self._shown = decode(self._tokenizer, self._ids)
        return piece

    def _shorten(self) -> str:
        """Keep the window short where nothing becomes certain, as bytes that are no text and special tokens can do for
        thousands of ids; give the text that is certain all the same.

        A special token leaves the window, as it leaves every text. Of WAIT ids that wait, the first ones have their
        text when it is theirs alone: the window splits there, and did so before each of the last three ids. (A
        character has four bytes; what stays after the split has more, so nothing that follows reaches back over it.)
        """
        tokenizer, ids = self._tokenizer, self._ids
        last = ids[-1:]
        if not decode(tokenizer, last) and tokenizer.decode(last, skip_special_tokens=False):
            ids.pop()
            return ""
        if (len(ids) - self._certain) % WAIT:
            return ""
        for split in range(len(ids) - 8, len(ids) - 12, -1):
            text = decode(tokenizer, ids[:split])
            if text.startswith(self._shown) and all(
                decode(tokenizer, ids[:end]) == text + decode(tokenizer, ids[split:end])
                for end in range(len(ids) - 3, len(ids) + 1)
            ):
                piece = text[len(self._shown) :]
                del ids[:split]
                self._certain, self._shown = 0, ""
                return piece
        return ""

    def flush(self) -> str:
        """The end of the answer: whatever was held back, replacement characters included."""
        text = decode(self._tokenizer, self._ids)
        piece = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._certain, self._shown = len(self._ids), text
        return piece


class StopText:
    """The text of one answer as it grows, and its end at the first of `stops`.

    stops: strings that end the answer, also across tokens and rounds. include_stop: whether the string that ended it
    stays in the text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._stream, self._stops, self._include = TextStream(tokenizer), tuple(stops), include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._closed = False
        self._taken = 0
        self.text = ""

    def push(self, token: int, search: bool = True) -> str | None:
        """Take one committed token; the stop string that its text completed, if one did (and search is on)."""
        before = len(self.text)
        self.text += self._stream.push([token])
        if not (search and self._stops and len(self.text) > before):
            return None
        found = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
        hits = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not hits:
            return None
        end, start, stop = min(hits)  # the one that is complete first, character by character
        self.text = self.text[: end if self._include else start]
        self._closed = True
        return stop

    def close(self) -> None:
        """The answer is over: what was held back belongs to it, unless a stop string cut it off."""
        if not self._closed:
            self.text += self._stream.flush()
            self._closed = True

    def take(self) -> str:
        """The text that became safe to show since the last call: nothing that may yet turn out to be a stop string."""
        safe = len(self.text) if self._closed else len(self.text) - self._held()
        piece = self.text[self._taken : safe]
        self._taken = max(self._taken, safe)
        return piece

    def _held(self) -> int:
        """Length of the longest end of the text that is a beginning of a stop string."""
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """One piece of text per id; a character made by several ids belongs to the last of them."""
    stream = TextStream(tokenizer)
    pieces = [stream.push([one]) for one in ids]
    if pieces:
        pieces[-1] += stream.flush()
    return pieces
