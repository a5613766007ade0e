"""Single tokens as a client sees them: their bytes, and a text for each."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import llguidance.hf


class TokenTexts:
    """Texts of single ids of one tokenizer; its table is read on first use (a third of a second)."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._table: Any = None
        self.of = lru_cache(maxsize=65536)(self._of)

    def _of(self, token: int) -> tuple[str, bytes]:
        """(text, bytes) of an id. Where the bytes are no whole characters, the text is OpenAI's `bytes:\\xf0\\x9f`."""
        raw = self._bytes(token)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _bytes(self, token: int) -> bytes:
        if self._table is None:
            try:
                self._table = llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self._vocab_size)
            except Exception:  # one that llguidance cannot read: then its text has to do
                self._table = False
        if not self._table:
            return str(self.tokenizer.decode([token])).encode()
        return bytes(self._table.decode_bytes([token]))
