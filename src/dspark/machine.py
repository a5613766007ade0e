"""What a figure was measured on: processor, threads, versions. No machine name, no path."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dspark import __version__
from dspark.kernels.library import kind

CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, str]:
    """Label -> value, for reports and JSON."""
    return {
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "torch threads": str(torch.get_num_threads()),
        "kernels": kind() or "none",
        "system": f"{platform.system()} {platform.machine()}",
        **describe_versions(),
    }


def describe_versions() -> dict[str, str]:
    """Label -> version of what decides the figures: Python, dspark and the libraries under it."""
    return {
        "python": platform.python_version(),
        "dspark": __version__,
        "torch": torch.__version__,
        "transformers": _version("transformers"),
    }


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
