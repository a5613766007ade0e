"""Tiny drafts: the Kimi-K3 recipe's fields with small numbers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml

from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft

TINY: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "layer_types": ["full_attention", "full_attention"],
    "vocab_size": 40,
    "draft_vocab_size": 40,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "target_name": "tiny",
    "mask_token_id": 39,
    "block_size": 4,
    "markov_rank": 6,
    "training_length": 64,
}
# Over four query heads
MLA: dict[str, Any] = {
    "attention": "mla", "num_key_value_heads": 4, "head_dim": 4,
    "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
}  # fmt: skip


def tiny_fields(**changes: Any) -> dict[str, Any]:
    recipe = yaml.safe_load((files("dspark") / "recipes" / "kimi-k3.yaml").read_text(encoding="utf-8"))
    fields = {**recipe["draft"], **TINY, **changes}
    if "layer_types" not in changes:
        fields["layer_types"] = ["full_attention"] * fields["num_hidden_layers"]
    return fields


def tiny_draft(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> DSparkDraft:
    """A bound draft whose every weight is random (nothing left at its zero or one start)."""
    torch.manual_seed(seed)
    config = DraftConfig(**tiny_fields(**changes))
    draft = DSparkDraft(config).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    if config.reduced:
        draft.set_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].tolist())
    shape = (config.vocab_size, config.hidden_size)
    draft.bind(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    return draft


@pytest.fixture
def fields() -> Callable[..., dict[str, Any]]:
    return tiny_fields


@pytest.fixture
def make_draft() -> Callable[..., DSparkDraft]:
    return tiny_draft
