"""Packed layers compute what the plain ones do, alone and several of one input together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dspark.targets.packed import (
    PackedLinear,
    Storage,
    exact_storage,
    pack_linears,
    packed,
    packing_available,
    weight_bytes,
)
from dspark.targets.transformers import TransformersTarget, load_target

STORAGES: tuple[Storage, ...] = ("float32", "float16")


class Block(nn.Module):
    """Sibling layers as attention and MLP have them, and one of its own."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, width, bias=bias) for width in (24, 8, 8))
        self.gate_proj, self.up_proj = nn.Linear(24, 40), nn.Linear(24, 40)
        self.o_proj = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.children()]


def reference(block: Block, x: torch.Tensor) -> list[torch.Tensor]:
    """With the weights as they are stored."""
    return [nn.functional.linear(x, layer.weight, layer.bias) for layer in block.children()]  # type: ignore[arg-type]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_the_same_values_for_every_shape(storage: Storage, bias: bool) -> None:
    block, plain = Block(bias), Block(bias)
    plain.load_state_dict(block.state_dict())
    assert pack_linears(block, storage) == 6 and pack_linears(block, storage) == 0
    for shape in ((24,), (1, 24), (3, 24), (1, 9, 24), (2, 3, 24), (0, 24)):
        x = torch.randn(shape)
        for found, wanted, near in zip(block(x), reference(block, x), plain(x), strict=True):
            assert found.is_contiguous()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found, near, rtol=2e-3, atol=2e-3)
    assert list(block.state_dict()) == list(plain.state_dict())


@torch.no_grad()
def test_a_row_is_the_same_alone_and_among_a_few() -> None:
    layer = packed(nn.Linear(24, 40))
    x = torch.randn(4, 24)
    for rows in (1, 2, 3):
        assert torch.equal(layer(x[:rows]), layer(x)[:rows])


@torch.no_grad()
def test_layers_of_one_input_in_any_order_and_number() -> None:
    block = Block()
    pack_linears(block)
    x, other = torch.randn(2, 24), torch.randn(2, 24)
    q, k = block.q_proj(x), block.k_proj(x)
    wanted = reference(block, other)
    for layer, given in ((block.v_proj, 2), (block.q_proj, 0), (block.q_proj, 0), (block.k_proj, 1)):
        torch.testing.assert_close(layer(other), wanted[given])  # x's own v is never asked for
    torch.testing.assert_close(block.v_proj(x), reference(block, x)[2])
    torch.testing.assert_close(torch.cat((q, k), -1), torch.cat(reference(block, x)[:2], -1))
    copied = copy.deepcopy(block)
    torch.testing.assert_close(copied(other), wanted)


@torch.no_grad()
def test_an_input_is_let_go_when_all_have_read_it() -> None:
    block = Block()
    pack_linears(block)
    together = block.q_proj._product.func.__self__
    block.k_proj(torch.randn(1, 24))
    assert together._held is not None
    block(torch.randn(2, 24))
    assert together._held is None


def test_layers_that_do_not_fit_together_are_packed_alone() -> None:
    block = Block()
    block.k_proj = nn.Linear(12, 8, bias=False)
    block.up_proj = nn.Linear(24, 40, dtype=torch.bfloat16)
    assert pack_linears(block) == 5
    assert all(not hasattr(layer._product, "func") for layer in (block.q_proj, block.k_proj, block.gate_proj))
    assert type(block.up_proj) is nn.Linear and packed(block.up_proj) is block.up_proj
    with torch.no_grad():
        torch.testing.assert_close(block.k_proj(torch.ones(1, 12)), block.k_proj.weight.sum(1)[None])


def test_bytes_that_a_pass_reads() -> None:
    block = Block()
    values = sum(layer.weight.numel() for layer in block.children())  # type: ignore[union-attr,operator]
    assert weight_bytes(block) == 4 * values
    pack_linears(block, "float16")
    assert weight_bytes(block) == 2 * values
    assert isinstance(block.o_proj, PackedLinear) and all(packing_available(storage) for storage in STORAGES)


@torch.no_grad()
def test_half_precision_is_chosen_where_it_loses_nothing() -> None:
    weights = torch.randn(40, 24) * 0.5
    weights[0] *= 1e-6  # far below half precision's smallest normal number, and below what a sum would notice
    of_bf16 = weights.bfloat16().float()
    assert exact_storage(of_bf16) == "float16"
    assert exact_storage(weights) == exact_storage(of_bf16, weights) == "float32"
    assert exact_storage(of_bf16 * 1e6) == exact_storage(torch.full((2, 2), torch.nan)) == "float32"
    block = Block()
    for layer in (block.q_proj, block.k_proj, block.v_proj, block.gate_proj):
        layer.weight.copy_((4 * layer.weight).bfloat16())
    plain = copy.deepcopy(block)
    pack_linears(block)
    chosen = {name: layer.storage for name, layer in block.named_children()}
    assert [name for name, storage in chosen.items() if storage == "float16"] == ["q_proj", "k_proj", "v_proj"]
    x = torch.randn(5, 24)
    torch.testing.assert_close(block(x), plain(x), rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_a_target_stored_in_float16_is_one_of_rounded_weights(tiny_llama_folder: object) -> None:
    half, rounded = (load_target(str(tiny_llama_folder), packed=False) for _ in range(2))
    assert pack_linears(half.model, "float16")
    half = TransformersTarget(half.name, half.model, half.tokenizer, packed=False)
    for module in rounded.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.copy_(module.weight.half().float())
    assert torch.equal(half.head_weight, rounded.head_weight)
    ids = torch.arange(5, 25)
    found, wanted = (one.forward([(one.new_state(20), ids)]).logits for one in (half, rounded))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
