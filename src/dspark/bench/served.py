"""Replay against serving: the same rows must give the same rounds, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from dspark.bench.compare import PLAIN, TIE_GAP, Difference, Question, Run
from dspark.data.rows import Row
from dspark.decoding.proposers import DSparkProposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Round
from dspark.targets.base import Target
from dspark.training.features import InProcessFeatures


@dataclass(frozen=True)
class Parting:
    """Where the replay of an answer first departs from the served rounds.

    round: 1-based; 0 when the served ids are not plain decoding's, so that there are two rows
    gap: the draft's top-two logit gap at the slot they judge differently; None where it cannot be put down to one
    tie: the gap is under 1e-3 and the row's token within it, so float noise decides what the draft proposes; or the
        served ids left plain decoding's at a tie of the target
    """

    mode: str
    question: str
    round: int
    served: Round | None
    replayed: Round | None
    gap: float | None
    tie: bool

    def __str__(self) -> str:
        place = f"{self.question}, {self.mode}"
        verdict = "tie" if self.tie else "REPLAY DIFFERS"
        if not self.round:
            return f"{verdict}: {place}: the served ids are not plain decoding's"
        said = [f"{one.accepted} of {one.scheduled}" if one else "no round" for one in (self.served, self.replayed)]
        gap = "none" if self.gap is None else f"{self.gap:.2e}"
        return (
            f"{verdict}: {place}, round {self.round}: served {said[0]}, replayed {said[1]}, draft's top-two gap {gap}"
        )


@torch.no_grad()
def check_replay(
    target: Target,
    proposers: dict[str, DSparkProposer],
    question: Question,
    runs: dict[str, Run],
    differences: Sequence[Difference],
) -> list[Parting]:
    """Replay plain decoding's answer with each mode's proposer; what departs from the mode's served rounds.

    proposers: mode name -> the one that served; runs: by mode name, plain decoding's among them; differences: where a
    mode's ids left plain's. The features come from one pass of the target in this process.
    """
    plain, left = runs[PLAIN.name], {one.mode: one.tie for one in differences}
    row = Row(
        id=question.id,
        source=question.id,
        prompt_ids=list(question.ids),
        answer_ids=plain.output_ids,
        finish="stop" if plain.finish_reason == "stop" else "length",
    )
    found: list[Parting] = []
    taps: dict[tuple[int, ...], Tensor] = {}
    for mode, proposer in proposers.items():
        if mode in left:
            found.append(Parting(mode, question.id, 0, None, None, None, left[mode]))
            continue
        if proposer.taps not in taps:
            taps[proposer.taps] = InProcessFeatures(target, proposer.taps).get(row).taps.float()
        walked = replay(proposer, [(row, taps[proposer.taps])], 1, target.max_context)[0]
        parting = _first_parting(proposer, row, taps[proposer.taps], mode, runs[mode].rounds, walked)
        found += [parting] if parting is not None else []
    return found


def _first_parting(
    proposer: DSparkProposer, row: Row, taps: Tensor, mode: str, served: Sequence[Round], walked: Sequence[Round]
) -> Parting | None:
    anchor = len(row.prompt_ids)  # the prefill's token
    for number, (one, other) in enumerate(zip_longest(served, walked), start=1):
        if one == other:
            anchor += one.accepted + 1
            continue
        if one is None or other is None or one.accepted == other.accepted:
            return Parting(mode, row.id, number, one, other, None, False)
        gap, tie = draft_gap(proposer, row.ids, taps, anchor, min(one.accepted, other.accepted))
        return Parting(mode, row.id, number, one, other, gap, tie)
    return None


@torch.no_grad()
def draft_gap(proposer: DSparkProposer, ids: Sequence[int], taps: Tensor, anchor: int, slot: int) -> tuple[float, bool]:
    """(the draft's top-two logit gap at a slot of the block at `anchor`, whether the row's token lies within a tie).

    taps [T, m * d]; slots before it are taken to have proposed the row's tokens.
    """
    draft = proposer.draft
    context = draft.new_context(len(ids) + proposer.n)
    draft.write_context([(context, taps[:anchor])])
    hidden = draft.block_hidden([(context, ids[anchor])], proposer.width)
    base = draft.base_logits(hidden)
    state = draft.markov_start(1)
    for k in range(slot + 1):
        previous = torch.tensor([ids[anchor + k]])
        logits, state = draft.slot_logits(base[:, k], hidden[:, k], previous, state)
    values = logits[0].double()
    top = values.topk(2).values
    gap, wanted = float(top[0] - top[1]), values[draft.draft_ids == ids[anchor + slot + 1]]
    return gap, gap < TIE_GAP and bool((top[0] - wanted < TIE_GAP).any())


def replay_line(answers: int, partings: Sequence[Parting]) -> str:
    """One sentence: on how many answers replay equals served, and how the rest came apart."""
    apart = {one.question for one in partings}
    faults = sum(not one.tie for one in partings)
    line = f"replay equals served on {answers - len(apart)} of {answers} answers, round by round"
    if partings:
        line += f"; {len(partings) - faults} ties" + (f", {faults} FAULTS" if faults else "")
    return line
