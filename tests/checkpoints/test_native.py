from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from dspark.checkpoints import native
from dspark.checkpoints.native import (
    config_from_json,
    config_to_json,
    load_draft,
    read_config,
    save_draft,
    weights_sha256,
)
from dspark.drafts.config import OPTIONAL, DraftConfig
from dspark.errors import DsparkError


def rewrite(folder: Path, change) -> None:
    """Apply `change` to the tensors of a saved draft."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def reconfigure(folder: Path, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        if value is ...:
            del values[key]
        else:
            values[key] = value
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": 30, "sample_from_anchor": True, "block_size": 7},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn", "confidence_head_with_markov": False},
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"attention_bias": True},
    ],
)
def test_round_trip(make_draft, tmp_path, changes) -> None:
    draft = make_draft(**changes)
    save_draft(draft, tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft")
    assert loaded.config == draft.config
    assert not loaded.bound
    for name, tensor in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert all(p.requires_grad and p.dtype == torch.float32 for p in loaded.parameters())
    loaded.bind(draft._target().embedding, torch.zeros(30, 16) if draft.config.reduced else draft._target().head_weight)
    hidden, ids = torch.randn(2, draft.config.gamma, 16), torch.randint(0, 30, (2, draft.config.gamma))
    # K < V: the file's own head rows count, whatever the target's head says
    assert torch.equal(loaded.teacher_logits(hidden, ids), draft.teacher_logits(hidden, ids))
    save_draft(loaded, tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "draft" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_everybody_who_may_read_the_config_may_read_the_weights(make_draft, tmp_path) -> None:
    save_draft(make_draft(), tmp_path / "draft")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "draft").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_the_file_holds_exactly_the_published_names_in_bf16(make_draft, tmp_path) -> None:
    save_draft(make_draft(), tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    expected |= {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    expected |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    for i in range(2):
        expected |= {f"layers.{i}.self_attn.{p}_proj.weight" for p in "qkvo"}
        expected |= {f"layers.{i}.self_attn.{p}_norm.weight" for p in "qk"}
        expected |= {f"layers.{i}.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
        expected |= {f"layers.{i}.{p}_layernorm.weight" for p in ("input", "post_attention")}
    assert set(tensors) == expected
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert tensors["lm_head.weight"].shape == (12, 16)
    assert (torch.arange(12) + tensors["d2t"]).tolist() == list(range(3, 27, 2))


def test_a_packaged_draft_takes_its_head_rows_from_the_target(make_draft, tmp_path) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "draft", lm_head=False)
    assert "lm_head.weight" not in load_file(tmp_path / "draft" / "model.safetensors")
    assert read_config(tmp_path / "draft") == (draft.config, False)
    loaded = load_draft(tmp_path / "draft")
    loaded.bind(draft._target().embedding, draft._target().head_weight)
    assert torch.equal(loaded.head_rows, draft.head_rows)


def test_saving_head_rows_needs_a_target(make_draft, tmp_path) -> None:
    save_draft(make_draft(), tmp_path / "draft", lm_head=False)
    loaded = load_draft(tmp_path / "draft")
    with pytest.raises(DsparkError, match="bind"):
        save_draft(loaded, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_load_in_another_type(make_draft, tmp_path) -> None:
    save_draft(make_draft(), tmp_path / "draft")
    loaded = load_draft(tmp_path / "draft", torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded.d2t.dtype == torch.int64


@given(
    sample_from_anchor=st.booleans(),
    theta=st.sampled_from([1e4, 5e4, 1e6]),
    rope=st.sampled_from(
        [
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 2.0},
            {"rope_type": "default", "partial_rotary_factor": 0.5},
        ]
    ),
    eps=st.floats(1e-8, 1e-3),
    thinking=st.none() | st.text(max_size=8),
    window=st.none() | st.integers(1, 100),
)
def test_config_json_round_trip_is_the_identity(sample_from_anchor, theta, rope, eps, thinking, window) -> None:
    config = DraftConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=eps,
        attention_bias=False,
        max_position_embeddings=64,
        rope_parameters={**rope, "rope_theta": theta},
        layer_types=("full_attention", "full_attention" if window is None else "sliding_attention"),
        sliding_window=window,
        sliding_window_non_causal=False,
        vocab_size=30,
        draft_vocab_size=30,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        target_name="tiny",
        mask_token_id=29,
        sample_from_anchor=sample_from_anchor,
        block_size=4,
        markov_rank=3,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        training_length=64,
        prompt_recipe={"template_sha256": None, "thinking": thinking},
    )
    values = json.loads(json.dumps(config_to_json(config, False)))
    assert config_from_json(values) == (config, False)
    assert config_to_json(config_from_json(values)[0], False) == values


def test_transformers_reads_the_same_settings(make_draft, tmp_path) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "draft")
    read = AutoConfig.from_pretrained(tmp_path / "draft")
    assert read.architectures == ["Qwen3DSparkModel"] and read.model_type == "qwen3"
    assert dict(read.rope_parameters) == draft.config.rope_parameters
    assert tuple(read.layer_types) == draft.config.layer_types and read.sliding_window == 5
    assert read.block_size == 8 and read.sample_from_anchor is False and list(read.target_layer_ids) == [0, 2]
    assert read.mask_token_id == 29 and read.num_target_layers == 4 and read.tie_word_embeddings is False
    assert read.head_dim == 4 and read.num_key_value_heads == 2 and read.draft_vocab_size == 12


def test_older_rotary_keys_are_read_and_must_agree(make_draft, tmp_path) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "draft")
    reconfigure(tmp_path / "draft", rope_parameters=...)
    assert read_config(tmp_path / "draft")[0] == draft.config
    save_draft(draft, tmp_path / "draft")
    reconfigure(tmp_path / "draft", rope_theta=200.0)
    with pytest.raises(DsparkError, match="agree"):
        read_config(tmp_path / "draft")
    for damaged in ({"rope_scaling": [1]}, {"rope_parameters": 5}):
        with pytest.raises(DsparkError, match=next(iter(damaged))):
            config_from_json({**json.loads((tmp_path / "draft" / "config.json").read_text()), **damaged})
    reconfigure(tmp_path / "draft", rope_theta=..., rope_parameters=...)
    with pytest.raises(DsparkError, match="rope_parameters"):
        read_config(tmp_path / "draft")


def test_every_missing_key_is_named(make_draft, tmp_path) -> None:
    for name in [*DraftConfig.model_fields, "lm_head_in_file", "architectures"]:
        if name == "rope_parameters" or name in OPTIONAL:
            continue
        save_draft(make_draft(), tmp_path / "draft")
        reconfigure(tmp_path / "draft", **{name: ...})
        with pytest.raises(DsparkError) as caught:
            load_draft(tmp_path / "draft")
        assert caught.value.field == name
        assert "\n" not in str(caught.value)
    save_draft(make_draft(), tmp_path / "draft")
    reconfigure(tmp_path / "draft", sample_from_anchor=...)
    with pytest.raises(DsparkError, match="state sample_from_anchor: true when"):
        load_draft(tmp_path / "draft")


FAULTS = {
    "missing": (lambda t: t.pop("layers.1.mlp.up_proj.weight"), r"missing layers\.1\.mlp\.up_proj\.weight"),
    "extra": (lambda t: t.update(mask_hidden=torch.zeros(3)), "unexpected mask_hidden"),
    "embedding": (lambda t: t.update({"embed_tokens.weight": torch.zeros(30, 16)}), r"unexpected embed_tokens\.weight"),
    "shape": (
        lambda t: t.update({"fc.weight": torch.zeros(16, 48)}),
        r"fc\.weight has shape \[16, 48\], the config gives \[16, 32\]",
    ),
    "nan": (lambda t: t["norm.weight"].fill_(float("nan")), r"norm\.weight.*finite"),
    "infinity": (lambda t: t["markov_head.markov_w1.weight"][2].fill_(float("inf")), r"markov_w1\.weight.*finite"),
    "integer": (lambda t: t.update({"norm.weight": torch.ones(16, dtype=torch.int64)}), r"norm\.weight.*bfloat16"),
    "absolute ids": (lambda t: t["d2t"].add_(torch.arange(12)), "d2t.*offsets"),
    "unsorted": (lambda t: t["d2t"][:2].copy_(torch.tensor([5, 2])), "d2t.*ascending"),
    "other t2d": (lambda t: t["t2d"][3:5].copy_(torch.tensor([False, True])), "t2d.*exactly the 12"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_tensors_are_named(make_draft, tmp_path, fault) -> None:
    change, message = FAULTS[fault]
    save_draft(make_draft(), tmp_path / "draft")
    load_draft(tmp_path / "draft")
    rewrite(tmp_path / "draft", change)
    with pytest.raises(DsparkError, match=message) as caught:
        load_draft(tmp_path / "draft")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "gone"])
def test_a_corrupt_file_is_one_line(make_draft, tmp_path, damage) -> None:
    save_draft(make_draft(), tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut": data[:-100], "header": b"\xff" * 8 + data[8:], "empty": b""}[damage])
    with pytest.raises(DsparkError, match=r"model\.safetensors") as caught:
        load_draft(tmp_path / "draft")
    assert "\n" not in str(caught.value)


def test_missing_folder_and_broken_config(make_draft, tmp_path) -> None:
    with pytest.raises(DsparkError, match="not a folder"):
        load_draft(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DsparkError, match=r"no config\.json"):
        load_draft(tmp_path / "empty")
    save_draft(make_draft(), tmp_path / "draft")
    for text in ("{", "[]", '"x"', ""):
        (tmp_path / "draft" / "config.json").write_text(text)
        with pytest.raises(DsparkError, match=r"config\.json"):
            load_draft(tmp_path / "draft")


def test_a_non_finite_draft_is_not_written(make_draft, tmp_path) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "draft")
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()
    with torch.no_grad():
        draft.norm.weight[3] = float("nan")
    with pytest.raises(DsparkError, match=r"norm\.weight"):
        save_draft(draft, tmp_path / "draft")
    with torch.no_grad():
        draft.norm.weight[3] = 3.4e38  # finite in fp32, infinite in BF16
    with pytest.raises(DsparkError, match=r"norm\.weight"):
        save_draft(draft, tmp_path / "draft")
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["draft"]


def test_overwriting_keeps_other_files_and_leaves_no_trace(make_draft, tmp_path) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "draft")
    (tmp_path / "draft" / "README.md").write_text("card")
    with torch.no_grad():
        draft.norm.weight.fill_(2.0)
    save_draft(draft, tmp_path / "draft")
    assert sorted(os.listdir(tmp_path / "draft")) == ["README.md", "config.json", "model.safetensors"]
    assert torch.equal(load_draft(tmp_path / "draft").norm.weight.detach(), torch.full((16,), 2.0))
    assert os.listdir(tmp_path) == ["draft"]


def test_a_draft_is_known_by_its_weights_in_any_dtype_and_folder(make_draft, tmp_path) -> None:
    draft = make_draft()
    with torch.no_grad():
        draft.norm.weight.copy_(torch.rand(16) / 3)  # not exact in BF16
    known = weights_sha256(draft)
    save_draft(draft, tmp_path / "best")
    save_draft(draft, tmp_path / "shipped", lm_head=False)
    whole = {**load_file(tmp_path / "best" / "model.safetensors"), **draft.state_dict()}
    save_draft(draft, tmp_path / "float32")
    save_file(whole, tmp_path / "float32" / "model.safetensors")
    for folder in ("best", "shipped", "float32"):
        for dtype in (torch.float32, torch.bfloat16):
            assert weights_sha256(load_draft(tmp_path / folder, dtype)) == known
    assert whole["norm.weight"].dtype == torch.float32
    with torch.no_grad():
        draft.norm.weight[3] += 0.01
    assert weights_sha256(draft) != known
    other = make_draft()
    other.set_vocabulary(range(12))
    assert weights_sha256(other) != weights_sha256(make_draft())


@pytest.mark.parametrize("stop_at", range(1, 6))
def test_a_kill_at_any_rename_leaves_a_loadable_draft(make_draft, tmp_path, monkeypatch, stop_at) -> None:
    draft = make_draft()
    save_draft(draft, tmp_path / "draft")
    (tmp_path / "draft" / "README.md").write_text("card")
    old = draft.norm.weight.detach().clone()
    with torch.no_grad():
        draft.norm.weight.fill_(2.0)
    renames, rename = [0], Path.rename

    def counted(self, target):
        renames[0] += 1
        if renames[0] >= stop_at:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted)
        patch.setattr(native.shutil, "rmtree", lambda *a, **k: None)  # a kill cleans nothing up
        try:
            save_draft(draft, tmp_path / "draft")
        except (KeyboardInterrupt, FileExistsError):
            pass
    found = load_draft(tmp_path / "draft").norm.weight.detach()
    assert torch.equal(found, old) or torch.equal(found, torch.full((16,), 2.0))
    save_draft(draft, tmp_path / "draft")
    assert torch.equal(load_draft(tmp_path / "draft").norm.weight.detach(), torch.full((16,), 2.0))
    assert (tmp_path / "draft" / "README.md").read_text() == "card"
    assert os.listdir(tmp_path) == ["draft"]
