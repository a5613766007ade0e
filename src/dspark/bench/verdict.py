"""What a report says about the output itself: whether it stayed plain decoding's, what failed, what is known of the
prompts. For Markdown, the page and the gate alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dspark.bench.report import Drafter, Report
from dspark.bench.tables import (
    at_batch,
    contestants,
    counted_suites,
    drafting,
    mean_batch,
    number,
    overall_of,
    times,
)


@dataclass(frozen=True)
class Verdict:
    """same: every compared answer has plain decoding's ids; ties: but for the target's own ties; different: they
    differ, or a replay left its served rounds; unchecked: nothing was compared."""

    kind: Literal["same", "ties", "different", "unchecked"]
    headline: str
    detail: str


@dataclass(frozen=True)
class Headline:
    """A figure and what it is. tone: good, bad or neither."""

    figure: str
    said: str
    tone: str = ""


def headlines(report: Report) -> list[Headline]:
    """In short: the output, the fastest drafter, the longest acceptance, how much was asked. Columns of other engines
    win nothing, nor do acceptance lengths over a part of the questions."""
    found = verdict(report)
    tone = {"same": "good", "ties": "good", "different": "bad", "unchecked": ""}[found.kind]
    cards = [Headline(found.headline, found.detail, tone)]
    means = [(one.name, mean) for one in contestants(report) if (mean := overall_of(report, one.name)) is not None]
    speeds = [(mean.mean_speedup, name) for name, mean in means if mean.mean_speedup is not None]
    if speeds:
        best, name = max(speeds)
        loss = ": slower than plain decoding" if best < 1 else ""
        place = at_batch(mean_batch(report, name))
        among = f", the fastest of {len(speeds)}" if len(speeds) > 1 else ""
        said = f"mean speedup of {name}, end to end, {place}{among}{loss}"
        cards.append(Headline(times(best), said, "bad" if best < 1 else ""))
    lengths = [
        (mean.mean_macro_length, name)
        for name, mean in means
        if mean.mean_macro_length is not None and _covers(report, name)
    ]
    if lengths:
        best, name = max(lengths)
        cards.append(Headline(number(best), f"tokens a target pass with {name}: mean acc_len, bonus counted"))
    suites = counted_suites(report)
    missing = f"; {len(report.missing)} more could not be had" if report.missing else ""
    said = f"questions of {len(suites)} suite{'' if len(suites) == 1 else 's'}{missing}"
    return [*cards, Headline(f"{sum(suite.questions for suite in suites):,}", said)]


def _covers(report: Report, drafter: str) -> bool:
    """Whether a drafter's acceptance is over every question of the suites that count."""
    for suite in counted_suites(report):
        column = suite.columns.get(drafter)
        if column is None or column.acceptance is None or column.acceptance.questions < suite.questions:
            return False
    return True


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
    asked = answers_compared(report)
    among = f", among {_count(asked, 'answer')} compared" if asked else ""
    if report.kind == "live":
        detail = "no difference between the answers that the engines gave and the baseline's that is no tie" + among
        return Verdict("ties" if ties else "same", "No difference found", detail)
    if ties:
        return Verdict("ties", "Same tokens, up to ties", f"{_count(ties, 'tie')} of the target itself{among}")
    if asked:
        whole = "each equal" if asked > 1 else "equal"
        detail = f"{_count(asked, 'served answer')} compared, {whole} to plain decoding's, id by id"
        return Verdict("same", "Same tokens", detail)
    return Verdict("same", "Same tokens", "every served answer equals plain decoding's, id by id")


def answers_compared(report: Report) -> int:
    """Served answers whose ids were set beside plain decoding's; 0 where the report does not tell."""
    names = {one.name for one in drafting(report)}
    return sum(one.compared for suite in report.suites for name, one in suite.columns.items() if name in names)


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


def cross_check(report: Report) -> list[str]:
    """Drafts that Transformers decoded with, too: on how many requests its rounds were ours, and where not."""
    lines = []
    for drafter in drafting(report):
        if drafter.kind != "transformers-dflash":
            continue
        columns = [suite.columns.get(drafter.name) for suite in report.suites]
        checked = sum(column.replay_checked for column in columns if column is not None)
        parted = [line for line in _partings(report) if f", {drafter.name}, round " in line]
        if checked:
            equal = checked - len(parted)
            said = f"rounds equal ours on {equal:,} of {_count(checked, 'timed request')}"
        else:
            said = "no rounds of its were set beside ours"
        lines += [f"{drafter.name}: {said}", *parted]
    return lines


def _partings(report: Report) -> list[str]:
    return [f"{suite.name}: {line}" for suite in report.suites for line in (*suite.replay_faults, *suite.replay_ties)]


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
    drafters = contestants(report)
    lines += [f"{one.name}: {_unknown(report, one)}" for one in drafters if report.kind == "live" or not one.trained_on]
    if drafters and not lines:
        return ["no prompt of these suites is in a training set: every draft lists its own"]
    return lines


def _unknown(report: Report, drafter: Drafter) -> str:
    """Why nobody here knows the prompts that a draft was trained on."""
    if report.kind == "live" or drafter.kind == "endpoint":
        return "not known here: a server does not list its draft's prompts"
    if drafter.trained_on is None:
        return "not known here: the report does not tell whether its draft lists its prompts"
    return "its draft does not list the prompts it was trained on, so they are not known"


def _some(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")
