"""What a report says about the output itself: whether it stayed plain decoding's, what failed, what is known of the
prompts. For Markdown, the page and the gate alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark.bench.report import Report
from dspark.bench.tables import drafting


@dataclass(frozen=True)
class Verdict:
    """same: every compared answer has plain decoding's ids; ties: but for the target's own ties; different: they
    differ, or a replay left its served rounds; unchecked: nothing was compared."""

    kind: Literal["same", "ties", "different", "unchecked"]
    headline: str
    detail: str


def verdict(report: Report) -> Verdict:
    """Whether the target's output stayed the same, in words that claim no more than was compared."""
    found, ties = len(differences(report)), sum(len(suite.ties) for suite in report.suites)
    faults = len(replay_faults(report))
    if found and report.kind == "live":
        detail = (
            f"{_count(found, 'answer')} of the endpoint's not the baseline's: a loss or a tie, not told from outside"
        )
        return Verdict("different", "Answers differ", detail)
    if found or faults:
        detail = f"{_count(found, 'difference')} from plain decoding, {_count(faults, 'fault')} of the replay"
        return Verdict("different", "NOT LOSSLESS", detail)
    if not compared(report):
        return Verdict("unchecked", "Not compared", "no answer was set beside plain decoding's")
    if report.kind == "live":
        detail = "no difference between the answers that the engines gave and the baseline's that is no tie"
        return Verdict("ties" if ties else "same", "No difference found", detail)
    if ties:
        return Verdict("ties", "Same tokens, up to ties", f"{_count(ties, 'tie')} of the target itself")
    return Verdict("same", "Same tokens", "every served answer equals plain decoding's, id by id")


def compared(report: Report) -> bool:
    """Whether some drafter's own answers were there to be set beside a baseline's."""
    if report.baseline is None:
        return False
    columns = [suite.columns.get(one.name) for suite in report.suites for one in drafting(report)]
    return any(
        column is not None
        and (column.speed or (column.acceptance is not None and column.acceptance.source == "served"))
        for column in columns
    )


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def differences_title(report: Report) -> str:
    """What `differences` are: of live engines nobody can tell whether one is a tie."""
    return "Answers that differ" if report.kind == "live" else "Not lossless"


def differences(report: Report) -> list[str]:
    """Differences from plain decoding that are no ties; of live engines, all from the baseline's answers."""
    return [f"{suite.name}: {line}" for suite in report.suites for line in suite.not_lossless]


def replay_faults(report: Report) -> list[str]:
    """Rounds in which the replay left the served ones without a tie."""
    return [f"{suite.name}: {line}" for suite in report.suites for line in suite.replay_faults]


def all_ties(report: Report) -> list[str]:
    """Ties of served answers and of the replay."""
    return [
        f"{suite.name}: {line}"
        for suite in report.suites
        for line in (*suite.ties, *(f"replay: {tie}" for tie in suite.replay_ties))
    ]


def replay_line(report: Report) -> str:
    """How many served requests the replay was set beside, and what came out."""
    checked = sum(suite.replay_checked for suite in report.suites)
    if not checked:
        return "no replay was set beside served rounds"
    ties = sum(len(suite.replay_ties) for suite in report.suites)
    return (
        f"the replay was set beside the served rounds of {_count(checked, 'request')}: "
        f"{_count(ties, 'tie')}, {_count(len(replay_faults(report)), 'fault')}"
    )


def failures(report: Report) -> list[str]:
    """Requests that ended in an error (in no figure, never repeated), and what a column notes of itself."""
    lines = []
    for suite in report.suites:
        for name, column in suite.columns.items():
            failed = max([column.failed, *(speed.failed for speed in column.speed)])
            if failed:
                lines.append(f"{suite.name}, {name}: {_count(failed, 'request')} failed; the figures are over the rest")
            if column.note:
                lines.append(f"{suite.name}, {name}: {column.note}")
    return lines


def training_lines(report: Report) -> list[str]:
    """What is known about prompts that the drafts were trained on."""
    lines = []
    for suite in report.suites:
        if suite.flagged and not suite.apart:
            known = f"{_count(len(suite.flagged), 'prompt')} in a draft's training set, reported apart and in no mean"
            lines.append(f"{suite.name}: {known} ({_some(suite.flagged)})")
        elif suite.apart:
            lines.append(f"{suite.name}: apart, in no mean; {_count(suite.questions, 'question')}")
    for drafter in drafting(report):
        if drafter.trained_on is False:
            lines.append(
                f"{drafter.name}: its draft does not list the prompts it was trained on, so they are not known"
            )
    return lines or ["no prompt of these suites is in the training set of a draft that lists it"]


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")
