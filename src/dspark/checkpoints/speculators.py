"""vLLM's speculators form: speculators_model_type, a nested transformer_layer_config, speculators_config.

As vLLM 0.32 reads it (transformers_utils/configs/speculators): layer ids are those of the layer that READS the state
(our id + 1); `sample_from_anchor` is read as false when missing; block_size counts the anchor slot when it predicts
nothing, as ours. "dspark" becomes Qwen3DSparkModel, vanilla Markov heads only, and `sliding_window_non_causal` is
dropped, so sliding layers are causal; "dflash" becomes DFlashDraftModel, whose layers, sliding or full, are all causal
unless that key is true or missing. Other top-level keys are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.qwen3 import HEADS, backbone_fields, backbone_json, nested, own_json, unknown_keys
from dspark.drafts.config import DraftConfig
from dspark.errors import DsparkError

VERSION = "0.9.0"
AUX = "aux_hidden_state_layer_ids"
_SHARED = ("mask_token_id", "draft_vocab_size", "block_size", "sample_from_anchor")
_DFLASH = {
    "markov_rank": 0,
    "markov_head_type": "vanilla",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
_KNOWN = {
    "speculators_model_type",
    "speculators_version",
    "speculators_config",
    "transformer_layer_config",
    AUX,
    *_SHARED,
    *HEADS,
}


def speculators_to_json(config: DraftConfig, lm_head: bool) -> dict[str, Any]:
    """The config.json of a draft in this form; a plain DFlash draft becomes a "dflash" one.

    Raises DsparkError naming what vLLM cannot express.
    """
    dflash = config.markov_rank == 0
    _check(config, dflash)
    heads = {} if dflash else config.model_dump(include=set(HEADS))
    window = "sliding_attention" in config.layer_types
    return {
        "architectures": ["DFlashDraftModel" if dflash else "DSparkDraftModel"],
        "speculators_model_type": "dflash" if dflash else "dspark",
        "speculators_version": VERSION,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        **config.model_dump(include=set(_SHARED)),
        **heads,
        # for "dflash" it says how all layers attend, see above
        **({"sliding_window_non_causal": config.sliding_window_non_causal if window else True} if dflash else {}),
        AUX: [tap + 1 for tap in config.target_layer_ids],
        "target_hidden_size": config.hidden_size,
        "transformer_layer_config": backbone_json(config),
        "speculators_config": {
            "algorithm": "dflash" if dflash else "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.gamma,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target_name, "architectures": []},
        },
        **own_json(config, lm_head),
    }


def _check(config: DraftConfig, dflash: bool) -> None:
    if config.markov_head_type != "vanilla":
        raise DsparkError("markov_head_type", config.markov_head_type, "vLLM serves vanilla Markov heads only")
    if dflash and config.enable_confidence_head:
        raise DsparkError("enable_confidence_head", True, "vLLM has no confidence head without a Markov head")
    if "sliding_attention" not in config.layer_types:
        return
    if not dflash and config.sliding_window_non_causal:
        raise DsparkError(
            "sliding_window_non_causal", True, "vLLM drops it in the speculators form and would attend causally"
        )
    if dflash and not config.sliding_window_non_causal and "full_attention" in config.layer_types:
        raise DsparkError(
            "layer_types",
            list(config.layer_types),
            "vLLM would make the full layers causal with the sliding ones in the speculators form",
        )


def speculators_fields(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The DraftConfig fields that a config.json in this form states.

    Raises DsparkError for another algorithm, or numbers that disagree.
    """
    kind = values.get("speculators_model_type")
    if kind not in ("dspark", "dflash"):
        raise DsparkError("speculators_model_type", kind, "must be dspark or dflash; others are not ours")
    layer, outer = nested(values, "transformer_layer_config"), nested(values, "speculators_config")
    if layer.get("model_type") != "qwen3":
        raise DsparkError("transformer_layer_config.model_type", layer.get("model_type"), "must be qwen3")
    unknown_keys(values, _KNOWN, "", notes)
    unknown_keys(layer, backbone_fields(layer), "transformer_layer_config.", notes)
    fields = {name: values[name] for name in _SHARED if name in values}
    fields |= _DFLASH if kind == "dflash" else {name: values[name] for name in HEADS if name in values}
    fields |= backbone_fields(layer)
    if "sample_from_anchor" not in fields:
        fields["sample_from_anchor"] = False
        notes.append("sample_from_anchor is missing: bonus-anchor, as speculators and vLLM read this form")
    if fields.get("draft_vocab_size") is None:
        fields["draft_vocab_size"] = fields.get("vocab_size")
    fields["target_layer_ids"] = _taps(values.get(AUX))
    _attention(values, fields, kind)
    verifier = outer.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if name:
        fields["target_name"] = name
    _check_count(outer, fields)
    return fields


def _taps(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(isinstance(i, int) and i > 0 for i in ids):
        raise DsparkError(AUX, ids, "must be a list of layer ids from 1, of the layers that read the states")
    return [i - 1 for i in ids]


def _attention(values: Mapping[str, Any], fields: dict[str, Any], kind: str) -> None:
    """What the sliding layers of a block see, as vLLM reads it."""
    stated = values.get("sliding_window_non_causal")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        fields["sliding_window_non_causal"] = stated is not False if kind == "dflash" else bool(stated)
    if kind == "dflash" and stated is False and "full_attention" in (fields.get("layer_types") or ()):
        raise DsparkError("sliding_window_non_causal", False, "makes full layers causal in this form; not supported")


def _check_count(outer: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    """proposal_methods must not ask for more tokens than a block has."""
    methods, block = outer.get("proposal_methods"), fields.get("block_size")
    first = methods[0] if isinstance(methods, list) and methods else None
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if isinstance(count, int) and isinstance(block, int):
        gamma = block if fields["sample_from_anchor"] else block - 1
        if count > gamma:
            raise DsparkError(
                "speculative_tokens", count, f"must be at most {gamma}, by block_size {block} and sample_from_anchor"
            )
