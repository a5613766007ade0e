"""From a journal of samples to a whole report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from dspark import __version__
from dspark.bench.compare import Run, spans
from dspark.bench.figures import acceptance, changes, overall, speed
from dspark.bench.longcontext import partition_of
from dspark.bench.metrics import acceptance_length
from dspark.bench.prompts import Missing, Suite
from dspark.bench.report import (
    Acceptance,
    Answer,
    Column,
    Drafter,
    MissingSuite,
    Piece,
    Rendered,
    Report,
    SuiteReport,
)
from dspark.bench.samples import Sample
from dspark.data.prompts import Prompt, prompt_hash
from dspark.decoding.text import token_pieces
from dspark.machine import describe_machine

Known = Mapping[str, frozenset[str] | None]


@dataclass
class Findings:
    """All that a report is made from.

    known: for each drafter the hashes of the prompts its draft was trained on; server: what live engines told of their
    acceptance, by (suite, drafter); differences: where their answers differ, by suite.
    """

    kind: Any
    target: str
    settings: dict[str, Any]
    drafters: list[Drafter]
    suites: list[Suite]
    missing: list[Missing]
    samples: list[Sample]
    known: Known = field(default_factory=dict)
    baseline: str | None = "plain"
    server: dict[tuple[str, str], Acceptance] = field(default_factory=dict)
    differences: Mapping[str, list[str]] = field(default_factory=dict)
    rendered: Rendered | None = None
    notes: list[str] = field(default_factory=list)
    tokenizer: Any = None


def assemble(found: Findings, texts: int = 1) -> Report:
    """The report. texts: prompts of each suite whose answers are shown, coloured by round."""
    suites = [part for suite in found.suites for part in _suite(suite, found)]
    means = overall(suites, found.drafters, found.baseline)
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        dspark=__version__,
        kind=found.kind,
        target=found.target,
        settings=found.settings,
        machine=describe_machine(),
        baseline=found.baseline,
        drafters=found.drafters,
        suites=suites,
        missing=[MissingSuite(name=one.name, reason=one.reason) for one in found.missing],
        overall=means,
        changes=changes(found.drafters, means),
        rendered=found.rendered,
        answers=[one for suite in found.suites for one in _answers(suite, found, texts)],
        notes=found.notes,
    )


def prompts_sha256(prompts: Sequence[Prompt]) -> str:
    """Which prompts were asked: sha256 over id and turns of each, in order."""
    return hashlib.sha256(json.dumps([[one.id, *one.turns] for one in prompts]).encode()).hexdigest()


def flagged(suite: Suite, known: Known) -> list[str]:
    """Ids of the prompts that some draft was trained on: a prompt counts when any of its turns does."""
    hashes = frozenset().union(*(one for one in known.values() if one is not None))
    return [one.id for one in suite.prompts if any(prompt_hash(turn) in hashes for turn in one.turns)]


def _suite(suite: Suite, found: Findings) -> list[SuiteReport]:
    """One suite; its prompts that a draft was trained on apart from the others."""
    trained = set(flagged(suite, found.known))
    inside = [one for one in found.samples if one.suite == suite.name]
    groups = {(one.batch, one.group) for one in inside if one.question in trained and one.seconds is not None}
    reports = []
    for apart in (False, True):
        prompts = [one for one in suite.prompts if (one.id in trained) == apart]
        if not prompts:
            continue
        names = {one.id for one in prompts}
        part = Suite(suite.name + " (trained on)" * apart, prompts, suite.source)
        samples = [
            one
            for one in inside
            if (((one.batch, one.group) in groups) == apart if one.seconds is not None else one.question in names)
        ]
        reports.append(_part(part, samples, found, apart, sorted(trained & names), suite.name))
    return reports


def _part(
    suite: Suite, samples: Sequence[Sample], found: Findings, apart: bool, trained: list[str], name: str
) -> SuiteReport:
    baseline = [one for one in samples if one.drafter == found.baseline]
    answers = [one for one in baseline if one.seconds is None] or baseline
    return SuiteReport(
        name=suite.name,
        source=suite.source,
        prompts_sha256=prompts_sha256(suite.prompts),
        questions=len(suite.prompts),
        speed_questions=len({one.question for one in samples if one.seconds is not None}),
        shortest_prompt=min((one.prompt_tokens for one in answers if one.prompt_tokens), default=None),
        longest_prompt=max((one.prompt_tokens for one in answers), default=0) or None,
        looping=sum(bool(one.looping) for one in answers),
        apart=apart,
        flagged=trained,
        ties=[line for one in samples for line in one.ties],
        not_lossless=[line for one in samples for line in one.faults] + list(found.differences.get(suite.name, [])),
        replay_checked=sum(one.replay_checked for one in samples),
        replay_ties=[line for one in samples for line in one.replay_ties],
        replay_faults=[line for one in samples for line in one.replay_faults],
        columns={one.name: _column(suite, samples, one, found, name) for one in found.drafters},
    )


def _column(suite: Suite, samples: Sequence[Sample], drafter: Drafter, found: Findings, name: str) -> Column:
    own = [one for one in samples if one.drafter == drafter.name]
    timed = [one for one in own if one.seconds is not None or (one.error is not None)]
    replayed = [one for one in own if one.source == "replay"]
    accepted = None
    if drafter.n != 0 and (replayed or timed):
        counted = replayed or [one for one in timed if one.batch == min(other.batch for other in timed)]
        parts = {one.id: part for one in suite.prompts if (part := partition_of(one.id)) is not None}
        widest = max((r.scheduled for one in counted for r in one.rounds or ()), default=0)
        accepted = acceptance(counted, drafter.n or widest, counted[0].source, parts)
        accepted = accepted if accepted.requests else None  # the engine does not tell with every answer
    accepted = accepted or found.server.get((name, drafter.name))
    speeds = []
    for batch in sorted({one.batch for one in timed}):
        base = None
        if found.baseline is not None and drafter.name != found.baseline:
            base = [one for one in samples if one.drafter == found.baseline and one.batch == batch and one not in own]
            base = [one for one in base if one.seconds is not None or one.error is not None]
        one_speed = speed([one for one in timed if one.batch == batch], base)
        speeds += [one_speed] if one_speed is not None else []
    return Column(
        acceptance=accepted,
        speed=speeds,
        failed=sum(one.error is not None for one in own),
        compared=sum(bool(one.output_ids) for one in timed) if drafter.name != found.baseline else 0,
        replay_checked=sum(one.replay_checked for one in own),
    )


def _answers(suite: Suite, found: Findings, texts: int) -> list[Answer]:
    """The first prompts of a suite as every drafter's rounds make them."""
    if found.tokenizer is None:
        return []
    shown = []
    for prompt in suite.prompts[:texts]:
        turns = [one for one in found.samples if one.suite == suite.name and one.question == prompt.id and not one.turn]
        plain = next((one for one in turns if one.drafter == found.baseline and one.output_ids), None)
        for drafter in found.drafters:
            own = [one for one in turns if one.drafter == drafter.name and one.rounds]
            own = [one for one in own if not (one.ties or one.faults)]  # those rounds are of another answer
            own.sort(key=lambda one: one.source != "served")
            rounds = own[0].rounds if own else None
            if plain is None or not drafter.n or rounds is None:
                continue
            run = Run(drafter.name, prompt.id, plain.output_ids, plain.finish, rounds, bool(plain.looping))
            shown.append(
                Answer(
                    suite=suite.name,
                    question=prompt.id,
                    drafter=drafter.name,
                    prompt=prompt.turns[0],
                    pieces=_pieces(run, found.tokenizer),
                    length=acceptance_length(rounds),
                )
            )
    return shown


def _pieces(run: Run, tokenizer: Any) -> list[Piece]:
    texts = token_pieces(tokenizer, run.output_ids)
    pieces = []
    for number, members in spans(run):
        one = run.rounds[number - 1] if number else None
        for owner in ("draft", "target"):
            text = "".join(texts[index] for index, who in members if who == owner)
            if text:
                accepted, scheduled = (one.accepted, one.scheduled) if one else (0, 0)
                pieces.append(Piece(text=text, round=number or 0, owner=owner, accepted=accepted, scheduled=scheduled))
    return pieces
