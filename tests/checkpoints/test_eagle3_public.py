"""EAGLE-3 files of others, read into our config and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.drafts.test_eagle3 import eagle3_draft

from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import load_draft, save_draft, weights_sha256
from dspark.checkpoints.read import import_draft, read_checkpoint
from dspark.errors import DsparkError

DEPTH = 10
DEFAULT = (1, 4, 6)  # of a target of 10 layers, outputs: the engines capture the inputs of 2, 5 and 7
STATED = {"num_target_layers": DEPTH, "target_name": "tiny", "training_steps": 7, "training_length": 64}
KEPT = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "hidden_act", "rms_norm_eps", "rope_theta",
    "max_position_embeddings", "num_attention_heads", "num_key_value_heads", "vocab_size", "draft_vocab_size",
    "num_hidden_layers", "tie_word_embeddings", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "v_head_dim", "head_dim",
)  # fmt: skip


def public(folder: Path, kind: str = "gqa", spelling: str = "midlayer.", **changes: Any):
    """A draft as others publish it: few keys, maybe other names, and the target's embedding inside."""
    draft = eagle3_draft(kind, draft_vocab_size=12, target_layer_ids=DEFAULT, num_target_layers=DEPTH)
    save_draft(draft, folder)
    path = folder / "model.safetensors"
    tensors = {name.replace("midlayer.", spelling, 1): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "embed_tokens.weight": torch.zeros(40, 24, dtype=torch.bfloat16)}, path)
    values = json.loads((folder / "config.json").read_text())
    values = {**{name: values[name] for name in KEPT if name in values}, "bos_token_id": 1, **changes}
    (folder / "config.json").write_text(json.dumps({n: v for n, v in values.items() if v is not ...}))
    return draft


@pytest.mark.parametrize(
    ("kind", "other"), [("gqa", "Eagle3LlamaForCausalLM"), ("mla-low-rank", "Eagle3DeepseekV3ForCausalLM")]
)
@pytest.mark.parametrize("spelling", ["midlayer.", "layers.0.", "model.layers.0."])
def test_names_of_others_become_ours(tmp_path, kind, other, spelling) -> None:
    changes = {} if spelling == "midlayer." else {"architectures": [other]}
    draft = public(tmp_path / "draft", kind, spelling, **changes)
    read = convert(tmp_path / "draft", "native", tmp_path / "out", **STATED)
    loaded = load_draft(tmp_path / "out")
    assert loaded.config.target_layer_ids == DEFAULT and weights_sha256(loaded) == weights_sha256(draft)
    assert any("embed_tokens" in note for note in read.notes) and any("default" in note for note in read.notes)
    for engine in ("vllm", "sglang"):
        convert(tmp_path / "draft", engine, tmp_path / engine, **STATED)
        assert (tmp_path / engine / "config.json").read_bytes() == (tmp_path / "out" / "config.json").read_bytes()


def test_unknown_keys_are_named(tmp_path) -> None:
    public(tmp_path / "draft", fancy=3)
    notes = read_checkpoint(tmp_path / "draft", **STATED).notes
    assert [note for note in notes if "left out, not known" in note] == ["left out, not known here: fancy = 3"]


def test_a_target_supplies_name_and_depth(tmp_path) -> None:
    public(tmp_path / "draft")
    (tmp_path / "target").mkdir()
    facts = {"num_hidden_layers": DEPTH, "hidden_size": 24, "vocab_size": 40}
    (tmp_path / "target" / "config.json").write_text(json.dumps(facts))
    read = read_checkpoint(tmp_path / "draft", str(tmp_path / "target"), training_steps=7, training_length=64)
    assert read.config.num_target_layers == DEPTH and read.config.target_layer_ids == DEFAULT


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}, (0, 2, 8)),  # vLLM's key
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}, DEFAULT),  # SGLang's default
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 7]}}, DEFAULT),  # vLLM's default
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, DEFAULT),
    ],
)
def test_layer_ids_are_read_by_whose_they_are(tmp_path, changes, taps) -> None:
    public(tmp_path / "draft", **changes)
    assert read_checkpoint(tmp_path / "draft", **STATED).config.target_layer_ids == taps


def test_ids_that_engines_read_differently_have_to_be_stated(tmp_path) -> None:
    public(tmp_path / "draft", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 9]})
    with pytest.raises(DsparkError, match="vLLM and SGLang read it differently"):
        import_draft(tmp_path / "draft", **STATED)
    read = import_draft(tmp_path / "draft", **STATED, target_layer_ids=[1, 3, 9])
    assert read.config.target_layer_ids == (1, 3, 9)


def test_what_a_missing_key_means(tmp_path) -> None:
    """Heads of hidden_size / heads and theta 10000, as Transformers' LlamaConfig has them."""
    public(tmp_path / "draft", rope_theta=..., head_dim=...)
    with pytest.raises(DsparkError, match=r"q_proj.weight has shape \[32, 48\], the config gives \[24, 48\]"):
        read_checkpoint(tmp_path / "draft", **STATED)
    public(tmp_path / "draft", rope_theta=...)
    read = read_checkpoint(tmp_path / "draft", **STATED)
    assert read.config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert any("rope_theta" in note for note in read.notes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({}, name) for name in ("training_steps", "training_length", "target_name")),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "eagle_config.use_aux_hidden_state"),
        ({"eagle_config": [1]}, "eagle_config"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}, "target_layer_ids"),
        ({"hidden_act": ...}, "hidden_act"),
        ({"draft_vocab_size": 13}, "model.safetensors"),
    ],
)
def test_faults_are_named(tmp_path, changes, field) -> None:
    public(tmp_path / "draft", **changes)
    stated = {name: value for name, value in STATED.items() if name != field}
    with pytest.raises(DsparkError) as caught:
        import_draft(tmp_path / "draft", **stated)
    assert caught.value.field == field and "\n" not in str(caught.value)


def test_one_tensor_under_two_names(tmp_path) -> None:
    public(tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.fc.weight": tensors["fc.weight"].clone()}, path)
    with pytest.raises(DsparkError, match="under two names"):
        import_draft(tmp_path / "draft", **STATED)


def test_other_goals_and_engines_refuse_by_name(tmp_path) -> None:
    save_draft(eagle3_draft("mla"), tmp_path / "full")
    save_draft(eagle3_draft("mla-low-rank"), tmp_path / "low")
    for form, field in (("speculators", "to"), ("gguf", "to"), ("k3_dspark", "to"), ("vllm", "q_lora_rank")):
        with pytest.raises(DsparkError) as caught:
            convert(tmp_path / "full", form, tmp_path / ("out.gguf" if form == "gguf" else "out"))
        assert caught.value.field == field
    notes = convert(tmp_path / "low", "sglang", tmp_path / "out").notes
    assert any("DeepSeek targets" in note for note in notes)
