"""Linear layers pre-packed for oneDNN: a pass of few rows on a CPU reads its weights at memory speed.

`F.linear` leaves the weight in its plain layout, which costs twice as much for 8 rows as for 1 (the embedded
target, float32, two threads). Packed once, 8 rows cost about what 1 row costs, and that is the condition under
which speculation pays on a CPU. Passes of many rows (a prompt, a batch) are as fast packed or faster, by the
processor: `benchmarks/decode.py --linear`. The plain weight stays beside it for whoever reads weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def packing_available() -> bool:
    """Whether this build of PyTorch can pack float32 linear weights for oneDNN."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class PackedLinear(nn.Module):
    """A frozen nn.Linear with the same result: [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packed(module: nn.Module) -> nn.Module:
    """`module` packed, when it is a float32 linear layer on a CPU and this build can; else `module` itself."""
    fits = type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"
    return PackedLinear(module) if fits and packing_available() else module  # type: ignore[arg-type]


def pack_linears(module: nn.Module) -> int:
    """Replace the float32 CPU linear layers inside `module` by packed ones, in place.

    Returns how many were replaced (0 where packing does not apply: no oneDNN, another device or dtype).
    """
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            replacement = packed(child)
            if replacement is not child:
                setattr(parent, name, replacement)
                count += 1
    return count


def weight_bytes(module: nn.Module) -> int:
    """Bytes of weights that one pass through every linear layer of `module` reads, as they are stored."""
    layers = (m for m in module.modules() if isinstance(m, nn.Linear | PackedLinear))
    return sum(layer.weight.nbytes for layer in layers)
