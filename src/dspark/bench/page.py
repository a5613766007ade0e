"""The demo's page: one HTML file that needs nothing else (inline CSS and SVG, no script, no network)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from dspark.bench.compare import PLAIN, Comparison, Mode, Run, spans
from dspark.bench.metrics import Interval, acceptance_length
from dspark.decoding.text import token_pieces
from dspark.errors import DsparkError

TEMPLATE = "demo.html.j2"
CHART_WIDTH, CHART_HEIGHT = 460, 240


@dataclass(frozen=True)
class Segment:
    """Text of one round: what the draft gave and was kept, then what the target added."""

    label: str
    shade: int
    draft: str
    target: str


@dataclass(frozen=True)
class TableRow:
    """One mode. Lengths count the bonus; `slots` are conditional acceptance rates (bonus not counted)."""

    mode: str
    n: int
    tokens_per_s: str
    decode_tokens_per_s: str
    speedup: str
    decode_speedup: str
    macro: str
    micro: str
    macro_without_loops: str
    slots: list[str]


def number(value: float | None, digits: int = 2) -> str:
    """A figure as shown everywhere; a figure over nothing is a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def table_rows(comparison: Comparison) -> list[TableRow]:
    """The demo's table, shared by the terminal and the page. Plain decoding first."""
    width = max(mode.n for mode in comparison.modes)
    rows = []
    for mode in comparison.modes:
        acceptance = comparison.acceptance(mode)
        rates = [number(slot.rate) for slot in acceptance.conditional]
        rows.append(
            TableRow(
                mode=mode.name,
                n=mode.n,
                tokens_per_s=number(comparison.tokens_per_second(mode), 1),
                decode_tokens_per_s=number(comparison.tokens_per_second(mode, decode_only=True), 1),
                speedup="1 (baseline)" if mode == PLAIN else str(comparison.speedup(mode)),
                decode_speedup="1" if mode == PLAIN else str(comparison.speedup(mode, decode_only=True)),
                macro=number(acceptance.macro_length),
                micro=number(acceptance.micro_length),
                macro_without_loops=number(acceptance.macro_length_without_loops),
                slots=rates + [""] * (width - len(rates)),
            )
        )
    return rows


def segments(run: Run, tokenizer: Any, n: int) -> list[Segment]:
    """An answer cut into its rounds. Joined, the segments' texts are the answer's text."""
    pieces = token_pieces(tokenizer, run.output_ids)
    out = []
    for round_number, members in spans(run):
        by_owner = {
            owner: "".join(pieces[index] for index, who in members if who == owner) for owner in ("draft", "target")
        }
        if round_number is None:
            label = "prompt pass: the target's first token"
        else:
            one = run.rounds[round_number - 1]
            label = f"round {round_number}: {one.accepted} of {one.scheduled} draft tokens accepted"
            if one.scheduled < n:
                label += f" ({one.proposed} proposed)"
        out.append(Segment(label, (round_number or 0) % 2, by_owner["draft"], by_owner["target"]))
    return out


def render_page(
    comparison: Comparison, tokenizer: Any, *, title: str, settings: Mapping[str, str], machine: Mapping[str, str]
) -> str:
    """The whole page as text. settings, machine: label -> value, printed as given (escaped)."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = jinja2.StrictUndefined
    template = environment.from_string(files("dspark").joinpath("assets", TEMPLATE).read_text(encoding="utf-8"))
    drafted = [mode for mode in comparison.modes if mode.n]
    return template.render(
        title=title,
        rows=table_rows(comparison),
        slots=max(mode.n for mode in comparison.modes),
        lossless=comparison.lossless,
        differences=[str(difference) for difference in comparison.differences],
        best=_best(comparison, drafted),
        questions=len(comparison.questions),
        speed_chart=_speed_chart(comparison),
        slot_chart=_slot_chart(comparison, drafted) if drafted else None,
        modes=[{"name": mode.name, "key": f"m{index}", "n": mode.n} for index, mode in enumerate(drafted)],
        prompts=[_prompt_view(comparison, index, drafted, tokenizer) for index in range(len(comparison.questions))],
        settings=settings,
        machine=machine,
        width=CHART_WIDTH,
        height=CHART_HEIGHT,
    )


def write_page(path: Path, html: str) -> Path:
    """Write atomically: a reader sees the old page or the whole new one. Raises DsparkError if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise DsparkError("out", str(path), f"cannot be written here ({error.strerror})") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(html)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise DsparkError("out", str(path), f"cannot be written ({error.strerror})") from error
        raise
    return path


def _best(comparison: Comparison, drafted: list[Mode]) -> dict[str, str] | None:
    """The fastest drafting mode, for the headline. A loss is shown as one (it reads 0.9x)."""
    if not drafted:
        return None
    fastest = max(drafted, key=lambda mode: comparison.speedup(mode).value)
    return {
        "mode": fastest.name,
        "speedup": f"{comparison.speedup(fastest).value:.2f}x",
        "length": number(comparison.acceptance(fastest).macro_length),
    }


def _prompt_view(comparison: Comparison, index: int, drafted: list[Mode], tokenizer: Any) -> dict[str, Any]:
    question = comparison.questions[index]
    plain = comparison.runs[PLAIN.name][index]
    answers = []
    for position, mode in enumerate(drafted):
        run = comparison.runs[mode.name][index]
        answers.append(
            {
                "key": f"m{position}",
                "mode": mode.name,
                "length": number(acceptance_length(run.rounds)),
                "rounds": len(run.rounds),
                "tokens": len(run.output_ids),
                "speedup": f"{plain.end_to_end.seconds / run.end_to_end.seconds:.2f}x",
                "same": run.output_ids == plain.output_ids,
                "segments": segments(run, tokenizer, mode.n),
            }
        )
    return {
        "id": question.id,
        "text": question.text,
        "looping": plain.looping,
        "finish": plain.finish_reason,
        "answers": answers,
    }


def _speed_chart(comparison: Comparison) -> list[dict[str, Any]]:
    """Bars of end-to-end tokens / s; the whisker is the speedup's interval times the plain speed."""
    base = comparison.tokens_per_second(PLAIN) or 0.0
    bars: list[dict[str, Any]] = []
    for mode in comparison.modes:
        interval = Interval(1.0, None, None) if mode == PLAIN else comparison.speedup(mode)
        speeds = [base * edge if edge is not None else None for edge in (interval.low, interval.high)]
        bars.append({"mode": mode, "speed": base * interval.value, "low": speeds[0], "high": speeds[1]})
    left, right, top, step = 64, 70, 24, (CHART_HEIGHT - 24) / len(bars)
    largest = max(max(bar["speed"], bar["high"] or 0.0) for bar in bars) or 1.0
    scale = (CHART_WIDTH - left - right) / largest
    for index, bar in enumerate(bars):
        ends = [left + value * scale if value is not None else None for value in (bar["low"], bar["high"])]
        bar.update(
            label=bar["mode"].name,
            x=left,
            y=round(top + index * step, 1),
            height=round(step * 0.6, 1),
            middle=round(top + index * step + step * 0.3, 1),
            width=round(bar["speed"] * scale, 1),
            low=ends[0] and round(ends[0], 1),
            high=ends[1] and round(ends[1], 1),
            value=number(bar["speed"], 1),
            colour=index,
            text_x=round(max(left + bar["speed"] * scale, ends[1] or 0.0) + 8, 1),
        )
    return bars


def _slot_chart(comparison: Comparison, drafted: list[Mode]) -> dict[str, Any]:
    """Conditional acceptance against the slot, one line per mode; y runs from 0 to 1."""
    left, right, top, bottom = 40, 16, 24, 50
    slots = max(mode.n for mode in drafted)
    step = (CHART_WIDTH - left - right) / max(slots, 1)

    def x(slot: int) -> float:
        return round(left + (slot - 0.5) * step, 1)

    def y(rate: float) -> float:
        return round(top + (1 - rate) * (CHART_HEIGHT - top - bottom), 1)

    lines = []
    for index, mode in enumerate(drafted):
        points = [
            {
                "x": x(slot.slot),
                "y": y(slot.rate),
                "title": f"{mode.name}, slot {slot.slot}: {slot.accepted} of {slot.verified} = {slot.rate:.2f}",
            }
            for slot in comparison.acceptance(mode).conditional
            if slot.rate is not None
        ]
        path = " ".join(f"{point['x']},{point['y']}" for point in points)
        lines.append({"label": mode.name, "colour": index + 1, "points": points, "path": path})
    ticks = [{"y": y(value / 4), "label": f"{value / 4:.2f}"} for value in range(5)]
    return {"lines": lines, "ticks": ticks, "slots": [{"x": x(k), "label": k} for k in range(1, slots + 1)], "x": left}
