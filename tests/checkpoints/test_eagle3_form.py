"""EAGLE-3 checkpoints: the public names and keys, back and forth without a changed byte, and every fault named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.drafts.test_eagle3 import KINDS, eagle3_draft

from dspark.checkpoints.builtin import load_named_draft
from dspark.checkpoints.native import load_draft, read_config, save_draft, weights_sha256
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.errors import DsparkError

COMMON = {
    "fc.weight",
    "norm.weight",
    "lm_head.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}
ATTENTION = {
    "gqa": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mla": {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"},
    "mla-low-rank": {
        "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"
    },
}  # fmt: skip


def saved(folder: Path, kind: str = "gqa", **changes: Any) -> tuple[Eagle3Draft, Path]:
    draft = eagle3_draft(kind, **changes)
    save_draft(draft, folder)
    return draft, folder


def edit(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        values.pop(name, None)
        if value is not None:
            values[name] = value
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("size", [40, 12])
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_are_the_same_bytes(tmp_path: Path, kind: str, size: int) -> None:
    draft, folder = saved(tmp_path / "a", kind, draft_vocab_size=size)
    loaded = load_named_draft(str(folder))
    assert isinstance(loaded, Eagle3Draft) and not loaded.bound
    assert loaded.config == draft.config
    assert weights_sha256(loaded) == weights_sha256(draft)
    assert torch.equal(loaded.draft_ids, draft.draft_ids)
    save_draft(loaded, tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_have_their_public_names(tmp_path: Path, kind: str) -> None:
    draft, folder = saved(tmp_path / "draft", kind, draft_vocab_size=12)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    attention = {f"midlayer.self_attn.{name}.weight" for name in ATTENTION[kind]}
    assert names == COMMON | attention | {"d2t", "t2d"}
    assert torch.equal(torch.arange(12) + d2t, draft.draft_ids) and d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool and t2d.nonzero().flatten().tolist() == draft.draft_ids.tolist()


def test_each_engine_finds_its_own_layer_ids(tmp_path: Path) -> None:
    """vLLM: the layer that reads the state, at top level; SGLang: the layer that made it, in eagle_config."""
    _, folder = saved(tmp_path / "draft", target_layer_ids=(0, 1, 3))
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and values["model_type"] == "llama"
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == values["target_layer_ids"] == [0, 1, 3]
    assert values["num_hidden_layers"] == 1 and values["norm_before_residual"] is False
    assert not {"attention", "kv_lora_rank", "q_lora_rank"} & values.keys()


def test_mla_has_deepseeks_keys(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "draft", "mla-low-rank")
    values = json.loads((folder / "config.json").read_text())
    assert values["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and values["model_type"] == "deepseek_v2"
    assert (values["q_lora_rank"], values["kv_lora_rank"], values["num_key_value_heads"]) == (16, 12, 4)
    assert "head_dim" not in values and "attention" not in values


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, "eagle_aux_hidden_state_layer_ids"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, "eagle_config"),
        ({"target_layer_ids": None}, "target_layer_ids"),
        ({"training_steps": None}, "training_steps"),
        ({"hidden_act": None}, "hidden_act"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"attention_bias": None}, "attention_bias"),
        ({"head_dim": None}, "head_dim"),
        ({"kv_lora_rank": 12}, "kv_lora_rank"),
        ({"rope_theta": 5.0}, "rope_theta"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "architectures"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "model_type"),
    ],
)
def test_a_config_that_is_not_whole_is_named(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    _, folder = saved(tmp_path / "draft")
    edit(folder, **changes)
    with pytest.raises(DsparkError, match=field):
        read_config(folder)


def test_missing_extra_misshapen_and_broken_tensors_are_named(tmp_path: Path) -> None:
    _, folder = saved(tmp_path / "draft", draft_vocab_size=12)
    path = folder / "model.safetensors"
    whole = load_file(path)

    def broken(**changes: torch.Tensor | None) -> None:
        tensors = {**whole, **{name.replace("__", "."): value for name, value in changes.items()}}
        save_file({name: value for name, value in tensors.items() if value is not None}, path)
        load_draft(folder)

    with pytest.raises(DsparkError, match=r"missing lm_head\.weight"):
        broken(lm_head__weight=None)
    with pytest.raises(DsparkError, match="unexpected embed_tokens"):
        broken(embed_tokens__weight=torch.zeros(2))
    with pytest.raises(DsparkError, match=r"fc\.weight has shape"):
        broken(fc__weight=torch.zeros(24, 24))
    with pytest.raises(DsparkError, match=r"norm\.weight"):
        broken(norm__weight=torch.full((24,), float("nan")))
    with pytest.raises(DsparkError, match="d2t"):
        broken(d2t=torch.arange(12) * 4)
    broken()


def test_a_broken_draft_is_not_written(tmp_path: Path) -> None:
    draft, folder = saved(tmp_path / "draft")
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        draft.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(DsparkError, match=r"lm_head\.weight"):
        save_draft(draft, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    unset = Eagle3Draft(eagle3_draft(draft_vocab_size=12).config)
    with pytest.raises(DsparkError, match="vocabulary"):
        save_draft(unset, tmp_path / "unset")
    assert not (tmp_path / "unset").exists()
