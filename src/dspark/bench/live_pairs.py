"""A baseline and an endpoint side by side: whether the two can be compared, and whether they say the same."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dspark.bench.samples import Sample
from dspark.errors import DsparkError

BASELINE, ENDPOINT = "baseline", "endpoint"
MUST_AGREE = ("engine", "model", "root", "max_model_len", "version")
MAY_DIFFER = frozenset((
    "reasoning_parser", "attention_backend", "sampling_backend", "chunked_prefill_size", "max_running_requests",
    "mem_fraction_static", "schedule_policy", "disable_cuda_graph", "disable_overlap_schedule",
))  # fmt: skip
"""Settings that an engine itself changes when it speculates, or that change no answer: a difference is a note."""


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
