"""What the doctor shows: a table of findings, the forecast, a verdict."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dspark.doctor.diagnose import Diagnosis
from dspark.doctor.forecast import Forecast
from dspark.machine import describe_machine

_STYLES = {"ok": "green", "note": "cyan", "loses": "yellow", "broken": "bold red", "skipped": "dim"}
_VERDICT = ("bold green", "bold yellow", "bold red")
_ALWAYS = ("acceptance",)
"""Shown also when they are as they should be."""


def show(console: Console, found: Diagnosis, every: bool = False) -> None:
    """Print a diagnosis; every: also the findings that are as they should be."""
    settings = found.settings
    machine = describe_machine()
    console.print(f"target {settings.target}, draft {settings.draft}", style="bold", markup=False, soft_wrap=True)
    console.print(", ".join(f"{name} {machine[name]}" for name in ("processor", "dspark", "torch")), style="dim")
    shown = [one for one in found.findings if every or one.level != "ok" or one.check in _ALWAYS]
    table = Table("check", "", "finding", box=None, padding=(0, 1))
    for one in shown:
        table.add_row(one.check, Text(one.level, style=_STYLES[one.level]), Text(one.text))
    if shown:
        console.print(table)
    hidden = len(found.findings) - len(shown)
    if hidden:
        console.print(f"{hidden} more as they should be (--all shows them)", style="dim")
    if found.forecast is not None:
        console.print(_forecast_table(found.forecast))
    console.print(Text(found.verdict, style=_VERDICT[found.code]), soft_wrap=True)


def _forecast_table(forecast: Forecast) -> Table:
    costs = forecast.costs
    title = f"forecast for {costs.engine}, {costs.source}: T(1) = {costs.plain * 1000:.1f} ms"
    table = Table("n", "length, macro, 95 %", "tokens a round", "break-even", "speedup, 95 %", title=title)
    best = forecast.best.n
    for one in forecast.rows:
        style = "bold" if one.n == best else ""
        cells = str(one.n), str(one.length), f"{one.tokens:.2f}", f"{one.cost:.2f}", str(one.speedup)
        table.add_row(*cells, style=style)
    table.caption = "length and tokens: bonus counted; break-even: seconds of a round / T(1)"
    return table
