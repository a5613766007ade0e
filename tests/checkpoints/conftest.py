"""Tiny drafts for checkpoint tests: the Kimi-K2.6 recipe's fields with small numbers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dspark.checkpoints.gguf import finish
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 65536,
    },
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 5,
    "vocab_size": 30,
    "draft_vocab_size": 12,
    "target_layer_ids": [0, 2],
    "num_target_layers": 4,
    "target_name": "tiny",
    "mask_token_id": 29,
    "markov_rank": 3,
    "prompt_recipe": {"template_sha256": "ab" * 32, "thinking": None},
}
FULL = {"layer_types": ["full_attention", "full_attention"], "sliding_window": None}
WHOLE = {**FULL, "draft_vocab_size": 30}
PLAIN = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
FIRST = {"sample_from_anchor": True, "block_size": 7}


def same_files(one: Path, other: Path) -> bool:
    """Whether two checkpoints, folders or GGUF files, are the same byte by byte."""
    if one.is_file():
        return one.read_bytes() == other.read_bytes()
    return all((one / n).read_bytes() == (other / n).read_bytes() for n in ("config.json", "model.safetensors"))


@pytest.fixture
def make_config() -> Callable[..., DraftConfig]:
    def make(**changes: Any) -> DraftConfig:
        recipe = yaml.safe_load((files("dspark") / "recipes" / "kimi-k2.6.yaml").read_text(encoding="utf-8"))
        return DraftConfig(**{**recipe["draft"], **TINY, **changes})

    return make


@pytest.fixture
def make_draft(make_config) -> Callable[..., DSparkDraft]:
    """A bound draft whose weights are random and exact in BF16."""

    def make(**changes: Any) -> DSparkDraft:
        torch.manual_seed(0)
        draft = DSparkDraft(make_config(**changes))
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.copy_(torch.randn_like(parameter).bfloat16())
        if draft.config.reduced:
            draft.set_vocabulary(range(3, 3 + 2 * draft.config.draft_vocab_size, 2))
        draft.bind(torch.randn(30, 16).bfloat16().float(), torch.randn(30, 16).bfloat16().float())
        return draft

    return make


@pytest.fixture
def write_target(tmp_path) -> Callable[..., Path]:
    """A file with a tokenizer of 30 tokens and, where asked, a head."""

    def write(head: dict[str, np.ndarray] | None = None, tokens: int = 30, **numbers: int) -> Path:
        gguf = pytest.importorskip("gguf", reason="the package gguf (extra demo) is not installed")
        path = tmp_path / "target.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in {"embedding_length": 16, "block_count": 4, **numbers}.items():
            writer.add_uint32(f"llama.{key}", value)
        if tokens:
            writer.add_tokenizer_model("gpt2")
            writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(tokens)])
            writer.add_array("tokenizer.ggml.token_type", [1] * tokens)
            writer.add_uint32("tokenizer.ggml.mask_token_id", 5)
            writer.add_bool("tokenizer.ggml.add_bos_token", False)
        for name, values in (head or {"token_embd.weight": np.ones((30, 16), np.float32)}).items():
            writer.add_tensor(name, values)
        finish(writer)
        return path

    return write
