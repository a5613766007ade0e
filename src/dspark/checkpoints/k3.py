"""vLLM's k3_dspark: a DSpark draft with DeepSeek-V3 attention, made for Kimi-K3.

As vLLM 0.32 reads it (transformers_utils/configs/k3_dspark.py, models/kimi_k3/nvidia/dspark_mla.py): DeepSeek-V3's keys
with no experts, `q_lora_rank` needed, the whole vocabulary, anchor-first, every layer full and bidirectional inside a
block, vanilla Markov heads. target_layer_ids are ours (vLLM adds 1 itself), and `num_target_layers` is their NUMBER,
not the target's depth, which stands with our own keys. Three tensors have other names. Rotary settings other than
default become DeepSeek's YaRN there, which reads fewer keys than Transformers does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.qwen3 import own_json, unknown_keys
from dspark.checkpoints.rope import older_rope_keys, rope_parameters
from dspark.drafts.config import MLA_SIZES, DraftConfig
from dspark.errors import DsparkError

MODEL_TYPE, ARCHITECTURE = "k3_dspark", "K3DSparkModel"
# Our tensor names in this form; all others are the same
RENAMED = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
_SHARED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "vocab_size",
    "draft_vocab_size",
    "q_lora_rank",
    *MLA_SIZES,
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "markov_rank",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
# Settings that would make another model of the same tensors: written, and required where they are stated.
_FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "mla_use_qk_norm": False,
    "n_routed_experts": 0,
    "n_shared_experts": 0,
    "num_experts_per_tok": 0,
    "rope_interleave": True,
    "sample_from_anchor": True,
    "markov_head_type": "vanilla",
}
_ALSO = {
    "num_key_value_heads", "num_target_layers", "aux_hidden_stream", "dspark_bonus_anchor", "logit_scale",
    "target_hidden_size", "head_dim", "qk_head_dim", "first_k_dense_replace", "moe_intermediate_size", "moe_layer_freq",
    "n_group", "norm_topk_prob", "num_nextn_predict_layers", "output_router_logits", "pretraining_tp",
    "routed_scaling_factor", "topk_group", "topk_method", "scoring_func", "aux_loss_alpha", "seq_aux", "ep_size",
}  # fmt: skip
_YARN = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


def k3_to_json(config: DraftConfig, lm_head: bool) -> dict[str, Any]:
    """The config.json of an MLA draft in this form. Raises DsparkError naming what it cannot express."""
    _check(config)
    taps = list(config.target_layer_ids)
    stream = {} if config.aux_hidden_stream is None else {"aux_hidden_stream": config.aux_hidden_stream}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **config.model_dump(include=set(_SHARED)),
        "target_layer_ids": taps,
        "num_key_value_heads": config.num_attention_heads,
        "num_target_layers": len(taps),
        "target_hidden_size": config.hidden_size,
        **stream,
        **_FIXED,
        "rope_parameters": dict(config.rope_parameters),
        **older_rope_keys(config.rope_parameters),
        **own_json(config, lm_head),
    }


def k3_fields(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The DraftConfig fields that a config.json in this form states.

    Raises DsparkError for a key that makes another model, or counts that disagree.
    """
    unknown_keys(values, {*_SHARED, *_FIXED, *_ALSO}, "", notes)
    allowed: dict[str, tuple[Any, ...]] = {name: (None, value) for name, value in _FIXED.items()}
    allowed |= {
        "dspark_bonus_anchor": (None, False),
        "logit_scale": (None, 1, 1.0),
        "target_hidden_size": (None, values.get("hidden_size")),
        "num_key_value_heads": (None, values.get("num_attention_heads")),
    }
    for name, wanted in allowed.items():
        if values.get(name) not in wanted:
            raise DsparkError(name, values[name], f"must be {wanted[-1]!r}: another model of these tensors")
    taps = values.get("target_layer_ids")
    if not isinstance(taps, list) or values.get("num_target_layers") != len(taps):
        remedy = "must be the NUMBER of target_layer_ids in this form, not the target's depth"
        raise DsparkError("num_target_layers", values.get("num_target_layers"), remedy)
    fields = {name: values[name] for name in _SHARED if name in values}
    fields |= {name: _FIXED[name] for name in ("attention_bias", "sample_from_anchor", "markov_head_type")}
    fields |= {"attention": "mla", "num_key_value_heads": values.get("num_attention_heads")}
    fields |= {"head_dim": values.get("qk_rope_head_dim"), "rope_parameters": rope_parameters(values)}
    layers = values.get("num_hidden_layers")
    if isinstance(layers, int) and layers < 1000:
        fields["layer_types"] = ["full_attention"] * layers
    fields["draft_vocab_size"] = values.get("draft_vocab_size") or values.get("vocab_size")
    for name in ("enable_confidence_head", "confidence_head_with_markov"):  # what vLLM reads a missing key as
        fields.setdefault(name, False)
    return fields


def without_tap_count(values: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json without the key that means the target's depth everywhere else."""
    return {name: value for name, value in values.items() if name != "num_target_layers"}


def _check(config: DraftConfig) -> None:
    for field, value, wanted, remedy in (
        ("attention", config.attention, "mla", "k3_dspark is for MLA drafts; use native, vllm or speculators"),
        ("sample_from_anchor", config.sample_from_anchor, True, "k3_dspark is anchor-first; use the native form"),
        ("markov_head_type", config.markov_head_type, "vanilla", "vLLM serves vanilla Markov heads only"),
        ("draft_vocab_size", config.draft_vocab_size, config.vocab_size, "k3_dspark has no reduced vocabulary"),
    ):
        if value != wanted:
            raise DsparkError(field, value, remedy)
    if config.q_lora_rank is None:
        raise DsparkError("q_lora_rank", None, "k3_dspark needs one: its queries are of low rank")
    if config.markov_rank == 0:
        raise DsparkError("markov_rank", 0, "k3_dspark needs a Markov head")
    if "sliding_attention" in config.layer_types:
        raise DsparkError("layer_types", list(config.layer_types), "k3_dspark has full attention only")
    _check_rope(config.rope_parameters)


def _check_rope(rope: Mapping[str, Any]) -> None:
    """What DeepSeek's YaRN in vLLM reads as Transformers does."""
    kind = rope["rope_type"]
    if kind not in ("default", "yarn"):
        raise DsparkError("rope_parameters.rope_type", kind, "must be default or yarn, as vLLM has it")
    known = _YARN if kind == "yarn" else set[str]()
    for name in sorted(set(rope) - known - {"rope_type", "rope_theta"}):
        raise DsparkError(f"rope_parameters.{name}", rope[name], "vLLM does not read it for k3_dspark")
    if ("mscale" in rope) != ("mscale_all_dim" in rope):
        raise DsparkError("rope_parameters.mscale", rope.get("mscale"), "must be stated with mscale_all_dim, or not")
