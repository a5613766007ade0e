"""llama.cpp's own costs for a pair, measured in child processes by a Python that has `xllamacpp`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dspark.checkpoints.gguf import export_gguf
from dspark.doctor.costs import EngineCosts
from dspark.doctor.draft import DraftFacts
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, find_gguf

SECONDS = 240
_SCRIPT = str(files("dspark.doctor").joinpath("llamacpp_child.py"))
WIDTHS = (1, 3, 5, 7)
"""Draft tokens a round that are measured; the rest are not forecast."""


def measure_llamacpp(
    python: str, target: str, draft: DraftFacts, prompts: Sequence[Sequence[int]], tokens: int = 48
) -> EngineCosts:
    """Seconds of a token and of rounds, from llama.cpp's own timings of greedy answers to `prompts`.

    Plain and drafted answers of a prompt follow each other, and a round's cost is the median over prompts of its ratio
    to the plain token of the same prompt. target: its .gguf file, or `embedded` for the file of the package.
    Raises DsparkError when the file is none, the draft cannot be written for llama.cpp, the child fails, or it serves
    without the draft.
    """
    weights = find_gguf() if target == EMBEDDED else Path(target)
    if weights.suffix != ".gguf" or not weights.is_file():
        raise DsparkError("engine_target", target, "must be the target's .gguf file for llama.cpp to be measured")
    gamma = draft.config.gamma if draft.config is not None else 0
    widths = [n for n in WIDTHS if n <= gamma]
    room = max(map(len, prompts)) + tokens + gamma + 8
    with tempfile.TemporaryDirectory() as made:
        path = _draft_file(draft, weights, Path(made))
        asked = {"prompts": [list(ids) for ids in prompts], "tokens": tokens, "widths": widths}
        found = _child([python, _SCRIPT, str(weights), str(torch.get_num_threads()), str(room), str(path)], asked)
    timings = {int(n): times for n, times in found["timings"].items()}
    if not all(one.get("draft_n") for n in widths for one in timings[n]):
        raise DsparkError("draft", draft.name, "llama.cpp served without the draft: no draft_n in its timings")
    plain = [one["predicted_ms"] / one["predicted_n"] / 1000 for one in timings[0]]
    ratios = {n: median(_round_seconds(a) / b for a, b in zip(timings[n], plain, strict=True)) for n in widths}
    return EngineCosts(
        engine="llamacpp",
        source="llama.cpp's own timings here",
        plain=median(plain),
        rounds={n: ratio * median(plain) for n, ratio in ratios.items()},
        measured={
            "build": found["build"],
            "threads": torch.get_num_threads(),
            "prompts": len(prompts),
            "tokens": tokens,
            "tokens_per_round": {n: round(_tokens_per_round(timings[n]), 3) for n in widths},
            "speedup": {n: round(_speedup(timings[0], timings[n]), 3) for n in widths},
        },
    )


def _draft_file(draft: DraftFacts, target: Path, folder: Path) -> Path:
    """The draft as a GGUF file: itself, or written from what was read. Raises DsparkError."""
    if draft.form == "gguf":
        return Path(draft.name)
    model = draft.build()
    if not isinstance(model, DSparkDraft):
        raise DsparkError("draft", draft.name, "is an EAGLE-3 baseline; only DSpark and DFlash drafts are written")
    export_gguf(model, folder / "draft.gguf", target, "f16")
    return folder / "draft.gguf"


def _child(command: list[str], asked: dict[str, Any]) -> dict[str, Any]:
    """What the child measured. Raises DsparkError when it does not answer."""
    try:
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DsparkError("engine_python", command[0], f"llama.cpp could not be measured with it ({error})") from None
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise DsparkError("engine_python", command[0], f"llama.cpp ended with code {done.returncode} ({last[:200]})")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def _rounds(timing: dict[str, Any]) -> int:
    return int(timing["predicted_n"] - timing["draft_n_accepted"])


def _round_seconds(timing: dict[str, Any]) -> float:
    return float(timing["predicted_ms"]) / _rounds(timing) / 1000


def _tokens_per_round(timings: Sequence[dict[str, Any]]) -> float:
    return sum(one["predicted_n"] for one in timings) / sum(map(_rounds, timings))


def _speedup(plain: Sequence[dict[str, Any]], drafted: Sequence[dict[str, Any]]) -> float:
    """What was measured on these very answers: pooled tokens a second, over plain."""
    speeds = [
        sum(one["predicted_n"] for one in side) / sum(one["predicted_ms"] for one in side) for side in (drafted, plain)
    ]
    return float(speeds[0] / speeds[1])
