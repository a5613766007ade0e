"""The EAGLE-3 layer: decoding and training go through it alike, step by step, and MLA equals its expanded form."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config

GQA = {"attention": "gqa", "num_key_value_heads": 2, "head_dim": 8}
MLA = {"attention": "mla", "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
KINDS: dict[str, dict[str, Any]] = {"gqa": GQA, "mla": MLA, "mla-low-rank": {**MLA, "q_lora_rank": 16}}


def eagle3_fields(kind: str = "gqa", **changes: Any) -> dict[str, Any]:
    fields = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "num_attention_heads": 4,
        "vocab_size": 40,
        "draft_vocab_size": 40,
        "target_layer_ids": (0, 1, 3),
        "num_target_layers": 4,
        "target_name": "tiny",
        "training_steps": 7,
        "training_length": 64,
        "prompt_recipe": {"template_sha256": None, "thinking": None},
        **KINDS[kind],
    }
    return {**fields, **changes}


def eagle3_draft(kind: str = "gqa", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Eagle3Draft:
    """A bound draft whose every weight is random (nothing left at its one start)."""
    torch.manual_seed(seed)
    config = Eagle3Config(**eagle3_fields(kind, **changes))
    draft = Eagle3Draft(config).to(dtype)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    if config.reduced:
        draft.set_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].tolist())
    draft.bind(torch.randn(config.vocab_size, config.hidden_size, dtype=dtype))
    return draft


def packed_row(lengths: list[int], width: int = 72) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids, taps, positions and first index of every token's document of a packed row."""
    total = sum(lengths)
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    return torch.randint(0, 40, (total,)), torch.randn(total, width), torch.arange(total) - starts, starts


def decoded(draft: Eagle3Draft, ids: list[int], taps: Tensor, anchor: int, parts: list[int]) -> Tensor:
    """What decoding gives at `anchor` when its drafts are the next tokens of `ids`: outputs [n, d].

    parts: how many tokens each part of the context has; every part but the last is drafted on as well.
    """
    context = draft.new_context(anchor + 3)
    read = 0
    for count in parts:
        draft.write_context([(context, taps[read : read + count])])
        read += count
        hidden = draft.first_step([(context, ids[context.written + 1 : read + 1])])
        outputs = [hidden]
        for step in range(1, draft.config.gamma):
            token = torch.tensor([ids[read + step]]) if read + step < len(ids) else torch.tensor([0])
            outputs.append(draft.next_step([context], token, outputs[-1], step))
    assert read == anchor
    return torch.cat(outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_states_of_training_at_every_step(kind: str) -> None:
    draft = eagle3_draft(kind)
    ids, taps, positions, starts = packed_row([13, 17, 12])
    anchors = torch.tensor([1, 4, 5, 14, 20, 32, 34])
    prev = torch.stack([ids[anchors + k] for k in range(7)], 1)
    trained = draft.train_hidden(taps, ids, positions, anchors, starts[anchors], prev)
    for row, anchor in zip(trained, anchors.tolist(), strict=True):
        start = int(starts[anchor])
        served = decoded(draft, ids[start:].tolist(), taps[start:], anchor - start, [anchor - start])
        assert torch.allclose(draft.logits(row), draft.logits(served), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_written_in_parts_is_the_same(kind: str) -> None:
    draft = eagle3_draft(kind, torch.float64)
    ids, taps, _, _ = packed_row([30])
    whole = decoded(draft, ids.tolist(), taps, 20, [20])
    for parts in ([1] * 20, [7, 1, 12], [19, 1]):
        assert torch.allclose(whole, decoded(draft, ids.tolist(), taps, 20, parts), atol=1e-10)
