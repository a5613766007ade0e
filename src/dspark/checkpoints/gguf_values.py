"""Values of a GGUF file's tensors: stored as f32, f16 or q8_0, and read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dspark.errors import DsparkError

try:
    import gguf
except ImportError:  # in the extra `demo`; dspark.checkpoints.gguf says so
    gguf = None  # type: ignore[assignment]

Q8_BLOCK = 32
MOST_LOST = 0.01  # of a matrix


class Written(np.ndarray[Any, Any]):
    """An array that goes into a file through Python: NumPy's own `tofile` makes a TypeError of Ctrl-C."""

    def tofile(self, fid: Any, sep: str = "", format: str = "%s") -> None:
        fid.write(self.tobytes())


def as_stored(name: str, tensor: Tensor, kind: str) -> tuple[np.ndarray[Any, Any], Any]:
    """A tensor's bytes and, where the array does not tell, its type.

    Raises DsparkError when it is not finite in `kind`, or much of it would be 0 there.
    """
    values = tensor.contiguous().numpy()
    if tensor.ndim == 1 or kind == "f32":
        stored = values
    else:
        with np.errstate(over="ignore"):
            stored = values.astype(np.float16)  # q8_0 keeps its scales in f16
    if not np.isfinite(stored).all():
        raise DsparkError(name, "NaN or infinity", f"must be finite in {kind}; use f32, or an earlier checkpoint")
    if kind == "q8_0" and tensor.ndim == 2 and tensor.shape[1] % Q8_BLOCK == 0:
        packed = gguf.GGMLQuantizationType.Q8_0
        blocks = gguf.quants.quantize(values, packed)
        _check_kept(name, values, gguf.quants.dequantize(blocks, packed), kind, Q8_BLOCK)
        return blocks, packed
    _check_kept(name, values, stored, kind, 1)
    return stored, None


def _check_kept(name: str, values: np.ndarray[Any, Any], stored: np.ndarray[Any, Any], kind: str, size: int) -> None:
    """Raise DsparkError when too many blocks of values, of `size`, are lost: too small for f16, and so stored as 0."""
    held = (values.reshape(-1, size) != 0).any(1)
    lost = held & ~(stored.reshape(-1, size) != 0).any(1)
    if lost.sum() > MOST_LOST * held.sum():
        remedy = f"{lost.sum() / held.sum():.0%} of it is too small for {kind} and would become 0; use f32"
        raise DsparkError(name, float(np.abs(values).max()), remedy)


def values_of(tensor: Any) -> Tensor:
    """A tensor of a file: integers as they are, anything else in float32."""
    if tensor.tensor_type == gguf.GGMLQuantizationType.I64:
        return torch.from_numpy(np.array(tensor.data))
    return torch.from_numpy(np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
