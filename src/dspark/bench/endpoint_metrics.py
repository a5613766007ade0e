"""What engines tell of acceptance: with one answer, or by counters that are read before and after a group of requests.

| engine | with an answer | counters |
|---|---|---|
| dspark serve | every round (`rounds: true`) | vLLM's |
| vLLM 0.32 | `metrics.speculative_decoding`, if run with --per-request-spec-decode-metrics | `vllm:spec_decode_*` |
| SGLang 0.5.2x | `sglext.spec_tokens_details` (`return_spec_tokens_details: true`) | `sglang:spec_verify_calls` |

vLLM counts rounds that drafted only, and drafts accepted beyond a stop. SGLang's one counter gives tokens by round,
which is no acceptance length. Its `spec_accept_length` is of the latest moments and is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from dspark.bench.report import Acceptance, Slot
from dspark.decoding.request import Round
from dspark.errors import DsparkError

DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
VERIFY_CALLS = "sglang:spec_verify_calls_total"
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
COUNTERS = frozenset((DRAFTS, DRAFT_TOKENS, ACCEPTED, ACCEPTED_AT, VERIFY_CALLS, *GENERATED))
BIRTHS = frozenset(("process_start_time_seconds", *(name.removesuffix("_total") + "_created" for name in COUNTERS)))
CUT_ROUNDS = 0.01
"""Share of a block's slots that may be unverified before conditional acceptance cannot be told from counters."""
MOST_SLOTS = 1024
"""Draft tokens a round that no engine has: what tells more is wrong."""

Labels = tuple[tuple[str, str], ...]


class StreamFault(Exception):
    """Why an answer is none; one line."""


class ServerChanged(DsparkError):
    """A server is not the one it was when the run began: what was measured cannot be used."""


# With one answer


def told_by_request(
    rounds: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], extras: Mapping[str, Any]
) -> tuple[list[Round] | None, list[int] | None]:
    """(round records, rounds by accepted tokens): the first where the engine tells round by round, else the second
    where it tells that, else neither. Raises StreamFault for numbers that no rounds can have.

    rounds: `round` of the chunks of `dspark serve`; usage: of the answer; extras: `sglext` and `metrics` of its chunks.
    """
    if "speculation" in usage and rounds:  # the first is the prompt's pass, which is no round
        made = [r for r in rounds if r["proposed"] is not None]
        return [_round("round", r["proposed"], r["scheduled"], r["accepted"]) for r in made], None
    found: Any = (extras.get("metrics") or {}).get("speculative_decoding") or {}
    if found.get("per_step_accepted"):
        steps = zip(found["per_step_drafted"], found["per_step_accepted"], strict=True)
        return [_round("per_step_accepted", drafted, drafted, accepted) for drafted, accepted in steps], None
    if "acceptance_histogram" in found:
        return None, _histogram("acceptance_histogram", found["acceptance_histogram"], usage)
    found = (extras.get("sglext") or {}).get("spec_tokens_details") or {}
    if found.get("spec_correct_drafts_histogram"):
        counts = _histogram("spec_correct_drafts_histogram", found["spec_correct_drafts_histogram"], usage)
        if sum(counts) == found.get("spec_verify_ct", sum(counts)):
            return None, counts
    return None, None


def count(field: str, value: object, most: int) -> int:
    """A number of things that a server tells. Raises StreamFault naming the field where it can be none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise StreamFault(f"the server tells {field} = {str(value)[:40]}, which cannot be")
    return value


def ids(field: str, values: object) -> list[int]:
    """Token ids that a server tells. Raises StreamFault naming the field where they are none."""
    if not isinstance(values, list):
        raise StreamFault(f"the server tells {field} = {str(values)[:40]}, which cannot be")
    return [count(field, value, 2**31) for value in values]


def _round(field: str, proposed: object, scheduled: object, accepted: object) -> Round:
    width = count(field, proposed, MOST_SLOTS)
    verified = count(field, scheduled, width)
    return Round(width, verified, count(field, accepted, verified))


def _histogram(field: str, counts: object, usage: Mapping[str, Any]) -> list[int]:
    """Every round gives a token; a few more rounds than tokens can have been under way when the answer ended."""
    if not isinstance(counts, list):
        raise TypeError(f"{field} is no list")
    most = 2 * usage["completion_tokens"] + 64
    found = [count(field, one, most) for one in counts]
    count(f"the length of {field}", len(found), MOST_SLOTS + 1)
    count(f"the sum of {field}", sum(found), most)
    return found


# By counters


@dataclass(frozen=True)
class Counters:
    """One reading: values by (name, labels); births: when the server says that a counter, or itself, began."""

    values: dict[tuple[str, Labels], float]
    births: dict[tuple[str, Labels], float]

    def total(self, name: str) -> float | None:
        """Over all label sets (several engines behind one address); None where there is no such counter."""
        found = [value for (known, _), value in self.values.items() if known == name]
        return sum(found) if found else None

    def rows(self) -> list[list[Any]]:
        """[name, place in the block or None, value over all other labels], as JSON has it."""
        sums: dict[tuple[str, str | None], float] = {}
        for (name, labels), value in self.values.items():
            key = name, dict(labels).get("position")
            sums[key] = sums.get(key, 0.0) + value
        return [[name, place, value] for (name, place), value in sums.items()]

    def by_position(self) -> list[float]:
        """Accepted draft tokens by their place in the block, from the first."""
        sums: dict[int, float] = {}
        for (name, labels), value in self.values.items():
            if name == ACCEPTED_AT:
                place = int(dict(labels)["position"])
                sums[place] = sums.get(place, 0.0) + value
        return [sums[place] for place in sorted(sums)]

    def generated(self) -> float | None:
        """Answer tokens; None where it does not count them."""
        found = [self.total(name) for name in GENERATED]
        return next((value for value in found if value is not None), None)


def read_counters(text: str | None) -> Counters:
    """The counters that tell of acceptance, from a page in Prometheus' text format; none from none, or from a page
    that is something else."""
    values: dict[tuple[str, Labels], float] = {}
    births: dict[tuple[str, Labels], float] = {}
    try:
        families = list(text_string_to_metric_families(text or ""))
    except ValueError:
        families = []
    for family in families:
        for sample in family.samples:
            kept = values if sample.name in COUNTERS else births if sample.name in BIRTHS else None
            if kept is not None:
                kept[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return Counters(values, births)


def difference(before: Counters, after: Counters, url: str) -> Counters:
    """What was counted between two readings. Raises ServerChanged when the server began anew in between."""
    for key, value in before.values.items():
        now = after.values.get(key)
        if now is None or now < value:
            raise ServerChanged(key[0], now, f"was {value:g} before: {url} was restarted while it was measured")
    for key, value in before.births.items():
        if after.births.get(key, value) != value:
            raise ServerChanged(key[0], after.births[key], f"{url} was restarted while it was measured")
    return Counters({key: value - before.values.get(key, 0.0) for key, value in after.values.items()}, after.births)


def added(parts: Iterable[Sequence[Sequence[Any]]]) -> Counters:
    """What was counted altogether, from the rows of parts of which no two hold the same time."""
    values: dict[tuple[str, Labels], float] = {}
    for name, place, value in (row for rows in parts for row in rows):
        key = str(name), (() if place is None else (("position", str(place)),))
        values[key] = values.get(key, 0.0) + float(value)
    return Counters(values, {})


@dataclass(frozen=True)
class Received:
    """What the client got while counters ran. complete: no request failed, so that all tokens are known."""

    questions: int
    requests: int
    tokens: int
    complete: bool


def counted_acceptance(delta: Counters, received: Received) -> tuple[Acceptance | None, list[str]]:
    """(figures, notes) from what the counters of one suite counted.

    micro_length = 1 + accepted / drafts over the rounds that drafted; the histogram follows from acceptance by place.
    Without counters, or where nothing was drafted, there are no figures, and a note says why.
    """
    drafts, calls = delta.total(DRAFTS), delta.total(VERIFY_CALLS)
    notes = foreign_traffic(delta, received)
    if drafts is None and calls is None:
        return None, ["it shows no counters of speculation, so acceptance is not known"]
    if not (drafts or calls):
        return None, [*notes, "its counters of speculation stood still: nothing was drafted"]
    if not drafts:
        assert calls is not None
        remedy = "it counts verification calls only, which give tokens a round and no acceptance length"
        return _from_calls(calls, received, tokens=None if notes else received.tokens), [*notes, remedy]
    places = delta.by_position()
    slots = drafts * len(places)
    unverified = slots - (delta.total(DRAFT_TOKENS) or 0.0)
    conditional: list[Slot] = []
    if unverified > CUT_ROUNDS * slots:
        notes.append("rounds verified different numbers of drafts, so acceptance by slot is not known")
    else:
        conditional = _conditional(drafts, places)
        if unverified > 0:
            notes.append(f"acceptance by slot counts {unverified:.0f} unverified of {slots:.0f} drafts as rejected")
    acceptance = Acceptance(
        source="server",
        questions=received.questions,
        requests=received.requests,
        rounds=round(drafts),
        macro_length=None,
        micro_length=1.0 + (delta.total(ACCEPTED) or 0.0) / drafts,
        completion_per_round=None,
        histogram=[round(one - two) for one, two in zip([drafts, *places], [*places, 0.0], strict=True)],
        conditional=conditional,
    )
    return acceptance, [*notes, "its counters leave out rounds that drafted nothing"]


def _from_calls(calls: float, received: Received, tokens: int | None) -> Acceptance:
    return Acceptance(
        source="server",
        questions=received.questions,
        requests=received.requests,
        rounds=round(calls),
        macro_length=None,
        micro_length=None,
        completion_per_round=None if tokens is None else tokens / calls,
    )


def _conditional(drafts: float, places: Sequence[float]) -> list[Slot]:
    """Every round verified every slot: those that reached slot k are those that accepted k - 1."""
    reached = [drafts, *places]
    return [
        Slot(slot=k, accepted=round(now), verified=round(before), rate=now / before if before else None)
        for k, (before, now) in enumerate(zip(reached, places, strict=False), start=1)
    ]


def foreign_traffic(delta: Counters, received: Received) -> list[str]:
    """A note where the server generated other tokens than we got."""
    generated = delta.generated()
    if generated is None:
        return []
    if not received.complete:
        return ["requests failed, so whether its counters hold other clients' tokens is not known"]
    if round(generated) == received.tokens:
        return []
    return [
        f"it counted {generated:.0f} tokens where {received.tokens} were received: its counters hold another client's "
        "requests, too"
    ]
