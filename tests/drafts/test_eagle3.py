"""The EAGLE-3 layer: decoding and training go through it alike, step by step, and MLA equals its expanded form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from dspark.drafts.attention import LatentAttention
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.inspect import parameter_counts
from dspark.drafts.rope import Rotary
from dspark.errors import DsparkError

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


def test_a_prefix_of_another_context_goes_on_with_its_own_token() -> None:
    for kind in KINDS:
        draft = eagle3_draft(kind, torch.float64)
        ids, taps, _, _ = packed_row([30])
        other = [*ids[:12].tolist(), *((ids[12:] + 1) % 40).tolist()]
        first = draft.new_context(30)
        draft.write_context([(first, taps[:20])])
        draft.first_step([(first, other[1:21])])
        second = draft.new_context(20)
        second.copy_prefix(first, 12)
        assert (second.length, second.written) == (12, 11)
        second.grow(30)
        draft.write_context([(second, taps[12:20])])
        served = draft.first_step([(second, ids[12:21].tolist())])
        assert torch.allclose(served, decoded(draft, ids.tolist(), taps, 20, [20])[:1], atol=1e-10)


def test_a_cut_context_forgets_the_pair_that_read_the_token() -> None:
    draft = eagle3_draft("mla", torch.float64)
    ids, taps, _, _ = packed_row([30])
    context = draft.new_context(30)
    draft.write_context([(context, taps[:20])])
    draft.first_step([(context, [*ids[1:15].tolist(), *[0] * 6])])
    context.truncate(14)
    assert (context.length, context.written) == (14, 13)
    draft.write_context([(context, taps[14:20])])
    served = draft.first_step([(context, ids[14:21].tolist())])
    assert torch.allclose(served, decoded(draft, ids.tolist(), taps, 20, [20])[:1], atol=1e-10)
    with pytest.raises(DsparkError, match="length"):
        context.truncate(21)


def test_ragged_batches_are_requests_alone() -> None:
    draft = eagle3_draft("gqa", torch.float64)
    ids, taps, _, _ = packed_row([30])
    contexts = [draft.new_context(30) for _ in range(3)]
    lengths = [4, 11, 20]
    draft.write_context([(c, taps[:n]) for c, n in zip(contexts, lengths, strict=True)])
    hidden = draft.first_step([(c, ids[1 : n + 1].tolist()) for c, n in zip(contexts, lengths, strict=True)])
    hidden = draft.next_step(contexts, ids[[n + 1 for n in lengths]], hidden, 1)
    for row, n in zip(hidden, lengths, strict=True):
        assert torch.allclose(row, decoded(draft, ids.tolist(), taps, n, [n])[1], atol=1e-10)


@pytest.mark.parametrize("low_rank", [False, True])
def test_absorbed_mla_is_the_attention_of_transformers(low_rank: bool) -> None:
    """Up to the mixed values, with a state twice as wide as the layer's."""
    rank = 16 if low_rank else None
    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 12}
    config = Eagle3Config(**eagle3_fields("mla", **sizes, q_lora_rank=rank))
    torch.manual_seed(0)
    ours = LatentAttention(config, 2 * config.hidden_size, Rotary(config.rotary)).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        ours.o_proj.weight.copy_(torch.eye(24, 48))
    theirs = DeepseekV3Attention(
        DeepseekV3Config(
            hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=rank, **sizes,
            rope_parameters=dict(config.rope_parameters), max_position_embeddings=256, attn_implementation="eager",
        ),
        0,
    ).double()  # fmt: skip
    weights = {name: value for name, value in ours.state_dict().items() if name != "o_proj.weight"}
    theirs.load_state_dict({**weights, "o_proj.weight": torch.eye(48)})
    x = torch.randn(9, 48, dtype=torch.float64)
    cos, sin = (table[:9, None] for table in ours.rotary.tables(9, x))
    mask = torch.full((1, 1, 9, 9), -torch.inf, dtype=torch.float64).triu(1)
    tables = cos[:, 0][None], sin[:, 0, 2:].repeat(1, 2)[None]  # ours carries the rotation's sign in its first half
    expected = theirs(x[None], tables, mask)[0][0]
    key, value = ours.key_value(x, cos, sin)
    scores = torch.einsum("nhk,mk->hnm", ours.query(x, cos, sin), key[:, 0]) * ours.scale + mask[0]
    mixed = torch.einsum("hnm,mr->nhr", scores.softmax(-1), value[:, 0])
    assert torch.allclose(ours.output(mixed), expected[:, :24], atol=1e-10)


def test_yarn_scales_the_softmax_of_mla_only_as_deepseek_does() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
    plain, scaled = (
        Eagle3Draft(Eagle3Config(**eagle3_fields("mla", rope_parameters={**rope, **more}))).midlayer.self_attn
        for more in ({}, {"mscale": 1.0, "mscale_all_dim": 1.0})
    )
    assert plain.scale == pytest.approx(10**-0.5)
    assert scaled.scale == pytest.approx(10**-0.5 * (0.1 * math.log(4.0) + 1) ** 2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention": "mha"}, "attention"),
        ({"head_dim": None}, "head_dim"),
        ({"head_dim": 7}, "head_dim"),
        ({"kv_lora_rank": 4}, "kv_lora_rank"),
        ({"q_lora_rank": 4}, "q_lora_rank"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"target_layer_ids": (0, 1)}, "three"),
        ({"target_layer_ids": (0, 1, 4)}, "target_layer_ids"),
        ({"draft_vocab_size": 41}, "draft_vocab_size"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta"),
        ({"prompt_recipe": {}}, "prompt_recipe"),
        ({"mask_token_id": 3}, "mask_token_id"),
        ({"training_steps": 0}, "training_steps"),
        ({"intermediate_size": 2**63 - 1}, "intermediate_size"),
        ({"target_name": "two\nlines"}, "target_name"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": True}}, "rope_theta"),
    ],
)
def test_a_config_that_is_wrong_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(DsparkError, match=field):
        Eagle3Config(**eagle3_fields(**changes))


def test_every_field_is_needed() -> None:
    fields = eagle3_fields()
    for name in fields:
        with pytest.raises(DsparkError, match=name):
            Eagle3Config(**{key: value for key, value in fields.items() if key != name})


def test_wrong_use_is_named() -> None:
    draft = eagle3_draft()
    context = draft.new_context(4)
    with pytest.raises(DsparkError, match="following"):
        draft.first_step([(context, [])])
    with pytest.raises(DsparkError, match="taps"):
        draft.write_context([(context, torch.zeros(1, 24))])
    with pytest.raises(DsparkError, match="do not fit"):
        draft.write_context([(context, torch.zeros(5, 72))])
    with pytest.raises(DsparkError, match="capacity"):
        draft.new_context(0)
    with pytest.raises(DsparkError, match="bind"):
        Eagle3Draft(draft.config).embed(torch.tensor([1]))
    with pytest.raises(DsparkError, match="embedding_weight"):
        draft.bind(torch.zeros(40, 23))
    ids, taps, positions, starts = packed_row([6, 6])
    first = torch.tensor([6])
    with pytest.raises(DsparkError, match="token before it"):
        draft.train_hidden(taps, ids, positions, first, starts[first], ids[6:8][None])
    with pytest.raises(DsparkError, match="whole vocabulary"):
        draft.set_vocabulary(range(40))


def test_parameters_are_counted_by_part() -> None:
    draft = eagle3_draft("mla")
    counts = parameter_counts(draft.config)
    assert counts["total"] == sum(p.numel() for p in draft.parameters())
    assert (counts["lm_head"], counts["fc"], counts["norms"]) == (40 * 24, 24 * 72, 24)
