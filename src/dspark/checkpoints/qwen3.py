"""What the foreign forms share: Qwen3's keys, our own keys beside theirs, and what a file leaves to be stated.

OWN holds what no engine asks for and we require. A foreign config.json that we write has it as one object, "dspark",
which engines do not read, so that there and back is exact. In somebody else's file those come from `stated`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dspark.checkpoints.rope import older_rope_keys, rope_parameters
from dspark.drafts.config import DraftConfig
from dspark.errors import DsparkError

OURS = "dspark"
OWN = (
    "target_name",
    "num_target_layers",
    "training_length",
    "prompt_recipe",
    "sliding_window",
    "sliding_window_non_causal",
    "aux_hidden_stream",
)
BACKBONE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "vocab_size",
)
HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_TUPLES = ("layer_types", "target_layer_ids")
# Written by Transformers or by training code, without meaning for a draft's forward pass
INERT = frozenset(
    "architectures attention_dropout auto_map bos_token_id dtype eos_token_id initializer_range max_window_layers "
    "model_type num_anchors pad_token_id rope_parameters rope_scaling rope_theta tie_word_embeddings torch_dtype "
    "transformers_version use_cache use_sliding_window target_hidden_size confidence_head_alpha _name_or_path".split()
)
# Keys that would make another model of the same tensors, and the values with which they do not
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_mode": (None, "gqa"),
    "attention_sink_bias": (None, False),
    "causal": (None, False),
    "is_causal": (None, False),
    "quantization_config": (None,),
    "use_aux_hidden_state": (None, True),
    "use_swa": (None, False),
}


def backbone_json(config: DraftConfig) -> dict[str, Any]:
    """Qwen3's keys of a draft, rotary settings in both spellings."""
    window = "sliding_attention" in config.layer_types
    return {
        "model_type": "qwen3",
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        **config.model_dump(include=set(BACKBONE)),
        "rope_parameters": dict(config.rope_parameters),
        **older_rope_keys(config.rope_parameters),
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if window else None,
        "use_sliding_window": window,
        "max_window_layers": 0 if window else config.num_hidden_layers,
    }


def backbone_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The DraftConfig fields that Qwen3's keys state; what is missing is left out.

    Raises DsparkError when layer_types is no list of names, or the rotary settings are stated in two ways.
    """
    fields = {name: values[name] for name in (*BACKBONE, "layer_types") if name in values}
    fields["rope_parameters"] = rope_parameters(values)
    layers, kinds = fields.get("num_hidden_layers"), fields.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise DsparkError("layer_types", kinds, "must be a list with the kind of attention of every layer")
    if kinds is None and not values.get("use_sliding_window") and isinstance(layers, int) and layers < 1000:
        fields["layer_types"] = ["full_attention"] * layers
    if isinstance(values.get("sliding_window"), int) and "sliding_attention" in (fields.get("layer_types") or ()):
        fields["sliding_window"] = values["sliding_window"]
    return fields


def own_json(config: DraftConfig, lm_head: bool) -> dict[str, Any]:
    """The object `dspark` of a foreign config.json."""
    return {OURS: {**config.model_dump(include=set(OWN)), "lm_head_in_file": lm_head}}


def own_object(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Our object in a foreign config.json, empty when there is none. Raises DsparkError when it is something else."""
    found = values.get(OURS, {})
    if not isinstance(found, Mapping):
        raise DsparkError(OURS, found, "must be an object")
    return found


def nested(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object inside a config.json. Raises DsparkError when it is missing or something else."""
    found = values.get(name)
    if not isinstance(found, Mapping):
        raise DsparkError(name, found, "must be an object in this form's config.json")
    return found


def unknown_keys(values: Mapping[str, Any], known: Iterable[str], where: str, notes: list[str]) -> None:
    """Note the keys that nobody here knows; refuse those that make another model of the same tensors."""
    strange = []
    for name in values:
        if name in NEUTRAL:
            if values[name] not in NEUTRAL[name]:
                raise DsparkError(f"{where}{name}", values[name], "makes another model of these tensors; not supported")
        elif name not in INERT and name not in known and name not in OWN and name != OURS:
            strange.append(f"{where}{name} = {json.dumps(values[name])[:60]}")
    if strange:
        notes.append("left out, not known here: " + "; ".join(strange))


def assemble(
    fields: Mapping[str, Any], values: Mapping[str, Any], stated: Mapping[str, Any], notes: list[str]
) -> DraftConfig:
    """A DraftConfig of what the form states, our own keys in the file, and what the user states.

    Raises DsparkError for a missing field, or a stated one that the file contradicts.
    """
    ours = own_object(values)
    top = {name: values[name] for name in OWN if name in values and name != "sliding_window"}
    found = {**top, **{name: ours[name] for name in OWN if name in ours}, **fields}
    state(found, stated, DraftConfig.model_fields)
    if "sliding_attention" not in (found.get("layer_types") or ()):  # then these have no effect
        found.setdefault("sliding_window", None)
        found.setdefault("sliding_window_non_causal", False)
    complete(found, notes)
    return DraftConfig(**found)


def state(found: dict[str, Any], stated: Mapping[str, Any], known: Iterable[str]) -> None:
    """Add what the user states. Raises DsparkError for what is no field, or what the checkpoint contradicts."""
    for name, value in stated.items():
        if name not in known:
            raise DsparkError(name, value, "is not a field of a draft, so it cannot be stated")
        held = list(found[name]) if isinstance(found.get(name), tuple) else found.get(name)
        if name in found and held != value:
            raise DsparkError(name, value, f"contradicts the checkpoint, which says {held!r}; leave it out")
        found[name] = value


def complete(found: dict[str, Any], notes: list[str]) -> None:
    """Lists as tuples, and the chat template, a record only, as not known. Raises DsparkError without hidden_act."""
    for name in _TUPLES:
        if isinstance(found.get(name), list):
            found[name] = tuple(found[name])
    if "hidden_act" not in found:  # has a default in Python; in a file nothing is left out
        raise DsparkError("hidden_act", None, "is missing from config.json: state it, hidden_act=silu for Qwen3")
    if "prompt_recipe" not in found:
        found["prompt_recipe"] = {"template_sha256": None, "thinking": None}
        notes.append("the file does not say which chat template it was trained with")
