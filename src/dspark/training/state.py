"""What a run needs to go on exactly where it stopped: one file, replaced in one move.

Parameters and AdamW moments in fp32, the step, the draft vocabulary, the recipe. Random numbers need no state: row
order and anchors are functions of (seed, step), the learning rate of the step.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark.data.rows import Row, ids_hash
from dspark.errors import DsparkError
from dspark.training.recipe import Recipe

FORMAT = "1"
STATE_NAME = "state.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")

# Changing these during a run changes nothing that was learned; anything else would, silently.
FREE = {("serve",)} | {
    ("training", key)
    for key in ("log_every", "validate_every", "validation_rows", "replay_rows", "replay_n", "save_every", "out")
}


def data_fingerprint(rows: Sequence[Row]) -> str:
    """Hash of the training rows' ids, token ids and order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.id}:{ids_hash(row)}\n".encode())
    return digest.hexdigest()


def has_state(out: str | Path) -> bool:
    return (Path(out) / STATE_NAME).is_file()


def save_state(
    out: str | Path,
    draft: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    fingerprint: str,
    step: int,
    best: dict[str, Any],
    draft_ids: Tensor | None,
    record: dict[str, Any] | None = None,
) -> Path:
    """Write `out/state.safetensors` under a temporary name, then rename: a kill leaves the old or the new one.

    record: what the run has cost so far (training/provenance.py).
    """
    tensors: dict[str, Tensor] = {}
    for name, parameter in draft.named_parameters():
        tensors[f"parameter.{name}"] = parameter.detach().contiguous()
        for moment, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{moment}.{name}"] = value.detach().contiguous()
    if draft_ids is not None:
        tensors["draft_ids"] = draft_ids.contiguous()
    meta = {"recipe": recipe.model_dump(mode="json"), "data": fingerprint, "step": step, "best": best}
    meta["record"] = record
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / (STATE_NAME + ".tmp")
    save_file(tensors, temporary, metadata={"format": FORMAT, "run": json.dumps(meta)})
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, folder / STATE_NAME)
    return folder / STATE_NAME


class SavedState:
    """A state file, read. Raises DsparkError when it is missing, corrupt or of another run."""

    def __init__(self, out: str | Path) -> None:
        self.path = Path(out) / STATE_NAME
        if not self.path.is_file():
            raise DsparkError("training.out", str(out), "holds no saved run to resume")
        try:
            with safe_open(self.path, framework="pt") as file:
                header = file.metadata() or {}
                self.tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}
            meta = json.loads(header["run"])
            self.recipe: dict[str, Any] = meta["recipe"]
            self.fingerprint: str = meta["data"]
            self.step: int = meta["step"]
            self.best: dict[str, Any] = meta["best"]
            self.record: dict[str, Any] | None = meta.get("record")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DsparkError("training.out", str(self.path), f"is not a readable state ({error!r})") from error
        if header.get("format") != FORMAT:
            raise DsparkError("training.out", header.get("format"), f"state format must be {FORMAT}")

    @property
    def draft_ids(self) -> list[int] | None:
        ids = self.tensors.get("draft_ids")
        return None if ids is None else ids.tolist()

    def check(self, recipe: Recipe, fingerprint: str) -> None:
        """Raises DsparkError naming the first setting or the data that differs from the saved run's."""
        for key, saved, now in _differences(self._saved_recipe(), recipe.model_dump(mode="json")):
            raise DsparkError(key, now, f"the saved run has {saved!r}; keep it, or start a new run with training.init")
        if self.fingerprint != fingerprint:
            raise DsparkError("data.rows", fingerprint[:12], "the saved run was trained on other rows")

    def _saved_recipe(self) -> dict[str, Any]:
        """The saved recipe with today's defaults for settings that did not exist when it was saved."""
        try:
            return Recipe.model_validate(self.recipe).model_dump(mode="json")
        except ValidationError:
            return self.recipe  # a setting is gone since: the comparison names it

    def restore(self, draft: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Parameters and moments, bit for bit. Raises DsparkError on a missing, extra or misshapen tensor."""
        names = dict(draft.named_parameters())
        wanted = {f"parameter.{name}" for name in names}
        present = {name for name in self.tensors if name.startswith("parameter.")}
        if wanted != present:
            raise DsparkError("training.out", str(self.path), f"tensors differ: {sorted(wanted ^ present)[:3]}")
        for name, parameter in names.items():
            saved = self.tensors[f"parameter.{name}"]
            if saved.shape != parameter.shape or saved.dtype != parameter.dtype:
                raise DsparkError(name, tuple(saved.shape), f"must be {tuple(parameter.shape)} {parameter.dtype}")
            with torch.no_grad():
                parameter.copy_(saved)
            moments = {m: self.tensors[f"{m}.{name}"].clone() for m in MOMENTS if f"{m}.{name}" in self.tensors}
            shapes = {m: () if m == "step" else tuple(parameter.shape) for m in MOMENTS}
            if moments and {m: tuple(value.shape) for m, value in moments.items()} != shapes:
                raise DsparkError("training.out", str(self.path), f"has damaged AdamW moments of {name}")
            if moments:
                optimizer.state[parameter] = moments


def _differences(saved: Any, now: Any, path: tuple[str, ...] = ()) -> list[tuple[str, Any, Any]]:
    if path in FREE:
        return []
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted(saved.keys() | now.keys())
        return [d for key in keys for d in _differences(saved.get(key), now.get(key), (*path, key))]
    return [] if saved == now else [(".".join(path), saved, now)]
