"""What commands show: text as it comes, coloured by round, JSON objects, tables and their legends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.bench.metrics import Acceptance, acceptance_length
from dspark.data.regenerate import Regenerated
from dspark.data.summary import RowSummary
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request, Result, Round
from dspark.decoding.text import TextStream, decode

ROUND_STYLES = ("cyan", "magenta")  # accepted draft tokens, by turns; the target's own tokens stay plain


SPEED_NOTES = (
    "length: tokens a round, bonus counted (acceptance length); macro = mean over prompts, micro = 1 + accepted / "
    "rounds. Slot k: accepted among the rounds that accepted 1..k-1 and verified k, bonus not counted. Speedup: over "
    "plain decoding of the same prompts in the same run, paired, bootstrap over prompts."
)


@dataclass(frozen=True)
class Generated:
    """A finished request and the wall-clock seconds it took, prefill included."""

    result: Result
    text: str
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return len(self.result.output_ids) / self.seconds


class StreamPrinter:
    """Prints an answer while it is made. Never half a character: what is not certain yet waits.

    On a terminal the accepted draft tokens of each round are coloured; elsewhere the text comes out as it is.
    """

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self._console = console
        self._text = TextStream(tokenizer)
        self._rounds = 0
        self._style = ""

    def step(self, new_ids: list[int], round_: Round | None) -> None:
        """One engine step: the first `round_.accepted` ids are the draft's, the rest the target's own."""
        accepted = round_.accepted if round_ is not None else 0
        self._show(new_ids[:accepted], ROUND_STYLES[self._rounds % len(ROUND_STYLES)])
        self._show(new_ids[accepted:], "")
        self._rounds += round_ is not None

    def finish(self) -> None:
        """Print what was held back, and end the line."""
        self._write(self._text.flush(), self._style)
        self._write("\n", "")

    def _show(self, ids: list[int], style: str) -> None:
        if ids:
            self._style = style
            self._write(self._text.push(ids), style)

    def _write(self, text: str, style: str) -> None:
        if self._console.is_terminal:
            self._console.print(Text(printable(text), style), end="", soft_wrap=True, highlight=False)
        else:
            self._console.file.write(text)
        self._console.file.flush()


def generate(engine: Engine, request: Request, tokenizer: Any, printer: StreamPrinter | None = None) -> Generated:
    """Serve one request on the clock; with a printer, show it as it comes (printing counts as time)."""
    start = time.perf_counter()
    for step in engine.stream(request):
        if printer is not None:
            printer.step(step.new_ids, step.round)
    seconds = time.perf_counter() - start
    if printer is not None:
        printer.finish()
    result = engine.last_result
    return Generated(result, decode(tokenizer, result.output_ids), seconds)


def summary_line(generated: Generated) -> str:
    """Tokens/s, rounds and acceptance length (bonus counted) in one line."""
    result = generated.result
    length = acceptance_length(result.rounds)
    parts = [
        f"{len(result.output_ids)} tokens ({result.finish_reason})",
        f"{generated.tokens_per_s:.1f} tokens/s end to end",
        f"{len(result.rounds)} rounds",
    ]
    if length is not None:
        parts.append(f"acceptance length {length:.2f} (bonus counted)")
    return ", ".join(parts)


def json_result(generated: Generated) -> dict[str, Any]:
    """What `--json` prints. acceptance_length: bonus counted, null for an answer without rounds."""
    result = generated.result
    return {
        "text": generated.text,
        "token_ids": list(result.output_ids),
        "finish_reason": result.finish_reason,
        "tokens_per_s": generated.tokens_per_s,
        "acceptance_length": acceptance_length(result.rounds),
        "rounds": [round_record(one) for one in result.rounds],
    }


def round_record(one: Round) -> dict[str, int]:
    """A round as JSON."""
    return {"proposed": one.proposed, "scheduled": one.scheduled, "accepted": one.accepted}


def acceptance_table(summary: Acceptance, title: str) -> Table:
    """Acceptance lengths and the conditional acceptance of every slot, each figure with its definition."""
    table = Table("measure", "value", title=title)
    for label, value in (
        ("acceptance length, macro over prompts, bonus counted", summary.macro_length),
        ("acceptance length, micro over rounds, bonus counted", summary.micro_length),
        ("macro without looping answers", summary.macro_length_without_loops),
    ):
        table.add_row(label, "-" if value is None else f"{value:.3f}")
    for number, slot in enumerate(summary.conditional, 1):
        rate = "-" if slot.rate is None else f"{slot.rate:.3f}"
        table.add_row(f"slot {number}: accepted, given that those before were", rate)
    table.add_row("prompts, answers, looping answers", f"{summary.questions}, {summary.requests}, {summary.looping}")
    table.add_row("rounds", f"{summary.rounds}")
    return table


def slot_percents(rates: Iterable[float | None]) -> str:
    """The conditional acceptance of slot 1, 2, ... in percent."""
    return " ".join("-" if rate is None else f"{100 * rate:.0f}" for rate in rates)


def regenerated_lines(report: Regenerated) -> str:
    """What a regenerate run came to: rows and their ends, what gave no row and why."""
    s = report.summary
    lines = [
        f"{s.rows} rows ({report.new_rows} new): {s.supervised_tokens:,} answer and {s.prompt_tokens:,} prompt tokens",
        f"answers: {s.stop} ended by themselves, {s.length_cut} cut at the token limit; {_looping(s)} end in a loop",
        f"no row: {s.dropped_empty} empty answers, {s.too_long} prompts too long, {s.duplicates} asked already",
    ]
    by_temperature = {f"temperature {value:g}": one for value, one in report.summaries.by_temperature().items()}
    for parts in (report.summaries.by_set(), by_temperature):
        if len(parts) > 1:
            lines.append("; ".join(f"{name}: {one.rows} rows, {_looping(one)} loop" for name, one in parts.items()))
    if report.left_out:
        lines.append(
            "left out: " + ", ".join(map(str, report.left_out[:8])) + (" ..." if len(report.left_out) > 8 else "")
        )
    return "\n".join(lines)


def _looping(counts: RowSummary) -> str:
    return f"{counts.loops} ({counts.loops / counts.rows:.1%})" if counts.rows else "0"


def printable(text: str) -> str:
    """For a terminal: control characters other than line breaks and tabs are shown, never obeyed."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160) else f"\\x{ord(c):02x}" for c in text)
