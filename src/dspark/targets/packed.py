"""Linear layers packed once, so that a pass of few rows on a CPU reads its weights at memory speed.

`F.linear` leaves the weight in its plain layout, which costs twice as much for 8 rows as for 1 (the embedded
target, float32, two threads). Packed, 8 rows cost little more than 1, and that is the condition under which
speculation pays on a CPU. The plain weight stays beside it for whoever reads weights.

Packed by our own kernels (`dspark.kernels`) where they are built and the layer has a multiple of 32 inputs: in the
smallest format that holds every weight exactly, widened to float32 as it is read. Otherwise by PyTorch's libraries:
float32 (oneDNN), or float16 (FBGEMM) for weights that half precision holds. Activations and sums are float32 always.
Layers that read the same input (q, k, v; gate, up) are one matrix: fewer, larger products. docs/speed.md has the
figures.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard, get_args

import torch
from torch import Tensor, nn

from dspark.errors import DsparkError
from dspark.kernels.matrix import Format, pack, packable

for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")
# oneDNN and PyTorch's layer above it keep what they make for every shape and number of rows, most of a MiB each and
# 1024 of them: a server would grow by hundreds of MiB. 128 are enough for the row counts that come again and again.

LEAST_ROWS = 4
"""oneDNN's float32 kernels take longer for 1, 2 or 3 rows than for 4 (AVX-512; 1.1 and 1.3 times for 1 and 2)."""

Storage = Format
STORAGES: tuple[Storage, ...] = get_args(Format)
BYTES: dict[Storage, float] = {
    "float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "q8_0": 34 / 32, "q4_1": 20 / 32
}  # fmt: skip
"""What a weight takes, as it is stored."""

Product = Callable[[Tensor], Tensor]

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names under which our drafts and Transformers' models keep sibling layers that are given one and the same tensor."""


def exact_storage(*weights: Tensor) -> Storage:
    """Of PyTorch's two: float16 when rounding to it changes no weight by more than float32's own epsilon (2^-23) of the
    largest one, which is what sums in float32 lose anyway; else float32."""
    for weight in weights:
        weight = weight.detach()
        lost = (weight - weight.half().float()).abs_().max()
        if not lost <= weight.abs().max() * torch.finfo(torch.float32).eps:
            return "float32"
    return "float16" if packing_available("float16") else "float32"


def packing_available(storage: Storage = "float32") -> bool:
    """Whether this build of PyTorch can pack float32 linear weights so on this machine (without our kernels)."""
    if storage == "float16":
        return "fbgemm" in torch.backends.quantized.supported_engines
    return (
        storage == "float32" and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _product(weight: Tensor, bias: Tensor | None, storage: Storage | None) -> tuple[Product, Storage]:
    """x [..., in] -> x @ weight.T + bias [..., out], from a packed copy of weight [out, in], and how it is stored."""
    if packable(weight):
        matrix = pack(weight, bias, storage)
        return matrix.multiply, matrix.format
    storage = storage or exact_storage(weight)
    if storage == "float16":
        half = torch.ops.quantized.linear_prepack_fp16(weight.detach(), bias)
        multiply = torch.ops.quantized.linear_dynamic_fp16
        return (lambda x: multiply(x, half) if x.dim() > 1 else multiply(x[None], half)[0]), storage
    packed, width = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), weight.shape[1]
    padding = torch.zeros(LEAST_ROWS, width)

    def run(x: Tensor) -> Tensor:
        rows = x.numel() // width
        if not 0 < rows < LEAST_ROWS:
            return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        padded = torch.cat((x.reshape(rows, width), padding[rows:]))
        out = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")
        return out[:rows].view(*x.shape[:-1], -1)

    return run, storage


def _rounded(weight: Tensor, storage: Storage) -> Tensor:
    """The float32 weights [out, in] that `storage` keeps; q8_0 and q4_1 are never given others than they hold."""
    weight = weight.detach()
    if storage == "int8":
        scale = weight.abs().amax(1, keepdim=True) / 127
        return torch.where(scale > 0, (weight / scale).round() * scale, 0.0)
    half = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(storage)
    return weight if half is None else weight.to(half).float()


class PackedLinear(nn.Module):
    """A frozen nn.Linear: [..., in] -> [..., out]. Its `weight` is what was stored, widened again."""

    def __init__(self, linear: nn.Linear, product: Product, storage: Storage) -> None:
        super().__init__()
        self.in_features, self.out_features, self.storage = linear.in_features, linear.out_features, storage
        self.weight, self.bias = linear.weight, linear.bias
        stored = _rounded(linear.weight, storage)
        if not torch.equal(stored, linear.weight):
            self.weight = nn.Parameter(stored, requires_grad=False)
        self._product = product

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            raise DsparkError("weight", "packed", "has no gradient; train a model that was not made ready to decode")
        return self._product(x)


class _Together:
    """Several layers of one input as one product: the first that is asked computes it, the others take their part.

    It belongs to the tensor that was given, which must not be changed in place before the last part is taken; then it
    is let go. Any other use (a part alone, twice, or from another thread) is right, only slower.
    """

    def __init__(self, layers: Sequence[nn.Linear], storage: Storage | None) -> None:
        self.sizes = [layer.out_features for layer in layers]
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self._product, self.storage = _product(weight, torch.cat(biases) if biases else None, storage)
        self._held: tuple[Tensor, list[Tensor | None]] | None = None

    def part(self, index: int, x: Tensor) -> Tensor:
        """x [..., in] -> the output of layer `index`, contiguous."""
        held = self._held
        found = held[1][index] if held is not None and held[0] is x else None
        if held is None or found is None:
            held = self._held = x, [*self._product(x).split(self.sizes, dim=-1)]
            found = held[1][index]
            assert found is not None
        held[1][index] = None
        if not any(part is not None for part in held[1]):
            self._held = None
        return found.contiguous()


def _packable(module: nn.Module, storage: Storage | None) -> TypeGuard[nn.Linear]:
    if not (type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu"):
        return False
    return packable(module.weight) or packing_available(storage or "float32")


def packed(module: nn.Module, storage: Storage | None = None) -> nn.Module:
    """`module` packed, when it is a float32 linear layer on a CPU and this build can; else `module` itself.

    storage None: the smallest that holds the weights exactly. Raises DsparkError for GGUF blocks (q8_0, q4_1) of
    weights that did not come from such blocks.
    """
    if not _packable(module, storage):
        return module
    return PackedLinear(module, *_product(module.weight, module.bias, storage))


def pack_linears(module: nn.Module, storage: Storage | None = None) -> int:
    """Replace the float32 CPU linear layers inside `module` by packed ones, in place.

    storage None: for each layer, or for those that become one matrix together, the smallest that holds the weights
    exactly. Returns how many were replaced (0 where packing does not apply: no library for it, another device or
    dtype). Raises DsparkError as `packed` does.
    """
    count = 0
    for parent in list(module.modules()):
        alone = {name: child for name, child in parent.named_children() if _packable(child, storage)}
        for names in SAME_INPUT:
            layers = [alone[name] for name in names if name in alone]
            if _fit_together(layers, len(names)):
                together = _Together(layers, storage)
                for index, name in enumerate(names):
                    layer = PackedLinear(alone.pop(name), partial(together.part, index), together.storage)
                    setattr(parent, name, layer)
                    count += 1
        for name, child in alone.items():
            setattr(parent, name, packed(child, storage))
            count += 1
    return count


def _fit_together(layers: Sequence[nn.Linear], wanted: int) -> bool:
    """All there, of one input width, and all with a bias or all without."""
    shapes = {(layer.in_features, layer.bias is None) for layer in layers}
    return len(layers) == wanted and len(shapes) == 1


def fingerprint(module: nn.Module) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Where the parameters are, how often they were written and their type: another one when weights were changed."""
    return tuple(
        (p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype) for name, p in module.named_parameters()
    )


def weight_bytes(module: nn.Module) -> int:
    """Bytes of weights that one pass through every linear layer of `module` reads, as they are stored."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | PackedLinear)]
    return round(sum(layer.weight.numel() * _bytes_of(layer) for layer in layers))


def _bytes_of(layer: nn.Linear | PackedLinear) -> float:
    return BYTES[layer.storage] if isinstance(layer, PackedLinear) else layer.weight.itemsize
