"""Who drafts in a round, how wide, and how much of it is verified: a gate before the draft pass, a schedule after it.

The gate decides from past rounds alone (method: scheduling); the schedule from this round's confidences, by the rules
of `scheduler.py`. Neither changes what a request's output can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from math import isfinite
from operator import mul
from typing import Literal, Protocol

import numpy as np

from dspark.decoding.drafting import Proposal
from dspark.decoding.request import Active, Round
from dspark.decoding.scheduler import Floats, Lengths, above, alone, budget, early_stop, look_ahead, spend, survivals

Mode = Literal["auto", "early-stop", "delayed"]
LEVELS = np.linspace(0.0, 0.95, 20)
"""Survivals from which on a slot might be verified: what a request promises is kept for each."""
MEMORY = 16
"""Rounds after which a request's past counts 1 / e."""
POOL_MEMORY = 128
HOLD, HOLD_PLAIN = 8, 32
"""Rounds that a decision of the gate holds for, with the same requests in them: that some draft, that nobody does."""
FIRST = 8
"""Drafts of requests that are made while nothing is known yet."""
PROBE_SHARE = 0.002
"""Share of the time that rounds may cost which are drafted against expectation, to learn whether it still holds."""
WRITTEN = 2
"""Tokens of context that the time of a draft pass holds (`calibration/passes.py`)."""
MARGIN = 1.03
"""What rounds with drafts must promise over plain ones: the best of many estimates, none of which is better than to a
percent or two, promises too much."""
PACE_MEMORY = 64
"""Rounds over which predicted and real times are compared, and after which a plain one is due for comparison."""
ENOUGH = 4
"""Rounds of either kind without which there is no comparing; until then a plain one is due every HOLD."""
CLEAR = 1.25
"""What rounds with drafts promise over plain ones where no comparison of times could change that; so it counts for as
much at most."""


class Schedule(Protocol):
    """What the engine asks, once a pass each. beside: prompt tokens that the same pass reads; reading: requests that
    are not in a round yet, because they still read theirs."""

    def choose(self, ready: Sequence[Active], beside: int, reading: int) -> tuple[list[Active], int | None]:
        """Before drafting: which of the requests in a round draft, and how many tokens (None: all)."""

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """After drafting: keep of each proposal what is to be verified."""

    def learn(self, active: Active, proposal: Proposal, record: Round) -> None:
        """What became of a round of one of them."""

    def took(self, seconds: float) -> None:
        """How long the pass took, all of it."""


class Fixed:
    """Everything that is drafted is verified; everyone drafts who may."""

    def choose(self, ready: Sequence[Active], beside: int, reading: int) -> tuple[list[Active], int | None]:
        """See `Schedule.choose`."""
        return [active for active in ready if active.request.speculate], None

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """See `Schedule.cut`."""

    def learn(self, active: Active, proposal: Proposal, record: Round) -> None:
        """See `Schedule.learn`."""

    def took(self, seconds: float) -> None:
        """See `Schedule.took`."""


class Threshold(Fixed):
    """Slots up to the first whose confidence is below `threshold`: a diagnosis, which no cost enters."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """See `Schedule.cut`."""
        lengths = above([proposal.confidence for proposal in proposals], self.threshold)
        for proposal, length in zip(proposals, lengths.tolist(), strict=True):
            proposal.cut(length)


class Costs(Protocol):
    """Seconds of passes (see `calibration/cost.py`). widths: draft tokens a round that a draft pass may give."""

    @property
    def widths(self) -> tuple[int, ...]:
        """See above."""

    def verify_table(self, requests: int, most: int) -> np.ndarray:
        """Of a target pass over 0, 1, ..., `most` tokens of so many requests, never falling."""

    def draft_seconds(self, requests: int, n: int | None = None) -> float:
        """Of a draft pass of n slots."""

    def context_seconds(self, tokens: int) -> float:
        """Of writing so many tokens to a draft context that had fallen behind."""


@dataclass
class Outlook:
    """What a request, or all of them, has promised so far. promise [2, widths, levels]: survivals, and slots, that a
    round of that width has above each level; rounds: how many it is made of; last: the engine's round of the last one.

    taken, tried [n]: rounds in which slot k was accepted, and verified after all before it were; both fade.
    recent: survivals of the last two rounds, in mode "delayed".
    """

    promise: Floats
    taken: list[float]
    tried: list[float]
    rounds: int = 0
    last: int = 0
    recent: deque[Floats] = field(default_factory=lambda: deque(maxlen=2))

    def copy(self) -> Outlook:
        """For a new request: as much as a few rounds of its own would tell."""
        known = min(self.rounds, 4)
        return Outlook(self.promise.copy(), [4 * rate for rate in self.rates], [4.0] * len(self.tried), known)

    @property
    def rates(self) -> list[float]:
        """How often slot k is accepted, when those before it are."""
        return [taken / tried for taken, tried in zip(self.taken, self.tried, strict=True)]

    def count(self, record: Round, memory: int) -> None:
        """Let what became of a round count as one of the last `memory`."""
        for slot in range(min(record.accepted + 1, record.scheduled)):
            self.taken[slot] += (slot < record.accepted) - self.taken[slot] / memory
            self.tried[slot] += 1 - self.tried[slot] / memory


@dataclass
class Decision:
    """What the gate said for these requests (key), batch of them with those that read: who drafts how many tokens, and
    for how many more rounds.

    probe: who drafts against expectation when there is credit for its price.
    """

    key: Hashable
    batch: int
    kept: list[Active]
    width: int
    rounds: int
    probe: Active | None = None
    probe_seconds: float = 0.0

    def plain_with(self, batch: int) -> bool:
        """Whether nobody drafts here, so that nobody would in a batch as large, of whomever."""
        return not self.kept and batch >= self.batch


class Planner:
    """Gate and schedule for one engine with these costs. n: draft tokens a round at most.

    mode "auto": Algorithm 1, looking ahead for requests that it cannot harm; "early-stop": Algorithm 1 for all;
    "delayed": a budget from survivals two rounds old, spent by the current ones. Proposals without confidences get
    their request's past acceptance in their place, which anticipates nothing; of a probe among them one slot at least
    is verified, or nothing would be learnt from it.
    """

    def __init__(self, costs: Costs, n: int, mode: Mode = "auto") -> None:
        self.costs, self.n, self.mode = costs, n, mode
        self.widths = tuple(sorted({*(w for w in costs.widths if w < n), n}))
        self._columns = np.array(self.widths) - 1
        shape = (2, len(self.widths), len(LEVELS))
        self.pool = Outlook(np.zeros(shape), [1.2] * n, [2.0] * n)
        self._fits, self._credit = 1.0, 0.0  # accepted / predicted; seconds that probes may take
        # rounds that the gate has not looked at yet: who drafted with which confidences, and what became of them
        self._survived: list[tuple[Sequence[Active], list[Sequence[float]]]] = []
        self._records: list[tuple[Active, float | None, Round]] = []
        self._rows, self._drafted = 0, 0.0  # of the round that is being planned
        self._seconds, self._plain = np.zeros(1), 0.0  # its verification, with 0, 1, ... drafts in it, and with none
        self._predicted: float | None = None  # all of it (None: prompts are read as well)
        self._pace = {"plain": 1.0, "drafted": 1.0}  # real / predicted seconds of rounds
        self._paced = {"plain": 0, "drafted": 0}
        self._round, self._last_plain = 0, 0
        self._close = True  # whether the times of rounds may decide about drafting
        self._decision = Decision(None, 0, [], n, 0)
        self._probed: Active | None = None  # in the round that is being planned
        self._tables = lru_cache(maxsize=64)(lambda rows, most: costs.verify_table(rows, most))
        self._drafts = lru_cache(maxsize=64)(
            lambda count: np.array([costs.draft_seconds(count, width) for width in self.widths])
        )

    # Before drafting

    def choose(self, ready: Sequence[Active], beside: int, reading: int) -> tuple[list[Active], int | None]:
        """See `Schedule.choose`."""
        able = [active for active in ready if active.request.speculate]
        if not able:
            self._rest()
            return [], None
        key = (tuple(able), len(ready), beside, reading)
        same = key == self._decision.key
        if not self._decision.rounds or not (same or self._decision.plain_with(len(ready) + reading)):
            self._decision, same = self._decide(key, able, len(ready), beside, reading), True
        decision = self._decision
        decision.rounds -= 1
        self._round += 1
        drafting = decision.kept
        if self._close and self._round - self._last_plain > (PACE_MEMORY if self._compared else HOLD):
            drafting = []
        elif decision.probe is not None:
            self._credit += PROBE_SHARE * self._plain
            if self._credit >= decision.probe_seconds:
                decision.rounds = 0
                if same:  # else the next decision is of those who are here now
                    drafting = [*drafting, decision.probe]
                    self._credit = 0.0
        self._probed = decision.probe if len(drafting) > len(decision.kept) else None
        self._last_plain = self._last_plain if drafting else self._round
        late = 0.0
        for active in drafting:
            active.outlook.last = self._round
            late += self.costs.context_seconds(_behind(active))
        at = self.widths.index(decision.width)
        self._drafted = float(self._drafts(len(drafting))[at]) if drafting else 0.0
        plain = self._plain if same else float(self._tables(len(ready), len(ready))[len(ready)])
        self._predicted = None if beside or reading else self._drafted + late + plain
        return drafting, decision.width

    def _rest(self) -> None:
        """Nobody is there to be scheduled: keep what was learnt, and nothing of those it was learnt from."""
        self._look_back()
        self._decision, self._probed = Decision(None, 0, [], self.n, 0), None
        self._predicted, self._drafted = None, 0.0

    def _decide(self, key: Hashable, able: list[Active], rows: int, beside: int, reading: int) -> Decision:
        """The gate, over what was learnt so far, and who is to be probed next."""
        self._look_back()
        self._rows, self._seconds = rows + reading, self._verification(rows, beside, reading)
        self._plain = float(self._seconds[0])
        outlooks = [self._outlook(active) for active in able]
        if not self.pool.rounds:
            first = able[:FIRST]
            return Decision(key, self._rows, first, self.n, FIRST // len(first))
        kept, width = self._gate(able, outlooks)
        decision = Decision(key, self._rows, kept, width, HOLD if kept else HOLD_PLAIN)
        if len(kept) < len(able):
            chosen = set(kept)
            closed = (active for active in able if active not in chosen)
            decision.probe = min(closed, key=lambda active: active.outlook.last)
            decision.probe_seconds = self._probe_seconds(decision.probe, width)
        return decision

    def _outlook(self, active: Active) -> Outlook:
        if active.outlook is None:
            active.outlook = self.pool.copy()
        return active.outlook

    def _gate(self, able: list[Active], outlooks: Sequence[Outlook]) -> tuple[list[Active], int]:
        """Those that a round is expected to be faster with than a plain one, and the best width."""
        promises = np.stack([one.promise for one in outlooks])
        seconds, rows = self._seconds, self._rows
        plain = MARGIN * self._slower() * rows / seconds[0]
        late = np.array([self._late(active) for active in able])

        def expected(kept: Floats, count: int, behind: float) -> tuple[Floats, Floats]:
            """Seconds of the verification, and tokens a second of the whole round, [widths, levels] both."""
            verified = np.interp(kept[1], np.arange(len(seconds)), seconds)
            return verified, (rows + self._fits * kept[0]) / ((self._drafts(count) + behind)[:, None] + verified)

        total = promises.sum(axis=0)
        verified, rate = expected(total, len(able), late.sum())
        width, level = (int(i) for i in np.unravel_index(np.argmax(rate), rate.shape))
        self._close = float(rate[width, level]) < CLEAR * plain
        price = max(float(rate[width, level]), plain)  # tokens that a second is worth
        slope = (verified[width, level] - seconds[0]) / max(total[1, width, level], 1e-9)
        more = float(self._drafts(len(able))[width] - self._drafts(1)[width]) / max(len(able) - 1, 1)
        gain = self._fits * promises[:, 0, width, level] - price * (slope * promises[:, 1, width, level] + more + late)
        kept = np.flatnonzero(gain > 0)
        if not len(kept):
            return [], self.n
        _, rate = expected(promises[kept].sum(axis=0), len(kept), late[kept].sum())
        best = int(np.argmax(rate.max(axis=1)))
        open_ = rate[best].max() > plain
        return [able[i] for i in kept] if open_ else [], self.widths[best] if open_ else self.n

    @property
    def _compared(self) -> bool:
        """Whether enough rounds of both kinds were timed."""
        return min(self._paced.values()) >= ENOUGH

    def _slower(self) -> float:
        """Real over predicted seconds of rounds with drafts, against those of plain ones."""
        if not self._compared:
            return 1.0
        return min(max(self._pace["drafted"] / self._pace["plain"], 1 / CLEAR), CLEAR)

    def _probe_seconds(self, active: Active, width: int) -> float:
        """What a round costs in which one of those drafts that should not, its accepted tokens taken off."""
        seconds = self._seconds
        tokens, slots = (active.outlook.promise[i, self.widths.index(width)].max() for i in (0, 1))
        drafted = self.costs.draft_seconds(1, width)
        cost = drafted + self.costs.context_seconds(_behind(active))
        cost += float(np.interp(slots / 2, np.arange(len(seconds)), seconds))
        cost -= self._plain * (1 + self._fits * tokens / self._rows)  # what those tokens would take plainly
        return max(cost, 0.2 * drafted)

    def _verification(self, rows: int, beside: int, reading: int) -> Floats:
        """Seconds with 0, 1, ... drafts, [rows * n + 1]. Prompt tokens in the same pass are due anyway: a draft costs
        what it costs beside them, but the round is weighed as if those who read were in it with a token each, or a
        batch that fills up would take its tokens for dearer than they are."""
        table = self._tables(rows, rows + beside + rows * self.n)
        everyone = rows + reading
        return self._tables(everyone, everyone)[everyone] + table[rows + beside :] - table[rows + beside]

    def _late(self, active: Active) -> float:
        """Seconds of a round for what its draft context must catch up with, spread over the rounds that follow."""
        rounds = max(min(MEMORY, active.limit - len(active.result.output_ids)), 1)
        return self.costs.context_seconds(_behind(active)) / rounds

    # After drafting

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """See `Schedule.cut`."""
        if not drafting:
            return
        confidences = [self._confidences(a, p) for a, p in zip(drafting, proposals, strict=True)]
        self._survived.append((drafting, confidences))
        if len(drafting) == 1 and self.mode != "delayed":
            ahead = self.mode == "auto" and drafting[0].rule != "rejection"
            survival = list(accumulate(confidences[0], mul))
            seconds = (self._drafted + self._seconds[: len(survival) + 1]).tolist()
            lengths = [alone(survival, seconds, self._rows, ahead)]
        else:
            lengths = self._lengths(drafting, survivals(confidences, self._decision.width)).tolist()
        if self._probed is not None and drafting[-1] is self._probed and not proposals[-1].confidence:
            lengths[-1] = max(lengths[-1], min(1, len(proposals[-1].tokens)))
        for proposal, length in zip(proposals, lengths, strict=True):
            proposal.cut(length)
        if self._predicted is not None:
            self._predicted += float(self._seconds[sum(lengths)] - self._plain)

    def _lengths(self, drafting: Sequence[Active], survival: Floats) -> Lengths:
        seconds = self._drafted + self._seconds
        if self.mode == "delayed":
            lengths = spend(survival, self._delayed(drafting, seconds))
            for active, row in zip(drafting, survival, strict=True):
                active.outlook.recent.append(np.pad(row, (0, self.n - len(row))))
            return lengths
        if self.mode == "early-stop":
            return early_stop(survival, seconds, self._rows)
        lossless = [active.rule != "rejection" for active in drafting]
        return look_ahead(survival, seconds, self._rows, None if all(lossless) else np.array(lossless))

    def _confidences(self, active: Active, proposal: Proposal) -> Sequence[float]:
        if proposal.confidence:  # a copy: what is not verified is cut from the proposal, not from what it promised
            return [one if isfinite(one) else 0.0 for one in proposal.confidence]
        return self._outlook(active).rates[: len(proposal.tokens)]

    def _delayed(self, drafting: Sequence[Active], seconds: Floats) -> int:
        """The budget, from survivals two rounds old; a request without them counts as the mean of the others."""
        old = [active.outlook.recent[0] for active in drafting if len(active.outlook.recent) == 2]
        if not old:
            return len(drafting)  # nothing is known yet
        known = np.stack(old)
        others = np.repeat(known.mean(axis=0)[None], len(drafting) - len(old), axis=0)
        return budget(np.concatenate((known, others)), seconds, self._rows)

    def learn(self, active: Active, proposal: Proposal, record: Round) -> None:
        """See `Schedule.learn`."""
        if record.scheduled:
            predicted = sum(accumulate(proposal.confidence, mul)) if proposal.confidence else None
            self._records.append((active, predicted, record))

    def _look_back(self) -> None:
        """Take what happened since the gate's last decision into what is expected."""
        for active, predicted, record in self._records:
            self._outlook(active).count(record, MEMORY)
            self.pool.count(record, POOL_MEMORY)
            if predicted is not None and isfinite(predicted):
                self._fits += (record.accepted - self._fits * predicted) / POOL_MEMORY
                self._fits = min(max(self._fits, 0.5), 1.5)
        self._records.clear()
        if self._survived:
            self._remember()
        self._survived.clear()

    def _remember(self) -> None:
        """Add survivals [R, width], and what they would have been further on, to what is promised; all rounds since
        the last decision have the same width."""
        width = self._decision.width
        whole = survivals([one for _, confidences in self._survived for one in confidences], width)
        if width < self.n:
            whole = np.concatenate((whole, whole[:, -1:] * np.cumprod(self.pool.rates[width:])), axis=1)
        counted = (whole[:, None, :] >= LEVELS[:, None]).astype(np.float64)  # [R, levels, n]
        parts = np.stack((whole[:, None, :] * counted, counted), axis=1).cumsum(axis=3)
        promises = parts[..., self._columns].swapaxes(2, 3)  # [R, 2, widths, levels]
        rows: dict[Active, list[int]] = {}
        for row, active in enumerate(active for drafting, _ in self._survived for active in drafting):
            rows.setdefault(active, []).append(row)
        for active, own in rows.items():
            outlook = self._outlook(active)
            outlook.rounds += len(own)
            share = len(own) / min(outlook.rounds, MEMORY)
            outlook.promise += (promises[own].mean(axis=0) - outlook.promise) * share
        self.pool.rounds += len(self._survived)
        share = len(self._survived) / min(self.pool.rounds, POOL_MEMORY)
        self.pool.promise += (promises.mean(axis=0) - self.pool.promise) * share

    def took(self, seconds: float) -> None:
        """See `Schedule.took`. Rounds with drafts have costs that no profile has, and contexts are of any length: what
        counts is whether they take longer than predicted by more than plain ones do."""
        kind = "drafted" if self._drafted else "plain"
        if self._predicted is not None:
            ratio = min(max(seconds / self._predicted / self._pace[kind], 0.5), 2.0)  # one long break is no pace
            self._paced[kind] += 1
            self._pace[kind] *= 1 + (ratio - 1) / min(self._paced[kind], PACE_MEMORY)


def _behind(active: Active) -> int:
    """Tokens to be written to its draft context before it can draft, beyond those of an ordinary round."""
    return max(sum(map(len, active.pending)) - WRITTEN, 0)
