"""Reliability diagrams: what the confidence head promised against what happened, as one PNG and one page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from dspark.calibration.stored import Calibration, Measured, slots
from dspark.calibration.temperature import SlotFigures
from dspark.data.prompts import write_text

STYLE = "body{font:15px sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse}"
STYLE += "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ccc}img{max-width:100%}"


def reliability_png(before: Sequence[SlotFigures], after: Sequence[SlotFigures]) -> bytes:
    """A panel a slot: share of rounds that accepted slots 1..k against the mean predicted survival, by bin, raw and
    scaled; a mark's area is the bin's share of the rounds."""
    figure = Figure(figsize=(2.6 * len(before), 3.1), layout="constrained")
    panels = figure.subplots(1, len(before), sharey=True, squeeze=False)[0]
    for panel, raw, scaled in zip(panels, before, after, strict=True):
        panel.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for one, colour, label in ((raw, "tab:orange", "raw"), (scaled, "tab:blue", "scaled")):
            full = [(count, x, y) for count, x, y in one.bins if count]
            areas = [4 + 300 * count / max(one.rounds, 1) for count, _, _ in full]
            panel.plot([x for _, x, _ in full], [y for _, _, y in full], color=colour, linewidth=1)
            panel.scatter([x for _, x, _ in full], [y for _, _, y in full], s=areas, color=colour, alpha=0.5)
            panel.plot([], [], color=colour, label=f"{label}: ECE {100 * one.error:.1f} %")
        panel.set_title(f"slots 1..{raw.slot}" if raw.slot > 1 else "slot 1", fontsize=10)
        panel.set_xlabel("predicted survival")
        panel.legend(fontsize=7, loc="upper left")
    panels[0].set_ylabel("accepted")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def write_page(folder: Path, calibration: Calibration, pictures: Mapping[str, bytes]) -> list[Path]:
    """Write reliability.html, whole in itself, and reliability.png, the picture of all held-out rounds together.

    pictures: by data set, `all` among them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    png = folder / "reliability.png"
    temporary = png.with_name("." + png.name)
    temporary.write_bytes(pictures["all"])
    temporary.replace(png)
    parts = [f"<h1>Calibration of a draft for {html.escape(calibration.target)}</h1>", _summary(calibration)]
    for name, picture in pictures.items():
        data = base64.b64encode(picture).decode()
        parts.append(f"<h2>{html.escape(name)}</h2><img alt='reliability' src='data:image/png;base64,{data}'>")
    text = f"<!doctype html><meta charset='utf-8'><title>Calibration</title><style>{STYLE}</style>" + "\n".join(parts)
    write_text(folder / "reliability.html", text)
    return [png, folder / "reliability.html"]


def _summary(calibration: Calibration) -> str:
    rows = "".join(_row(name, one) for name, one in calibration.measured.items())
    return (
        f"<p>Temperatures of slots 1, 2, ...: {slots(calibration.temperatures, '.2f', 1)}, fitted on "
        f"{calibration.rounds:,} greedy rounds of {calibration.prompts:,} prompts of "
        f"{html.escape(', '.join(calibration.datasets))}. Everything below is of prompts that they were not fitted "
        "on. ECE: 15 bins of the cumulative product, in percent, with a 95 % bootstrap interval over prompts.</p>"
        "<table><tr><th>prompts of</th><th>rounds</th><th>ECE raw, by slot</th><th>by temperatures alone</th>"
        "<th>scaled, with offsets</th>"
        f"<th>interval of the worst slot</th><th>ROC-AUC</th></tr>{rows}</table>"
    )


def _row(name: str, one: Measured) -> str:
    worst = max(range(len(one.ece_after)), key=lambda slot: one.ece_after[slot])
    interval = f"{100 * one.ece_after_low[worst]:.1f} to {100 * one.ece_after_high[worst]:.1f}"
    errors = (slots(one.ece_before), slots(one.ece_temperatures), slots(one.ece_after))
    cells = (name, f"{one.rounds:,}", *errors, interval, slots(one.auc, ".2f", 1))
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
