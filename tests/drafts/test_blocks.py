"""Trainer/drafter parity, and both against a plain reference built from Transformers' Qwen3 pieces."""

from __future__ import annotations

import pytest
import torch
from tests.drafts.conftest import MLA
from transformers import DeepseekV3Config, Qwen3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from dspark.drafts import anchors as anchors_module
from dspark.drafts.config import MLA_SIZES
from dspark.errors import DsparkError

YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LAYERS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3},
    "non-causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "sliding_window_non_causal": True},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "partial-rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "bias": {"attention_bias": True},
    "mla": MLA,
    "mla, low rank, yarn": {**MLA, "q_lora_rank": 16, "rope_parameters": YARN},
    "mla, sliding": {**MLA, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
}
LAYOUTS = {"anchor-first": {"sample_from_anchor": True}, "bonus-anchor": {"sample_from_anchor": False, "block_size": 5}}

# A packed row of three documents, and anchors at two and more depths of each (one at a document's very start)
LENGTHS = (11, 7, 14)
ANCHORS = (0, 3, 9, 13, 17, 18, 25, 31)


class PackedRow:
    def __init__(self, draft, dtype=torch.float64, seed=1):
        torch.manual_seed(seed)
        size = sum(LENGTHS)
        self.starts = [sum(LENGTHS[:i]) for i in range(3)]
        self.taps = torch.randn(size, 2 * draft.config.hidden_size, dtype=dtype)
        self.positions = torch.cat([torch.arange(length) for length in LENGTHS])
        self.index = torch.tensor(ANCHORS)
        self.ids = torch.randint(0, 39, (len(ANCHORS),))
        self.doc_start = torch.tensor([max(s for s in self.starts if s <= a) for a in ANCHORS])

    def train(self, draft, n=None, keep=slice(None), taps=None):
        taps = self.taps if taps is None else taps
        return draft.train_hidden(taps, self.positions, self.index[keep], self.ids[keep], self.doc_start[keep], n)


def decoded(draft, row, anchor, n):
    """The drafting engine's states for one anchor: its document's tokens written in uneven pieces, then a block."""
    start, end = int(row.doc_start[anchor]), int(row.index[anchor])
    context = draft.new_context(end - start + 1)
    for piece in row.taps[start:end].split(4):
        draft.write_context([(context, piece)])
    assert context.length == end - start
    return draft.block_hidden([(context, int(row.ids[anchor]))], n)[0]


def reference(draft, row, anchor, n):
    """One block through Transformers' own layer modules, with an explicit mask over [context ; block]."""
    config = draft.config
    shape = Qwen3Config(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        num_hidden_layers=2,
        rms_norm_eps=config.rms_norm_eps,
        attention_bias=config.attention_bias,
        max_position_embeddings=256,
        rope_parameters=dict(config.rope_parameters),
        attn_implementation="eager",
    )
    start, end = int(row.doc_start[anchor]), int(row.index[anchor])
    length, slots = end - start, config.slots(n)
    norm = Qwen3RMSNorm(24, config.rms_norm_eps).double()
    norm.weight = draft.hidden_norm.weight
    context = norm(row.taps[start:end] @ draft.fc.weight.T)
    ids = torch.full((slots,), config.mask_token_id)
    ids[0] = row.ids[anchor]
    x = draft.embed(ids)
    query_at, key_at = torch.arange(length, length + slots), torch.arange(length + slots)
    cos, sin = Qwen3RotaryEmbedding(shape)(x, key_at[None])
    for index, mine in enumerate(draft.layers):
        layer = Qwen3DecoderLayer(shape, index).double()
        layer.load_state_dict(mine.state_dict())
        attention = layer.self_attn
        states = layer.input_layernorm(x)
        both = torch.cat((context, states))
        query = attention.q_norm(attention.q_proj(states).view(slots, 4, 8)).transpose(0, 1)
        key = attention.k_norm(attention.k_proj(both).view(-1, 2, 8)).transpose(0, 1)
        value = attention.v_proj(both).view(-1, 2, 8).transpose(0, 1).repeat_interleave(2, 0)
        query, _ = apply_rotary_pos_emb(query[None], query[None], cos[:, length:], sin[:, length:])
        key, _ = apply_rotary_pos_emb(key[None], key[None], cos, sin)
        key = key[0].repeat_interleave(2, 0)
        seen = torch.ones(slots, length + slots, dtype=torch.bool)
        if config.layer_types[index] == "sliding_attention":
            back = query_at[:, None] - key_at
            seen = back < config.sliding_window
            seen &= (back > -config.sliding_window) if config.sliding_window_non_causal else (back >= 0)
        scores = (query[0] @ key.transpose(1, 2) * 8**-0.5).masked_fill(~seen, float("-inf"))
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(slots, -1)
        x = x + attention.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    norm.weight = draft.norm.weight
    return norm(x)[slots - n :]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", LAYERS)
def test_trainer_equals_drafter(make_draft, layers, layout) -> None:
    draft = make_draft(**LAYERS[layers], **LAYOUTS[layout])
    row = PackedRow(draft)
    for n in (draft.config.gamma, 1, 2):
        trained = row.train(draft, n)
        assert trained.shape == (len(ANCHORS), n, 24)
        for a in range(len(ANCHORS)):
            torch.testing.assert_close(decoded(draft, row, a, n), trained[a].detach(), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_logits_equal_drafter_logits(make_draft, kind, layout) -> None:
    """Through the heads too: on the tokens that sequential drafting chose, logits and confidence agree."""
    draft = make_draft(markov_head_type=kind, draft_vocab_size=17, **LAYERS["mixed"], **LAYOUTS[layout])
    row, n = PackedRow(draft), draft.config.gamma
    trained = row.train(draft)
    for a in (2, 5, 7):
        hidden = decoded(draft, row, a, n)[None]
        base, state = draft.base_logits(hidden), draft.markov_start(1)
        prev, chosen, logits = row.ids[a : a + 1], [], []
        for slot in range(n):
            chosen.append(prev)
            step, state = draft.slot_logits(base[:, slot], hidden[:, slot], prev, state)
            logits.append(step)
            prev = draft.draft_ids[step.argmax(-1)]
        previous = torch.stack(chosen, 1)
        torch.testing.assert_close(
            draft.teacher_logits(trained[a : a + 1], previous), torch.stack(logits, 1), rtol=1e-10, atol=1e-10
        )
        torch.testing.assert_close(draft.confidence(trained[a : a + 1], previous), draft.confidence(hidden, previous))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("layers", ["full", "sliding", "non-causal", "mixed", "bias"])
def test_both_equal_a_plain_qwen3_reference(make_draft, layers, layout) -> None:
    # Qwen3's norm works in fp32, hence the tolerance
    draft = make_draft(**LAYERS[layers], **LAYOUTS[layout])
    row, n = PackedRow(draft), draft.config.gamma
    trained = row.train(draft)
    for a in range(len(ANCHORS)):
        torch.testing.assert_close(trained[a], reference(draft, row, a, n), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 100.0}, YARN])
@pytest.mark.parametrize("rank", [None, 16])
def test_mla_equals_deepseeks_attention_over_context_and_block(make_draft, rank, rope) -> None:
    """Transformers' own module reads [context ; normed block] with nothing masked; the block's rows are taken."""
    draft = make_draft(**MLA, q_lora_rank=rank, rope_parameters=rope)
    row, sizes = PackedRow(draft), {name: MLA[name] for name in MLA_SIZES}
    shape = DeepseekV3Config(
        hidden_size=24, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=rank, **sizes, rope_parameters=rope,
        rms_norm_eps=draft.config.rms_norm_eps, max_position_embeddings=256, attn_implementation="eager",
    )  # fmt: skip
    trained, slots = row.train(draft), draft.config.gamma
    for a in (2, 5, 7):
        start, end = int(row.doc_start[a]), int(row.index[a])
        context, ids = draft.context_states(row.taps[start:end]), torch.full((slots,), draft.config.mask_token_id)
        ids[0] = row.ids[a]
        x = draft.embed(ids)
        tables = DeepseekV3RotaryEmbedding(shape)(x, torch.arange(end - start + slots)[None])
        for index, mine in enumerate(draft.layers):
            attention = DeepseekV3Attention(shape, index).double()
            attention.load_state_dict(mine.self_attn.state_dict())
            both = torch.cat((context, mine.input_layernorm(x)))
            x = x + attention(both[None], tables, None)[0][0, -slots:]
            x = x + mine.mlp(mine.post_attention_layernorm(x))
        torch.testing.assert_close(trained[a], draft.norm(x), rtol=2e-4, atol=2e-4)  # norms and softmax in fp32 there


@pytest.mark.parametrize("layers", ["full", "mixed", "mla, low rank, yarn"])
def test_parity_in_single_precision(make_draft, layers) -> None:
    draft = make_draft(torch.float32, **LAYERS[layers])
    row = PackedRow(draft, torch.float32)
    trained = row.train(draft)
    for a in range(len(ANCHORS)):
        torch.testing.assert_close(decoded(draft, row, a, 4), trained[a].detach(), rtol=1e-4, atol=1e-5)


def test_half_precision_runs_and_stays_close(make_draft) -> None:
    draft, half = make_draft(**LAYERS["mixed"]), make_draft(torch.bfloat16, **LAYERS["mixed"])
    half.load_state_dict(draft.state_dict())
    half.bind(draft._target().embedding, draft._target().head_weight)
    row = PackedRow(draft)
    exact, trained = row.train(draft).detach(), row.train(half).detach()
    drafted = decoded(half, row, 7, 4)
    assert trained.dtype == drafted.dtype == draft.to(torch.bfloat16).fc.weight.dtype == torch.bfloat16
    assert float((trained - exact).norm() / exact.norm()) < 0.05
    assert float((drafted - exact[7]).norm() / exact[7].norm()) < 0.05


def test_a_short_block_is_not_the_prefix_of_a_long_one(make_draft) -> None:
    draft = make_draft()
    row = PackedRow(draft)
    assert not torch.allclose(row.train(draft, 1), row.train(draft, 4)[:, :1], rtol=1e-3)
    causal = make_draft(**LAYERS["sliding"])
    torch.testing.assert_close(row.train(causal, 1), row.train(causal, 4)[:, :1])


@pytest.mark.parametrize("layers", ["full", "mixed", "non-causal", "mla"])
@pytest.mark.parametrize("budget", [1, 2000, 4_000_000])
@pytest.mark.parametrize("recompute", [False, True])
def test_chunks_and_recomputation_change_nothing(make_draft, monkeypatch, layers, budget, recompute) -> None:
    draft = make_draft(**LAYERS[layers])
    row = PackedRow(draft)
    draft.zero_grad()
    expected = row.train(draft)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    key = "kv_a_proj_with_mqa" if layers == "mla" else "k_proj"
    assert f"layers.1.self_attn.{key}.weight" in gradients and "fc.weight" in gradients
    monkeypatch.setattr(anchors_module, "SCORES_PER_CHUNK", budget)
    monkeypatch.setattr(anchors_module, "CHECKPOINT_SCORES", 0 if recompute else 10**12)
    draft.zero_grad()
    hidden = row.train(draft)
    torch.testing.assert_close(hidden, expected, rtol=1e-11, atol=1e-11)
    (hidden * weights).sum().backward()
    for name, gradient in gradients.items():
        torch.testing.assert_close(draft.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layers", ["full", "mixed"])
def test_blocks_never_see_each_other(make_draft, layers) -> None:
    draft = make_draft(**LAYERS[layers])
    row = PackedRow(draft)
    together = row.train(draft)
    for a in range(len(ANCHORS)):
        torch.testing.assert_close(row.train(draft, keep=slice(a, a + 1))[0], together[a], rtol=1e-11, atol=1e-11)
    row.ids[3] = (row.ids[3] + 1) % 39
    changed = row.train(draft)
    same = [a for a in range(len(ANCHORS)) if a != 3]
    assert torch.equal(changed[same], together[same])
    assert not torch.allclose(changed[3], together[3], rtol=1e-3)


@pytest.mark.parametrize("layers", ["full", "sliding", "mixed"])
def test_context_from_the_anchor_on_and_other_documents_never_influence(make_draft, layers) -> None:
    draft = make_draft(**LAYERS[layers])
    row = PackedRow(draft)
    before = row.train(draft)
    for a in range(len(ANCHORS)):
        start, end = int(row.doc_start[a]), int(row.index[a])
        taps = torch.randn_like(row.taps)
        taps[start:end] = row.taps[start:end]
        assert torch.equal(row.train(draft, taps=taps)[a], before[a])
        if end > start:
            taps = row.taps.clone()
            taps[end - 1] = torch.randn_like(taps[end - 1])
            assert not torch.allclose(row.train(draft, taps=taps)[a], before[a], rtol=1e-6)


def test_a_dropped_anchor_has_exactly_zero_gradient(make_draft) -> None:
    draft = make_draft(**LAYERS["mixed"])
    row = PackedRow(draft)
    taps = row.taps.clone().requires_grad_()
    hidden = row.train(draft, taps=taps)
    hidden[:-1].square().sum().backward()  # the last anchor, alone with tokens 25..30, has no part in the loss
    assert bool((taps.grad[25:] == 0).all())
    assert bool((taps.grad[18:25] != 0).any())
    draft.zero_grad()
    hidden = row.train(draft)
    weights = torch.ones(len(ANCHORS), dtype=torch.float64)
    weights[4] = 0.0
    (weights[:, None, None] * hidden.square()).sum().backward()
    masked = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    keep = torch.tensor([a for a in range(len(ANCHORS)) if a != 4])
    row.train(draft, keep=keep).square().sum().backward()
    for name, gradient in masked.items():
        torch.testing.assert_close(draft.get_parameter(name).grad, gradient, rtol=1e-9, atol=1e-10)


def test_gradients_are_exact(make_draft) -> None:
    draft = make_draft(num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=3, block_size=2)
    row = PackedRow(draft)
    taps = row.taps[:11].clone().requires_grad_()
    index, start = torch.tensor([2, 7]), torch.tensor([0, 0])

    def run(t):
        return draft.train_hidden(t, row.positions[:11], index, row.ids[:2], start)

    assert torch.autograd.gradcheck(run, (taps,), fast_mode=True)


@pytest.mark.parametrize("layers", ["full", "mixed", "non-causal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_ragged_batch_equals_single_requests(make_draft, layers, layout) -> None:
    draft = make_draft(**LAYERS[layers], **LAYOUTS[layout])
    torch.manual_seed(3)
    taps = [torch.randn(t, 48, dtype=torch.float64) for t in (1, 9, 4)]
    contexts = [draft.new_context(20) for _ in range(4)]  # the last one stays empty
    draft.write_context([*zip(contexts, taps, strict=False), (contexts[3], torch.empty(0, 48, dtype=torch.float64))])
    assert [c.length for c in contexts] == [1, 9, 4, 0]
    anchors = [3, 1, 30, 7]
    for n in range(1, draft.config.gamma + 1):
        batch = draft.block_hidden(list(zip(contexts, anchors, strict=True)), n)
        for r in range(4):
            alone = draft.new_context(20)
            if r < 3:
                draft.write_context([(alone, taps[r])])
            torch.testing.assert_close(
                draft.block_hidden([(alone, anchors[r])], n)[0], batch[r], rtol=1e-11, atol=1e-11
            )


def test_a_used_context_can_be_truncated_and_reused(make_draft) -> None:
    draft = make_draft()
    torch.manual_seed(4)
    taps = torch.randn(12, 48, dtype=torch.float64)
    context, fresh = draft.new_context(12), draft.new_context(12)
    draft.write_context([(context, taps)])
    draft.block_hidden([(context, 5)], 4)
    context.truncate(3)
    draft.write_context([(context, taps[:2])])
    draft.write_context([(fresh, torch.cat((taps[:3], taps[:2])))])
    torch.testing.assert_close(
        draft.block_hidden([(context, 5)], 4), draft.block_hidden([(fresh, 5)], 4), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(DsparkError, match="length"):
        context.truncate(6)


def test_a_block_fits_at_the_end_of_a_full_context_and_no_token_more(make_draft) -> None:
    draft = make_draft()
    context = draft.new_context(5)
    taps = torch.randn(5, 48, dtype=torch.float64)
    draft.write_context([(context, taps)])
    assert torch.isfinite(draft.block_hidden([(context, 1)], 4)).all()
    with pytest.raises(DsparkError, match="do not fit"):
        draft.write_context([(context, taps[:1])])
    assert context.length == 5


def test_a_context_made_in_inference_mode_works_outside_it(make_draft) -> None:
    draft = make_draft()
    with torch.inference_mode():
        context = draft.new_context(5)
        draft.write_context([(context, torch.randn(2, 48, dtype=torch.float64))])
    draft.write_context([(context, torch.randn(2, 48, dtype=torch.float64))])
    hidden = draft.block_hidden([(context, 1)], 4)
    assert context.length == 4 and torch.isfinite(hidden).all()
    PackedRow(draft).train(draft).sum().backward()  # the rotary tables made above are usable under autograd


def test_bad_anchors_and_depths_are_refused(make_draft) -> None:
    draft = make_draft()
    row = PackedRow(draft)
    with pytest.raises(DsparkError, match="n = 5"):
        draft.block_hidden([(draft.new_context(4), 1)], 5)
    with pytest.raises(DsparkError, match="sorted"):
        row.train(draft, keep=torch.tensor([2, 1]))
    with pytest.raises(DsparkError, match="inside the row"):
        draft.train_hidden(row.taps[:5], row.positions[:5], torch.tensor([5]), torch.tensor([1]), torch.tensor([0]))
    with pytest.raises(DsparkError, match="doc_start"):
        draft.train_hidden(row.taps, row.positions, torch.tensor([5]), torch.tensor([1]), torch.tensor([6]))
    with pytest.raises(DsparkError, match="2 taps"):
        draft.write_context([(draft.new_context(4), torch.randn(2, 24, dtype=torch.float64))])
    assert row.train(draft, keep=slice(0, 0)).shape == (0, 4, 24)
