"""A tiny random target, rows it wrote itself, and a recipe that trains a draft on them in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dspark.data.rows import Row, row_id
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request
from dspark.targets.transformers import TransformersTarget, load_target
from dspark.training.recipe import Recipe

TAPS = (1, 3)


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Path) -> TransformersTarget:
    return load_target(str(tiny_llama_folder), packed=False)


@pytest.fixture(scope="session")
def rows(target: TransformersTarget) -> list[Row]:
    """Twelve greedy answers of unequal length, two turns for the first two prompts."""
    prompts = [[1, *(4 + (7 * i + j) % 90 for j in range(3 + i % 5))] for i in range(12)]
    requests = [Request(prompt, max_tokens=8 + 3 * (i % 4), ignore_eos=True) for i, prompt in enumerate(prompts)]
    results = dict(Engine(target, max_batch=4).run(requests))
    return [
        Row(
            id=row_id(prompt, {"test": True}),
            source=f"p/{i // 2 if i < 4 else i}",
            turn=i % 2 if i < 4 else 0,
            prompt_ids=prompt,
            answer_ids=results[i].output_ids,
            finish="length",
        )
        for i, prompt in enumerate(prompts)
    ]


def draft_fields(target: TransformersTarget, **changes: Any) -> dict[str, Any]:
    fields = {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "sliding_window_non_causal": False,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": 40,
        "target_layer_ids": list(TAPS),
        "num_target_layers": target.num_layers,
        "mask_token_id": 3,
        "sample_from_anchor": True,
        "block_size": 4,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "training_length": 64,
        "prompt_recipe": {"template_sha256": None, "thinking": None},
    }
    return {**fields, **changes}


@pytest.fixture
def make_recipe(target: TransformersTarget, rows: list[Row], tmp_path: Path) -> Callable[..., Recipe]:
    """A recipe for the tiny target; keyword arguments change its training section, `draft` and `data` their own."""

    emitted = {2, *(token for row in rows for token in row.answer_ids)}
    unused = min(set(range(target.vocab_size)) - emitted)

    def make(
        out: str = "run", draft: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **training: Any
    ):
        content = {
            "name": "tiny",
            "target": target.name,
            "draft": draft_fields(target, **{"mask_token_id": unused, **(draft or {})}),
            "data": {"rows": ["unused.jsonl"], "held_out": 2, "max_length": 64, **(data or {})},
            "training": {
                "steps": 4,
                "rows_per_step": 2,
                "anchors_per_row": 3,
                "accumulation": 2,
                "lr": 1e-2,
                "log_every": 1,
                "validate_every": 2,
                "validation_rows": 2,
                "replay_rows": 2,
                "save_every": 2,
                "out": str(tmp_path / out),
                **training,
            },
        }
        return Recipe.model_validate(content)

    return make


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)
