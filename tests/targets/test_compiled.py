"""A target's compiled pass against the same model's own modules, and both against float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.conftest import small_model, small_target
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OlmoConfig,
    OlmoForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dspark.errors import DsparkError
from dspark.kernels import library
from dspark.targets.cache import RequestCache
from dspark.targets.packed import PackedLinear, Storage, _rounded
from dspark.targets.transformers import TransformersTarget, load_target

pytestmark = pytest.mark.skipif(library.kind() is None, reason="no kernels here: none built, or none wanted")


def rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": small_model,
    "llama, biases": lambda: small_model(attention_bias=True, mlp_bias=True),
    "llama, attention bias": lambda: small_model(attention_bias=True),
    "llama, mlp bias": lambda: small_model(mlp_bias=True),
    "llama, 4 heads on 1": lambda: small_model(num_key_value_heads=1),
    "llama, 4 heads on 4": lambda: small_model(num_key_value_heads=4),
    "llama, tied head": lambda: small_model(tie_word_embeddings=True),
    "llama, head_dim 64": lambda: small_model(head_dim=64, rms_norm_eps=1e-2),
    "llama, 77 ids": lambda: small_model(vocab_size=77),
    "llama3 rope": lambda: small_model(**rope("llama3", **LLAMA3)),
    "yarn rope": lambda: small_model(**rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "linear rope": lambda: small_model(**rope("linear", factor=2.0)),
    "mistral": lambda: small_model(MistralForCausalLM, MistralConfig, sliding_window=None),
    "mistral, window 16": lambda: small_model(MistralForCausalLM, MistralConfig, sliding_window=16),
    "mistral, window 21": lambda: small_model(MistralForCausalLM, MistralConfig, sliding_window=21),
    "mistral, window 1": lambda: small_model(MistralForCausalLM, MistralConfig, sliding_window=1),
    "qwen2": lambda: small_model(Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=True),
    "qwen2, some layers slide": lambda: small_model(
        Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=19, max_window_layers=1
    ),
    "qwen3": lambda: small_model(Qwen3ForCausalLM, Qwen3Config, rms_norm_eps=1e-3),
    "qwen3, bias": lambda: small_model(Qwen3ForCausalLM, Qwen3Config, attention_bias=True, tie_word_embeddings=True),
    "qwen3, some layers slide": lambda: small_model(
        Qwen3ForCausalLM, Qwen3Config, use_sliding_window=True, sliding_window=19, max_window_layers=2
    ),
}


def ids_of(count: int, seed: int, vocabulary: int = 77) -> Tensor:
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def story(target: TransformersTarget) -> Iterator[tuple[str, Tensor]]:
    """Requests of several lengths that join, go on, are cut, grow and take over others' K/V: every number there is."""
    a, b, c = (target.new_state(size) for size in (64, 40, 90))

    def read(name: str, batch: list[tuple[Any, Tensor]], **asked: Any) -> Iterator[tuple[str, Tensor]]:
        lengths = [state.length + len(ids) for state, ids in batch]
        out = target.forward(batch, **asked)
        assert [state.length for state, _ in batch] == lengths
        yield f"{name}: logits", out.logits
        yield f"{name}: last_hidden", out.last_hidden
        if asked.get("taps"):
            yield f"{name}: taps", out.taps
        else:
            assert out.taps is None

    yield from read("prompts", [(a, ids_of(23, 1)), (b, ids_of(1, 2)), (c, ids_of(70, 3))], taps=[2, 0, 2])
    yield from read("a round", [(a, ids_of(1, 4)), (c, ids_of(5, 5)), (b, ids_of(3, 6))], taps=[1])
    a.grow(100)
    b.truncate(2)
    c.truncate(71)
    yield from read("grown and cut", [(b, ids_of(9, 7)), (a, ids_of(30, 8))], taps=[0, 1, 2], logits=[0, 4])
    d = target.new_state(50)
    d.copy_prefix(c, 40)
    yield from read("taken over", [(d, ids_of(4, 9)), (c, ids_of(2, 10))], taps=[1, 0], logits="last")
    d.grow(60)
    yield from read("no logits", [(d, ids_of(7, 11)), (a, ids_of(1, 12))], taps=[2], logits="none")
    yield from read("after that", [(d, ids_of(2, 13)), (c, ids_of(6, 14))])


def check_story(ours: TransformersTarget, plain: TransformersTarget, true: TransformersTarget) -> None:
    """Ours is as near to float64 as PyTorch's float32 is, number for number of the story."""
    for (name, found), (_, near), (_, wanted) in zip(story(ours), story(plain), story(true), strict=True):
        assert found.shape == near.shape == wanted.shape and found.dtype == torch.float32, name
        lost, theirs = (float((one - wanted).norm()) for one in (found, near))
        assert lost <= 3 * theirs + 1e-6 * float(wanted.norm()), (name, lost, theirs)


def pair(model: Any) -> tuple[TransformersTarget, TransformersTarget]:
    """The same weights through the model's own modules, in float32 and float64."""
    true = copy.deepcopy(model).double()
    return TransformersTarget("plain", model, None, packed=False), TransformersTarget("true", true, None, packed=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_compiled_pass_computes_what_the_model_does(name: str) -> None:
    model = MODELS[name]()
    ours = TransformersTarget("ours", copy.deepcopy(model), None)
    assert ours._compiled is not None
    check_story(ours, *pair(model))


@pytest.mark.parametrize("name", MODELS)
def test_a_token_has_the_same_bits_however_it_is_read(name: str) -> None:
    target = TransformersTarget("ours", MODELS[name](), None)
    ids, state = ids_of(84, 20), target.new_state(84)
    single = [target.forward([(state, part)], taps=[0, 2]) for part in ids.split(1)]
    wanted = [torch.cat(parts) for parts in zip(*[(one.logits, one.taps, one.last_hidden) for one in single])]
    for sizes in ([70, 14], [70, *[1] * 14], list(range(1, 13)) + [6], [16] * 5 + [4]):
        state, other = target.new_state(84), target.new_state(200)
        row = 0
        for part in ids.split(sizes):
            out = target.forward([(other, ids_of(3, row)), (state, part)], taps=[0, 2])
            for found, alone in zip((out.logits, out.taps, out.last_hidden), wanted, strict=True):
                assert torch.equal(found[3:], alone[row : row + len(part)]), (sizes, row)
            row += len(part)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
def test_a_storage_that_rounds_is_the_rounded_model(storage: Storage) -> None:
    """Also where several layers have become one matrix, gate and up by turns."""
    model = small_model(attention_bias=True, mlp_bias=True)
    ours = TransformersTarget("ours", copy.deepcopy(model), None, storage=storage)
    assert ours._compiled is not None
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data = _rounded(layer.weight, storage).clone()
    check_story(ours, *pair(model))
    size = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1}[storage]
    values = 3 * (256 * 64 + 128 * 64 + 3 * 96 * 64) + 128 * 64  # 100 ids take 4 units of 32
    assert ours.weight_bytes == size * values
    assert torch.equal(ours.head_weight, model.lm_head.weight) and isinstance(ours._head_module, PackedLinear)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(ours.head(hidden), model.lm_head(model.model.norm(hidden)), rtol=1e-5, atol=1e-5)
    rows = torch.tensor([3, 40, 7])
    torch.testing.assert_close(ours.head(hidden, rows), ours.head(hidden)[:, rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("storage", ["q8_0", "q4_1"])
def test_blocks_of_other_weights_are_refused(storage: Storage) -> None:
    with pytest.raises(Exception, match=f"storage = '{storage}': does not hold these weights"):
        small_target(storage=storage)


def test_the_head_rebuilds_the_targets_own_logits() -> None:
    """The draft's training and its base head depend on it."""
    for name in ("llama", "llama, tied head"):
        target = TransformersTarget("ours", MODELS[name](), None)
        out = target.forward([(target.new_state(32), ids_of(17, 1))], taps=[2])
        torch.testing.assert_close(target.head(out.last_hidden), out.logits, rtol=1e-5, atol=1e-5)
        assert torch.equal(out.taps, out.last_hidden)


def test_which_logits_are_given() -> None:
    target = small_target()
    batch = [ids_of(5, 1), ids_of(9, 2), ids_of(1, 3)]

    def read(logits: Any) -> Any:
        return target.forward([(target.new_state(9), ids) for ids in batch], logits=logits)

    every = read("all")
    assert every.logits.shape == (15, 100) and every.best == every.logits.argmax(1).tolist()
    for asked, rows in (("last", [4, 13, 14]), ("none", []), ([2, 0, 1], [3, 4, 14]), ([5, 9, 1], [*range(15)])):
        out = read(asked)
        assert torch.equal(out.logits, every.logits[rows])
        assert out.best == [every.best[row] for row in rows]
        assert torch.equal(out.last_hidden, every.last_hidden)


def test_the_largest_is_the_first_of_equals() -> None:
    model = small_model()
    model.lm_head.weight.data[[4, 50, 51, 99]] = 3 * model.lm_head.weight.data[50]
    out = (target := TransformersTarget("ours", model, None)).forward([(target.new_state(60), ids_of(60, 1))])
    assert out.best == out.logits.argmax(1).tolist() and 4 in out.best and not {50, 51, 99} & {*out.best}


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_have_no_largest(odd: float) -> None:
    """Only in the requests that they belong to."""
    model = small_model()
    model.model.embed_tokens.weight.data[7, 5] = odd
    target = TransformersTarget("ours", model, None)
    good, bad = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 7, 2])
    alone = target.forward([(target.new_state(8), good)])
    out = target.forward([(target.new_state(8), part) for part in (good, bad, good)])
    assert out.best == [*alone.best, -1, -1, -1, *alone.best]
    assert torch.equal(out.logits[:4], alone.logits) and torch.equal(out.logits[7:], alone.logits)
    plain = TransformersTarget("plain", model, None, packed=False)
    wanted = plain.forward([(plain.new_state(8), bad)]).logits
    assert torch.equal(out.logits[4:7].isfinite(), wanted.isfinite())
    model.lm_head.weight.data[40, 9] = odd
    target = TransformersTarget("ours", model, None)
    out = target.forward([(target.new_state(8), good)])
    wanted = [
        -1 if not bool(row.isfinite().all()) and not row[40] == -torch.inf else row.argmax() for row in out.logits
    ]
    assert out.best == wanted


def test_a_request_can_be_as_long_as_the_context() -> None:
    """The rotary tables grow with it; a capacity that was reached is no place to write at."""
    target, plain = (small_target(packed=packed, max_position_embeddings=2600) for packed in (True, False))
    outs = []
    for one in (target, plain):
        short, state = one.new_state(4), one.new_state(2500)
        one.forward([(short, ids_of(2, 1))])
        one.forward([(state, ids_of(2490, 2))], logits="none")
        outs.append(one.forward([(state, ids_of(10, 3)), (short, ids_of(2, 4))]).logits)
        with pytest.raises(Exception, match="capacity"):
            one.forward([(state, ids_of(1, 5))])
        assert (state.length, short.length) == (2500, 4)
    torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-3)


def test_a_copied_target_computes_the_same() -> None:
    target = small_target()
    copied, ids = copy.deepcopy(target), ids_of(20, 1)
    outs = [one.forward([(one.new_state(20), ids)], taps=[1]) for one in (target, copied)]
    assert torch.equal(outs[0].logits, outs[1].logits) and torch.equal(outs[0].taps, outs[1].taps)


def test_in_inference_mode_and_out_of_it() -> None:
    """Servers run in inference mode; what a request keeps must stay usable outside."""
    target, ids = small_target(), ids_of(20, 1)
    with torch.inference_mode():
        state = target.new_state(60)
        first = target.forward([(state, ids)]).logits.clone()
    state.grow(80)
    other = target.new_state(30)
    other.copy_prefix(state, 15)
    fresh = target.new_state(60)
    assert torch.equal(target.forward([(fresh, ids)]).logits, first)
    wanted = target.forward([(fresh, ids_of(4, 2))]).logits
    assert torch.equal(target.forward([(state, ids_of(4, 2))]).logits, wanted)
    assert torch.equal(target.forward([(other, ids[15:])]).logits, first[15:])


UNFIT: dict[str, Callable[[], Any]] = {
    "head_dim 8": lambda: small_model(head_dim=8),
    "hidden 48": lambda: small_model(hidden_size=48),
    "intermediate 80": lambda: small_model(intermediate_size=80),
    "gelu": lambda: small_model(hidden_act="gelu"),
    "dynamic rope": lambda: small_model(**rope("dynamic", factor=2.0)),
    "gemma2": lambda: small_model(Gemma2ForCausalLM, Gemma2Config, sliding_window=16, query_pre_attn_scalar=32),
    "granite": lambda: small_model(
        GraniteForCausalLM, GraniteConfig, residual_multiplier=0.5, attention_multiplier=0.1, logits_scaling=3.0
    ),
    "olmo": lambda: small_model(OlmoForCausalLM, OlmoConfig),
    "phi3": lambda: small_model(Phi3ForCausalLM, Phi3Config, pad_token_id=0),
}


@pytest.mark.parametrize("name", UNFIT)
def test_another_model_goes_through_its_own_modules(name: str) -> None:
    model = UNFIT[name]()
    ours = TransformersTarget("ours", copy.deepcopy(model), None)
    assert ours._compiled is None and any(isinstance(m, PackedLinear) for m in ours.model.modules())
    ids = ids_of(60, 1)
    eager = copy.deepcopy(model).eval()
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = eager(ids[None]).logits[0]
    state = ours.new_state(60)
    outs = [ours.forward([(state, part)]) for part in ids.split([31, 1, 20, 8])]
    assert all(out.best is None for out in outs)
    torch.testing.assert_close(torch.cat([out.logits for out in outs]), wanted, rtol=1e-3, atol=1e-3)


def test_a_model_of_another_type_is_not_compiled() -> None:
    target = TransformersTarget("ours", small_model().bfloat16(), None)
    assert target._compiled is None and target.dtype == torch.bfloat16
    assert target.forward([(target.new_state(9), ids_of(9, 1))]).logits.dtype == torch.bfloat16


def test_the_embedded_target_lies_as_near_as_its_own_modules(embedded_path: Path) -> None:
    """Real weights, in the blocks that they came in: 30 layers, 9 heads on 3, 49152 ids."""
    ours, plain = (load_target("embedded:smollm2-135m", packed=packed) for packed in (True, False))
    assert ours._compiled is not None and ours.weight_bytes < 100e6
    ids = plain.tokenizer("The capital of France is Paris, and that of Italy is", return_tensors="pt").input_ids[0]
    taps = [29, 0, 14]
    outs = []
    for one in (ours, plain):
        state = one.new_state(30)
        one.forward([(state, ids[:9])])
        outs.append(one.forward([(state, ids[9:])], taps=taps))
    assert plain.tokenizer.decode([outs[0].best[-1]]) == " Rome"
    for found, wanted in ((outs[0].logits, outs[1].logits), (outs[0].taps, outs[1].taps)):
        assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())


def test_models_here_have_numbers_everywhere() -> None:
    """What is compared must depend on norms and biases too."""
    for build in MODELS.values():
        assert all(bool(p.std() > 0.05) for p in build().parameters())


def test_an_adapter_in_a_layer_is_not_passed_by() -> None:
    """A wrapper that forwards `weight` looks packable; the base model would be served in its place."""

    class Adapter(torch.nn.Module):
        def __init__(self, base: torch.nn.Linear) -> None:
            super().__init__()
            self.base, self.weight, self.bias = base, base.weight, base.bias
            self.down, self.up = (
                torch.nn.Linear(base.in_features, 32, False),
                torch.nn.Linear(32, base.out_features, False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = small_model()
    model.model.layers[1].self_attn.o_proj = Adapter(model.model.layers[1].self_attn.o_proj)
    assert TransformersTarget("adapted", model, None)._compiled is None


def test_the_default_dtype_of_the_user_does_not_matter() -> None:
    """Buffers that the kernels write are float32 whatever `torch.set_default_dtype` says."""
    target, ids = small_target(), torch.arange(20)
    wanted = target.forward([(target.new_state(30), ids)], [1]).logits
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            found = target.forward([(target.new_state(30), ids)], [1]).logits
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(found, wanted)


def test_the_state_of_another_model_is_refused() -> None:
    """It would be read and written past its ends: fewer layers, or none that were allocated."""
    target = small_target()
    for keys in ([None] * target.num_layers, [torch.zeros(1, 2, 30, 32)] * (target.num_layers - 1)):
        state = RequestCache(len(keys), 30)
        state.keys, state.values = list(keys), list(keys)
        with pytest.raises(DsparkError, match="state"):
            target.forward([(state, torch.arange(5))])
