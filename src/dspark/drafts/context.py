"""What a DSpark draft keeps of a request between its passes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dspark.errors import DsparkError


class DraftContext:
    """One request's committed K/V, preallocated: keys [layers, kvh, capacity + scratch, kd], values [.., vd].

    The scratch holds the block of the current pass, so that attention reads context and block as one slice without a
    copy; it is never part of `length`. values None: they are the first `value_width` numbers of the keys (MLA).
    compiled: where they lie, kept by the compiled pass until they move.
    """

    def __init__(self, keys: Tensor, values: Tensor | None, value_width: int, capacity: int) -> None:
        self.keys, self.value_width, self.capacity = keys, value_width, capacity
        self._values = values
        self.length = 0
        self.compiled: Any = None

    @property
    def values(self) -> Tensor:
        """[layers, kvh, capacity + scratch, vd]."""
        return self.keys[..., : self.value_width] if self._values is None else self._values

    def write(self, layers: int | slice, start: int, key: Tensor, value: Tensor) -> None:
        """Keys and values [.., kvh, t, kd or vd] of the tokens at start.. in one layer or several."""
        end = start + key.shape[-2]
        self.keys[layers, :, start:end] = key
        if self._values is not None:
            self._values[layers, :, start:end] = value

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on. Raises DsparkError when length > self.length."""
        if not 0 <= length <= self.length:
            raise DsparkError("length", length, f"must be 0..{self.length}, what the draft's context holds")
        self.length = length

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` committed tokens in all; what is held is copied."""
        more = capacity - self.capacity
        if more > 0:
            self.keys = self._longer(self.keys, more)
            self._values = None if self._values is None else self._longer(self._values, more)
            self.capacity, self.compiled = capacity, None

    def _longer(self, held: Tensor, more: int) -> Tensor:
        layers, heads, places, width = held.shape
        grown = held.new_empty(layers, heads, places + more, width)
        grown[:, :, : self.length] = held[:, :, : self.length]
        return grown

    def copy_prefix(self, other: DraftContext, length: int) -> None:
        """Take the first `length` tokens of another request's context, which must hold them."""
        self.write(slice(None), 0, other.keys[:, :, :length], other.values[:, :, :length])
        self.length = length
