"""What is known to go wrong in engines, by version: read from their sources at the version in ENGINES, or seen running.

A table to be edited: one entry a fault, with the releases that have it and what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dspark.doctor.draft import DraftFacts
from dspark.doctor.findings import Level
from dspark.drafts.config import DraftConfig

ENGINES = {"vllm": "0.32.0", "sglang": "0.5.23", "llamacpp": "11549"}
"""Engine -> the release that this table was read from; llama.cpp counts builds."""


@dataclass(frozen=True)
class Fault:
    """releases: a version specifier; when: which drafts it concerns."""

    engine: str
    releases: str
    level: Level
    when: Callable[[DraftFacts], bool]
    text: str


def _always(draft: DraftFacts) -> bool:
    return True


def _layers(draft: DraftFacts) -> bool:
    return isinstance(draft.config, DraftConfig) and draft.config.num_hidden_layers > 1


def _confident(draft: DraftFacts) -> bool:
    return draft.config is not None and draft.config.enable_confidence_head


def _not_confident(draft: DraftFacts) -> bool:
    return not _confident(draft)


def _yarn(draft: DraftFacts) -> bool:
    return draft.config is not None and draft.config.rope_parameters["rope_type"] == "yarn"


def _bonus_speculators(draft: DraftFacts) -> bool:
    config = draft.config
    return draft.form == "speculators" and isinstance(config, DraftConfig) and not config.sample_from_anchor


FAULTS = (
    Fault(
        "vllm",
        "<=0.32.0",
        "note",
        _always,
        "with tensor parallelism turn fuse_allreduce_rms off, whose workspace fails under CUDA graph capture",
    ),
    Fault(
        "vllm",
        "==0.32.0",
        "note",
        _layers,
        "its CPU build gives every draft layer's context keys the first layer's k_norm: acceptance falls there",
    ),
    Fault(
        "vllm",
        "<=0.32.0",
        "note",
        _bonus_speculators,
        "takes block_size draft tokens of a bonus-anchor draft, one too many: pass num_speculative_tokens",
    ),
    Fault("vllm", "<=0.32.0", "note", _yarn, "a YaRN draft needs max_model_len stated, at most what it was made for"),
    Fault("vllm", "<=0.32.0", "note", _confident, "the confidence head is unused without enable_adaptive_verification"),
    Fault(
        "sglang",
        "<=0.5.23",
        "note",
        _confident,
        "the confidence head is unused in the static mode, which is the default and what DCP forces",
    ),
    Fault("llamacpp", ">=11434", "note", _always, "drafts 3 tokens unless n_max says otherwise"),
    Fault(
        "llamacpp",
        ">=11434",
        "note",
        _always,
        "serves plainly, with a line in its log, when the draft does not start: see that draft_n is in the timings",
    ),
    Fault(
        "llamacpp", ">=11434", "note", _not_confident, "p_min above 0 serves a draft without a confidence head plainly"
    ),
)

VLLM_WITHOUT_TAPS = frozenset(
    "BailingMoeForCausalLM BloomForCausalLM Cohere2ForCausalLM CohereForCausalLM DbrxForCausalLM "
    "DeepseekV32ForCausalLM DeepseekV4ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneForCausalLM "
    "FalconForCausalLM FalconH1ForCausalLM GPT2LMHeadModel GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM "
    "Gemma3nForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM "
    "GraniteMoeForCausalLM GraniteMoeHybridForCausalLM InternLM2ForCausalLM JambaForCausalLM KimiLinearForCausalLM "
    "Lfm2ForCausalLM Lfm2MoeForCausalLM LongcatFlashForCausalLM MambaForCausalLM MixtralForCausalLM "
    "NemotronForCausalLM OPTForCausalLM OlmoeForCausalLM PhiMoEForCausalLM Qwen2MoeForCausalLM SolarForCausalLM "
    "StableLmForCausalLM Step3TextForCausalLM Zamba2ForCausalLM".split()
)
"""Targets whose hidden states vLLM 0.32 cannot hand to a draft (classes without SupportsEagle3)."""
