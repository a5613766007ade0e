"""A baseline and an endpoint side by side: whether the two can be compared, whether they say the same, and what their
counters and caches tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.bench.endpoint_metrics import (
    Counters,
    Received,
    ServerChanged,
    added,
    counted_acceptance,
    foreign_traffic,
)
from dspark.bench.report import Acceptance
from dspark.bench.samples import Sample
from dspark.errors import DsparkError

Unit = tuple[str, int, str]
"""(suite, group, drafter): what is asked and kept in one piece."""
BASELINE, ENDPOINT = "baseline", "endpoint"
MUST_AGREE = ("engine", "model", "root", "max_model_len", "version")
MAY_DIFFER = frozenset((
    "reasoning_parser", "attention_backend", "sampling_backend", "chunked_prefill_size", "max_running_requests",
    "mem_fraction_static", "schedule_policy", "disable_cuda_graph", "disable_overlap_schedule",
))  # fmt: skip
"""Settings that an engine itself changes when it speculates, or that change no answer: a difference is a note."""
CACHE_SHARE = 0.05
"""Difference in the prompt tokens that two servers need not read from which on their speeds end to end say nothing."""


def check_same(baseline: Mapping[str, Any], endpoint: Mapping[str, Any]) -> list[str]:
    """Notes on what two servers (`Endpoint.describe`) may differ in. Raises DsparkError naming the field and both
    values where a difference beside speculation would be in every ratio. What one does not tell cannot differ."""
    both = [(name, baseline[name], endpoint[name]) for name in MUST_AGREE]
    settings = baseline["settings"]
    both += [(name, settings[name], value) for name, value in endpoint["settings"].items() if name in settings]
    notes = []
    for name, one, other in both:
        if one == other or (name in MUST_AGREE and None in (one, other)):
            continue
        if name not in MAY_DIFFER:
            remedy = f"the baseline has {one!r}; compare servers that differ in speculation only"
            raise DsparkError(name, other, remedy)
        notes.append(f"{name} differs between the servers: baseline {one!r}, endpoint {other!r}")
    return notes


def facts(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a server says of itself (`Endpoint.describe`) but for its address, one value a name."""
    groups = ("settings", "speculative")
    parts = {f"{group} {name}": value for group in groups for name, value in about[group].items()}
    return {name: about[name] for name in MUST_AGREE} | parts


def check_unchanged(side: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ServerChanged naming what a server says otherwise than when the run began. What it does not tell (once)
    has not changed."""
    then, told = facts(before), facts(now)
    for name, value in then.items():
        if None not in (value, told.get(name)) and told[name] != value:
            remedy = f"was {value!r} when the run began: another server answers at {now['url']}"
            raise ServerChanged(f"{side} {name}", told[name], remedy)


def counted_figures(
    samples: Iterable[Sample], counted: Mapping[Unit, Counters]
) -> tuple[dict[tuple[str, str], Acceptance], list[str]]:
    """(what counters tell by suite and drafter, notes), from what they counted while each group was asked: a gap where
    they tell nothing, and no notes where the answers themselves tell of their rounds."""
    table: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for one in samples:
        table[one.suite, one.drafter].append(one)
    figures: dict[tuple[str, str], Acceptance] = {}
    notes: list[str] = []
    for (suite, name), asked in table.items():
        answered = [one for one in asked if one.error is None]
        covered = [one for one in answered if (suite, one.group, name) in counted]
        if not covered:
            continue
        total = added(counted[suite, group, name].rows() for group in dict.fromkeys(one.group for one in covered))
        tokens, complete = sum(one.output_tokens for one in covered), len(answered) == len(asked)
        received = Received(len({one.question for one in covered}), len(covered), tokens, complete)
        acceptance, said = counted_acceptance(total, received)
        if acceptance is not None:
            figures[suite, name] = acceptance
        if all(one.rounds is not None or one.histogram is not None for one in answered):
            said = foreign_traffic(total, received) if complete else []
        elif len(covered) < len(answered):
            said.append(f"its counters cover {len(covered)} of {len(answered)} answers")
        notes += [f"{suite}, {name}: {text}" for text in said]
    return figures, notes


def cache_notes(samples: Iterable[Sample]) -> list[str]:
    """What the servers' prefix caches did to the speeds, by suite and side. One that is silent beside one that tells is
    taken to have read everything."""
    table: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for one in samples:
        if one.error is None:
            table[one.suite][one.drafter].append(one)
    every = [one for sides in table.values() for found in sides.values() for one in found]
    tell = {one.drafter for one in every if one.cached_tokens is not None}
    notes = [
        f"{name}: the server tells of no prompt tokens from its prefix cache: there were none, or it does not tell "
        "(vLLM does with --enable-prompt-tokens-details, SGLang with --enable-cache-report)"
        for name in sorted({one.drafter for one in every} - tell)
    ]
    for suite, sides in table.items():
        shares = dict[str, float]()
        for name, found in sides.items():
            cached, read = sum(one.cached_tokens or 0 for one in found), sum(one.prompt_tokens for one in found)
            shares[name] = cached / read if read else 0.0
            if cached:
                notes.append(
                    f"{suite}, {name}: {cached} of {read} prompt tokens came from the server's prefix cache, so time "
                    "to first token and end-to-end speed are of warm prompts; turn it off (dspark serve "
                    "--no-prefix-cache, vLLM --no-enable-prefix-caching, SGLang --disable-radix-cache)"
                )
        if len(shares) == 2 and abs(shares[BASELINE] - shares[ENDPOINT]) > CACHE_SHARE:
            notes.append(
                f"{suite}: NOT COMPARABLE END TO END: {shares[BASELINE]:.0%} of the baseline's prompt tokens came from "
                f"its prefix cache and {shares[ENDPOINT]:.0%} of the endpoint's; of the speedups only that of decoding "
                "alone is of the same work"
            )
    return notes


def check_prompt_tokens(samples: Iterable[Sample]) -> None:
    """Both servers must read a question's first turn, the same request, as the same number of tokens. Raises
    DsparkError naming both counts."""
    counts: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for one in samples:
        if one.turn == 0 and one.error is None:
            found = counts[one.suite, one.question]
            found[one.drafter] = one.prompt_tokens
            check_counts(f"{one.suite} {one.question}", found)


def check_counts(what: str, counts: Mapping[str, int]) -> None:
    """Raises DsparkError unless the prompt tokens of one request, by drafter, are equal."""
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{name} {count}" for name, count in counts.items())
        remedy = f"the servers read the same request ({what}) as different numbers of tokens: other tokenizers or "
        raise DsparkError("prompt_tokens", said, f"{remedy}chat templates, so their speeds cannot be compared")


def greedy_differences(samples: Iterable[Sample]) -> dict[str, list[str]]:
    """suite -> where greedy answers of baseline and endpoint differ, in the order of the samples: in ids where both
    servers tell them, else in text.

    Either one is not lossless, or two tokens were numerically tied: that cannot be told from outside. A later turn is
    compared only where the turns before it are equal.
    """
    answers: dict[tuple[str, str], dict[int, dict[str, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for one in samples:
        if one.error is None:
            answers[one.suite, one.question][one.turn][one.drafter] = one
    found: dict[str, list[str]] = {}
    for (suite, _), turns in answers.items():
        for turn in sorted(turns):
            pair = turns[turn]
            parting = _parting(pair[BASELINE], pair[ENDPOINT]) if len(pair) == 2 else None
            if parting is not None:
                found.setdefault(suite, []).append(f"{place(pair[BASELINE])}: {parting}")
            if parting is not None or len(pair) < 2:
                break
    return found


def _parting(one: Sample, other: Sample) -> str | None:
    """Where two answers part; None where they are equal."""
    a: Sequence[object] = one.text or ""
    b: Sequence[object] = other.text or ""
    what = "texts differ from character"
    if one.output_ids and other.output_ids:
        a, b, what = one.output_ids, other.output_ids, "ids differ from token"
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return f"{what} {at} on"


def place(sample: Sample) -> str:
    """Which request, for people."""
    return f"{sample.suite} {sample.question} turn {sample.turn + 1}"
