"""A tiny target with a draft that is often right, and a tokenizer that splits characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.endpoints import Fake

from dspark.bench.compare import Comparison, Question, compare, modes_for
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget, load_target


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Path) -> TransformersTarget:
    """Its attention is turned down, so that the last token says much, not all, about the next one."""
    target = load_target(str(tiny_llama_folder), packed=False)
    for layer in target.model.model.layers:
        layer.self_attn.o_proj.weight.data.mul_(0.15)
    return target


@pytest.fixture(scope="session")
def draft(target: TransformersTarget) -> DSparkDraft:
    """Random backbone; its Markov head is what the target says after each token alone, so many drafts are right."""
    config = DraftConfig(
        hidden_size=target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        attention_bias=False,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        layer_types=("full_attention",),
        sliding_window=None,
        sliding_window_non_causal=False,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_layers,
        target_name="tiny",
        mask_token_id=3,
        sample_from_anchor=True,
        block_size=7,
        markov_rank=target.vocab_size,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        training_length=256,
        prompt_recipe={"template_sha256": None, "thinking": None},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        draft = DSparkDraft(config)
    every = [(target.new_state(1), torch.tensor([token])) for token in range(target.vocab_size)]
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.eye(target.vocab_size))
        draft.markov_head.markov_w2.weight.copy_(3.0 * target.forward(every).logits.T)
    return draft


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """Starts engine-shaped servers of a test's own."""
    servers: list[Fake] = []

    def start(stream: Any, **more: Any) -> Fake:
        servers.append(Fake(stream, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def questions(target: TransformersTarget) -> list[Question]:
    texts = ["2+2?", "<b>tell</b> me & more", "write code", "hello there, how are you today"]
    return [Question(f"q/{i}", text, target.tokenizer(text).input_ids) for i, text in enumerate(texts)]


@pytest.fixture(scope="session")
def comparison(target: TransformersTarget, draft: DSparkDraft, questions: list[Question]) -> Comparison:
    """Shared by the tests, so none may change it."""
    return compare(target, draft, questions, modes_for([3, 7]), max_tokens=24, warmup_tokens=2)
