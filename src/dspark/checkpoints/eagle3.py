"""config.json of an EAGLE-3 draft, in the public forms that vLLM and SGLang load; its tensors have the public names.

GQA attention: `LlamaForCausalLMEagle3` (vLLM, SGLang). MLA: vLLM's `Eagle3DeepseekV2ForCausalLM`, which needs a
q_lora_rank. The engines count layers differently, and each reads its own key, so both are written: vLLM takes
`eagle_aux_hidden_state_layer_ids` at top level as the layer that READS the state (our id + 1), SGLang the list of that
name inside `eagle_config` as the layer that made it (our id). Neither has keys for who the draft was made for; ours
stand beside theirs: target_layer_ids, num_target_layers, target_name, training_steps, training_length, prompt_recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.rope import older_rope_keys, rope_parameters
from dspark.drafts.eagle3_config import KINDS, Eagle3Config
from dspark.errors import DsparkError

ARCHITECTURES = {"gqa": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
AUX = "eagle_aux_hidden_state_layer_ids"
# Settings of the engines that would make another model of the same tensors: written, and required when read.
FIXED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
}
_OF_KIND: dict[str, dict[str, Any]] = {
    "gqa": {"model_type": "llama", "mlp_bias": False},
    # deepseek_v3 would make vLLM take the draft for DeepSeek's own MTP layers
    "mla": {"model_type": "deepseek_v2", "rope_interleave": True, "n_routed_experts": 0, "first_k_dense_replace": 1},
}


def eagle3_to_json(config: Eagle3Config) -> dict[str, Any]:
    """The config.json of an EAGLE-3 draft."""
    taps = list(config.target_layer_ids)
    kind = config.attention
    others = {name for name in (*KINDS["gqa"], *KINDS["mla"], "q_lora_rank") if name not in KINDS[kind]}
    fields = config.model_dump(exclude={"attention", *others})
    if kind == "mla":
        fields |= {"q_lora_rank": config.q_lora_rank, "num_key_value_heads": config.num_attention_heads}
    return {
        "architectures": [ARCHITECTURES[kind]],
        "torch_dtype": "bfloat16",
        **_OF_KIND[kind],
        **FIXED,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(taps),
        AUX: [tap + 1 for tap in taps],
        "eagle_config": {"use_aux_hidden_state": True, AUX: taps},
        **older_rope_keys(config.rope_parameters),
        **fields,
        "target_layer_ids": taps,
    }


def eagle3_from_json(values: Mapping[str, Any]) -> Eagle3Config:
    """The config of a config.json whose architecture is one of ARCHITECTURES.

    Raises DsparkError naming a missing or wrong key, one that makes another model, or tap ids that disagree.
    """
    kind = next(kind for kind, name in ARCHITECTURES.items() if values.get("architectures") == [name])
    for name, wanted in {**FIXED, **_OF_KIND[kind]}.items():
        if name not in values or values[name] != wanted:
            raise DsparkError(name, values.get(name), f"must be {wanted!r} in config.json: other models are not ours")
    theirs = {"num_key_value_heads"} if kind == "mla" else set()
    if theirs and values.get("num_key_value_heads") != values.get("num_attention_heads"):
        raise DsparkError("num_key_value_heads", values.get("num_key_value_heads"), "must be the number of heads (MLA)")
    names = set(Eagle3Config.model_fields) - theirs
    fields = {name: values[name] for name in names if name in values}
    fields |= {"attention": kind, "rope_parameters": rope_parameters(values)}
    for name in ("hidden_act", *(["q_lora_rank"] if kind == "mla" else [])):  # default in Python; a file states all
        if name not in values:
            raise DsparkError(name, None, "is missing from config.json: state it")
    if isinstance(fields.get("target_layer_ids"), list):
        fields["target_layer_ids"] = tuple(fields["target_layer_ids"])
    config = Eagle3Config(**fields)
    _check_taps(values, list(config.target_layer_ids))
    return config


def _check_taps(values: Mapping[str, Any], taps: list[int]) -> None:
    """The engines' lists must name the same layers as ours, where they are stated."""
    inner = values.get("eagle_config")
    inner_ids = inner.get(AUX) if isinstance(inner, Mapping) else None
    for field, found, wanted in (
        (AUX, values.get(AUX), [tap + 1 for tap in taps]),
        (f"eagle_config.{AUX}", inner_ids, taps),
    ):
        if found != wanted:
            raise DsparkError(field, found, f"must be {wanted}, for target_layer_ids {taps}")
