"""Synthetic reports as `dspark bench` writes them: every field filled, figures that belong together."""

from __future__ import annotations

import random
from typing import Any

from dspark.bench.figures import changes, macro_over_buckets, overall
from dspark.bench.report import (
    Acceptance,
    Answer,
    Column,
    DepthBucket,
    Drafter,
    LengthBucket,
    MissingSuite,
    Piece,
    Ratio,
    Rendered,
    Report,
    Slot,
    Speed,
    Spread,
    SuiteReport,
)

BUCKETS = [("0-1K", 0, 1024), ("1-2K", 1024, 2048), ("2-4K", 2048, 4096), ("4-8K", 4096, 8192)]
BUCKETS += [("8-16K", 8192, 16384), ("16-32K", 16384, 32768)]
AIME = [(13, 192, 885, 3.1310), (5, 1359, 1828, 2.5773), (6, 2210, 3732, 2.5632), (4, 5187, 7750, 2.7174)]
AIME += [(0, None, None, None), (0, None, None, None), (2, 54545, 224703, 4.9194)]
RULER = {"MK": 4.4658, "MV": 4.3081, "QA": 3.9919}
SUITES = ("GSM8K", "MATH500", "AIME26", "HumanEval", "ruler-v2")
HOSTILE = "</script><script>alert('x')</script> <b>bold</b> | pipe & \"quotes\" 🙂\nsecond line"


def make_drafters(count: int = 2) -> list[Drafter]:
    """Plain decoding, then DSpark at n = 3 and 7, and others."""
    named = [("DSpark n = 3", "dspark", 3), ("DSpark n = 7", "dspark", 7), ("DFlash n = 3", "dflash", 3)]
    named += [("DFlash n = 7", "dflash", 7), ("EAGLE-3 n = 3", "eagle3", 3), ("EAGLE-3 n = 7", "eagle3", 7)]
    named += [("EAGLE-3 MLA n = 3", "eagle3-mla", 3), ("EAGLE-3 MLA n = 7", "eagle3-mla", 7)]
    named += [("mine, long name n = 5", "dspark", 5), ("other n = 5", "dspark", 5)]
    made = [
        Drafter(
            name=name,
            kind=kind,
            n=n,
            draft="runs/draft",
            weights_sha256="ab" * 32,
            parameters=2249289601,
            trained_on=True,
        )
        for name, kind, n in named[:count]
    ]
    return [Drafter(name="plain", kind="plain", n=0), *made]


def length_buckets(rows: list[tuple[Any, ...]] = AIME, shift: float = 0.0) -> list[LengthBucket]:
    """The published table's buckets: (questions, shortest, longest, acc_len)."""
    spans = [*BUCKETS, ("32K+", 32768, None)]
    return [
        LengthBucket(
            label=label,
            low=low,
            high=high,
            questions=n,
            shortest=shortest,
            longest=longest,
            macro_length=None if value is None else value + shift,
        )
        for (label, low, high), (n, shortest, longest, value) in zip(spans, rows, strict=True)
    ]


def make_acceptance(n: int, rate: float, suite: str) -> Acceptance:
    """Rounds whose slots are each accepted with about `rate`, falling a little from slot to slot."""
    left, counts, slots = 2000, [0] * (n + 1), []
    for k in range(1, n + 1):
        taken = int(left * rate * 0.97**k)
        slots.append(Slot(slot=k, accepted=taken, verified=left, rate=taken / left if left else None))
        counts[k - 1], left = left - taken, taken
    counts[n] = left
    micro = 1 + sum(k * count for k, count in enumerate(counts)) / sum(counts)
    buckets = length_buckets(shift=rate - 0.7)
    macro = macro_over_buckets(buckets)
    parts = RULER if suite == "ruler-v2" else {}
    return Acceptance(
        source="replay",
        questions=30,
        requests=30,
        looping=2,
        rounds=sum(counts),
        unscheduled_rounds=1,
        macro_length=macro,
        micro_length=micro,
        completion_per_round=micro + 0.02,
        macro_length_without_loops=(macro or 0) - 0.2,
        micro_length_without_loops=micro - 0.1,
        completion_per_round_without_loops=micro - 0.08,
        histogram=counts,
        conditional=slots,
        by_output_length=buckets,
        by_context_depth=[
            DepthBucket(label="0-512", low=0, high=512, rounds=1500, micro_length=micro + 0.1),
            DepthBucket(label="512-1K", low=512, high=1024, rounds=500, micro_length=micro - 0.3),
            DepthBucket(label="1-2K", low=1024, high=2048, rounds=0, micro_length=None),
        ],
        partitions=dict(parts),
        partition_questions=dict.fromkeys(parts, 10),
    )


def make_speed(ratio: float | None, batch: int = 1) -> Speed:
    """A speed `ratio` times the baseline's 40 tokens/s; None: the baseline's own."""
    spread = Spread(mean=0.0251, p50=0.024, p99=0.051)
    factor = 1.0 if ratio is None else ratio
    return Speed(
        batch=batch,
        questions=30,
        requests=30,
        tokens=30000,
        tokens_per_s=40 * factor,
        decode_tokens_per_s=42 * factor,
        speedup=ratio and Ratio(value=ratio, low=ratio * 0.93, high=ratio * 1.08),
        decode_speedup=ratio and Ratio(value=ratio * 1.03, low=ratio * 0.95, high=ratio * 1.1),
        first_token=Spread(mean=0.2, p50=0.19, p99=0.31),
        time_per_token=spread,
        inter_token=spread,
        latency=Spread(mean=2.5, p50=2.4, p99=5.1),
        draft_seconds=None if ratio is None else 0.0042,
        verify_seconds=0.0251,
        engine_share=0.012,
        bench_share=0.003,
    )


def make_suite(name: str, drafters: list[Drafter], seed: int = 0) -> SuiteReport:
    """One suite with a column for every drafter; the first suite of a report shows a loss for narrow drafts."""
    draw = random.Random(f"{name}{seed}")
    columns = {}
    for index, drafter in enumerate(drafters):
        if drafter.kind == "plain":
            columns[drafter.name] = Column(speed=[make_speed(None), make_speed(None, 4)])
            continue
        rate = 0.85 - 0.03 * index + draw.uniform(-0.05, 0.05)
        gain = 0.7 + rate + 0.08 * (drafter.n or 0) * draw.uniform(0.6, 1.2)
        columns[drafter.name] = Column(
            acceptance=make_acceptance(drafter.n or 0, rate, name),
            speed=[make_speed(gain if name != "GSM8K" else 0.91 * gain / 1.8), make_speed(gain * 0.8, 4)],
        )
    return SuiteReport(
        name=name,
        source=f"{name} test set, 30 of them by seed 0",
        prompts_sha256=name.encode().hex().ljust(64, "0"),
        questions=30,
        speed_questions=30,
        shortest_prompt=1000432 if name == "ruler-v2" else 40,
        longest_prompt=1047925 if name == "ruler-v2" else 700,
        looping=2,
        replay_checked=30,
        columns=columns,
    )


def make_answer(drafter: str, prompt: str = "What is 12 * 3?", suite: str = "GSM8K") -> Answer:
    """An answer of three rounds; the texts of its pieces are hostile on purpose."""
    texts = [("12", 0, "target"), (" times </div>", 1, "draft"), (" 3", 1, "target"), (" is <script>", 2, "draft")]
    texts += [(" 36", 2, "target"), (".\n", 3, "target")]
    pieces = [
        Piece(text=text, round=number, owner=owner, accepted=2 if number < 3 else 0, scheduled=3)  # type: ignore[arg-type]
        for text, number, owner in texts
    ]
    return Answer(suite=suite, question=f"{suite}/0", drafter=drafter, prompt=prompt, pieces=pieces, length=2.33)


def add_peers(report: Report) -> None:
    """Transformers alone, and with the first draft: timed alone at batch 1, faster than anything here."""
    own = report.drafters[1]
    plain = Drafter(name="plain in Transformers", kind="transformers", n=0)
    drafter = own.model_copy(update={"name": f"{own.name} in Transformers", "kind": "transformers-dflash"})
    report.drafters += [plain, drafter]
    for suite in report.suites:
        for name, speedup in ((plain.name, 0.8), (drafter.name, 9.0)):
            speed = make_speed(speedup)
            speed.inter_token = None
            suite.columns[name] = Column(speed=[speed], compared=5)
        served = make_acceptance(own.n or 0, 0.99, suite.name)
        served.source, served.questions = "served", 5
        suite.columns[drafter.name].acceptance = served
        suite.columns[drafter.name].replay_checked = 5
    means = overall(report.suites, report.drafters, report.baseline)
    report.overall = [
        one.model_copy(update={"mean_macro_length": None}) if one.drafter == drafter.name else one for one in means
    ]


def make_report(drafters: int = 2, suites: tuple[str, ...] = SUITES, **fields: Any) -> Report:
    """A whole run in process. fields: of the report, as they shall be instead."""
    columns = make_drafters(drafters)
    made = [make_suite(name, columns) for name in suites]
    means = overall(made, columns, "plain")
    values: dict[str, Any] = {
        "created": "2026-01-02T03:04:05Z",
        "dspark": "0.1.0",
        "kind": "in process",
        "target": "SmolLM2-135M-Instruct",
        "settings": {"max_tokens": 512, "sampling": "greedy", "batches": [1, 4], "threads": 2},
        "machine": {"processor": "a processor, 2 cores", "torch threads": "2", "python": "3.11.7", "torch": "2.13.0"},
        "drafters": columns,
        "suites": made,
        "missing": [MissingSuite(name="LiveCodeBench", reason="not on this disk | give --data")],
        "overall": means,
        "changes": changes(columns, means),
        "rendered": Rendered(suite="GSM8K", question="GSM8K/0", tokens=21, text="<|im_start|>user\n```\nWhat?\n"),
        "answers": [make_answer(one.name, HOSTILE) for one in columns[1:3]],
        "notes": ["the p99 of 30 requests is their largest"],
    }
    return Report(**{**values, **fields})
