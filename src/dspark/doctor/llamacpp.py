"""llama.cpp's own costs for a pair, measured in child processes by a Python that has `xllamacpp`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from dspark.checkpoints.gguf import export_gguf
from dspark.doctor.costs import EngineCosts
from dspark.doctor.draft import DraftFacts
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, find_gguf

SECONDS = 240
WIDTHS = (1, 3, 5, 7)
"""Draft tokens a round that are measured; the rest are not forecast."""


def measure_llamacpp(
    python: str, target: str, draft: DraftFacts, prompts: Sequence[Sequence[int]], tokens: int = 48
) -> EngineCosts:
    """Seconds of a token and of rounds, from llama.cpp's own timings of greedy answers to `prompts`.

    target: its .gguf file, or `embedded` for the file of the package. Raises DsparkError when the file is none, the
    draft cannot be written for llama.cpp, the child fails, or it serves without the draft.
    """
    weights = find_gguf() if target == EMBEDDED else Path(target)
    if weights.suffix != ".gguf" or not weights.is_file():
        raise DsparkError("engine_target", target, "must be the target's .gguf file for llama.cpp to be measured")
    gamma = draft.config.gamma if draft.config is not None else 0
    room = max(map(len, prompts)) + tokens + gamma + 8
    with tempfile.TemporaryDirectory() as made:
        path = _draft_file(draft, weights, Path(made))
        plain = _child(python, weights, room, prompts, tokens)
        drafted = {n: _child(python, weights, room, prompts, tokens, path, n) for n in WIDTHS if n <= gamma}
    timed = [one["timings"] for one in plain["answers"]]
    made_tokens = sum(one["predicted_n"] for one in timed)
    return EngineCosts(
        engine="llamacpp",
        source="llama.cpp's own timings here",
        plain=sum(one["predicted_ms"] for one in timed) / made_tokens / 1000,
        rounds={n: _round_seconds(found) for n, found in drafted.items()},
        measured={
            "build": plain["build"],
            "threads": torch.get_num_threads(),
            "prompts": len(prompts),
            "tokens": tokens,
            "tokens_per_round": {n: _tokens_per_round(found) for n, found in drafted.items()},
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


def _child(
    python: str,
    target: Path,
    context: int,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    draft: Path | None = None,
    n: int = 0,
) -> dict[str, Any]:
    """What one child measured. Raises DsparkError when it does not answer, or drafts nothing though it should."""
    script = str(files("dspark.doctor").joinpath("llamacpp_child.py"))
    command = [python, script, str(target), str(torch.get_num_threads()), str(context)]
    command += [] if draft is None else [str(draft), str(n)]
    asked = json.dumps({"prompts": [list(ids) for ids in prompts], "tokens": tokens})
    try:
        done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DsparkError("engine_python", python, f"llama.cpp could not be measured with it ({error})") from None
    if done.returncode or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise DsparkError("engine_python", python, f"llama.cpp ended with code {done.returncode} ({last[:200]})")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    if draft is not None and not all(one["timings"].get("draft_n") for one in found["answers"]):
        raise DsparkError("draft", str(draft), "llama.cpp served without the draft: no draft_n in its timings")
    return found


def _rounds(found: dict[str, Any]) -> int:
    return sum(one["timings"]["predicted_n"] - one["timings"]["draft_n_accepted"] for one in found["answers"])


def _round_seconds(found: dict[str, Any]) -> float:
    return float(sum(one["timings"]["predicted_ms"] for one in found["answers"]) / _rounds(found) / 1000)


def _tokens_per_round(found: dict[str, Any]) -> float:
    return round(sum(one["timings"]["predicted_n"] for one in found["answers"]) / _rounds(found), 3)
