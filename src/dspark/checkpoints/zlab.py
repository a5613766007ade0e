"""DFlash drafts in the two forms that others load; the z-lab one is read as well (`zlab_fields`).

A DFlash draft is a DSparkDraft with markov_rank 0, no confidence head and the bonus-anchor layout. Both forms hold its
backbone in BF16, 0-based layer ids of outputs (ours), block_size = predictions + 1 (ours in this layout) and no layout
key; embedding and head are the target's.

"transformers": what Transformers 5.24 runs with `speculation_type="dflash"`. Its one DFlash class is
MuseGlimmerAssistantModel (model_type muse_glimmer_assistant): every key at top level, `fc` and `hidden_norm` named
`encoder.fc` and `encoder.output_norm_enc`. AutoModel loads the folder; z-lab's MLX loader reads the form too.
"z-lab": DFlashDraftModel, Qwen3's keys, mask and layer ids in `dflash_config`, our tensor names. z-lab's own code,
vLLM and SGLang read it. Transformers must not be given it: AutoModel makes a Qwen3 model of it, with invented weights.

What a form cannot say is refused by name. Neither has a draft vocabulary: see `over_whole_vocabulary`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dspark.checkpoints.native import write_checkpoint
from dspark.checkpoints.qwen3 import BACKBONE, backbone_fields, nested, unknown_keys
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.rope import Rotary
from dspark.errors import DsparkError

Form = Literal["transformers", "z-lab"]

TRANSFORMERS_TYPE = "muse_glimmer_assistant"
TRANSFORMERS_ARCHITECTURE, ZLAB_ARCHITECTURE = "MuseGlimmerAssistantModel", "DFlashDraftModel"
# Our tensor names in Transformers' class; all others are the same
RENAMED = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
# The others either depend on the length of the request there ("dynamic", "longrope"), or are not DFlash's
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def over_whole_vocabulary(draft: DSparkDraft) -> DSparkDraft:
    """The same backbone, unbound, drafting over all V tokens of the target instead of the K it was trained for.

    With the target's own head the K logits stay what they were, but any of the other V - K, which training never
    looked at, may be larger: other tokens are drafted, and the target's output does not change. The draft's own head
    rows are dropped. A fresh draft: the given one is not touched. One over the whole vocabulary comes back as a copy.
    Raises DsparkError for a draft that is packed for decoding.
    """
    config = draft.config.model_copy(update={"draft_vocab_size": draft.config.vocab_size})
    whole = DSparkDraft(config)
    found = {name: tensor for name, tensor in draft.state_dict().items() if name not in ("d2t", "t2d")}
    check_whole(found, whole)
    whole.load_state_dict(found)
    return whole.to(draft.norm.weight.dtype)


def export_zlab(draft: DSparkDraft, folder: str | Path, form: Form = "transformers") -> None:
    """Write a DFlash draft to the new folder, config.json and model.safetensors, whole or not at all.

    Raises DsparkError for what the form cannot express, a non-finite tensor, a draft packed for decoding, or a folder
    that exists and is not empty; then nothing is written.
    """
    values = config_for(draft.config, form)
    tensors = draft.state_dict()
    with torch.device("meta"):
        check_whole(tensors, DSparkDraft(draft.config))
    renamed = RENAMED if form == "transformers" else {}
    write_checkpoint(folder, values, {renamed.get(name, name): one for name, one in tensors.items()}, replace=False)


def config_for(config: DraftConfig, form: Form) -> dict[str, Any]:
    """The config.json of a draft in one of the forms. Raises DsparkError naming the field that it cannot express."""
    if form not in ("transformers", "z-lab"):
        raise DsparkError("form", form, "must be transformers or z-lab")
    _check_dflash(config)
    shared = {
        "dtype": "bfloat16",
        **config.model_dump(
            include={
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "intermediate_size",
                "hidden_act",
                "rms_norm_eps",
                "max_position_embeddings",
                "rope_parameters",
                "vocab_size",
                "num_target_layers",
                "target_name",
                "block_size",
            }
        ),
        "layer_types": list(config.layer_types),
        "attention_dropout": 0.0,
    }
    mask_and_taps = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    if form == "transformers":
        return _transformers(config, {**shared, **mask_and_taps})
    return _zlab(config, {**shared, "dflash_config": mask_and_taps})


def _transformers(config: DraftConfig, values: dict[str, Any]) -> dict[str, Any]:
    if config.attention_bias:
        raise DsparkError("attention_bias", True, "Transformers' DFlash attention has no biases; use the native form")
    if not Rotary(config).whole:
        raise DsparkError(
            "rope_parameters.partial_rotary_factor",
            config.rope_parameters.get("partial_rotary_factor"),
            "Transformers' DFlash attention rotates whole heads; use the native form",
        )
    return {
        "architectures": [TRANSFORMERS_ARCHITECTURE],
        "model_type": TRANSFORMERS_TYPE,
        **values,
        "sliding_window": _inclusive_window(config),
        # the class would otherwise take those of the model it was made for
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }


def _inclusive_window(config: DraftConfig) -> int:
    """Transformers sees |i - j| <= window here, in the block both ways; ours |i - j| < window when non-causal."""
    if "sliding_attention" not in config.layer_types:
        return config.max_position_embeddings  # read, never used
    window = config.sliding_window or 0
    if not config.sliding_window_non_causal:
        raise DsparkError(
            "sliding_window_non_causal",
            False,
            "Transformers' DFlash sees later slots of the block in sliding layers too; use the native form",
        )
    if window < 2:
        raise DsparkError("sliding_window", window, "must be at least 2 for Transformers' DFlash")
    return window - 1


def _zlab(config: DraftConfig, values: dict[str, Any]) -> dict[str, Any]:
    if "sliding_attention" in config.layer_types:
        raise DsparkError(
            "layer_types",
            list(config.layer_types),
            "readers of the z-lab form differ on what a sliding layer sees of its block; use the native form",
        )
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    return {
        "architectures": [ZLAB_ARCHITECTURE],
        "model_type": "qwen3",
        **values,
        "attention_bias": config.attention_bias,
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
    }


def zlab_fields(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The DraftConfig fields that a z-lab config.json states: DFlash, so bonus-anchor, which no key says.

    Keys of the draft are read inside `dflash_config` and at top level.
    """
    inner = nested(values, "dflash_config")
    mine = ("mask_token_id", "target_layer_ids", "block_size")
    known = {*BACKBONE, *mine, "layer_types", "sliding_window", "dflash_config", "sample_from_anchor"}
    unknown_keys(values, known, "", notes)
    unknown_keys(inner, mine, "dflash_config.", notes)
    fields = {
        **backbone_fields(values),
        "draft_vocab_size": values.get("vocab_size"),
        "sample_from_anchor": False,
        "markov_rank": 0,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    if values.get("sample_from_anchor") not in (None, False):
        raise DsparkError(
            "sample_from_anchor", values["sample_from_anchor"], "must be absent or false: DFlash's layout"
        )
    for name in mine:
        found = [level[name] for level in (inner, values) if level.get(name) is not None]
        if len(found) == 2 and found[0] != found[1]:
            raise DsparkError(name, found[1], f"must agree with dflash_config.{name} {found[0]!r}")
        if found:
            fields[name] = found[0]
    notes.append("no layout key: bonus-anchor, as z-lab's DFlash is")
    return fields


def _check_dflash(config: DraftConfig) -> None:
    """Raises DsparkError for a draft that is not plain DFlash over the whole vocabulary."""
    if config.attention == "mla":
        raise DsparkError("attention", "mla", "must be gqa: DFlash has no latent attention")
    if config.markov_rank:
        raise DsparkError("markov_rank", config.markov_rank, "must be 0: DFlash has no Markov head")
    if config.enable_confidence_head:
        raise DsparkError("enable_confidence_head", True, "must be false: DFlash has no confidence head")
    if config.sample_from_anchor:
        raise DsparkError("sample_from_anchor", True, "must be false: DFlash's anchor slot predicts nothing")
    if config.reduced:
        raise DsparkError(
            "draft_vocab_size",
            config.draft_vocab_size,
            f"must be vocab_size {config.vocab_size}: DFlash's forms draft with the target's whole head; "
            "vLLM (speculators form) and llama.cpp (gguf) take a reduced one",
        )
    if config.num_target_layers - 1 in config.target_layer_ids:
        raise DsparkError(
            "target_layer_ids",
            config.num_target_layers - 1,
            "the target's last layer cannot be a tap: DFlash's readers take it after the final norm, ours before",
        )
    if config.rope_parameters["rope_type"] not in _ROPE_TYPES:
        raise DsparkError(
            "rope_parameters.rope_type",
            config.rope_parameters["rope_type"],
            f"must be one of {', '.join(_ROPE_TYPES)}: others change while a request grows, and ours do not",
        )


def check_whole(tensors: dict[str, Tensor], fresh: DSparkDraft) -> None:
    """Raises DsparkError unless the tensors are those of an unpacked draft."""
    expected = {name: tensor.shape for name, tensor in fresh.state_dict().items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != expected:
        raise DsparkError("draft", fresh.config.target_name, "is packed for decoding; load it again to export it")
