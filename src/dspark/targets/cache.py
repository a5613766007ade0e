"""Preallocated K/V per request, and the ragged pass that reads and writes it.

The new tokens of all requests form one row `[1, sum of new tokens]`. `RaggedCache.update` (the interface that
Transformers' attention layers call) writes each request's new keys and values at that request's own offset; the
attention function registered here reads every request's K/V in place. Nothing is copied, nothing is padded, and
rollback is lowering a length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.errors import DsparkError

ATTENTION_NAME = "dspark_ragged"
UNKNOWN_TO_US = ("s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Arguments by which some models change their attention (sinks, relative bias, sparse keys)."""


class RequestCache:
    """One request's K/V: `capacity` tokens a layer, allocated when a layer first writes.

    keys, values: per layer [1, kv_heads, capacity, head_dim]; entries from `length` on are not valid.
    compiled: where they lie, kept by the compiled pass until they move.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.compiled: Any = None
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on. Raises DsparkError when length is not in 0..self.length."""
        if not 0 <= length <= self.length:
            raise DsparkError("length", length, f"a request's cache can be cut to 0..{self.length} tokens")
        self.length = length

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """keys, values [1, kv_heads, t, head_dim] go to positions start..start+t of `layer`."""
        held_k, held_v = self.keys[layer], self.values[layer]
        if held_k is None or held_v is None:
            held_k = self.keys[layer] = keys.new_empty(1, keys.shape[1], self.capacity, keys.shape[3])
            held_v = self.values[layer] = values.new_empty(1, values.shape[1], self.capacity, values.shape[3])
        count = keys.shape[2]
        held_k.narrow(2, start, count).copy_(keys)
        held_v.narrow(2, start, count).copy_(values)

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens in all; what is held is copied."""
        if capacity <= self.capacity:
            return
        self.capacity, self.compiled = capacity, None
        for held in (self.keys, self.values):
            for layer, tensor in enumerate(held):
                if tensor is not None:
                    grown = tensor.new_empty(1, tensor.shape[1], capacity, tensor.shape[3])
                    grown[:, :, : self.length] = tensor[:, :, : self.length]
                    held[layer] = grown

    def copy_prefix(self, other: RequestCache, length: int) -> None:
        """Take the first `length` tokens of another request's K/V, which must hold them."""
        for layer, (keys, values) in enumerate(zip(other.keys, other.values, strict=True)):
            assert keys is not None and values is not None  # a request that holds tokens has every layer's
            self.write(layer, 0, keys[:, :, :length], values[:, :, :length])
        self.length = length


@dataclass
class Segment:
    """The new tokens of one request: rows row..row+count of the flat pass, positions start..start+count.

    masks: the causal mask [count, start + count] by sliding window (None = no window), made once a pass.
    """

    cache: RequestCache
    row: int
    count: int
    start: int
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """True where a new token sees a position; None when all of them are visible."""
        if window not in self.masks:
            end = self.start + self.count
            query = torch.arange(self.start, end, device=device)[:, None]
            key = torch.arange(end, device=device)[None, :]
            visible = key <= query
            if window is not None:
                visible &= key > query - window
            whole = self.count == 1 and (window is None or end <= window)
            self.masks[window] = None if whole else visible
        return self.masks[window]


class RaggedCache:
    """The cache object a Transformers model is given for one ragged pass."""

    is_compileable = False

    def __init__(self, batch: Sequence[tuple[RequestCache, int]]) -> None:
        self.segments: list[Segment] = []
        row = 0
        for cache, count in batch:
            if cache.length + count > cache.capacity:
                raise DsparkError(
                    "capacity", cache.capacity, f"the request's cache needs room for {cache.length + count} tokens"
                )
            self.segments.append(Segment(cache, row, count, cache.length))
            row += count
        self.counts = [count for _, count in batch]

    def positions(self, device: torch.device) -> Tensor:
        """Position ids of the flat row, [1, rows]."""
        return torch.cat([torch.arange(s.start, s.start + s.count, device=device) for s in self.segments])[None]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Write keys, values [1, kv_heads, rows, head_dim] at per-request offsets; attention reads them in place."""
        parts = zip(self.segments, keys.split(self.counts, dim=2), values.split(self.counts, dim=2), strict=True)
        for s, new_keys, new_values in parts:
            s.cache.write(layer_idx, s.start, new_keys, new_values)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of Transformers' cache interface; positions are always given explicitly, so nothing is assumed."""
        return 0

    def commit(self) -> None:
        """The pass went through: every request is longer by its new tokens."""
        for s in self.segments:
            s.cache.length = s.start + s.count


def ragged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: RaggedCache | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of the flat row: query [1, heads, rows, head_dim] -> [1, rows, heads, head_dim].

    Each request's new tokens see that request's own K/V only. `softcap` (Gemma 2) has no fused kernel and is
    computed in the open. Raises DsparkError for what would change the result and is not computed here.
    """
    changed = [name for name in UNKNOWN_TO_US if others.get(name) is not None]
    if ragged is None or changed:
        lacks = f"needs {changed[0]}" if changed else "does not hand the pass's arguments to its attention"
        raise DsparkError("target", type(module).__name__, f"{lacks}, so it cannot be run here; use another target")
    layer: int = module.layer_idx  # type: ignore[assignment]
    parts = []
    for s, q in zip(ragged.segments, query.split(ragged.counts, dim=2), strict=True):
        end = s.start + s.count
        held_k, held_v = s.cache.keys[layer], s.cache.values[layer]
        assert held_k is not None and held_v is not None  # update() ran just before
        k, v = held_k.narrow(2, 0, end), held_v.narrow(2, 0, end)
        mask = s.mask(sliding_window, q.device)
        if softcap is None:
            parts.append(_attend(q, k, v, mask, scaling))
        else:
            parts.append(_attend_softcapped(q, k, v, mask, scaling, softcap))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2), None


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    if mask is None and groups > 1:
        # One new token: the query heads of a K/V head become its rows, so that K/V are read once, unrepeated.
        packed = q.reshape(1, k.shape[1], groups, q.shape[3])
        return F.scaled_dot_product_attention(packed, k, v, scale=scaling).reshape(q.shape[:3] + v.shape[3:])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=groups > 1)


def _attend_softcapped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(2, 3) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ v
