"""Where a run's figures go: one line on the console, one JSON object in `metrics.jsonl`, TensorBoard when installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark.errors import pip_install

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """One record per (kind, step). A resumed run first drops the records past its own step: none appears twice."""

    def __init__(self, out: str | Path, console: Console, step: int = 0) -> None:
        self.path = Path(out) / METRICS_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.console = console
        self._keep_until(step)
        self._file = self.path.open("a", encoding="utf-8")
        self._board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter  # heavy and optional
        except ImportError:
            remedy = pip_install("tensorboard")
            console.print(f"TensorBoard is not installed ({remedy}); metrics go to metrics.jsonl only", soft_wrap=True)
        else:
            self._board = SummaryWriter(str(Path(out) / "tensorboard"), purge_step=step + 1)

    def _keep_until(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError):  # a line torn by a kill
                continue
        temporary = self.path.with_name(METRICS_NAME + ".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, self.path)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        """kind: `train` or `validation`."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)
            self._board.flush()

    def line(self, kind: str, step: int, steps: int, values: dict[str, float]) -> None:
        """The figures a person watches, on one line."""
        slots = [f"{values[k]:.2f}" for k in sorted(values) if k.startswith("acceptance/")]
        parts = [f"{kind} {step}/{steps}"]
        for name, label, form in (
            ("loss", "loss", ".4f"),
            ("tau_teacher_forced", "tau(teacher)", ".3f"),
            ("replay_acceptance", "tau(replay)", ".3f"),
            ("kept_mass", "kept", ".3f"),
            ("grad_norm", "grad", ".2f"),
            ("lr", "lr", ".2e"),
            ("tokens_per_s", "tok/s", ",.0f"),
            ("blocks_per_s", "blocks/s", ",.0f"),
            ("data_wait_share", "wait", ".0%"),
        ):
            if name in values:
                parts.append(f"{label} {values[name]:{form}}")
        if slots:
            parts.append("slots " + " ".join(slots))
        self.console.print("  ".join(parts), highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
