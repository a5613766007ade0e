"""The tables of a report, for Markdown, the page and the terminal alike: every cell is text as it is shown.

A figure over nothing is a dash. Lengths count the bonus; which mean each is stands in its column's head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dspark.bench.figures import partition_mean
from dspark.bench.report import (
    Acceptance,
    Change,
    Column,
    Drafter,
    LengthBucket,
    Overall,
    Ratio,
    Report,
    Slot,
    Speed,
    Spread,
    SuiteReport,
)

DASH = "—"
PEERS = frozenset({"transformers", "transformers-dflash"})
"""Kinds that our engine does not run: they are shown beside the drafters and win nothing."""
FEW = 10
"""Under so many rounds a share is shown with its counts."""
LENGTHS = (
    "acc_len: accepted draft tokens + 1 (bonus counted), mean within each question, then equally over questions "
    "(macro). micro: 1 + accepted / rounds over all rounds. completion / round: output tokens / rounds, which counts "
    "the prompt pass's token and loses what a stop cut off; it is no acceptance length. without loops: over the "
    "answers that do not end in a loop."
)
SLOTS = (
    "Slot k: of the rounds in which drafts 1 to k-1 were accepted and k was verified, the share that accepted k (bonus "
    "not counted). Under 10 verified rounds, their counts in brackets."
)


@dataclass(frozen=True)
class Table:
    """The first `labels` columns are words, the others figures or dashes. note: what the columns mean."""

    title: str
    header: list[str]
    rows: list[list[str]]
    labels: int = 1
    note: str = ""


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or the dash."""
    return DASH if value is None else f"{value:,.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    """Seconds shown in ms; what is under 10 ms keeps two digits."""
    return DASH if seconds is None else number(1000 * seconds, 2 if seconds < 0.01 else 1)


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one, in percent."""
    return DASH if share is None else f"{100 * share:.{digits}f}%"


def change(value: float | None) -> str:
    """A relative change with its sign, as the published table has it."""
    return DASH if value is None else f"{100 * value:+.1f}%"


def times(value: float | None) -> str:
    """A speedup; below 1 it is a loss and reads so."""
    return DASH if value is None else f"{value:.2f}x"


def ratio(value: Ratio | None) -> str:
    """A speedup with its interval over prompts, where there is one."""
    if value is None:
        return DASH
    if value.low is None or value.high is None:
        return times(value.value)
    return f"{value.value:.2f}x ({value.low:.2f}–{value.high:.2f})"


def is_baseline(report: Report, drafter: Drafter) -> bool:
    """Whether it is what the others are compared with: plain decoding, or the baseline endpoint."""
    return drafter.kind == "plain" or drafter.name == report.baseline


def drafting(report: Report) -> list[Drafter]:
    """Every drafter but the baseline, in the report's order."""
    return [drafter for drafter in report.drafters if not is_baseline(report, drafter)]


def is_peer(drafter: Drafter) -> bool:
    """Whether another engine runs it, for comparison."""
    return drafter.kind in PEERS


def contestants(report: Report) -> list[Drafter]:
    """The drafters that are measured: neither the baseline nor peers."""
    return [drafter for drafter in drafting(report) if not is_peer(drafter)]


def counted_suites(report: Report) -> list[SuiteReport]:
    """The suites that the means are taken over."""
    return [suite for suite in report.suites if not suite.apart]


def first_speed(column: Column | None) -> Speed | None:
    """A column's speed at the smallest batch, the one that the means are taken over."""
    return min(column.speed, key=lambda one: one.batch) if column and column.speed else None


def batch(speed: Speed) -> str:
    """Requests in flight; 0 stands for arrivals at a rate, where no number of them is kept."""
    return str(speed.batch) if speed.batch else "open loop"


def at_batch(size: int | None) -> str:
    """Where a speed was taken, in words: batch 1; None: not the same in every suite."""
    return "the smallest batch" if size is None else f"batch {size}" if size else "open loop"


def mean_batch(report: Report, drafter: str) -> int | None:
    """The batch that a drafter's mean speedup is taken at; None where its suites have no common one."""
    mean = overall_of(report, drafter)
    if mean is not None and mean.batch is not None:
        return mean.batch
    found = {one.batch for suite in counted_suites(report) if (one := first_speed(suite.columns.get(drafter)))}
    return found.pop() if len(found) == 1 else None


def means_at(report: Report) -> str:
    """The batches that the mean speedups stand at, in words."""
    means = [overall_of(report, one.name) for one in drafting(report)]
    said = {at_batch(mean_batch(report, one.drafter)) for one in means if one and one.mean_speedup is not None}
    return " or ".join(sorted(said)) or "the smallest batch"


def overall_of(report: Report, drafter: str) -> Overall | None:
    """The means of one drafter."""
    return next((one for one in report.overall if one.drafter == drafter), None)


def accepted(report: Report, suite: SuiteReport) -> Iterator[tuple[Drafter, Acceptance]]:
    """The drafters with acceptance figures on this suite."""
    for drafter in drafting(report):
        column = suite.columns.get(drafter.name)
        if column is not None and column.acceptance is not None:
            yield drafter, column.acceptance


def mean_tables(report: Report) -> list[Table]:
    """The published speed table, one for every pair of widths, and which draft each is; without two widths, each
    drafter's mean speedup."""
    pairs: dict[tuple[int, int], list[Change]] = {}
    for one in report.changes:
        pairs.setdefault((one.low_n, one.high_n), []).append(one)
    title = f"Mean speedup, {means_at(report)}"
    tables = []
    for (a, b), found in pairs.items():
        header = ["target", "draft", f"n = {a} mean speedup", f"n = {b} mean speedup", f"change from n = {a}"]
        rows = []
        for one in found:
            named = [drafter for drafter in contestants(report) if _family(drafter) == one.draft]
            figures = [times(one.low), times(one.high), change(one.change)]
            rows.append([report.target, one.draft, *figures, "; ".join(dict.fromkeys(map(identity, named))) or DASH])
        tables.append(Table(title, [*header, "checkpoint"], rows, labels=2))
    return tables or [_plain_means(report, title)]


def _plain_means(report: Report, title: str) -> Table:
    rows = []
    for drafter in drafting(report):
        mean = overall_of(report, drafter.name)
        rows.append([report.target, drafter.name, times(mean.mean_speedup if mean else None), identity(drafter)])
    return Table(title, ["target", "draft", "mean speedup", "checkpoint"], rows, labels=2)


def _family(drafter: Drafter) -> str:
    return drafter.name.removesuffix(f" n = {drafter.n}")


def identity(drafter: Drafter) -> str:
    """Which draft it is: where it lies, and its parameters."""
    size = "" if drafter.parameters is None else f"{drafter.parameters:,} parameters"
    return ", ".join(part for part in (drafter.draft, size) if part) or DASH


def overall_table(report: Report) -> Table:
    """Every drafter's means over the suites."""
    rows = []
    for drafter in report.drafters:
        mean = overall_of(report, drafter.name)
        if is_baseline(report, drafter) or mean is None:
            continue
        lengths = (mean.mean_macro_length, mean.mean_macro_length_without_loops)
        rows.append(
            [
                *(drafter.name, _mean_batch(report, mean), times(mean.mean_speedup), times(mean.mean_decode_speedup)),
                *(number(x, 4) for x in lengths),
            ]
        )
    header = ["drafter", "batch", "speedup", "speedup, decode only", "acc_len", "acc_len without loops"]
    return Table("Means over suites", header, rows, note=means_note(report))


def _mean_batch(report: Report, mean: Overall) -> str:
    found = mean_batch(report, mean.drafter)
    return DASH if found is None else str(found) if found else "open loop"


def means_note(report: Report) -> str:
    """Over what the means are taken, and how."""
    named = ", ".join(suite.name for suite in counted_suites(report)) or "no suite"
    return (
        f"The simple unweighted mean over {named}; not weighted by the number of prompts; speedups at "
        f"{means_at(report)}. A dash: one of them lacks the figure."
    )


def speed_table(report: Report, suites: Sequence[SuiteReport] | None = None) -> Table:
    """Tokens/s and speedups with intervals: one line a suite, drafter and batch."""
    rows = []
    for suite in report.suites if suites is None else suites:
        for drafter, speed in _speeds(report, suite):
            base = is_baseline(report, drafter)
            rows.append(
                [
                    *(suite.name, drafter.name, batch(speed), number(speed.tokens_per_s, 1)),
                    "1 (baseline)" if base else ratio(speed.speedup),
                    number(speed.decode_tokens_per_s, 1),
                    "1" if base else ratio(speed.decode_speedup),
                    f"{speed.questions:,}",
                ]
            )
    header = ["suite", "drafter", "batch", "tokens/s", "speedup", "tokens/s, decode", "speedup, decode", "questions"]
    note = "Speedup: tokens/s over the baseline's on the same prompts in the same run, end to end, paired; in brackets "
    return Table("Speed by suite", header, rows, 2, f"{note}{_level(report)} interval over prompts (bootstrap).")


def _level(report: Report) -> str:
    found = {
        speed.speedup.level
        for suite in report.suites
        for column in suite.columns.values()
        for speed in column.speed
        if speed.speedup is not None
    }
    return "the " + (" or ".join(f"{100 * level:g}%" for level in sorted(found)) or "95%")


def _speeds(report: Report, suite: SuiteReport) -> Iterator[tuple[Drafter, Speed]]:
    for drafter in report.drafters:
        column = suite.columns.get(drafter.name)
        for speed in column.speed if column is not None else ():
            yield drafter, speed


def acceptance_table(report: Report, drafter: Drafter) -> Table:
    """The published acceptance table of one drafter, with the other means beside it under their own names."""
    rows = []
    for suite in report.suites:
        column = suite.columns.get(drafter.name)
        if column is None or column.acceptance is None:
            continue
        one = column.acceptance
        rows.append(
            [
                *(suite.name, _questions(one), number(one.macro_length, 4)),
                *(number(x, 4) for x in (one.micro_length, one.completion_per_round)),
                number(one.macro_length_without_loops, 4),
                *(f"{one.looping:,}", f"{one.rounds:,}", one.source),
            ]
        )
    header = ["Dataset", "Questions", "acc_len", "micro", "completion / round", "acc_len without loops"]
    return Table(drafter.name, [*header, "loops", "rounds", "source"], rows)


def _questions(acceptance: Acceptance) -> str:
    """1,319; of a suite with equal partitions: 150 (50 per partition)."""
    parts = set(acceptance.partition_questions.values())
    return f"{acceptance.questions:,}" + (f" ({parts.pop():,} per partition)" if len(parts) == 1 else "")


def partition_lines(report: Report, drafter: Drafter) -> list[str]:
    """What the published table says under itself of a long-context suite: the true span, and each partition."""
    lines = []
    for suite in report.suites:
        column = suite.columns.get(drafter.name)
        if column is None or column.acceptance is None or not column.acceptance.partitions:
            continue
        parts = ", ".join(f"{number(value, 4)} for {name}" for name, value in column.acceptance.partitions.items())
        mean = number(partition_mean(column.acceptance.partitions), 4)
        lines.append(f"{suite.name}: {prompt_span(suite)}; partition acc_len is {parts}; their mean is {mean}.")
    return lines


def prompt_span(suite: SuiteReport) -> str:
    """The prompts' true lengths."""
    if suite.shortest_prompt is None or suite.longest_prompt is None:
        return "the prompts' actual span is not recorded"
    return f"actual prompts span {suite.shortest_prompt:,}–{suite.longest_prompt:,} tokens"


def length_tables(report: Report, suite: SuiteReport) -> list[Table]:
    """acc_len by output length, as published: from the first bucket with questions to the last. Drafters whose answers
    fall into the same buckets share a table."""
    groups: dict[tuple[tuple[object, ...], ...], list[tuple[Drafter, list[LengthBucket]]]] = {}
    for drafter, found in accepted(report, suite):
        buckets = _filled_span(found.by_output_length)
        if buckets:
            key = tuple((one.label, one.questions, one.shortest, one.longest) for one in buckets)
            groups.setdefault(key, []).append((drafter, buckets))
    tables = []
    for members in groups.values():
        rows = []
        for index, bucket in enumerate(members[0][1]):
            lengths = [number(buckets[index].macro_length, 4) for _, buckets in members]
            rows.append([bucket.label, f"{bucket.questions:,}", _range(bucket), *lengths])
        header = ["Output-token bucket", "Questions", "Actual output range", *(drafter.name for drafter, _ in members)]
        tables.append(Table(f"{suite.name}: acc_len by output length", header, rows))
    return tables


def _filled_span(buckets: Sequence[LengthBucket]) -> list[LengthBucket]:
    """Without the empty buckets before the first and behind the last that holds a question."""
    filled = [index for index, one in enumerate(buckets) if one.questions]
    return list(buckets[filled[0] : filled[-1] + 1]) if filled else []


def _range(bucket: LengthBucket) -> str:
    return DASH if bucket.shortest is None or bucket.longest is None else f"{bucket.shortest:,}–{bucket.longest:,}"


def depth_table(report: Report, suite: SuiteReport) -> Table | None:
    """Micro acceptance length by how many tokens lie before a round's anchor, with the rounds in it."""
    found = [(drafter, acceptance.by_context_depth) for drafter, acceptance in accepted(report, suite)]
    labels = {bucket.low: bucket.label for _, buckets in found for bucket in buckets if bucket.rounds}
    if not labels:
        return None
    rows = []
    for drafter, buckets in found:
        known = {one.low: f"{number(one.micro_length)} ({one.rounds:,})" for one in buckets if one.rounds}
        rows.append([drafter.name, *(known.get(low, DASH) for low in sorted(labels))])
    header = ["drafter", *(labels[low] for low in sorted(labels))]
    note = "Micro acceptance length of the rounds whose anchor has so many tokens before it (rounds in brackets)."
    return Table(f"{suite.name}: acceptance length by context depth", header, rows, note=note)


def slot_table(report: Report, suite: SuiteReport) -> Table | None:
    """Conditional acceptance of each slot."""
    found = [(drafter, one.conditional) for drafter, one in accepted(report, suite) if one.conditional]
    width = max((len(slots) for _, slots in found), default=0)
    rows = [[drafter.name, *_filled(map(_slot, slots), width)] for drafter, slots in found]
    header = ["drafter", *(f"slot {k}" for k in range(1, width + 1))]
    return Table(f"{suite.name}: conditional acceptance by slot", header, rows, note=SLOTS) if rows else None


def _slot(slot: Slot) -> str:
    """Its share; of few rounds with the counts it is made of."""
    counts = f" ({slot.accepted}/{slot.verified})" if 0 < slot.verified < FEW else ""
    return number(slot.rate, 3) + counts


def histogram_table(report: Report, suite: SuiteReport) -> Table | None:
    """Rounds by how many draft tokens they accepted."""
    found = [(drafter, one) for drafter, one in accepted(report, suite) if one.histogram]
    width = max((len(one.histogram) for _, one in found), default=0)
    rows = [
        [drafter.name, *_filled((f"{count:,}" for count in one.histogram), width), f"{one.unscheduled_rounds:,}"]
        for drafter, one in found
    ]
    note = "Rounds by accepted draft tokens (bonus not counted); those that verified nothing are among the 0."
    header = ["drafter", *(str(k) for k in range(width)), "nothing verified"]
    return Table(f"{suite.name}: rounds by accepted draft tokens", header, rows, note=note) if rows else None


def _filled(cells: Iterable[str], width: int) -> list[str]:
    made = list(cells)
    return made + [DASH] * (width - len(made))


LATENCY_NOTE = (
    "Milliseconds. Inter-token: the gaps between a request's chunks, more than one token each where a round is; "
    "a token: (last - first) / (tokens - 1) of each request. Outside the models: of the time between a request's first "
    "and last token, what lay outside the draft's and the target's passes; outside the engine: the bench's own part."
)


def latency_table(report: Report, suite: SuiteReport) -> Table | None:
    """Times to the first token, between tokens and end to end; draft and verification of a round; overheads."""
    rows = []
    for drafter, speed in _speeds(report, suite):
        rows.append(
            [
                *(drafter.name, batch(speed)),
                *(_mean_p50_p99(speed.first_token), _inter_token(drafter, speed)),
                *(_mean_p50_p99(x) for x in (speed.time_per_token, speed.latency)),
                *(milliseconds(speed.draft_seconds), milliseconds(speed.verify_seconds)),
                *(percent(speed.engine_share), percent(speed.bench_share)),
            ]
        )
    header = [
        *("drafter", "batch", "first token: mean / p50 / p99", "inter-token: mean / p50 / p99"),
        *("a token: mean / p50 / p99", "end to end: mean / p50 / p99", "draft a round", "verify a round"),
        *("outside the models", "outside the engine"),
    ]
    return Table(f"{suite.name}: latency", header, rows, note=LATENCY_NOTE) if rows else None


def _mean_p50_p99(spread: Spread | None) -> str:
    return DASH if spread is None else " / ".join(milliseconds(x) for x in (spread.mean, spread.p50, spread.p99))


def _inter_token(drafter: Drafter, speed: Speed) -> str:
    """The gaps between chunks, or why there are none."""
    if speed.inter_token is None:
        return f"{DASH} ({'answers are not streamed' if is_peer(drafter) else 'no second chunk'})"
    return _mean_p50_p99(speed.inter_token)


DETAILS: tuple[Callable[[Report, SuiteReport], Table | None], ...] = (
    *(depth_table, slot_table, histogram_table, latency_table),
)


def detail_tables(report: Report, suite: SuiteReport) -> list[Table]:
    """All of one suite's tables beyond speed and acceptance."""
    return [*length_tables(report, suite), *filter(None, (make(report, suite) for make in DETAILS))]


def drafter_table(report: Report) -> Table:
    """What each column is."""
    rows = [
        [
            *(one.name, one.kind, one.draft or DASH, DASH if one.n is None else str(one.n)),
            DASH if one.parameters is None else f"{one.parameters:,}",
            one.weights_sha256[:16] if one.weights_sha256 else DASH,
            {None: DASH, True: "listed", False: "not listed"}[one.trained_on],
        ]
        for one in report.drafters
    ]
    header = ["drafter", "kind", "draft", "n", "parameters", "weights sha256", "training prompts"]
    return Table("Drafters", header, rows, labels=3)


def setting(value: object) -> str:
    """A setting's value in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {setting(one)}" for key, one in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(setting, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def suite_table(report: Report) -> Table:
    """What each suite is, and how its answers compare with plain decoding's."""
    rows = [
        [
            *(one.name, one.source, one.prompts_sha256[:16], f"{one.questions:,}", f"{one.speed_questions:,}"),
            *(f"{one.looping:,}", f"{len(one.ties):,}", f"{len(one.not_lossless):,}"),
            *(f"{one.replay_checked:,}", f"{len(one.replay_ties):,}", f"{len(one.replay_faults):,}"),
        ]
        for one in report.suites
    ]
    header = [
        *("suite", "source", "prompts sha256", "questions", "timed", "looping", "ties", "not lossless"),
        *("replayed", "replay ties", "replay faults"),
    ]
    return Table("Suites", header, rows, labels=3)
