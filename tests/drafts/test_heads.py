from __future__ import annotations

import pytest
import torch

from dspark.errors import DsparkError

HEADS = ["vanilla", "gated", "rnn"]


def expected_bias(draft, kind, hidden, prev_ids):
    """The formulas of method section 2, slot by slot: hidden [n, d], prev_ids [n] -> [n, K]."""
    head = draft.markov_head
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    rank, state, rows = w1.shape[1], torch.zeros(w1.shape[1], dtype=w1.dtype), []
    for h, x in zip(hidden, prev_ids, strict=True):
        e = w1[x]
        if kind == "vanilla":
            f = e
        elif kind == "gated":
            f = torch.sigmoid(head.gate_proj.weight @ torch.cat((h, e)) + head.gate_proj.bias) * e
        else:
            z = head.joint_proj.weight @ torch.cat((state, e, h)) + head.joint_proj.bias
            g = torch.sigmoid(z[:rank])
            state = g * state + (1 - g) * torch.tanh(z[rank : 2 * rank])
            f = torch.tanh(z[2 * rank :])
        rows.append(w2 @ f)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("kept", [40, 17])
def test_sequential_slots_equal_teacher_forcing_and_the_formula(make_draft, kind, kept) -> None:
    draft = make_draft(markov_head_type=kind, draft_vocab_size=kept)
    hidden = torch.randn(3, 4, 24, dtype=torch.float64)
    prev_ids = torch.randint(0, 40, (3, 4))
    base = draft.base_logits(hidden)
    torch.testing.assert_close(base, hidden @ draft.head_rows.T)
    taught = draft.teacher_logits(hidden, prev_ids)
    assert taught.shape == (3, 4, kept)
    state = draft.markov_start(3)
    for slot in range(4):
        logits, state = draft.slot_logits(base[:, slot], hidden[:, slot], prev_ids[:, slot], state)
        torch.testing.assert_close(logits, taught[:, slot], rtol=1e-12, atol=1e-12)
    for block in range(3):
        expected = base[block] + expected_bias(draft, kind, hidden[block], prev_ids[block])
        torch.testing.assert_close(taught[block], expected, rtol=1e-12, atol=1e-12)


def test_rank_zero_is_plain_dflash(make_draft) -> None:
    draft = make_draft(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    assert not [name for name in draft.state_dict() if "markov" in name or "confidence" in name]
    hidden, prev_ids = torch.randn(2, 4, 24, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.int64)
    base = draft.base_logits(hidden)
    assert draft.markov_start(2) is None
    assert torch.equal(draft.slot_logits(base[:, 0], hidden[:, 0], prev_ids[:, 0], None)[0], base[:, 0])
    assert torch.equal(draft.teacher_logits(hidden, prev_ids), base)
    assert draft.confidence(hidden, prev_ids) is None


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_the_markov_part_only_when_told(make_draft, with_markov) -> None:
    draft = make_draft(confidence_head_with_markov=with_markov)
    hidden, prev_ids = torch.randn(5, 24, dtype=torch.float64), torch.arange(5)
    proj = draft.confidence_head.proj
    assert proj.in_features == 24 + 6 * with_markov
    features = torch.cat((hidden, draft.markov_head.markov_w1.weight[prev_ids]), -1) if with_markov else hidden
    torch.testing.assert_close(draft.confidence(hidden, prev_ids), features @ proj.weight[0] + proj.bias)


def test_fresh_weights_add_no_bias_and_half_confidence(fields) -> None:
    from dspark.drafts.config import DraftConfig
    from dspark.drafts.dspark import DSparkDraft

    draft = DSparkDraft(DraftConfig(**fields()))
    draft.bind(torch.randn(40, 24), torch.randn(40, 24))
    hidden, prev_ids = torch.randn(2, 4, 24), torch.arange(8).view(2, 4)
    assert torch.equal(draft.teacher_logits(hidden, prev_ids), draft.base_logits(hidden))
    assert torch.equal(torch.sigmoid(draft.confidence(hidden, prev_ids)), torch.full((2, 4), 0.5))
    assert 0.015 < float(draft.fc.weight.detach().std()) < 0.025


def test_d2t_holds_offsets(make_draft) -> None:
    draft = make_draft(draft_vocab_size=4)
    draft.set_vocabulary([10, 5, 40 - 1, 9])
    assert draft.d2t.tolist() == [5, 8, 8, 36]
    assert draft.draft_ids.tolist() == [5, 9, 10, 39]
    assert draft.t2d.nonzero().flatten().tolist() == [5, 9, 10, 39]
    hidden = torch.randn(24, dtype=torch.float64)
    torch.testing.assert_close(draft.base_logits(hidden), draft._target().head_weight[[5, 9, 10, 39]] @ hidden)


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 2, 3, 3], [1, 2, 3, 40], [-1, 2, 3, 4], [1, 2, 3, 4, 5]])
def test_a_wrong_vocabulary_is_refused(make_draft, ids) -> None:
    draft = make_draft(draft_vocab_size=4)
    before = draft.d2t.clone()
    with pytest.raises(DsparkError, match="vocabulary"):
        draft.set_vocabulary(ids)
    assert torch.equal(draft.d2t, before)


def test_a_reduced_vocabulary_that_was_never_set_is_refused(fields) -> None:
    from dspark.drafts.config import DraftConfig
    from dspark.drafts.dspark import DSparkDraft

    draft = DSparkDraft(DraftConfig(**fields(draft_vocab_size=4)))
    with pytest.raises(DsparkError, match="vocabulary"):
        draft.bind(torch.randn(40, 24), torch.randn(40, 24))


def test_the_target_is_referenced_and_never_owned(make_draft, fields) -> None:
    from dspark.drafts.config import DraftConfig
    from dspark.drafts.dspark import DSparkDraft

    draft = DSparkDraft(DraftConfig(**fields()))
    with pytest.raises(DsparkError, match="bind"):
        draft.embed(torch.tensor([1]))
    with pytest.raises(DsparkError, match="bind"):
        draft.base_logits(torch.zeros(24))
    names, count = set(draft.state_dict()), sum(p.numel() for p in draft.parameters())
    embedding, head = torch.nn.Parameter(torch.randn(40, 24)), torch.nn.Parameter(torch.randn(40, 24))
    draft.bind(embedding, head)
    assert set(draft.state_dict()) == names
    assert sum(p.numel() for p in draft.parameters()) == count
    assert draft.head_rows.data_ptr() == head.data_ptr()
    with torch.no_grad():
        embedding[3] = 7.0
    assert torch.equal(draft.embed(torch.tensor([3])), torch.full((1, 24), 7.0))
    with pytest.raises(DsparkError, match="head_weight"):
        draft.bind(embedding, head[:39])


def test_the_head_can_be_replaced_outside_the_module_tree(make_draft) -> None:
    draft = make_draft()
    names = [name for name, _ in draft.named_modules()]

    class Doubled(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return 2 * self.linear(x)

    hidden = torch.randn(3, 24, dtype=torch.float64)
    before = draft.base_logits(hidden)
    draft.head = Doubled(draft.head)
    assert torch.equal(draft.base_logits(hidden), 2 * before)
    assert [name for name, _ in draft.named_modules()] == names
