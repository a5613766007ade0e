"""A tiny target and a random draft for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget, load_target


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Path) -> TransformersTarget:
    return load_target(str(tiny_llama_folder))


@pytest.fixture(scope="session")
def draft(target: TransformersTarget) -> DSparkDraft:
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
        markov_rank=8,
        markov_head_type="vanilla",
        enable_confidence_head=False,
        confidence_head_with_markov=False,
        training_length=256,
        prompt_recipe={"template_sha256": None, "thinking": None},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return DSparkDraft(config)
