"""training.json of a draft folder, as it lies there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dspark.checkpoints.native import TRAINING_FILE
from dspark.errors import DsparkError


def read_training(folder: str | Path) -> dict[str, Any] | None:
    """training.json of a draft folder, None when there is none. Raises DsparkError when it cannot be read."""
    path = Path(folder) / TRAINING_FILE
    return read_json(path) if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises DsparkError when the file is missing or holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise DsparkError(path.name, str(path), f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DsparkError(path.name, str(path), f"is not JSON ({error}); make it again") from None
    if not isinstance(found, dict):
        raise DsparkError(path.name, str(path), "must hold one JSON object; make it again")
    return found


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number")
