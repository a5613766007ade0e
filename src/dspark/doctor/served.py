"""Serving against what it must equal: the ids of plain decoding, and the rounds of the replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dspark.bench.compare import Mode, Question, Run, find_difference
from dspark.bench.served import first_parting
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, Round
from dspark.doctor.findings import Finding
from dspark.doctor.trial import Answers
from dspark.drafts.kinds import Draft
from dspark.targets.base import Target

_BATCH = 3


def check_served(
    target: Target, draft: Draft, answers: Answers, walked: Sequence[Sequence[Round]], count: int
) -> Iterator[Finding]:
    """served-ids and replay: the first `count` answers again, with the draft, three requests at a time."""
    proposer = make_proposer(target, draft)
    chosen = range(min(count, len(answers.rows)))
    requests = [Request(answers.rows[i].prompt_ids, max_tokens=len(answers.rows[i].answer_ids)) for i in chosen]
    different, parted, ties, rounds = [], [], 0, 0
    for index, result in Engine(target, proposer, max_batch=_BATCH).run(requests):
        row, name = answers.row(index), f"prompt {index + 1}"
        mode, question = Mode("served", proposer.n), Question(name, "", row.prompt_ids)
        plain = Run("plain", name, row.answer_ids, "length", [], False)
        difference = find_difference(target, question, plain, Run.of(mode, question, result))
        if difference is not None:
            ties += difference.tie
            different += [] if difference.tie else [str(difference)]
            continue  # other ids, other rounds
        parting = first_parting(target, proposer, row, "served", result.rounds, walked[index])
        rounds += len(result.rounds)
        if parting is not None:
            ties += parting.tie
            parted += [] if parting.tie else [str(parting)]
    tied = f" ({ties} ties of float noise)" if ties else ""
    if different:
        yield Finding("served-ids", "broken", f"{len(different)} of {len(requests)} answers: {different[0]}")
    else:
        yield Finding("served-ids", "ok", f"{len(requests)} answers have the ids of plain decoding{tied}")
    if parted:
        yield Finding("replay", "broken", f"{len(parted)} of {len(requests)} answers: {parted[0]}")
    else:
        yield Finding("replay", "ok", f"served = replayed in {rounds} rounds of {len(requests)} answers{tied}")
