"""Training on one process: `train(recipe)`.

Every step: rows and anchors as functions of (seed, step), features read ahead by a thread, forward and backward in
chunks pooled over the accumulation, clipped AdamW on fp32 masters. Method.md section 3.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch import nn

from dspark.checkpoints.native import save_draft
from dspark.data.rows import Row
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.locks import lock_for_writing
from dspark.targets.base import Target
from dspark.targets.transformers import load_target
from dspark.training.batches import Batches, MicroBatch, Reader, split_rows
from dspark.training.features import FeatureSource
from dspark.training.loss import LossStats
from dspark.training.metrics import MetricsLog
from dspark.training.provenance import RunRecord
from dspark.training.recipe import Recipe, TrainingSection
from dspark.training.setup import build_draft, finished_config, memory_estimate, open_features, read_training_rows
from dspark.training.state import SavedState, data_fingerprint, has_state, save_state
from dspark.training.validation import Validator, micro_loss


@dataclass
class TrainResult:
    """Steps done, where the best draft lies, and its replay acceptance length (bonus counted; None without held-out
    rows). interrupted: stopped before the last step, can be resumed."""

    steps: int
    best: Path
    acceptance: float | None
    interrupted: bool


def learning_rate(step: int, training: TrainingSection) -> float:
    """Of step 0..steps-1: linear warm-up, then a cosine from lr to lr * min_lr_ratio. A function of the step alone."""
    warmup = training.warmup * training.steps if training.warmup < 1 else training.warmup
    warm_steps = math.ceil(warmup)
    if step < warm_steps:
        return training.lr * (step + 1) / warm_steps
    done = (step - warm_steps) / max(training.steps - warm_steps, 1)
    return training.lr * (training.min_lr_ratio + (1 - training.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    target: Target | None = None,
    source: FeatureSource | None = None,
    rows: Sequence[Row] | None = None,
    stop_after: int | None = None,
    console: Console | None = None,
) -> TrainResult:
    """Run a recipe. `target`, `source` and `rows` replace what the recipe names (they must agree with it).

    Leaves in `training.out`: `best/` and `last/` (drafts), `state.safetensors` (to resume), `metrics.jsonl`,
    `tensorboard/`, `training.json` and `training_prompts.txt` (also beside both drafts: training/provenance.py).
    stop_after: stop after that many steps in all, as an interrupt would.
    Raises DsparkError on bad input, on an existing run without `resume`, when another process trains into the same
    folder, and at the first non-finite value.
    """
    with lock_for_writing(recipe.training.out, "training.out"):
        return _train(recipe, resume, target, source, rows, stop_after, console or Console())


def _train(
    recipe: Recipe,
    resume: bool,
    target: Target | None,
    source: FeatureSource | None,
    rows: Sequence[Row] | None,
    stop_after: int | None,
    console: Console,
) -> TrainResult:
    started = time.perf_counter()
    say = partial(console.print, highlight=False, soft_wrap=True)
    out = Path(recipe.training.out)
    saved = SavedState(out) if resume else None
    if saved is None and has_state(out):
        raise DsparkError("training.out", str(out), "holds a run already; resume it, or choose another folder")
    rows = read_training_rows(recipe, say) if rows is None else list(rows)
    train_rows, held = split_rows(rows, recipe.data)
    fingerprint = data_fingerprint(rows)
    if saved is not None:
        saved.check(recipe, fingerprint)
    target = target or load_target(recipe.target, packed=False)
    config = finished_config(recipe, target, rows, train_rows)
    source = source or open_features(recipe, target, rows, say)
    draft = build_draft(recipe, config, target, train_rows, saved.draft_ids if saved else None, say)
    batches = Batches(train_rows, source, recipe.data, recipe.training, config.gamma)
    parts = memory_estimate(recipe, draft, target, batches.rows)
    listed = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items())
    say(f"memory of one step, estimated: {sum(parts.values()) / 2**30:.2f} GiB ({listed} MiB)")
    tokens = sum(len(row.answer_ids) for row in batches.rows)
    say(f"{len(batches.rows)} training rows ({tokens:,} answer tokens), {len(held)} held out")
    validator = Validator(held, source, recipe, config.gamma)
    before, resumed = (saved.record, True) if saved is not None else (None, False)
    record = RunRecord(recipe, config.gamma, train_rows, held, validator, started, resumed, before, say)
    return _Run(recipe, draft, target, batches, validator, fingerprint, console, saved, record).go(stop_after)


class _Stopper:
    """Ctrl-C (or SIGTERM) asks the run to stop after this step; a second one is an ordinary interrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, self._before[number])

    def __enter__(self) -> _Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _Window:
    """Sums since the last log line."""

    def __init__(self, gamma: int) -> None:
        self.stats = LossStats(gamma)
        self.tokens = 0
        self.steps = 0
        self.waited = self.validated = 0.0
        self.processor = 0.0  # of the process while stepping: what a step costs, however busy the machine is
        self.started = time.perf_counter()

    def metrics(self, grad_norm: float, lr: float) -> dict[str, float]:
        elapsed = max(time.perf_counter() - self.started - self.validated, 1e-9)
        return {
            **self.stats.metrics(),
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_s": self.tokens / elapsed,
            "blocks_per_s": self.stats.blocks / elapsed,
            "step_s": elapsed / max(self.steps, 1),
            "step_cpu_s": self.processor / max(self.steps, 1),
            "data_wait_s": self.waited,
            "data_wait_share": self.waited / elapsed,
        }


class _RateColumn(ProgressColumn):
    """Seconds a step."""

    def render(self, task: Task) -> Text:
        return Text(f"{1 / task.speed:.2f} s/step" if task.speed else "")


class _Run:
    def __init__(
        self,
        recipe: Recipe,
        draft: Draft,
        target: Target,
        batches: Batches,
        validator: Validator,
        fingerprint: str,
        console: Console,
        saved: SavedState | None,
        record: RunRecord,
    ) -> None:
        self.recipe, self.training, self.out = recipe, recipe.training, Path(recipe.training.out)
        self.draft, self.target, self.batches, self.validator = draft, target, batches, validator
        self.fingerprint, self.console, self.record = fingerprint, console, record
        t = self.training
        self.optimizer = torch.optim.AdamW(
            draft.parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=True
        )
        self.step = 0
        self.best: dict[str, Any] = {"acceptance": None, "step": None}
        if saved is not None:
            saved.restore(draft, self.optimizer)
            self.step, self.best = saved.step, saved.best
        self.log = MetricsLog(self.out, console, self.step)
        if validator.note:
            console.print(f"note: {validator.note}")

    def go(self, stop_after: int | None) -> TrainResult:
        end, started_at = min(self.training.steps, stop_after or self.training.steps), self.step
        reader = Reader(self.batches, self.step, end)
        try:
            with _Stopper() as stopper, self._progress() as progress:
                task = progress.add_task("train", total=self.training.steps, completed=self.step)
                self._loop(iter(reader), end, stopper, lambda: progress.update(task, completed=self.step))
        finally:
            reader.close()
            self.log.close()
        interrupted = self.step < self.training.steps
        if self.step == started_at:
            self.console.print(f"nothing to do: step {self.step} of {self.training.steps} was reached before")
        if interrupted:
            again = "the same command with --resume goes on exactly here"
            self.console.print(f"stopped at step {self.step} of {self.training.steps}, saved in {self.out}; {again}")
        best = self.out / ("best" if self.best["step"] is not None else "last")
        return TrainResult(self.step, best, self.best["acceptance"], interrupted)

    def _progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        return Progress(*columns, *times, console=self.console, disable=not self.console.is_terminal)

    def _loop(self, batches: Iterator[MicroBatch], end: int, stopper: _Stopper, show: Any) -> None:
        t = self.training
        window = _Window(self.draft.config.gamma)
        while self.step < end and not stopper.asked:
            processor = time.process_time()
            norm, lr = self._one_step(batches, window)
            window.processor += time.process_time() - processor
            self.step += 1
            show()
            last = self.step == t.steps
            if self.step % t.log_every == 0 or last:
                values = window.metrics(norm, lr)
                self.log.write("train", self.step, values)
                self.log.line("train", self.step, t.steps, values)
                window = _Window(self.draft.config.gamma)
            if last or (t.validate_every and self.step % t.validate_every == 0):
                started = time.perf_counter()
                self._validate()
                window.validated += time.perf_counter() - started
            if last or (t.save_every and self.step % t.save_every == 0):
                self._save()
        if self.step < t.steps:
            self._save()

    def _one_step(self, batches: Iterator[MicroBatch], window: _Window) -> tuple[float, float]:
        """One optimiser step: returns (gradient norm before clipping, learning rate)."""
        self.optimizer.zero_grad(set_to_none=True)
        lr = learning_rate(self.step, self.training)
        rows: list[str] = []
        while True:
            waiting = time.perf_counter()
            batch = next(batches)
            window.waited += time.perf_counter() - waiting
            assert batch.step == self.step, (batch.step, self.step)
            rows += [row.id for row in batch.plan.rows]
            stats = micro_loss(
                self.draft, self.target, batch.plan, batch.taps, batch.last_hidden, batch.lse, self.recipe,
                batch.scale, backward=True,
            )  # fmt: skip
            if not math.isfinite(stats.total):
                self._stop_non_finite("loss", rows)
            window.stats = window.stats + stats
            window.tokens += len(batch.plan.packed.ids)
            if batch.last:
                break
        norm = float(nn.utils.clip_grad_norm_(self.draft.parameters(), self.training.clip))
        if not math.isfinite(norm):
            self._stop_non_finite("gradient", rows)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        window.steps += 1
        return norm, lr

    def _stop_non_finite(self, what: str, rows: Sequence[str]) -> None:
        """Raises DsparkError that names the first broken parameter or gradient and the rows.

        Nothing is written: the last good checkpoint stays.
        """
        broken = "none of the parameters"
        for name, parameter in self.draft.named_parameters():
            if not torch.isfinite(parameter).all():
                broken = f"parameter {name}"
                break
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
                broken = f"gradient of {name}"
                break
        kept = f"the last good checkpoint in {self.out} is kept" if has_state(self.out) else "nothing was saved yet"
        remedy = f"non-finite first in {broken}; rows {', '.join(rows)}; {kept}; lower training.lr or check the rows"
        raise DsparkError(f"training.{what} at step {self.step + 1}", "non-finite", remedy)

    def _validate(self) -> None:
        if not self.validator.rows and not self.validator.replay_rows:
            return
        hours, started = self.record.tick(), time.perf_counter()
        values = self.validator.run(self.draft, self.target)
        self.record.validated(self.step, values, hours, time.perf_counter() - started)
        self.log.write("validation", self.step, values)
        self.log.line("validation", self.step, self.training.steps, values)
        acceptance = values.get("replay_acceptance")
        if acceptance is not None and acceptance > (self.best["acceptance"] or 0.0):
            self.best = {"acceptance": acceptance, "step": self.step}
            save_draft(self.draft, self.out / "best", files=self.record.files(self.step, self.best, "best"))
        self.record.write(self.step, self.best)

    def _save(self) -> None:
        save_draft(self.draft, self.out / "last", files=self.record.files(self.step, self.best, "last"))
        draft_ids = self.draft.draft_ids if self.draft.config.reduced else None
        save_state(
            self.out, self.draft, self.optimizer, self.recipe, self.fingerprint, self.step, self.best, draft_ids,
            self.record.state,
        )  # fmt: skip
        self.record.write(self.step, self.best)
