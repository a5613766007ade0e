"""Each kernel library in turn, weights that a format holds exactly, and small targets that the kernels know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.kernels import library
from dspark.targets.transformers import TransformersTarget

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


@pytest.fixture(params=library.KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """One after another the libraries that were built and that this processor runs; everything uses that one."""
    monkeypatch.setenv(library.SETTING, request.param)
    if library.kind() is None:
        pytest.skip(f"no {request.param} here: not built, or not for this processor")
    assert library.library() is not None, "it is there and cannot be loaded"
    yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    """PyTorch's number of threads is as before after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def q4_1(outputs: int, inputs: int) -> Tensor:
    """Weights of q4_1 blocks: scale * 0..15 + minimum, with a scale and a minimum in half precision."""
    steps = torch.randint(0, 16, (outputs, inputs // 32, 32))
    steps[..., 3], steps[..., 20] = 0, 15
    scale, least = (torch.rand(outputs, inputs // 32, 1) * 0.05 + 0.001).half(), torch.randn(outputs, inputs // 32, 1)
    return (scale.float() * steps + least.half().float()).view(outputs, inputs)


def q8_0(outputs: int, inputs: int) -> Tensor:
    """Weights of q8_0 blocks: scale * -127..127, with a scale in half precision."""
    steps = torch.randint(-127, 128, (outputs, inputs // 32, 32))
    steps[..., 7] = -127
    return ((torch.rand(outputs, inputs // 32, 1) * 0.05 + 0.001).half().float() * steps).view(outputs, inputs)


WEIGHTS = {
    "float32": lambda outputs, inputs: torch.randn(outputs, inputs),
    "float16": lambda outputs, inputs: torch.randn(outputs, inputs).half().float(),
    "bfloat16": lambda outputs, inputs: torch.randn(outputs, inputs).bfloat16().float(),
    "int8": lambda outputs, inputs: torch.randn(outputs, inputs),
    "q8_0": q8_0,
    "q4_1": q4_1,
}


def randomise(model: torch.nn.Module, seed: int = 1) -> None:
    """Give norms and biases numbers too, which Transformers leaves at 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def small_model(model: Any = LlamaForCausalLM, config: Any = LlamaConfig, seed: int = 0, **changes: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = model(config(**{**SMALL, **changes}))
    randomise(made)
    return made


def small_target(packed: bool = True, storage: Any = None, **changes: Any) -> TransformersTarget:
    """A random model without a tokenizer; the same weights for the same changes."""
    return TransformersTarget("small", small_model(**changes), None, packed, storage)
