"""Packed weight matrices: the formats, which of them hold a weight exactly, and products (matrix.hpp).

Activations and sums are float32, and a row's result has the same bits however many rows a product has.
"""

from __future__ import annotations

import ctypes
from typing import Literal

import torch
from torch import Tensor

from dspark.errors import DsparkError
from dspark.kernels.library import CMatrix, address, library, threads

Format = Literal["float32", "float16", "bfloat16", "int8", "q8_0", "q4_1"]
NUMBERS: dict[Format, int] = {"float32": 0, "float16": 1, "bfloat16": 2, "int8": 3, "q8_0": 4, "q4_1": 5}
"""As matrix.hpp numbers them. int8: a scale per output; q8_0 and q4_1: GGUF's blocks of 32 inputs."""

SMALLEST_FIRST: tuple[Format, ...] = ("q4_1", "q8_0", "bfloat16", "float16", "float32")
LINE = 64


class Matrix:
    """weight [outputs, inputs] packed in `format`, with a bias [outputs] or None.

    exact: whether every weight is what it was; bytes: what a product reads.
    """

    def __init__(
        self,
        format: Format,
        exact: bool,
        data: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        outputs: int,
        inputs: int,
    ) -> None:
        self.format, self.exact, self.outputs, self.inputs, self.bytes = format, exact, outputs, inputs, data.numel()
        self._kept, self._library = (data, scales, bias), library()
        self.c = CMatrix(NUMBERS[format], outputs, inputs, 0, address(data), address(scales), address(bias))

    def __deepcopy__(self, memo: object) -> Matrix:
        return self  # frozen; a copy of a model shares it

    def multiply(self, x: Tensor) -> Tensor:
        """x [..., inputs] float32 -> x @ weight.T + bias [..., outputs]."""
        assert x.dtype == torch.float32 and x.shape[-1] == self.inputs  # else memory past the ends is used
        x = x.detach().contiguous()
        y = torch.empty(*x.shape[:-1], self.outputs, dtype=torch.float32)
        rows = x.numel() // self.inputs
        if rows:
            self._library.dspark_multiply(ctypes.byref(self.c), address(x), rows, address(y), threads())
        return y


def packable(weight: Tensor) -> bool:
    """Whether the compiled kernels are there and take this weight: float32 on a CPU, inputs a multiple of 32."""
    fits = weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.dim() == 2
    return fits and weight.shape[1] % 32 == 0 and weight.numel() > 0 and library() is not None


def pack(weight: Tensor, bias: Tensor | None = None, format: Format | None = None) -> Matrix:
    """Pack weight [outputs, inputs]; format None: the smallest that holds every weight exactly.

    A format that is asked for rounds what it does not hold; q8_0 and q4_1 are for weights that came from such blocks.
    Raises DsparkError for weights that they do not hold.
    """
    if format is not None and format not in NUMBERS:
        raise DsparkError("storage", format, f"must be one of {', '.join(NUMBERS)}")
    weight = weight.detach().contiguous()
    for candidate in SMALLEST_FIRST if format is None else (format,):
        packed = _pack(weight, bias, candidate, rounded=format is not None)
        if packed is not None:
            return packed
    raise DsparkError("storage", format, "does not hold these weights, which did not come from such blocks")


def _pack(weight: Tensor, bias: Tensor | None, format: Format, rounded: bool) -> Matrix | None:
    outputs, inputs = weight.shape
    blocks = format in ("q8_0", "q4_1")
    size = library().dspark_packed_bytes(NUMBERS[format], outputs, inputs)
    room = torch.empty(size + LINE, dtype=torch.uint8)
    data = room[-room.data_ptr() % LINE :][:size]  # whole cache lines
    padded = -(-outputs // 32) * 32
    scales = torch.zeros(padded, dtype=torch.float32) if format == "int8" else None
    exact = library().dspark_pack(
        NUMBERS[format], address(weight), outputs, inputs, address(data), address(scales),
        int(rounded and not blocks), threads(),
    )  # fmt: skip
    if not exact and (blocks or not rounded):
        return None
    if bias is not None:
        bias = torch.nn.functional.pad(bias.detach().float(), (0, padded - outputs)).contiguous()
    return Matrix(format, bool(exact), data, scales, bias, outputs, inputs)
