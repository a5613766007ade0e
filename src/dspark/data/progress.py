"""How far a long job is: a live bar on a terminal, one line every half minute in a log."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

LOG_EVERY = 30.0  # seconds between lines when the output is not a terminal


class TokenProgress:
    """Counts finished rows and tokens. Skipped rows (done before, left out) move the bar, never the rate."""

    def __init__(self, label: str, total: int, console: Console | None = None, quiet: bool = False) -> None:
        self.label, self.total = label, total
        self.console = console or Console(stderr=True)
        self.done = self.skipped = self.tokens = 0
        self.started = self._logged = time.monotonic()
        self._quiet = quiet
        self._bar: Progress | None = None
        if not quiet and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task(label, total=total, rate="")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def rate(self) -> str:
        """Tokens per second so far and the time left at this pace."""
        if not self.done:
            return "starting"
        left = (self.total - self.done - self.skipped) * self.seconds / self.done
        return f"{self.tokens / max(self.seconds, 1e-9):.1f} tok/s, {_clock(left)} left"

    def row(self, tokens: int) -> None:
        self.done += 1
        self.tokens += tokens
        self._show()

    def skip(self, rows: int = 1) -> None:
        self.skipped += rows
        self._show()

    def _show(self) -> None:
        completed = self.done + self.skipped
        if self._bar is not None:
            self._bar.update(self._task, completed=completed, rate=self.rate())
        elif not self._quiet and time.monotonic() - self._logged >= LOG_EVERY:
            self._logged = time.monotonic()
            self.console.print(f"{self.label}: {completed}/{self.total} rows, {self.rate()}", highlight=False)

    def __enter__(self) -> TokenProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
