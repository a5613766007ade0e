"""SpecForge's export: Qwen3's keys at top level, the draft's own inside `dflash_config`.

As SpecForge 0.2 writes it: architectures DSparkDraftModel (DFlashDraftModel in older ones, or Qwen3DSparkModel when it
renamed them for SGLang), projector_type "dspark", layer ids as ours, block_size the number of predictions. Its DSpark
strategy is anchor-first and no key says so. SGLang 0.5.23 does not load the nested form: convert it to `native`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dspark.checkpoints.qwen3 import BACKBONE, HEADS, backbone_fields, backbone_json, nested, own_json, unknown_keys
from dspark.drafts.config import DraftConfig
from dspark.errors import DsparkError

ARCHITECTURES = ("DSparkDraftModel", "DFlashDraftModel", "Qwen3DSparkModel")
_NESTED = ("target_layer_ids", "mask_token_id", *HEADS)
_OUTSIDE = {*BACKBONE, "layer_types", "sliding_window", "block_size", "draft_vocab_size", "dflash_config", *_NESTED}


def is_specforge(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is in this form."""
    inner = values.get("dflash_config")
    return isinstance(inner, Mapping) and (inner.get("projector_type") == "dspark" or "markov_rank" in inner)


def specforge_to_json(config: DraftConfig, lm_head: bool) -> dict[str, Any]:
    """The config.json of a draft in this form. Raises DsparkError naming what it cannot express."""
    if not config.sample_from_anchor:
        raise DsparkError("sample_from_anchor", False, "SpecForge's DSpark is anchor-first; use the native form")
    if config.reduced:
        raise DsparkError(
            "draft_vocab_size", config.draft_vocab_size, "SpecForge's DSpark has no reduced vocabulary; use native"
        )
    if "sliding_attention" in config.layer_types:
        raise DsparkError(
            "layer_types", list(config.layer_types), "this form does not say what a sliding layer sees; use native"
        )
    return {
        "architectures": ["DSparkDraftModel"],
        "dtype": "bfloat16",
        **backbone_json(config),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": {
            "attention_mode": "gqa",
            "projector_type": "dspark",
            **config.model_dump(include=set(HEADS)),
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        **own_json(config, lm_head),
    }


def specforge_fields(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The DraftConfig fields that a config.json in this form states. Raises DsparkError for another projector.

    Keys may stand at either level; a key stated at both must agree.
    """
    inner = nested(values, "dflash_config")
    if inner.get("projector_type") not in (None, "dspark"):
        raise DsparkError("dflash_config.projector_type", inner.get("projector_type"), "must be dspark")
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1 or architectures[0] not in ARCHITECTURES:
        raise DsparkError("architectures", architectures, f"must be one of {', '.join(ARCHITECTURES)} in this form")
    unknown_keys(values, _OUTSIDE | {"sample_from_anchor"}, "", notes)
    unknown_keys(inner, {*_NESTED, "projector_type", "block_size", "sample_from_anchor"}, "dflash_config.", notes)
    fields = backbone_fields(values)
    for name in (*_NESTED, "block_size", "sample_from_anchor"):
        found = [level[name] for level in (inner, values) if level.get(name) is not None]
        if len(found) == 2 and found[0] != found[1]:
            raise DsparkError(name, found[1], f"must agree with dflash_config.{name} {found[0]!r}")
        if found:
            fields[name] = found[0]
    if "sample_from_anchor" not in fields:
        fields["sample_from_anchor"] = True
        notes.append("no layout key: anchor-first, as SpecForge trains DSpark")
    fields["draft_vocab_size"] = values.get("draft_vocab_size") or fields.get("vocab_size")
    return fields
