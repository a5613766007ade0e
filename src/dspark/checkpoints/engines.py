"""What the native form cannot make an engine do: refused, or noted.

vLLM 0.32: vanilla Markov heads only, none at all is not DSpark there, sliding layers are causal. SGLang 0.5.23: no
reduced vocabulary, rank 0 refused, block_size without the anchor's slot, the confidence head always built.
"""

from __future__ import annotations

from collections.abc import Sequence

from dspark.checkpoints.taps import check_ascending
from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError


def check_eagle3(config: Eagle3Config, form: str, forms: Sequence[str], notes: list[str]) -> None:
    """Raise DsparkError for a goal that has no EAGLE-3 drafts, or an engine that cannot load this one."""
    if form not in forms:
        raise DsparkError("to", form, f"has no EAGLE-3 drafts here; must be one of {', '.join(forms)}")
    if form == "native":
        return
    check_ascending(config)
    if config.attention == "gqa":
        return
    if config.q_lora_rank is None:
        raise DsparkError("q_lora_rank", None, "vLLM and SGLang need one for MLA: queries of low rank")
    first = config.target_layer_ids[0]
    if form == "sglang" and first != 1:
        notes.append(
            f"SGLang's DeepSeek targets take layer ids that do not begin with 1 (yours: {first}) for the layers that "
            "READ the states: on such a target add 1 to each in eagle_config"
        )


def check_vllm(config: DraftConfig, notes: list[str]) -> None:
    """Raise DsparkError naming what vLLM cannot serve from the native form."""
    check_ascending(config)
    if config.markov_head_type != "vanilla":
        raise DsparkError("markov_head_type", config.markov_head_type, "vLLM serves vanilla Markov heads only")
    if config.markov_rank == 0:
        raise DsparkError("markov_rank", 0, "vLLM loads plain DFlash in the speculators or z-lab form")
    _check_window(config, "vLLM")


def check_sglang(config: DraftConfig, notes: list[str]) -> None:
    """Raise DsparkError naming what SGLang cannot serve from the native form; note what it ignores."""
    check_ascending(config)
    if config.markov_rank == 0:
        raise DsparkError("markov_rank", 0, "SGLang's DSPARK needs a Markov head; use the z-lab form and DFLASH")
    if config.reduced:
        raise DsparkError(
            "draft_vocab_size", config.draft_vocab_size, "SGLang has no reduced vocabulary; expand it (--expand)"
        )
    _check_window(config, "SGLang")
    if not config.sample_from_anchor:
        notes.append(
            f"SGLang drafts block_size = {config.block_size} tokens of a bonus-anchor draft, one too many: give it "
            f"--speculative-dspark-block-size {config.gamma}, as dspark launch does"
        )
    if not config.enable_confidence_head:
        notes.append(
            "enable_confidence_head is false, which SGLang ignores: its confidence head has made-up weights, "
            "so keep SGLANG_RAGGED_VERIFY_MODE at static"
        )
    if config.num_target_layers - 1 in config.target_layer_ids:
        notes.append("target_layer_ids has the target's last layer, which some releases of SGLang cannot capture")


def _check_window(config: DraftConfig, engine: str) -> None:
    if "sliding_attention" in config.layer_types and config.sliding_window_non_causal:
        raise DsparkError(
            "sliding_window_non_causal", True, f"{engine} does not read it in the native form and attends causally"
        )
