"""Packed matrices: what they hold, and products that depend on nothing but the row and the weights."""

from __future__ import annotations

import copy
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.kernels.conftest import WEIGHTS, q4_1, q8_0
from torch import Tensor, nn

from dspark.errors import DsparkError
from dspark.kernels.matrix import NUMBERS, Format, pack, packable
from dspark.targets.packed import PackedLinear, packed
from dspark.targets.transformers import load_target

FORMATS = tuple(NUMBERS)
OUTPUTS, INPUTS = 75, 96
ROUNDED = {"float16": Tensor.half, "bfloat16": Tensor.bfloat16}


def stored(weight: Tensor, format: Format | None = None) -> Tensor:
    """What a packed weight holds, read back through products with the identity."""
    return pack(weight, None, format).multiply(torch.eye(weight.shape[1])).T


def check_product(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Within what a float32 sum of so many products can lose, of the sum in float64."""
    wanted, room = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        wanted, room = wanted + bias.double(), room + bias.double().abs()
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert bool(((found - wanted).abs() <= (weight.shape[1] + 2) * 2**-24 * room).all())


@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_the_stored_weights(kind: str, format: Format) -> None:
    """Wrong here: a nibble, a scale, a bias or a panel in another place; outputs that fill no unit of 32."""
    for outputs, inputs in ((OUTPUTS, INPUTS), (1, 32), (16, 64), (32, 32), (33, 256), (64, 96)):
        weight, bias, x = WEIGHTS[format](outputs, inputs), torch.randn(outputs), torch.randn(9, inputs)
        kept = stored(weight, format)
        if format != "int8":
            assert torch.equal(kept, weight)
        for rows in (1, 2, 3, 9):
            check_product(pack(weight, None, format).multiply(x[:rows]), x[:rows], kept)
            check_product(pack(weight, bias, format).multiply(x[:rows]), x[:rows], kept, bias)
        if format == "float32":
            check_product(nn.functional.linear(x, weight, bias), x, weight, bias)  # PyTorch's lie as near


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, OUTPUTS)], ids=["", "bias"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(kind: str, format: Format, bias: Tensor | None) -> None:
    """Verification depends on it: ids would differ from plain decoding's where two logits are near. 33 rows and more
    go through weights that are widened first, 200 and 300 in several parts."""
    matrix, x = pack(WEIGHTS[format](OUTPUTS, INPUTS), bias, format), torch.randn(300, INPUTS)
    alone = torch.cat([matrix.multiply(row[None]) for row in x])
    for rows in (*range(1, 18), 33, 128, 129, 200, 300):
        for start in {0, 300 - rows}:
            assert torch.equal(matrix.multiply(x[start : start + rows]), alone[start : start + rows]), rows


@pytest.mark.parametrize("format", ["float32", "int8", "q4_1"])
def test_threads_change_no_bit(kind: str, format: Format, threads: None) -> None:
    weight, bias, x = WEIGHTS[format](300, INPUTS), torch.randn(300), torch.randn(140, INPUTS)
    found = []
    for count in (1, 2, 3, 1):
        torch.set_num_threads(count)
        matrix = pack(weight, bias, format)
        found.append(torch.cat([matrix.multiply(x[:rows]) for rows in (1, 5, 140)]))
    assert all(torch.equal(one, found[0]) for one in found)


def test_any_shape_of_inputs(kind: str) -> None:
    """One row, several dimensions, none at all, and numbers that do not lie side by side."""
    weight, bias = torch.randn(OUTPUTS, INPUTS), torch.randn(OUTPUTS)
    matrix = pack(weight, bias)
    given = [torch.randn(INPUTS), torch.randn(2, 3, INPUTS), torch.randn(1, 1, 1, INPUTS)]
    given += [torch.randn(INPUTS, 5).T, torch.randn(4, 2 * INPUTS)[:, ::2], torch.randn(1, INPUTS).expand(6, INPUTS)]
    given += [torch.randn(3, 4, INPUTS).transpose(0, 1), torch.randn(2, INPUTS, requires_grad=True)]
    for x in given:
        check_product(matrix.multiply(x), x.detach(), weight, bias)
        assert torch.equal(matrix.multiply(x).view(-1, OUTPUTS), matrix.multiply(x.reshape(-1, INPUTS)))
    for shape in ((0, INPUTS), (2, 0, INPUTS)):
        assert matrix.multiply(torch.empty(shape)).shape == (*shape[:-1], OUTPUTS)


def test_inputs_of_another_width_or_type_are_refused(kind: str) -> None:
    """They would be read, and results written, past their ends."""
    matrix = pack(torch.randn(8, 64))
    for x in (torch.randn(2, 96), torch.randn(2, 32), torch.randn(2, 64).double(), torch.randn(2, 64).bfloat16()):
        with pytest.raises(AssertionError):
            matrix.multiply(x)


@pytest.mark.parametrize("format", ["q4_1", "q8_0", "bfloat16", "float16", "float32"])
def test_the_smallest_format_that_holds_every_weight_is_chosen(kind: str, format: Format) -> None:
    weight = WEIGHTS[format](OUTPUTS, INPUTS)
    matrix = pack(weight)
    assert (matrix.format, matrix.exact) == (format, True)
    assert torch.equal(stored(weight), weight)
    bits = {"q4_1": 5, "q8_0": 8.5, "bfloat16": 16, "float16": 16, "float32": 32}
    assert matrix.bytes == 96 * INPUTS * bits[format] / 8  # rows up to a whole unit of 32
    weight[-1, -1] += 2**-20  # one weight of the last block is enough
    assert pack(weight).format == "float32" and torch.equal(stored(weight), weight)


def block_of(scale: float, least: float, steps: Tensor) -> Tensor:
    """A block's weights as GGUF has them."""
    scale, least = (torch.tensor(number).half().float() for number in (scale, least))
    return scale * steps + least


STEPS = torch.arange(32) % 16
SPECIAL_Q4_1 = {
    "zero": torch.zeros(32),
    "constant": torch.full((32,), 0.75),
    "negative constant": torch.full((32,), -3.5),
    "negative minimum": block_of(0.0371, -0.2913, STEPS),
    "all below zero": block_of(0.0117, -5.03, STEPS),
    "largest number 9": block_of(0.0371, -0.2913, STEPS.clamp(max=9)),
    "largest number 1": block_of(0.0371, 0.11, STEPS.clamp(max=1)),
    "one weight apart": block_of(0.0371, 0.11, (torch.arange(32) == 31) * 15),
    "subnormal scale": block_of(3e-7, -0.0, STEPS),
    "subnormal scale and minimum": block_of(1.2e-6, -9e-6, STEPS),
    "smallest scale": block_of(2.0**-24, 0.0, STEPS),
    "large": block_of(3000.0, -20000.0, STEPS),
}


@pytest.mark.parametrize("name", SPECIAL_Q4_1)
def test_special_blocks_of_q4_1(kind: str, name: str) -> None:
    """A block's scale and minimum are found from its weights alone, also where rounding leaves little to find."""
    weight = q4_1(40, 96)
    weight[5, 32:64] = SPECIAL_Q4_1[name]
    weight[39, 64:] = SPECIAL_Q4_1[name].flip(0)
    matrix = pack(weight)
    assert matrix.format == "q4_1" and torch.equal(stored(weight), weight)


SPECIAL_Q8_0 = {
    "zero": torch.zeros(32),
    "one weight": (torch.arange(32) == 4) * torch.tensor(0.0123).half().float() * 127,
    "constant": torch.full((32,), 127 * 2.0**-9),
    "subnormal scale": torch.tensor(9e-7).half().float() * (torch.arange(32) * 8 - 127).clamp(max=127),
    "smallest scale": 2.0**-24 * (torch.arange(32) * 8 - 127).clamp(max=127),
    "large": 500.0 * (torch.arange(32) * 8 - 127).clamp(max=127),
}


@pytest.mark.parametrize("name", SPECIAL_Q8_0)
def test_special_blocks_of_q8_0(kind: str, name: str) -> None:
    weight = q8_0(40, 96)
    weight[5, 32:64] = SPECIAL_Q8_0[name]
    weight[39, 64:] = SPECIAL_Q8_0[name].flip(0)
    matrix = pack(weight)
    assert matrix.format == "q8_0" and torch.equal(stored(weight), weight)


@pytest.mark.parametrize("format", ROUNDED)
def test_halves_round_as_pytorch_does(kind: str, format: Format) -> None:
    """To the nearest, ties to even, down to subnormal numbers."""
    weight = torch.randn(33, 64) * torch.logspace(-9, 3, 64)
    ties = 1 + torch.arange(64) * (2.0**-11 if format == "float16" else 2.0**-8)
    weight[1], weight[2], weight[3] = ties, -ties, ties * 2.0**-20
    matrix = pack(weight, format=format)
    assert (matrix.format, matrix.exact) == (format, False)
    assert torch.equal(stored(weight, format), ROUNDED[format](weight).float())
    assert torch.equal(packed(layer_of(weight), format).weight, ROUNDED[format](weight).float())


def test_int8_rounds_to_a_scale_per_output(kind: str) -> None:
    """The same numbers that the packed layer shows as its weight."""
    weight = torch.randn(40, 64) * torch.logspace(-6, 3, 40)[:, None]
    weight[7] = 0.0
    kept = stored(weight, "int8")
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert torch.equal(kept, torch.where(scale > 0, (weight / scale).round() * scale, 0.0))
    assert not pack(weight, format="int8").exact and bool(((kept - weight).abs() <= scale * 0.5001).all())
    layer = packed(layer_of(weight), "int8")
    assert isinstance(layer, PackedLinear) and torch.equal(layer.weight, kept)
    whole = torch.randint(-127, 128, (40, 64)).float()
    whole[:, 0] = 127.0
    assert pack(whole * 0.5, format="int8").exact and torch.equal(stored(whole * 0.5, "int8"), whole * 0.5)


def layer_of(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], len(weight), bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_blocks_of_other_weights_are_refused(kind: str, format: Format) -> None:
    for weight in (torch.randn(8, 64), torch.full((8, 64), torch.nan), torch.full((8, 64), torch.inf)):
        with pytest.raises(DsparkError, match=f"storage = '{format}': does not hold these weights"):
            pack(weight, format=format)
    weight = q8_0(8, 64) if format == "q4_1" else q4_1(8, 64)
    with pytest.raises(DsparkError, match="storage"):
        pack(weight, format=format)


ODD = {"nan": 0x7FC00000, "nan of ones": 0x7FFFFFFF, "inf": 0x7F800000, "-inf": 0xFF800000 - 2**32}
"""Bits of weights that are no numbers; ones everywhere carry over when they are rounded."""


@pytest.mark.parametrize("format", [None, "float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("odd", ODD)
def test_a_weight_that_is_no_number_shows(kind: str, odd: str, format: Format | None) -> None:
    """An output with such a weight must not look like one without, and the other outputs must be right."""
    weight = torch.randn(40, 64)
    weight.view(torch.int32)[3, 17] = weight.view(torch.int32)[38, 63] = ODD[odd]
    others = [output for output in range(40) if output not in (3, 38)]
    x = torch.rand(3, 64) + 0.1
    for given in (x, x.repeat(20, 1)):
        found, wanted = pack(weight, format=format).multiply(given), given @ weight.T
        torch.testing.assert_close(found[:, others], wanted[:, others], rtol=0.05, atol=0.1)
        assert not bool(found[:, [3, 38]].isfinite().any())
        if format != "int8":
            torch.testing.assert_close(found[:, [3, 38]], wanted[:, [3, 38]], equal_nan=True)


def test_weights_too_large_for_half_precision_become_infinite(kind: str) -> None:
    """As PyTorch's do, with every library."""
    weight = torch.zeros(8, 32)
    weight[0, 3], weight[1, 4] = 1e6, -1e6
    found = pack(weight, format="float16").multiply(torch.ones(1, 32))[0]
    assert found.tolist() == [torch.inf, -torch.inf, *[0.0] * 6]


def test_weights_that_cannot_be_packed(kind: str) -> None:
    assert packable(torch.randn(5, 32)) and packable(nn.Linear(64, 3).weight)
    for weight in (torch.randn(5, 48), torch.randn(5, 31), torch.randn(32), torch.randn(2, 5, 32)):
        assert not packable(weight)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert not packable(torch.zeros(5, 32, dtype=dtype))
    assert not packable(torch.empty(0, 32)) and not packable(torch.empty(5, 0))
    assert not packable(torch.empty(5, 32, device="meta"))


def test_weights_that_do_not_lie_side_by_side(kind: str) -> None:
    weight = torch.randn(64, 40).T
    assert torch.equal(stored(weight), weight)
    assert torch.equal(stored(weight[::2]), weight[::2])


def test_a_copy_computes_the_same(kind: str) -> None:
    """Whoever copies a model copies its packed layers with it."""
    layer, x = packed(nn.Linear(64, 40)), torch.randn(3, 64)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_calls_from_several_threads_at_once(kind: str, threads: None) -> None:
    """They share the library's threads and buffers, and wait for each other."""
    torch.set_num_threads(2)
    matrices = [pack(torch.randn(200, 64)) for _ in range(4)]
    x = torch.randn(4, 40, 64)
    wanted = [matrix.multiply(rows) for matrix, rows in zip(matrices, x, strict=True)]

    def work(i: int) -> bool:
        return all(torch.equal(matrices[i].multiply(x[i]), wanted[i]) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes(kind: str, threads: None) -> None:
    """The library's threads stay in the parent; the child must not wait for them."""
    torch.set_num_threads(2)
    matrix, x = pack(torch.randn(200, 64)), torch.randn(8, 64)
    wanted = matrix.multiply(x)
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if torch.equal(matrix.multiply(x), wanted) else 3)
        finally:
            os._exit(4)
    for _ in range(2000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(matrix.multiply(x), wanted)


def test_the_embedded_targets_weights_are_held_in_their_own_blocks(embedded_path: Path, kind: str) -> None:
    """They came from q4_1 and q8_0 blocks: nothing larger is read, and not a bit is lost."""
    model = load_target("embedded:smollm2-135m", packed=False).model
    layer = model.model.layers[17]
    for linear in (layer.self_attn.q_proj, layer.mlp.down_proj, layer.mlp.gate_proj):
        assert pack(linear.weight).format == "q4_1"
        assert torch.equal(stored(linear.weight), linear.weight)
    rows = model.lm_head.weight[:3000]
    assert pack(rows).format == "q8_0" and torch.equal(stored(rows), rows)
