"""Rounds for calibration: what the confidence head said of every slot, and how many were accepted.

They are collected by replay: the target answers plainly in one batch with its taps kept, and the draft walks those
answers, which gives the very rounds of serving (`decoding/replay.py`) for a fraction of their price.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, prompt_hash
from dspark.data.rows import Row
from dspark.decoding.drafting import DraftProposer, Proposal
from dspark.decoding.engine import Engine
from dspark.decoding.replay import replay
from dspark.decoding.request import Request
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.training.features import FeatureSource

BATCH = 32
FIELDS = ("domain", "prompt", "logits", "scheduled", "accepted")


@dataclass(frozen=True)
class Rounds:
    """N rounds. domain, prompt: names [N]; logits: raw confidence logits [N, n]; scheduled [N]: slots whose fate is
    known; accepted [N] <= scheduled.

    A round that an answer's end cuts short tells nothing of the slots behind it: those do not count as scheduled.
    """

    domain: NDArray[np.str_]
    prompt: NDArray[np.str_]
    logits: NDArray[np.float64]
    scheduled: NDArray[np.int64]
    accepted: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.accepted)

    def where(self, chosen: NDArray[np.bool_]) -> Rounds:
        """The chosen ones [N]."""
        return Rounds(*(getattr(self, name)[chosen] for name in FIELDS))

    def halves(self) -> tuple[Rounds, Rounds]:
        """Two halves of the prompts of every domain, by the hash of their names: no prompt is in both."""
        names = sorted(set(zip(self.domain.tolist(), self.prompt.tolist(), strict=True)))
        order = sorted(names, key=lambda name: prompt_hash("/".join(name)))
        first = {
            name for domain in set(self.domain.tolist()) for name in [one for one in order if one[0] == domain][::2]
        }
        inside = [name in first for name in zip(self.domain.tolist(), self.prompt.tolist(), strict=True)]
        chosen = np.array(inside, dtype=bool)
        return self.where(chosen), self.where(~chosen)

    def save(self, path: Path) -> None:
        """Write a .npz file whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as file:
            np.savez_compressed(file, **{name: getattr(self, name) for name in FIELDS})
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Rounds:
        """Raises DsparkError when the file cannot be read, or holds something else than rounds."""
        try:
            with np.load(path, allow_pickle=False) as file:
                found = cls(*(file[name] for name in FIELDS))
        except (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile, zlib.error) as error:
            raise DsparkError("rounds", str(path), f"cannot be read ({error}); collect them again") from None
        if found.logits.ndim != 2 or len({len(getattr(found, name)) for name in FIELDS}) > 1:
            raise DsparkError("rounds", str(path), "has arrays of different lengths; collect them again")
        kinds = {"logits": "f", "scheduled": "iu", "accepted": "iu", "domain": "U", "prompt": "U"}
        for name, kind in kinds.items():
            if getattr(found, name).dtype.kind not in kind:
                raise DsparkError("rounds", str(path), f"{name} is {getattr(found, name).dtype}; collect them again")
        if not np.isfinite(found.logits).all():
            raise DsparkError("rounds", str(path), "has logits that are no finite numbers; collect them again")
        slots = found.logits.shape[1]
        inside = (found.accepted >= 0) & (found.accepted <= found.scheduled) & (found.scheduled <= slots)
        if not inside.all():
            raise DsparkError("rounds", str(path), f"has rounds that accept more than was verified of {slots} slots")
        return found


def joined(parts: Sequence[Rounds]) -> Rounds:
    """All rounds of several collections, of the same number of slots."""
    return Rounds(*(np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS))


@dataclass(frozen=True)
class Answered:
    """A row as `replay` reads it."""

    prompt_ids: list[int]
    answer_ids: list[int]


Key = tuple[str, str]
"""Domain and prompt."""
Progress = Callable[[int, int], Any]
"""(prompts answered, rounds so far)"""


def collect_rounds(
    target: Target,
    proposer: DraftProposer,
    renderer: ChatRenderer,
    suites: Mapping[str, Sequence[Prompt]],
    max_tokens: int,
    progress: Progress = lambda prompts, rounds: None,
) -> Rounds:
    """Greedy rounds of the first turn of every prompt, by domain; prompts without room for an answer are left out.

    Raises DsparkError for a draft without a confidence head, or when no prompt gives a round.
    """
    asked = [((domain, prompt.id), prompt) for domain, prompts in suites.items() for prompt in prompts]
    ids = [renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]) for _, prompt in asked]
    fits = [i for i, one in enumerate(ids) if len(one) + max_tokens <= target.max_context]
    engine = Engine(target, max_batch=BATCH, capture_taps=proposer.taps)

    def answers() -> Iterator[tuple[Key, Answered, Tensor]]:
        taken: dict[int, Tensor] = {}
        requests = (Request(ids[i], max_tokens) for i in fits)
        for place, result in engine.run(requests, lambda i, taps, _: taken.__setitem__(i, taps)):
            row = Answered(ids[fits[place]], list(result.output_ids))
            yield asked[fits[place]][0], row, taken.pop(place)

    return _walk(proposer, answers(), target.max_context, progress)


def rounds_of_rows(
    proposer: DraftProposer,
    rows: Sequence[Row],
    source: FeatureSource,
    max_context: int,
    progress: Progress = lambda prompts, rounds: None,
) -> Rounds:
    """The same of rows that the target wrote greedily, by the first part of their source's name.

    Raises DsparkError as `collect_rounds`.
    """
    answers = (((row.source.split("/")[0], row.id), row, source.get(row).taps.float()) for row in rows)
    return _walk(proposer, answers, max_context, progress)


def _walk(
    proposer: DraftProposer, found: Iterable[tuple[Key, Answered | Row, Tensor]], max_context: int, progress: Progress
) -> Rounds:
    if not proposer.confidence:
        raise DsparkError(
            "draft", "no confidence head", "there is nothing to calibrate; its past acceptance is used instead"
        )
    answered: list[tuple[Key, int]] = []
    confidences: dict[int, list[list[float]]] = {}

    def answers() -> Iterator[tuple[Answered | Row, Tensor]]:
        for key, row, taps in found:
            answered.append((key, len(row.answer_ids)))
            progress(len(answered), sum(map(len, confidences.values())))
            yield row, taps

    def watch(place: int, proposal: Proposal) -> None:
        confidences.setdefault(place, []).append(proposal.confidence)

    walked = replay(proposer, answers(), BATCH, max_context, watch=watch)
    domain, prompt, logits, scheduled, accepted = [], [], [], [], []
    for place, rounds in enumerate(walked):
        (where, which), tokens = answered[place]
        left = tokens - 1
        for one, own in zip(rounds, confidences.get(place, []), strict=True):
            if len(own) < proposer.n:
                continue
            domain.append(where)
            prompt.append(which)
            logits.append(own)
            accepted.append(one.accepted)
            scheduled.append(one.scheduled if left > one.accepted else one.accepted)
            left -= one.accepted + 1
    if not logits:
        raise DsparkError("prompts", len(answered), "gave no round: every answer is one token, or no prompt fits")
    table = np.array(logits)
    with np.errstate(divide="ignore"):
        raw = np.clip(np.log(table) - np.log1p(-table), -60.0, 60.0)
    return Rounds(np.array(domain), np.array(prompt), raw, np.array(scheduled), np.array(accepted))
