"""What other engines read of a calibration and a cost profile: SGLang 0.5.23's two files, vLLM 0.32's setting."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dspark.calibration.cost import CostProfile
from dspark.calibration.stored import Calibration
from dspark.data.prompts import write_text
from dspark.errors import DsparkError

Engine = Literal["sglang", "vllm"]


def sglang_temperatures(calibration: Calibration) -> dict[str, Any]:
    """--speculative-dspark-confidence-sts-path: one temperature a slot, for a server that runs all of them."""
    measured = calibration.measured.get("all")
    return {
        "temperatures": list(calibration.temperatures),
        "dataset": ",".join(calibration.datasets),
        "num_samples": calibration.rounds,
        "ece_before": [] if measured is None else list(measured.ece_before),
        "ece_after": [] if measured is None else list(measured.ece_temperatures),
    }


def sglang_costs(profile: CostProfile) -> dict[str, Any]:
    """--speculative-dspark-sps-table-path: steps a second at the measured numbers of tokens, never rising."""
    tokens = sorted({point.tokens for point in profile.verify})
    rates = [profile.steps_per_second(one) for one in tokens]
    return {"sample_batch_tokens": tokens, "sample_steps_per_sec": rates, "max_batch_tokens": tokens[-1]}


def vllm_settings(draft: str, n: int) -> dict[str, Any]:
    """--speculative-config: vLLM measures costs itself at the start, and reads raw confidences."""
    return {"method": "dspark", "model": draft, "num_speculative_tokens": n, "enable_adaptive_verification": True}


def export(
    engine: Engine, out: Path, draft: str, gamma: int, calibration: Calibration | None, profile: CostProfile | None
) -> tuple[list[Path], list[str]]:
    """Write the files of an engine into the folder `out`: their paths, and what the engine leaves unused.

    Raises DsparkError when there is nothing to write for it.
    """
    files: dict[str, Mapping[str, Any]] = {}
    if engine == "vllm":
        files["speculative-config.json"] = vllm_settings(draft, gamma)
        notes = [
            "vLLM 0.32 takes raw confidences (it has no place for temperatures) and measures its own costs",
            "it needs full CUDA graphs and an attention backend that can trim requests on the device, and refuses LoRA "
            "and pipeline parallelism with it",
        ]
    else:
        notes = [
            "SGLang 0.5.23 uses them with SGLANG_RAGGED_VERIFY_MODE=compact or cap-accept; its default, static, does "
            "not, and decode context parallelism forces static"
        ]
        if calibration is not None:
            files["temperatures.json"] = sglang_temperatures(calibration)
            notes.append(f"--speculative-dspark-confidence-sts-path {out / 'temperatures.json'}")
        if profile is not None:
            files["costs.json"] = sglang_costs(profile)
            notes.append(f"--speculative-dspark-sps-table-path {out / 'costs.json'}: measured on this machine")
        if not files:
            raise DsparkError(
                "export", engine, "there are no temperatures and no costs yet; run without --export first"
            )
    for name, content in files.items():
        write_text(out / name, json.dumps(content, indent=1) + "\n")
    return [out / name for name in files], notes
