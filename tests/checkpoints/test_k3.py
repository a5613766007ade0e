"""vLLM's k3_dspark: names, shapes and keys against what vLLM 0.32 reads, and what is not that form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.conftest import FIRST, WHOLE
from tests.drafts.conftest import MLA

from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.read import import_draft, read_checkpoint
from dspark.errors import DsparkError

LATENT: dict[str, Any] = {**WHOLE, **FIRST, **MLA, "q_lora_rank": 8}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
# vllm/models/kimi_k3/nvidia/dspark_mla.py and mla.py, before the loader joins projections; d 16, 2 taps, 4 heads
OF_A_LAYER = {
    "self_attn.q_a_proj.weight": (8, 16),
    "self_attn.q_a_layernorm.weight": (8,),
    "self_attn.q_b_proj.weight": (4 * (6 + 4), 8),
    "self_attn.kv_a_proj_with_mqa.weight": (12 + 4, 16),
    "self_attn.kv_a_layernorm.weight": (12,),
    "self_attn.kv_b_proj.weight": (4 * (6 + 10), 12),
    "self_attn.o_proj.weight": (16, 4 * 10),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
    "input_layernorm.weight": (16,),
    "post_attention_layernorm.weight": (16,),
}
OUTSIDE = {
    "context_proj.weight": (16, 2 * 16),
    "context_norm.weight": (16,),
    "final_norm.weight": (16,),
    "markov_head.markov_w1.weight": (30, 3),
    "markov_head.markov_w2.weight": (30, 3),
    "confidence_head.proj.weight": (1, 16 + 3),
    "confidence_head.proj.bias": (1,),
}


@pytest.fixture
def folder(make_draft, tmp_path) -> Path:
    save_draft(make_draft(**LATENT, aux_hidden_stream="attn_res"), tmp_path / "native")
    convert(tmp_path / "native", "k3_dspark", tmp_path / "k3")
    return tmp_path / "k3"


def edit(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    (folder / "config.json").write_text(json.dumps({n: v for n, v in values.items() if v is not ...}))


def test_names_and_shapes_are_those_of_vllms_class(folder) -> None:
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    layers = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in OF_A_LAYER.items()}
    assert stored == {**OUTSIDE, **layers}


def test_keys_are_those_of_vllms_config(folder) -> None:
    values = json.loads((folder / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == ("k3_dspark", ["K3DSparkModel"])
    assert values["target_layer_ids"] == [0, 2] and values["num_target_layers"] == 2  # how many, not how deep
    assert values["dspark"]["num_target_layers"] == 4 and values["aux_hidden_stream"] == "attn_res"
    assert values["draft_vocab_size"] == values["vocab_size"] and values["block_size"] == 7
    assert values["n_routed_experts"] == 0 and values["q_lora_rank"] == 8


def test_the_native_form_of_mla_is_taken_for_no_other_model(make_draft, tmp_path) -> None:
    save_draft(make_draft(**LATENT), tmp_path / "draft")
    values = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert values["architectures"] == ["LatentDSparkModel"] and values["model_type"] == "dspark_latent"
    assert load_draft(tmp_path / "draft").config.attention == "mla"
    edit(tmp_path / "draft", architectures=["Qwen3DSparkModel"])
    with pytest.raises(DsparkError, match="attention"):
        load_draft(tmp_path / "draft")


def test_a_foreign_file_needs_what_it_lacks(folder) -> None:
    """A public one: no keys of ours, a training-only confidence head, the target's embedding inside."""
    edit(folder, dspark=..., enable_confidence_head=..., rope_theta=..., rope_scaling=..., bos_token_id=3)
    path = folder / "model.safetensors"
    save_file({**load_file(path), "embed_tokens.weight": torch.zeros(30, 16, dtype=torch.bfloat16)}, path)
    with pytest.raises(DsparkError) as caught:
        read_checkpoint(folder, target_name="k3", training_length=64)
    assert caught.value.field == "num_target_layers"
    read = read_checkpoint(folder, target_name="k3", training_length=64, num_target_layers=4)
    assert read.config.num_target_layers == 4 and read.config.aux_hidden_stream == "attn_res"
    assert not read.config.enable_confidence_head and "confidence_head.proj.weight" not in read.tensors
    assert {note.split()[0] for note in read.notes} >= {"confidence_head", "embed_tokens.weight"}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_target_layers": 4}, "num_target_layers"),
        ({"q_lora_rank": ...}, "model.safetensors"),
        ({"kv_lora_rank": ...}, "kv_lora_rank"),
        ({"n_routed_experts": 8}, "n_routed_experts"),
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"target_hidden_size": 32}, "target_hidden_size"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"aux_hidden_stream": "raw"}, "aux_hidden_stream"),
    ],
)
def test_other_models_of_these_tensors_are_refused(folder, changes, field) -> None:
    if "aux_hidden_stream" in changes:
        edit(folder, dspark={**json.loads((folder / "config.json").read_text())["dspark"], **changes})
    else:
        edit(folder, **changes)
    with pytest.raises(DsparkError) as caught:
        import_draft(folder)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}, "layer_types"),
        ({"markov_head_type": "rnn"}, "markov_head_type"),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "markov_rank"),
        ({"draft_vocab_size": 12}, "draft_vocab_size"),
        ({"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
         "rope_parameters.rope_type"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.0}}, "rope_parameters.attention_factor"),
        ({"rope_parameters": {**YARN, "mscale": 0.7}}, "rope_parameters.mscale"),
    ],
)  # fmt: skip
def test_what_the_form_cannot_say_is_refused(make_draft, tmp_path, changes, field) -> None:
    save_draft(make_draft(**{**LATENT, **changes}), tmp_path / "draft")
    with pytest.raises(DsparkError) as caught:
        convert(tmp_path / "draft", "k3_dspark", tmp_path / "out")
    assert caught.value.field == field and not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{}, {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}])
def test_yarn_goes_there_and_back(make_draft, tmp_path, more) -> None:
    save_draft(make_draft(**LATENT, rope_parameters={**YARN, **more}), tmp_path / "draft")
    convert(tmp_path / "draft", "k3_dspark", tmp_path / "out")
    assert import_draft(tmp_path / "out").config == load_draft(tmp_path / "draft").config
