"""EAGLE-3 files of others (SpecForge, the EAGLE authors, vLLM's and SGLang's users) as our config and our names.

They have `checkpoints/eagle3.py`'s architectures and tensors, and few of its keys. What engines take a missing key for
is taken here too, and noted. Layer ids are the exception: vLLM reads the list inside `eagle_config` as the layers that
READ the states, SGLang as those that made them, so that one alone is decided only where it is one of their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.eagle3 import ARCHITECTURES, AUX, FIXED, eagle3_from_json
from dspark.checkpoints.qwen3 import complete, state, unknown_keys
from dspark.checkpoints.rope import rope_parameters
from dspark.drafts.eagle3_config import KINDS, Eagle3Config
from dspark.errors import DsparkError

OWN = ("target_layer_ids", "num_target_layers", "target_name", "training_steps", "training_length", "prompt_recipe")
# Names of the same two models that vLLM accepts, by kind of attention
PUBLIC = {name: kind for kind, name in ARCHITECTURES.items()} | {
    "Eagle3LlamaForCausalLM": "gqa",
    "Eagle3DeepseekV3ForCausalLM": "mla",
}
_SHAPE = (
    "hidden_size",
    "intermediate_size",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "vocab_size",
)
_ALSO = {"draft_vocab_size", "eagle_config", "num_aux_hidden_states", "num_key_value_heads", "head_dim", AUX}
# With any other value they make another model of the same tensors
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{name: (None, value) for name, value in FIXED.items()},
    "mlp_bias": (None, False),
    "bias": (None, False),
    "use_aux_norm": (None, False),
    "rope_interleave": (None, True),
    "logit_scale": (None, 1, 1.0),
    "quantization_config": (None,),
}


def read_eagle3(
    values: Mapping[str, Any], facts: Mapping[str, Any], stated: Mapping[str, Any], notes: list[str]
) -> Eagle3Config:
    """The config of an EAGLE-3 config.json: our own, which states all, or a public one with what `facts` (of the
    target) and `stated` add.

    Raises DsparkError naming a missing or wrong key, one that makes another model, or what contradicts the file.
    """
    if set(OWN) <= values.keys() and values["architectures"][0] in ARCHITECTURES.values():
        config = eagle3_from_json(values)
        state(config.model_dump(), stated, Eagle3Config.model_fields)
        return config
    kind = PUBLIC[values["architectures"][0]]
    inner = values.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise DsparkError("eagle_config", inner, "must be an object")
    _check_neutral(values, inner)
    names = (*_SHAPE, *KINDS[kind], *(["q_lora_rank"] if kind == "mla" else []))
    unknown_keys(values, {*names, *OWN, *_NEUTRAL, *_ALSO}, "", notes)
    found = {name: values[name] for name in (*names, *OWN) if values.get(name) is not None}
    found |= {"attention": kind, "draft_vocab_size": values.get("draft_vocab_size") or values.get("vocab_size")}
    found["rope_parameters"] = _rope(values, notes)
    if kind == "gqa" and "head_dim" not in found and _whole_heads(values):
        found["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    found = {**{name: value for name, value in facts.items() if name not in found}, **found}
    if "target_layer_ids" not in found:
        depth = stated.get("num_target_layers", found.get("num_target_layers"))
        taps = _taps(values.get(AUX), inner.get(AUX), depth, "target_layer_ids" in stated, notes)
        if taps is not None:
            found["target_layer_ids"] = taps
    state(found, stated, Eagle3Config.model_fields)
    complete(found, notes)
    return Eagle3Config(**found)


def eagle3_name(name: str) -> str:
    """Our name of a tensor in any public spelling: with `model.` before it, the one layer as layers.0 or midlayer."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _check_neutral(values: Mapping[str, Any], inner: Mapping[str, Any]) -> None:
    for name, allowed in _NEUTRAL.items():
        for level in (values, inner):
            if level.get(name) not in allowed:
                raise DsparkError(name, level[name], "makes another model of these tensors; not supported")
    if inner.get("use_aux_hidden_state") not in (None, True):
        raise DsparkError("eagle_config.use_aux_hidden_state", False, "is EAGLE-2, without taps; not supported")


def _whole_heads(values: Mapping[str, Any]) -> bool:
    sizes = values.get("hidden_size"), values.get("num_attention_heads")
    return all(isinstance(size, int) and size > 0 for size in sizes)


def _rope(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    if values.get("rope_parameters") is None and values.get("rope_theta") is None:
        notes.append("rope_theta is missing: 10000, as Transformers and both engines read it")
        values = {**values, "rope_theta": 10000.0}
    return rope_parameters(values)


def _taps(outer: Any, inner: Any, depth: Any, stated: bool, notes: list[str]) -> list[int] | None:
    """Our ids of the taps; None when they have to be stated."""
    for name, ids in ((AUX, outer), (f"eagle_config.{AUX}", inner)):
        if ids and not (isinstance(ids, list) and all(type(i) is int and i >= 0 for i in ids)):
            raise DsparkError(name, ids, "must be a list of layer ids")
    if outer:
        notes.append(f"{AUX} read as vLLM does: the layers that read the states, our ids + 1")
        return [i - 1 for i in outer]
    made = [1, depth // 2 - 1, depth - 4] if isinstance(depth, int) else None
    if not inner:
        if made is not None and not stated:
            notes.append(f"no layer ids: {made}, the engines' default for a target of {depth} layers")
        return None if stated else made
    if made is not None and inner in (made, [i + 1 for i in made]):
        whose = "SGLang's, ours" if inner == made else "vLLM's, ours + 1"
        notes.append(f"eagle_config.{AUX} is the default of {depth} layers as {whose}")
        return made
    if not stated:
        raise DsparkError(
            f"eagle_config.{AUX}",
            inner,
            "vLLM and SGLang read it differently: state target_layer_ids=[...], the 0-based layers whose outputs it "
            "was trained on, or give the --target if they are the default",
        )
    return None
