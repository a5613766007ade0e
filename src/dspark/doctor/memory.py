"""Whether the target fits into this machine's memory, before loading it ends in a killed process."""

from __future__ import annotations

from math import prod
from pathlib import Path

from dspark.checkpoints.tensors import tensor_shapes
from dspark.doctor.facts import TargetFacts
from dspark.errors import DsparkError

MEMORY_INFO = Path("/proc/meminfo")
_BYTES = 4
"""Of a weight as it is loaded: float32."""


def lacking_memory(target: TargetFacts) -> str:
    """How much memory is missing to load the target, "" when it fits or this system does not tell."""
    free = available_bytes()
    if target.folder is None or free is None:
        return ""
    try:
        shapes, _ = tensor_shapes(target.folder)
    except DsparkError:  # loading it will say what is wrong
        return ""
    needed = _BYTES * sum(prod(shape) for shape in shapes.values())
    if needed <= free:
        return ""
    giga = 1e9
    return (
        f"{target.name} takes {needed / giga:.1f} GB in float32 and {free / giga:.1f} GB are free, "
        f"{(needed - free) / giga:.1f} GB too few"
    )


def available_bytes() -> int | None:
    """Memory that programs can still get; None where the system does not tell."""
    if not MEMORY_INFO.exists():
        return None
    for line in MEMORY_INFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
