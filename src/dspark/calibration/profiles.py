"""The cost profile of a pair on this machine, kept in the cache folder and measured again when anything changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from dspark.calibration.cost import CostProfile, measure_cost
from dspark.drafts.kinds import Draft
from dspark.machine import describe_machine
from dspark.targets.base import Target
from dspark.targets.embedded import cache_directory

TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
REQUESTS = (1, 2, 4, 8, 16, 32)
WIDTHS = (2, 3, 4)
"""Draft tokens a round that are measured beside all of them."""
CONTEXT, REPEATS = 256, 7


def profile_path(target: Target, draft_sha256: str) -> Path:
    """Where the profile of this pair is kept."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(target.name).name)
    return cache_directory() / "cost" / f"{name}-{draft_sha256[:16]}.json"


def changes(profile: CostProfile, target: Target, n: int) -> list[str]:
    """What is otherwise now than when it was measured: "threads 2 -> 1", ...; none when it holds."""
    settings = profile.settings
    then = {
        **profile.machine,
        "target": settings.target,
        "weights": settings.weight_bytes,
        "dtype": settings.dtype,
        "threads": settings.threads,
    }
    now = {
        **describe_machine(),
        "target": target.name,
        "weights": getattr(target, "weight_bytes", None),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    then.pop("torch threads", None)  # the same as threads
    now.pop("torch threads", None)
    found = [f"{label} {then.get(label)} -> {value}" for label, value in now.items() if then.get(label) != value]
    return found if settings.n >= n else [*found, f"n {settings.n} -> {n}"]


def measure_profile(
    target: Target,
    draft: Draft,
    draft_name: str,
    tokens: Sequence[int] = TOKENS,
    requests: Sequence[int] = REQUESTS,
    repeats: int = REPEATS,
) -> CostProfile:
    """All slots of the draft, some shorter passes, every request with a context of 256 ids (or half the target's)."""
    ids = [5 + i % min(90, target.vocab_size - 5) for i in range(min(CONTEXT, target.max_context // 2))]
    return measure_cost(
        target, draft, ids, draft_name=draft_name, tokens=tokens, requests=requests, widths=WIDTHS, repeats=repeats
    )
