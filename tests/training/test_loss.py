"""The chunked loss against the dense one, and the dense one against the definition written as loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.training import loss as loss_module
from dspark.training.anchors import AnchorBatch, build_anchor_batch
from dspark.training.loss import LossSettings, LossStats, dense_loss, loss_and_backward, slot_weights

V, K, WIDTH, GAMMA = 48, 20, 16, 5
LENGTHS = (12, 9, 3, 14)  # documents of the packed row
SIZE = sum(LENGTHS)
SCALE = 0.37

HEADS: list[dict[str, Any]] = [
    {},
    {"markov_head_type": "gated", "draft_vocab_size": K},
    {"markov_head_type": "rnn", "draft_vocab_size": K, "confidence_head_with_markov": False},
    {"enable_confidence_head": False, "draft_vocab_size": K},
    {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
]


def make_draft(dtype: torch.dtype = torch.float64, **changes: Any) -> DSparkDraft:
    """A bound draft whose every weight is random, the same numbers in every dtype."""
    config = DraftConfig(
        **{
            "hidden_size": WIDTH,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 24,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
            "layer_types": ("full_attention",),
            "sliding_window": None,
            "sliding_window_non_causal": False,
            "vocab_size": V,
            "draft_vocab_size": V,
            "target_layer_ids": (0, 2),
            "num_target_layers": 4,
            "target_name": "tiny",
            "mask_token_id": V - 1,
            "sample_from_anchor": True,
            "block_size": GAMMA,
            "markov_rank": 4,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "training_length": 64,
            "prompt_recipe": {"template_sha256": None, "thinking": None},
            **changes,
        }
    )
    generator = torch.Generator().manual_seed(1)
    draft = DSparkDraft(config)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    if config.reduced:
        draft.set_vocabulary(torch.randperm(V, generator=generator)[:K].tolist())
    draft.to(dtype)
    embedding, head = torch.randn(2, V, WIDTH, generator=generator)
    draft.bind(embedding.to(dtype), head.to(dtype))
    return draft


class Row:
    """A packed row of four documents, its features and its anchors, one of which has no label."""

    def __init__(self, dtype: torch.dtype = torch.float64, documents: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        generator = torch.Generator().manual_seed(2)
        all_documents = torch.cat([torch.full((n,), d) for d, n in enumerate(LENGTHS)])
        keep = torch.isin(all_documents, torch.tensor(documents))
        self.ids = torch.randint(V, (SIZE,), generator=generator)[keep]
        self.document_ids = all_documents[keep]
        self.loss_mask = torch.ones(SIZE, dtype=torch.bool)
        self.loss_mask[[0, 1, 12, 30]] = False
        self.loss_mask = self.loss_mask[keep]
        self.positions = torch.cat([torch.arange(n) for n in LENGTHS])[keep]
        self.taps = torch.randn(SIZE, 2 * WIDTH, generator=generator)[keep].to(dtype)
        self.target_logits = (2 * torch.randn(SIZE, V, generator=generator))[keep].to(dtype)
        anchors = torch.tensor([2, 3, 5, 9, 11, 14, 15, 21, 25, 27, 31, 32, 36])
        index = torch.zeros(SIZE, dtype=torch.bool)
        index[anchors] = True
        self.batch = build_anchor_batch(
            self.ids, self.loss_mask, self.document_ids, index[keep].nonzero().flatten(), GAMMA
        )

    def log_p(self, draft: DSparkDraft) -> Callable[[Tensor], Tensor]:
        ids = draft.draft_ids
        return lambda index: self.target_logits[index].log_softmax(-1)[:, ids]

    def hidden(self, draft: DSparkDraft) -> Tensor:
        batch = self.batch
        return draft.train_hidden(self.taps, self.positions, batch.anchor_index, batch.anchor_ids, batch.doc_start)


def gradients(draft: DSparkDraft, hidden: Tensor | None = None) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    if hidden is not None:
        assert hidden.grad is not None
        found["hidden"] = hidden.grad.clone()
    draft.zero_grad(set_to_none=True)
    return found


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = (found[name].double() - value.double()).norm()
        assert error <= tolerance * value.double().norm(), (name, float(error / value.double().norm()))


def by_definition(draft: DSparkDraft, row: Row, hidden: Tensor, settings: LossSettings) -> dict[str, Any]:
    """Method section 3, slot by slot, q and p over all V."""
    batch, ids = row.batch, draft.draft_ids.tolist()
    logits, confidence = draft.teacher_logits(hidden, batch.prev_ids), draft.confidence(hidden, batch.prev_ids)
    out = {"weight": 0.0, "total": 0.0, "ce": 0.0, "l1": 0.0, "bce": 0.0, "tau": 0.0, "kept": 0.0, "outside": 0}
    accepted = [0.0] * GAMMA
    for a in range(len(batch.mask)):
        product = 1.0
        out["tau"] += 1.0 if batch.mask[a, 0] else 0.0
        for k in range(GAMMA):
            if not batch.mask[a, k]:
                break
            weight = math.exp(-k / settings.decay)
            p = row.target_logits[batch.anchor_index[a] + k].softmax(-1)
            q = torch.zeros(V, dtype=p.dtype)
            q[ids] = logits[a, k].softmax(-1)
            label = int(batch.labels[a, k])
            ce = -float(q[label].log()) if label in ids else 0.0
            l1 = float((q - p).abs().sum())
            y = 1 - l1 / 2
            bce = 0.0
            if confidence is not None:
                c = 1 / (1 + math.exp(-float(confidence[a, k])))
                bce = -y * math.log(c) - (1 - y) * math.log(1 - c)
            product *= y
            accepted[k] += y
            out["tau"] += product
            out["kept"] += float(p[ids].sum())
            out["outside"] += label not in ids
            for name, value in (("weight", 1.0), ("ce", ce), ("l1", l1), ("bce", bce)):
                out[name] += weight * value
    out["total"] = settings.ce * out["ce"] + settings.l1 * out["l1"] + settings.confidence * out["bce"]
    return {**out, "accepted": accepted}


def test_weights_decay_from_the_first_slot_and_are_zero_where_masked():
    weights = slot_weights(torch.tensor([[True, True, True], [True, False, False]]), 4.0)
    expected = [[1.0, math.exp(-0.25), math.exp(-0.5)], [1.0, 0.0, 0.0]]
    assert torch.allclose(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=0)


@pytest.mark.parametrize("changes", HEADS)
def test_dense_loss_and_statistics_equal_the_definition(changes: dict[str, Any]):
    draft, row, settings = make_draft(**changes), Row(), LossSettings(ce=0.3, l1=0.6, confidence=0.8, decay=3.0)
    with torch.no_grad():
        hidden = row.hidden(draft)
        wanted = by_definition(draft, row, hidden, settings)
        dense = dense_loss(draft, hidden, row.batch, row.log_p(draft), settings, SCALE)
    stats = loss_and_backward(draft, hidden, row.batch, row.log_p(draft), settings, SCALE, chunk=3, backward=False)
    assert float(dense) == pytest.approx(SCALE * wanted["total"], rel=1e-12)
    for name in ("weight", "total", "ce", "l1", "bce", "outside"):
        assert getattr(stats, name) == pytest.approx(wanted[name], rel=1e-12), name
    assert stats.tau_teacher_forced == pytest.approx(wanted["tau"], rel=1e-12)
    assert stats.blocks + float(stats.survival.sum()) == pytest.approx(wanted["tau"], rel=1e-12)
    assert stats.kept_mass == pytest.approx(wanted["kept"], rel=1e-12)
    assert stats.accepted.tolist() == pytest.approx(wanted["accepted"], rel=1e-12)
    assert stats.slots.tolist() == row.batch.mask.sum(0).tolist()
    assert stats.weight == pytest.approx(float(slot_weights(row.batch.mask, settings.decay).sum()), rel=1e-12)
    assert (wanted["outside"] > 0) == draft.config.reduced


@pytest.mark.parametrize("chunk", [1, 4, None])
@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("changes", HEADS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_chunked_equals_the_dense_fp64_reference(changes, detach, chunk, dtype, tolerance):
    settings = LossSettings(detach_confidence=detach)
    reference, row = make_draft(**changes), Row()
    hidden = row.hidden(reference).detach().float().double().requires_grad_()
    wanted_loss = dense_loss(reference, hidden, row.batch, row.log_p(reference), settings, SCALE)
    wanted_loss.backward()
    wanted = gradients(reference, hidden)

    draft, row = make_draft(dtype, **changes), Row(dtype)
    hidden = hidden.detach().to(dtype).requires_grad_()
    stats = loss_and_backward(draft, hidden, row.batch, row.log_p(draft), settings, SCALE, chunk)
    assert stats.total * SCALE == pytest.approx(wanted_loss.item(), rel=tolerance)
    assert_close(gradients(draft, hidden), wanted, tolerance)


def test_gradients_reach_every_parameter_of_the_draft_as_in_the_dense_step():
    draft, row, settings = make_draft(draft_vocab_size=K), Row(), LossSettings()
    dense_loss(draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE).backward()
    wanted = gradients(draft)
    loss_and_backward(draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE, chunk=2)
    assert wanted.keys() == dict(draft.named_parameters()).keys()
    assert_close(gradients(draft), wanted, 1e-12)


def test_rows_in_one_pass_give_the_same_result(monkeypatch: pytest.MonkeyPatch):
    """The path of accelerators, which takes a chunk's rows at once, equals the one that walks over anchors."""
    draft, row, settings = make_draft(draft_vocab_size=K), Row(), LossSettings()
    results = []
    for by_anchor in (True, False):
        monkeypatch.setattr(loss_module, "_walks_over_anchors", lambda device, choice=by_anchor: choice)
        hidden = row.hidden(draft).detach().requires_grad_()
        stats = loss_and_backward(draft, hidden, row.batch, row.log_p(draft), settings, SCALE, chunk=4)
        results.append((stats, gradients(draft, hidden)))
    (walked, walked_grads), (whole, whole_grads) = results
    assert whole.metrics() == pytest.approx(walked.metrics(), rel=1e-13)
    assert_close(whole_grads, walked_grads, 1e-13)


def test_four_rows_at_once_equal_four_accumulated_ones():
    draft, settings = make_draft(draft_vocab_size=K), LossSettings()
    whole, parts = Row(), [Row(documents=(d,)) for d in range(4)]
    pooled = sum(float(slot_weights(part.batch.mask, settings.decay).sum()) for part in parts)
    assert pooled == pytest.approx(float(slot_weights(whole.batch.mask, settings.decay).sum()), rel=1e-14)
    total = loss_and_backward(draft, whole.hidden(draft), whole.batch, whole.log_p(draft), settings, 1 / pooled)
    wanted, stats = gradients(draft), LossStats(GAMMA)
    for part in parts:
        stats = stats + loss_and_backward(
            draft, part.hidden(draft), part.batch, part.log_p(draft), settings, 1 / pooled, chunk=2
        )
    assert_close(gradients(draft), wanted, 1e-12)
    assert stats.metrics() == pytest.approx(total.metrics(), rel=1e-12)
    # the weights of the parts differ, so a mean of their own means would be another number
    assert len({float(slot_weights(part.batch.mask, settings.decay).sum()) for part in parts}) > 1


def test_masked_slots_and_dropped_anchors_have_exactly_zero_gradient():
    draft, row = make_draft(), Row()
    hidden = row.hidden(draft).detach().requires_grad_()
    loss_and_backward(draft, hidden, row.batch, row.log_p(draft), LossSettings(), SCALE, chunk=4)
    mask = row.batch.mask
    assert not mask.any(1).all() and (mask.any(1) & ~mask.all(1)).any()  # one dropped anchor, some cut blocks
    assert hidden.grad is not None
    assert (hidden.grad[~mask] == 0).all()
    assert (hidden.grad[mask].abs().sum(-1) > 0).all()


def test_a_dropped_anchor_leaves_no_trace_in_the_draft():
    draft, row, settings = make_draft(), Row(), LossSettings()
    loss_and_backward(draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE)
    wanted = gradients(draft)
    kept = row.batch.mask[:, 0]
    row.batch = AnchorBatch(**{name: value[kept] for name, value in vars(row.batch).items()})
    loss_and_backward(draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE)
    assert_close(gradients(draft), wanted, 1e-13)


def test_a_batch_without_labels_gives_zero_gradients_and_no_metrics():
    draft, row = make_draft(), Row()
    row.batch = AnchorBatch(**{**vars(row.batch), "mask": torch.zeros_like(row.batch.mask)})
    stats = loss_and_backward(draft, row.hidden(draft), row.batch, row.log_p(draft), LossSettings(), SCALE)
    assert stats.blocks == 0 and stats.metrics() == {}
    assert all((grad == 0).all() for grad in gradients(draft).values())


def test_p_is_asked_once_per_position_of_a_chunk_and_never_where_masked():
    draft, row, asked = make_draft(), Row(), []
    log_p, wanted = row.log_p(draft), set(row.batch.label_positions[row.batch.mask].tolist())

    def recorded(index: Tensor) -> Tensor:
        asked.append(index.tolist())
        return log_p(index)

    loss_and_backward(draft, row.hidden(draft), row.batch, recorded, LossSettings(), SCALE)
    assert len(asked) == 1 and asked[0] == sorted(wanted)
    asked.clear()
    loss_and_backward(draft, row.hidden(draft), row.batch, recorded, LossSettings(), SCALE, chunk=5)
    assert len(asked) == 3 and {i for part in asked for i in part} == wanted
    assert all(part == sorted(set(part)) for part in asked)


def test_a_draft_that_equals_the_target_is_always_accepted():
    """K = V and p = q: y = 1 in every slot, no L1, tau = 1 + labelled slots, and L1 pushes nowhere."""
    draft, row = make_draft(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False), Row()
    vectors = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(5)).double()
    row.target_logits = F.linear(vectors, draft.head_rows)
    hidden = vectors[row.batch.label_positions].requires_grad_()
    stats = loss_and_backward(draft, hidden, row.batch, row.log_p(draft), LossSettings(ce=0.0), SCALE)
    assert stats.l1 == pytest.approx(0.0, abs=1e-12)
    assert stats.accepted.tolist() == pytest.approx(stats.slots.tolist(), rel=1e-12)
    assert stats.tau_teacher_forced == pytest.approx(stats.blocks + float(stats.slots.sum()), rel=1e-12)


def test_p_is_not_renormalised_over_the_draft_vocabulary():
    """A draft that equals p renormalised over K is accepted with probability sum_K p, not 1."""
    draft = make_draft(
        draft_vocab_size=K, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False
    )
    row = Row()
    vectors = torch.randn(SIZE, WIDTH, generator=torch.Generator().manual_seed(5)).double()
    row.target_logits = torch.randn(SIZE, V, generator=torch.Generator().manual_seed(6)).double()
    row.target_logits[:, draft.draft_ids] = F.linear(vectors, draft.head_rows)
    hidden = vectors[row.batch.label_positions].requires_grad_()
    stats = loss_and_backward(draft, hidden, row.batch, row.log_p(draft), LossSettings(), SCALE)
    assert float(stats.accepted.sum()) == pytest.approx(stats.kept_mass, rel=1e-12)
    assert 0.2 < stats.metrics()["kept_mass"] < 0.999


def test_bce_reaches_the_backbone_unless_detached():
    draft, row = make_draft(), Row()
    found = {}
    for detach in (False, True):
        hidden = row.hidden(draft).detach().requires_grad_()
        settings = LossSettings(ce=0.0, l1=0.0, detach_confidence=detach)
        loss_and_backward(draft, hidden, row.batch, row.log_p(draft), settings, SCALE)
        found[detach] = gradients(draft, hidden)
    assert found[False]["hidden"].norm() > 0 and (found[True]["hidden"] == 0).all()
    head = "confidence_head.proj.weight"
    assert torch.equal(found[True][head], found[False][head]) and found[True][head].norm() > 0


def test_measuring_leaves_no_gradient_and_gives_the_same_sums():
    draft, row, settings = make_draft(draft_vocab_size=K), Row(), LossSettings()
    trained = loss_and_backward(draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE, chunk=4)
    gradients(draft)
    measured = loss_and_backward(
        draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE, chunk=4, backward=False
    )
    assert measured.metrics() == pytest.approx(trained.metrics(), rel=1e-13)
    assert all(p.grad is None for p in draft.parameters())


def test_a_label_the_draft_all_but_excludes_keeps_a_finite_exact_cross_entropy():
    """q[label] underflows to zero in fp32; its logarithm must not."""
    config = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    settings, losses = LossSettings(), []
    for dtype in (torch.float64, torch.float32):
        draft, row = make_draft(dtype, **config), Row(dtype)
        hidden = torch.randn(len(row.batch.mask), GAMMA, WIDTH, generator=torch.Generator().manual_seed(3)) * 60
        hidden = hidden.to(dtype).requires_grad_()
        stats = loss_and_backward(draft, hidden, row.batch, row.log_p(draft), settings, SCALE)
        assert hidden.grad is not None and torch.isfinite(hidden.grad).all()
        losses.append(stats.ce)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0] / stats.weight > 104  # log of fp32's least


def test_bf16_autocast_keeps_p_exact_and_the_loss_close():
    draft, row, settings = make_draft(torch.float32), Row(torch.float32), LossSettings()
    exact = loss_and_backward(draft, row.hidden(draft), row.batch, row.log_p(draft), settings, SCALE)
    wanted, head = gradients(draft), torch.randn(V, V) / V**0.5

    def log_p(index: Tensor) -> Tensor:
        seen.append(F.linear(head, head).dtype)
        return row.log_p(draft)(index)

    seen: list[torch.dtype] = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stats = loss_and_backward(draft, row.hidden(draft), row.batch, log_p, settings, SCALE, chunk=4)
    found = gradients(draft)
    assert set(seen) == {torch.float32}
    assert stats.kept_mass == pytest.approx(exact.kept_mass, rel=1e-6)
    assert stats.total == pytest.approx(exact.total, rel=2e-2)
    assert stats.total != exact.total
    assert_close(found, wanted, 0.15)


def test_statistics_of_different_widths_do_not_add():
    with pytest.raises(DsparkError, match="gamma"):
        LossStats(3) + LossStats(4)


@pytest.mark.parametrize("changes", [{"ce": -0.1}, {"l1": float("nan")}, {"decay": 0.0}])
def test_bad_settings_name_the_field(changes: dict[str, float]):
    with pytest.raises(DsparkError) as error:
        LossSettings(**changes)
    assert error.value.field == f"loss.{next(iter(changes))}"


@pytest.mark.parametrize("field", ["mask", "label_positions", "hidden", "chunk"])
def test_a_batch_that_contradicts_itself_is_refused(field: str):
    draft, row = make_draft(), Row()
    hidden, chunk, parts = row.hidden(draft), None, dict(vars(row.batch))
    if field == "mask":
        parts["mask"] = parts["mask"].flip(1)
    elif field == "label_positions":
        parts["label_positions"] = parts["label_positions"].flip(1)
    elif field == "hidden":
        hidden = hidden[:, :-1]
    else:
        chunk = 0
    with pytest.raises(DsparkError) as error:
        loss_and_backward(draft, hidden, AnchorBatch(**parts), row.log_p(draft), LossSettings(), SCALE, chunk)
    assert error.value.field == field
