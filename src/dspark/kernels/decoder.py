"""A whole pass of decoder layers in one call: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

Targets of the Llama and Qwen families and DFlash drafts are made of such layers (kernels.cpp).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.errors import DsparkError
from dspark.kernels.library import CDecoder, CLayer, CSegment, address, addresses, library, threads
from dspark.kernels.matrix import Matrix

PANEL = 16

Tables = Callable[[int], tuple[Tensor, Tensor]]
"""Positions -> cos and sin [at least so many, dims]; the first half of sin carries the rotation's minus sign."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norms [d]; q_norm, k_norm [head_dim] or None; qkv: queries, keys, values; gate_up: `interleaved`.

    window: a token sees only keys less than this far away (0: all); causal: and none after itself.
    """

    attention_norm: Tensor
    qkv: Matrix
    out: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    window: int = 0
    causal: bool = True


@dataclass(frozen=True)
class Shape:
    """What the layers share. head_dim is a multiple of 16, head_dim * heads and the widths multiples of 32."""

    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    intermediate: int
    eps: float
    scale: float


class Pointers:
    """Where one request's K/V lie: a tensor [kv_heads, capacity, head_dim] for each layer, contiguous."""

    def __init__(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.shapes = {tuple(tensor.shape[-3:]) for tensor in (*keys, *values)}
        self.layers = len(keys)
        if any(tensor.dtype != torch.float32 or not tensor.is_contiguous() for tensor in (*keys, *values)):
            raise DsparkError(
                "state",
                str({str(tensor.dtype) for tensor in keys}),
                "a compiled pass keeps its K/V in contiguous float32",
            )
        self._keys, self._values = addresses(keys), addresses(values)
        self.keys, self.values = ctypes.addressof(self._keys), ctypes.addressof(self._values)

    def __deepcopy__(self, memo: object) -> None:
        return None  # a copy of what it points to lies elsewhere


@dataclass(frozen=True)
class Span:
    """`count` new tokens of one request at positions start.., and its K/V with room for `capacity` tokens."""

    start: int
    count: int
    capacity: int
    pointers: Pointers


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up [outputs, ...] -> [2 * outputs, ...], by turns 16 of one and 16 of the other."""
    outputs = len(gate)
    both = torch.stack((gate.reshape(outputs // PANEL, PANEL, -1), up.reshape(outputs // PANEL, PANEL, -1)), 1)
    return both.reshape(2 * outputs, *gate.shape[1:])


class Decoder:
    """Layers that run together. tables: the rotary tables; storages: the formats of their matrices."""

    def __init__(self, shape: Shape, layers: Sequence[LayerWeights], tables: Tables) -> None:
        self.shape, self._tables = shape, tables
        self.storages = sorted({m.format for w in layers for m in (w.qkv, w.out, w.gate_up, w.down)})
        self._kept: list[Any] = []
        self._layers = (CLayer * len(layers))(*[self._layer(layer) for layer in layers])
        s = shape
        self._c = CDecoder(
            len(layers), s.width, s.heads, s.kv_heads, s.head_dim, s.rotary_dims, s.intermediate, 0, s.eps, s.scale,
            self._layers,
        )  # fmt: skip

    def __deepcopy__(self, memo: object) -> Decoder:
        return self  # frozen; a copy of a model shares it

    def _layer(self, layer: LayerWeights) -> CLayer:
        norms = [
            None if norm is None else norm.detach().float().contiguous()
            for norm in (layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm)
        ]
        self._kept += [norms, layer]
        matrices = [matrix.c for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        return CLayer(*[address(norm) for norm in norms], *matrices, layer.window, layer.causal)

    def run(self, x: Tensor, spans: Sequence[Span], taps: Sequence[int] = ()) -> Tensor | None:
        """New tokens x [rows, d], the spans' one after the other, through all layers, in place; their K/V are written.

        taps: layers in ascending order; x after each, side by side [rows, taps * d].
        """
        rows, width = x.shape
        if x.dtype != torch.float32:
            raise DsparkError("dtype", str(x.dtype), "passes were compiled for float32; load the model again")
        tapped = torch.empty(rows, len(taps) * width, dtype=torch.float32) if taps else None
        self._check(spans)
        cos, sin = self._tables(max(span.start + span.count for span in spans))
        library().dspark_decode(
            ctypes.byref(self._c), address(x), rows, address(cos), address(sin), _segments(spans), len(spans),
            (ctypes.c_int32 * len(taps))(*taps), len(taps), address(tapped), threads(),
        )  # fmt: skip
        return tapped

    def _check(self, spans: Sequence[Span]) -> None:
        """Raises DsparkError for the state of another model: it would be written past its ends."""
        for span in spans:
            wanted = (self.shape.kv_heads, span.capacity, self.shape.head_dim)
            if span.pointers.layers != len(self._layers) or span.pointers.shapes != {wanted}:
                found = f"{span.pointers.layers} layers of {sorted(span.pointers.shapes)}"
                raise DsparkError("state", found, f"this model needs {len(self._layers)} layers of {wanted}")

    def write_context(self, taps: Tensor, fc: Matrix, norm: Tensor, kv: Matrix, spans: Sequence[Span]) -> None:
        """A DFlash draft's context of committed tokens: taps [rows, m * d] -> norm(fc taps) -> K/V of every layer.

        kv: the layers' k and v one after the other.
        """
        self._check(spans)
        cos, sin = self._tables(max(span.start + span.count for span in spans))
        library().dspark_context(
            ctypes.byref(self._c), address(taps), len(taps), ctypes.byref(fc.c), address(norm), ctypes.byref(kv.c),
            address(cos), address(sin), _segments(spans), len(spans), threads(),
        )  # fmt: skip


def _segments(spans: Sequence[Span]) -> Any:
    segments, row = (CSegment * len(spans))(), 0
    for segment, span in zip(segments, spans, strict=True):
        segment.row, segment.count, segment.start, segment.capacity = row, span.count, span.start, span.capacity
        segment.keys, segment.values = span.pointers.keys, span.pointers.values
        row += span.count
    return segments


def head(x: Tensor, chosen: Tensor, norm: Tensor, eps: float, matrix: Matrix | None) -> tuple[Tensor, Tensor, Tensor]:
    """norm(x)[chosen] [rows, d]; with a matrix also its logits [rows, V] and the place of the largest of each row
    [rows], the first of equals (else empty). x [.., d], chosen [rows] int64."""
    rows = len(chosen)
    normed = torch.empty(rows, x.shape[1], dtype=torch.float32)
    logits = torch.empty(rows, 0 if matrix is None else matrix.outputs, dtype=torch.float32)
    best = torch.empty(0 if matrix is None else rows, dtype=torch.int64)
    if rows:
        library().dspark_head(
            address(x), x.shape[1], address(chosen), rows, address(norm), eps, address(normed),
            None if matrix is None else ctypes.byref(matrix.c), address(logits), address(best),
            threads(),
        )  # fmt: skip
    return normed, logits, best


def markov_tokens(base: Tensor, w1: Tensor, w2: Matrix, first: Tensor, ids: Tensor | None) -> Tensor:
    """A vanilla Markov head's greedy tokens [R, n], slot by slot: the largest of base[:, k] + w2 w1[token before].

    base [R, n, K]; w1 [V, r]; first [R]: the token before slot 0; ids [K]: target ids of the outputs (None: the same).
    """
    requests, slots, _ = base.shape
    tokens = torch.empty(requests, slots, dtype=torch.int64)
    library().dspark_markov(
        address(base), requests, slots, address(w1), ctypes.byref(w2.c), address(first), address(ids), address(tokens),
        threads(),
    )  # fmt: skip
    return tokens
