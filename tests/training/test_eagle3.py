"""Training an EAGLE-3 draft: its loss, its first weights, exact resume, and recipes that cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tests.drafts.test_eagle3 import KINDS, eagle3_draft, packed_row

from dspark.checkpoints.native import load_draft, save_draft
from dspark.data.rows import Row
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training.anchors import build_anchor_batch
from dspark.training.features import InProcessFeatures
from dspark.training.loss import LossSettings, dense_loss, loss_and_backward, slot_weights
from dspark.training.recipe import Recipe, load_recipe
from dspark.training.setup import build_draft, finished_config, memory_estimate
from dspark.training.state import SavedState
from dspark.training.trainer import train

TAPS = (0, 1, 3)
LOSS = {"ce": 0.0, "l1": 0.0, "soft": 1.0, "confidence": 0.0, "decay": 4.481420117724551}
Make = Callable[..., Recipe]


@pytest.fixture
def make(make_recipe: Make, target: TransformersTarget) -> Make:
    """The tiny recipe with an EAGLE-3 draft of the given kind."""

    def eagle3(out: str = "run", kind: str = "gqa", draft: dict[str, Any] | None = None, **training: Any) -> Recipe:
        fields = {
            "architecture": "eagle3",
            "hidden_size": target.hidden_size,
            "intermediate_size": 64,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "num_attention_heads": 4,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": 40,
            "target_layer_ids": list(TAPS),
            "num_target_layers": target.num_layers,
            "training_steps": 4,
            "training_length": 64,
            "prompt_recipe": {"template_sha256": None, "thinking": None},
            **KINDS[kind],
            **(draft or {}),
        }
        content = make_recipe(out, loss=LOSS, **training).model_dump()
        return Recipe.model_validate({**content, "draft": fields})

    return eagle3


@pytest.fixture
def given(target: TransformersTarget, rows: list[Row], quiet: Console) -> dict[str, Any]:
    return {"target": target, "source": InProcessFeatures(target, TAPS), "rows": rows, "console": quiet}


@pytest.mark.parametrize("size", [40, 15])
@pytest.mark.parametrize("kind", KINDS)
def test_the_chunked_loss_is_the_dense_one_and_that_the_definition(kind: str, size: int) -> None:
    """-sum over K of p log q, p over all V and not renormalised: the renormalised loss times the mass in K."""
    draft = eagle3_draft(kind, torch.float64, draft_vocab_size=size)
    ids, taps, positions, starts = packed_row([14, 11])
    mask = torch.ones(25, dtype=torch.bool)
    mask[[0, 1, 14, 20]] = False
    batch = build_anchor_batch(ids, mask, starts, torch.tensor([2, 5, 9, 12, 16, 21]), 7)
    logits = torch.randn(25, 40, dtype=torch.float64)
    settings, scale = LossSettings(**LOSS), 0.3

    def log_p(index: torch.Tensor) -> torch.Tensor:
        return logits[index].log_softmax(-1)[..., draft.draft_ids]

    def hidden() -> torch.Tensor:
        args = (batch.anchor_index, batch.doc_start, batch.prev_ids)
        return draft.train_hidden(taps.double(), ids, positions, *args)

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
        draft.zero_grad(set_to_none=True)
        return found

    p = log_p(batch.label_positions).exp()
    kept = p.sum(-1)
    log_q = draft.logits(hidden()).log_softmax(-1)
    renormalised = -(p / kept[..., None] * log_q).sum(-1)
    weights = slot_weights(batch.mask, settings.decay)
    assert torch.allclose(weights[0][:3], torch.tensor([1.0, 0.8, 0.64], dtype=torch.float64))
    wanted = scale * (weights * torch.where(batch.mask, kept * renormalised, 0)).sum()
    dense = dense_loss(draft, hidden(), batch, log_p, settings, scale)
    assert torch.allclose(dense, wanted, rtol=1e-12)
    dense.backward()
    reference = gradients()
    assert reference.keys() == dict(draft.named_parameters()).keys()
    for chunk in (None, 1, 4):
        stats = loss_and_backward(draft, hidden(), batch, log_p, settings, scale, chunk)
        assert stats.total * scale == pytest.approx(float(wanted.detach()), rel=1e-12)
        for name, gradient in gradients().items():
            assert (gradient - reference[name]).norm() <= 1e-11 * reference[name].norm(), name


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_four_steps_are_two_and_two(make: Make, given: dict[str, Any], kind: str) -> None:
    whole, parts = make("whole", kind), make("parts", kind)
    train(whole, **given)
    assert train(parts, stop_after=2, **given).interrupted
    result = train(parts, resume=True, **given)
    a, b = SavedState(whole.training.out), SavedState(parts.training.out)
    assert a.tensors.keys() == b.tensors.keys() and a.best == b.best
    assert all(torch.equal(tensor, b.tensors[name]) for name, tensor in a.tensors.items())
    first = {n: t for n, t in SavedState(parts.training.out).tensors.items() if n.startswith("parameter.")}
    assert "parameter.lm_head.weight" in first
    assert isinstance(load_draft(result.best), Eagle3Draft)
    document = json.loads((Path(parts.training.out) / "last" / "training.json").read_text())
    assert document["recipe"]["draft"]["architecture"] == "eagle3" and document["steps"] == 4


@pytest.mark.parametrize("kind", ["gqa", "mla-low-rank"])
def test_training_learns_what_replay_shows(make: Make, given: dict[str, Any], kind: str) -> None:
    more = {"rows_per_step": 4, "anchors_per_row": 8, "accumulation": 1, "replay_rows": 4}
    recipe = make("run", kind, steps=40, validate_every=20, compute_dtype="bf16", **more)
    result = train(recipe, **given)
    lines = [json.loads(line) for line in (Path(recipe.training.out) / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert lines[-1]["loss_soft"] == lines[-1]["loss"]
    replayed = [line["replay_acceptance"] for line in lines if line["kind"] == "validation"]
    assert len(replayed) == 2 and result.acceptance == max(replayed) > 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_first_weights_come_from_the_last_layer_and_the_head(
    make: Make, target: TransformersTarget, rows: list[Row], kind: str
) -> None:
    recipe = make("run", kind, init="target-layers")
    draft = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, lambda _: None)
    assert isinstance(draft, Eagle3Draft)
    own, theirs = dict(draft.named_parameters()), target.model.state_dict()
    assert torch.equal(own["lm_head.weight"], target.head_weight[draft.draft_ids])
    assert torch.equal(own["midlayer.mlp.up_proj.weight"], theirs["model.layers.3.mlp.up_proj.weight"])
    assert torch.equal(own["midlayer.hidden_norm.weight"], theirs["model.layers.3.input_layernorm.weight"])
    assert torch.equal(own["midlayer.input_layernorm.weight"], torch.ones(32))
    assert torch.equal(own["fc.weight"][:, 64:], torch.eye(32))
    if kind == "gqa":
        last = theirs["model.layers.3.self_attn.q_proj.weight"]
        assert torch.equal(own["midlayer.self_attn.q_proj.weight"][:, 32:], last)
        assert 0 < own["midlayer.self_attn.q_proj.weight"][:, :32].std() < 0.05
    parts = memory_estimate(recipe, draft, target, rows)
    assert parts["parameters"] == 4 * sum(p.numel() for p in draft.parameters())


def test_a_draft_goes_on_with_another_vocabulary(
    make: Make, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    config = make().draft_config()
    assert isinstance(config, Eagle3Config)
    before = Eagle3Draft(config)
    before.set_vocabulary(range(30, 70))
    save_draft(before, tmp_path / "given")
    folder = str(tmp_path / "given")
    kept = load_draft(folder)
    for recount in ("keep", "recount"):
        recipe = make(init=folder, init_vocabulary=recount)
        draft = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, lambda _: None)
        assert isinstance(draft, Eagle3Draft) and isinstance(kept, Eagle3Draft)
        rows_of = dict(zip(kept.draft_ids.tolist(), kept.lm_head.weight, strict=True))
        for token, row in zip(draft.draft_ids.tolist(), draft.lm_head.weight, strict=True):
            assert torch.equal(row, rows_of.get(token, target.head_weight[token]))
    assert draft.draft_ids.tolist() != kept.draft_ids.tolist()


def test_a_draft_of_another_kind_is_no_start(make: Make, make_recipe: Make, given: dict[str, Any]) -> None:
    train(make_recipe("dspark", steps=1, loss={}), **{**given, "source": InProcessFeatures(given["target"], (1, 3))})
    recipe = make("run", init=str(Path(make("dspark").training.out) / "last"))
    with pytest.raises(DsparkError, match="kind"):
        train(recipe, **given)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("draft.architecture=eagle2", "architecture"),
        ("draft.attention=mha", "attention"),
        ("draft.mask_token_id=4", "mask_token_id"),
        ("training.block_widths=all", "block_widths"),
        ("training.markov_init=bigram", "markov_init"),
        ("training.replay_n=8", "replay_n"),
        ("training.loss.soft=-1", "soft"),
    ],
)
def test_what_an_eagle3_recipe_cannot_say(override: str, field: str) -> None:
    with pytest.raises(DsparkError, match=field):
        load_recipe("smollm2-135m-eagle3", [override])


@pytest.mark.parametrize(("name", "attention"), [("smollm2-135m-eagle3", "gqa"), ("smollm2-135m-eagle3-mla", "mla")])
def test_the_recipes_of_the_embedded_target(name: str, attention: str) -> None:
    """They share rows, features and draft vocabulary with the DSpark recipe they are the baseline of."""
    recipe, dspark = load_recipe(name), load_recipe("smollm2-135m")
    config = recipe.draft_config()
    assert isinstance(config, Eagle3Config) and config.attention == attention
    assert set(config.target_layer_ids) < set(dspark.draft_config().target_layer_ids)
    assert config.draft_vocab_size == dspark.draft_config().draft_vocab_size
    assert recipe.data == dspark.data
    assert recipe.training.loss.decay == pytest.approx(4.4814201)
