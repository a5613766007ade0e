"""Positions: the rotary settings, whether the installed library computes them as written down, how far they reach."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from dspark.doctor.facts import TargetFacts
from dspark.doctor.findings import Finding
from dspark.drafts.config import DraftConfig
from dspark.drafts.kinds import Config
from dspark.drafts.rope import inverse_frequencies


@dataclass(frozen=True)
class Golden:
    """Inverse frequencies (first, second, middle, last) and factor of known settings, computed apart from the library.

    It is a `rope.RotarySettings` of one head.
    """

    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    frequencies: tuple[float, float, float, float]
    factor: float = 1.0
    hidden_size: int = 128
    num_attention_heads: int = 1
    num_key_value_heads: int = 1


GOLDEN = (
    Golden(
        128,
        262144,
        {"rope_type": "default", "rope_theta": 50000.0},
        (1.0, 0.844459048688527, 0.004472135954999579, 2.36838009e-05),
    ),
    Golden(
        64,
        8192,
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        (1.0, 0.5623413251903491, 0.01, 0.000177827941),
    ),
    Golden(
        64,
        1048576,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
        },
        (1.0, 0.7498942093324559, 0.01, 2.75679926e-05),
        1.2772588722239782,
    ),
)


def check_golden() -> Finding:
    """rotary-library: the installed library gives the frequencies written down for plain, partial and YaRN settings."""
    for golden in GOLDEN:
        found, factor = inverse_frequencies(golden)
        picked = found[[0, 1, len(found) // 2, -1]].double()
        wanted = torch.tensor(golden.frequencies, dtype=torch.float64)
        if not torch.allclose(picked, wanted, rtol=1e-5, atol=0) or abs(factor - golden.factor) > 1e-4:
            text = (
                f"{golden.rope_parameters} gives {picked.tolist()}, must be {list(golden.frequencies)}: another release"
            )
            return Finding("rotary-library", "broken", text)
    return Finding("rotary-library", "ok", f"{len(GOLDEN)} known settings give the frequencies written down")


def check_rotary(config: Config, target: TargetFacts) -> Finding:
    """rotary: complete (read so already), and YaRN's lengths consistent with each other and with training."""
    rope, reach = config.rope_parameters, config.max_position_embeddings
    shown = ", ".join(f"{name} {value}" for name, value in rope.items())
    if not all(_finite(value) for value in rope.values()):
        return Finding("rotary", "broken", f"{shown}: must be finite")
    if rope["rope_type"] == "yarn":
        original, factor = rope["original_max_position_embeddings"], rope.get("factor")
        if isinstance(factor, int | float) and round(original * factor) != reach:
            text = f"{shown}: {original} x {factor:g} is not max_position_embeddings {reach}; one is another draft's"
            return Finding("rotary", "loses", text)
        if original < config.training_length:
            text = f"{shown}: original {original} is below the {config.training_length} tokens trained on"
            return Finding("rotary", "loses", text)
    partial = rope.get("partial_rotary_factor", 1.0)
    theirs = _theta(target)
    if partial != 1.0 and isinstance(config, DraftConfig):
        return Finding("rotary", "note", f"{shown}: only part of a head turns, which some engines do not read")
    if theirs is not None and theirs != rope["rope_theta"]:
        return Finding("rotary", "note", f"{shown}; the target's base is {theirs:g}: the draft must keep its own")
    return Finding("rotary", "ok", shown)


def _theta(target: TargetFacts) -> float | None:
    parameters = target.values.get("rope_parameters") or target.values
    found = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    return float(found) if isinstance(found, int | float) and _finite(found) else None


def _finite(value: Any) -> bool:
    """Whether every number in a rotary setting is one that a float holds."""
    if isinstance(value, list | tuple):
        return all(_finite(one) for one in value)
    return not isinstance(value, int | float) or abs(value) < sys.float_info.max


def check_length(config: Config, target: TargetFacts, context: int | None) -> Iterator[Finding]:
    """trained-length: what is asked against what was trained, what the positions reach and what the target reads."""
    trained, reach = config.training_length, config.max_position_embeddings
    asked = context if context is not None else target.context
    if asked is None:
        yield Finding("trained-length", "skipped", f"trained at {trained} tokens; {target.missing}")
    elif context is not None and target.context is not None and context > target.context:
        yield Finding("trained-length", "broken", f"context {context} is asked, the target reads {target.context}")
    elif context is not None and context > reach:
        text = f"context {context} is asked, the draft's positions end at {reach}: acceptance collapses past it"
        yield Finding("trained-length", "loses", text)
    elif context is not None and context > trained and config.rope_parameters["rope_type"] == "default":
        text = (
            f"context {context} is asked, trained at {trained} tokens: acceptance falls past it; train longer, or YaRN"
        )
        yield Finding("trained-length", "loses", text)
    elif asked > trained:
        kind = "a context of" if context is not None else "the target reads"
        yield Finding("trained-length", "note", f"trained at {trained} tokens, {kind} {asked}: measure past it")
    else:
        yield Finding("trained-length", "ok", f"trained at {trained} tokens, {asked} asked")
