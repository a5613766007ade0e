"""Who drafts in a round, how wide, and how much of it is verified: a gate before the draft pass, a schedule after it.

The gate decides from past rounds alone (method: scheduling); the schedule from this round's confidences, by the rules
of `scheduler.py`. Neither changes what a request's output can be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, Protocol

import numpy as np

from dspark.decoding.drafting import Proposal
from dspark.decoding.request import Active, Round
from dspark.decoding.scheduler import Floats, above, budget, early_stop, look_ahead, spend, survivals

Mode = Literal["auto", "early-stop", "delayed"]
LEVELS = np.linspace(0.0, 0.95, 20)
"""Survivals from which on a slot might be verified: what a request promises is kept for each."""
MEMORY = 16
"""Rounds after which a request's past counts 1 / e."""
POOL_MEMORY = 128
HOLD = 4
"""Rounds that a decision of the gate holds for, while the same requests are in them."""
FIRST = 8
"""Requests that draft while nothing is known yet."""
PROBE_SHARE = 0.005
"""Share of the time that rounds may cost which are drafted against expectation, to learn whether it still holds."""


class Schedule(Protocol):
    """What the engine asks, once a pass each. beside: prompt tokens that the same pass reads."""

    def choose(self, ready: Sequence[Active], beside: int) -> tuple[list[Active], int | None]:
        """Before drafting: which of the requests in a round draft, and how many tokens (None: all)."""

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """After drafting: keep of each proposal what is to be verified."""

    def learn(self, active: Active, proposal: Proposal, record: Round) -> None:
        """What became of a round of one of them."""


class Fixed:
    """Everything that is drafted is verified; everyone drafts who may."""

    def choose(self, ready: Sequence[Active], beside: int) -> tuple[list[Active], int | None]:
        """See `Schedule.choose`."""
        return [active for active in ready if active.request.speculate], None

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """See `Schedule.cut`."""

    def learn(self, active: Active, proposal: Proposal, record: Round) -> None:
        """See `Schedule.learn`."""


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


@dataclass
class Outlook:
    """What a request, or all of them, has promised so far. promise [2, widths, levels]: survivals, and slots, that a
    round of that width has above each level; rounds: how many it is made of; idle: rounds since the last of them.

    taken, tried [n]: rounds in which slot k was accepted, and verified after all before it were; both fade.
    recent: survivals of the last two rounds.
    """

    promise: Floats
    taken: Floats
    tried: Floats
    rounds: int = 0
    idle: int = 0
    recent: deque[Floats] = field(default_factory=lambda: deque(maxlen=2))

    def copy(self) -> Outlook:
        """For a new request: as much as a few rounds of its own would tell."""
        return Outlook(self.promise.copy(), 4 * self.taken / self.tried, np.full_like(self.tried, 4.0))


class Planner:
    """Gate and schedule for one engine with these costs. n: draft tokens a round at most.

    mode "auto": Algorithm 1, looking ahead for requests that it cannot harm; "early-stop": Algorithm 1 for all;
    "delayed": a budget from survivals two rounds old, spent by the current ones. Proposals without confidences get
    their request's past acceptance in their place, which anticipates nothing.
    """

    def __init__(self, costs: Costs, n: int, mode: Mode = "auto") -> None:
        self.costs, self.n, self.mode = costs, n, mode
        self.widths = tuple(sorted({*(w for w in costs.widths if w < n), n}))
        self._columns = np.array(self.widths) - 1
        shape = (2, len(self.widths), len(LEVELS))
        self.pool = Outlook(np.zeros(shape), np.full(n, 1.2), np.full(n, 2.0))
        self._fits, self._credit = 1.0, 0.0  # accepted / predicted; seconds that probes may take
        self._rows, self._drafted = 0, 0.0  # of the round that is being planned
        self._seconds: Floats = np.zeros(1)  # its verification, with 0, 1, ... drafts in it
        # the gate's last decision: for which requests beside how many prompt tokens, who drafts, how wide
        self._held: tuple[Hashable, list[Active], int] = (None, [], n)
        self._held_for = 0
        self._tables = lru_cache(maxsize=64)(lambda rows, most: costs.verify_table(rows, most))

    # Before drafting

    def choose(self, ready: Sequence[Active], beside: int) -> tuple[list[Active], int | None]:
        """See `Schedule.choose`."""
        able = [active for active in ready if active.request.speculate]
        if not able:
            return [], None
        key = (tuple(able), len(ready), beside)
        if key == self._held[0] and self._held_for < HOLD:
            self._held_for += 1
        else:
            self._rows, self._seconds = len(ready), self._verification(len(ready), beside)
            outlooks = [self._outlook(active) for active in able]
            found = self._gate(able, outlooks) if self.pool.rounds else (able[:FIRST], self.n)
            self._held, self._held_for = (key, *found), 1
        _, kept, width = self._held
        drafting = kept
        for active in able:
            active.outlook.idle += 1
        if self.pool.rounds and len(kept) < len(able):
            chosen = set(kept)
            drafting = kept + self._probe([active for active in able if active not in chosen], width)
        for active in drafting:
            active.outlook.idle = 0
        self._drafted = self.costs.draft_seconds(len(drafting), width) if drafting else 0.0
        return drafting, width

    def _outlook(self, active: Active) -> Outlook:
        if active.outlook is None:
            active.outlook = self.pool.copy()
        return active.outlook

    def _gate(self, able: list[Active], outlooks: Sequence[Outlook]) -> tuple[list[Active], int]:
        """Those that a round is expected to be faster with than a plain one, and the best width."""
        promises = np.stack([one.promise for one in outlooks])
        seconds, rows = self._seconds, self._rows
        plain = rows / seconds[0]

        def expected(kept: Floats, count: int) -> tuple[Floats, Floats]:
            """Seconds of the verification, and tokens a second of the whole round, [widths, levels] both."""
            drafted = np.array([self.costs.draft_seconds(count, width) for width in self.widths])
            verified = np.interp(kept[1], np.arange(len(seconds)), seconds)
            return verified, (rows + self._fits * kept[0]) / (drafted[:, None] + verified)

        total = promises.sum(axis=0)
        verified, rate = expected(total, len(able))
        width, level = (int(i) for i in np.unravel_index(np.argmax(rate), rate.shape))
        price = max(float(rate[width, level]), plain)  # tokens that a second is worth
        slope = (verified[width, level] - seconds[0]) / max(total[1, width, level], 1e-9)
        more = self._draft_slope(len(able), self.widths[width])
        gain = self._fits * promises[:, 0, width, level] - price * (slope * promises[:, 1, width, level] + more)
        kept = np.flatnonzero(gain > 0)
        if not len(kept):
            return [], self.n
        _, rate = expected(promises[kept].sum(axis=0), len(kept))
        best = int(np.argmax(rate.max(axis=1)))
        open_ = rate[best].max() > plain
        return [able[i] for i in kept] if open_ else [], self.widths[best] if open_ else self.n

    def _probe(self, closed: Sequence[Active], width: int) -> list[Active]:
        """Sometimes one of those that should not draft: the one that has not done so for longest."""
        if not closed:
            return []
        seconds = self._seconds
        self._credit += PROBE_SHARE * seconds[0]
        active = max(closed, key=lambda one: one.outlook.idle)
        tokens, slots = (active.outlook.promise[i, self.widths.index(width)].max() for i in (0, 1))
        cost = self.costs.draft_seconds(1, width) + np.interp(slots / 2, np.arange(len(seconds)), seconds)
        cost -= seconds[0] * (1 + self._fits * tokens / self._rows)  # what its accepted tokens would take plainly
        cost = max(cost, 0.2 * self.costs.draft_seconds(1, width))
        if self._credit < cost:
            return []
        self._credit = 0.0
        return [active]

    def _verification(self, rows: int, beside: int) -> Floats:
        """Seconds with 0, 1, ... drafts, [rows * n + 1]. Prompt tokens in the same pass are due anyway: a draft costs
        what it costs beside them, but the round is weighed as if they were not there."""
        table = self._tables(rows, rows + beside + rows * self.n)
        return table[rows] + table[rows + beside :] - table[rows + beside]

    def _draft_slope(self, count: int, width: int) -> float:
        """Seconds that one more request adds to a draft pass."""
        if count == 1:
            return 0.0
        return (self.costs.draft_seconds(count, width) - self.costs.draft_seconds(1, width)) / (count - 1)

    # After drafting

    def cut(self, drafting: Sequence[Active], proposals: Sequence[Proposal]) -> None:
        """See `Schedule.cut`."""
        if not drafting:
            return
        width = max(len(proposal.tokens) for proposal in proposals)
        survival = survivals([self._confidences(a, p) for a, p in zip(drafting, proposals, strict=True)], width)
        seconds = self._drafted + self._seconds
        lossless = np.array([active.rule != "rejection" for active in drafting])
        if self.mode == "delayed":
            lengths = spend(survival, self._delayed(drafting, seconds))
        elif self.mode == "early-stop":
            lengths = early_stop(survival, seconds, self._rows)
        else:
            lengths = look_ahead(survival, seconds, self._rows, lossless)
        self._remember(drafting, survival)
        for proposal, length in zip(proposals, lengths.tolist(), strict=True):
            proposal.cut(length)

    def _confidences(self, active: Active, proposal: Proposal) -> Sequence[float]:
        if proposal.confidence:
            return proposal.confidence
        outlook = self._outlook(active)
        return (outlook.taken / outlook.tried)[: len(proposal.tokens)].tolist()

    def _delayed(self, drafting: Sequence[Active], seconds: Floats) -> int:
        """The budget, from survivals two rounds old; a request without them counts as the mean of the others."""
        old = [active.outlook.recent[0] for active in drafting if len(active.outlook.recent) == 2]
        if not old:
            return len(drafting)  # nothing is known yet
        known = np.stack(old)
        others = np.repeat(known.mean(axis=0)[None], len(drafting) - len(old), axis=0)
        return budget(np.concatenate((known, others)), seconds, self._rows)

    def _remember(self, drafting: Sequence[Active], survival: Floats) -> None:
        """Add a round's survivals [R, width], and what they would have been further on, to what is expected."""
        whole = survival
        if survival.shape[1] < self.n:
            rates = (self.pool.taken / self.pool.tried)[survival.shape[1] :]
            whole = np.concatenate((survival, survival[:, -1:] * np.cumprod(rates)), axis=1)
        counted = (whole[:, None, :] >= LEVELS[:, None]).astype(np.float64)  # [R, levels, n]
        parts = np.stack((whole[:, None, :] * counted, counted), axis=1).cumsum(axis=3)
        promises = parts[..., self._columns].swapaxes(2, 3)  # [R, 2, widths, levels]
        for active, row, promise in zip(drafting, whole, promises, strict=True):
            outlook = self._outlook(active)
            outlook.rounds += 1
            outlook.promise += (promise - outlook.promise) / min(outlook.rounds + 4, MEMORY)
            outlook.recent.append(row)
        self.pool.rounds += 1
        share = 1 / min(self.pool.rounds, POOL_MEMORY)
        self.pool.promise += (promises.mean(axis=0) - self.pool.promise) * share

    def learn(self, active: Active, proposal: Proposal, record: Round) -> None:
        """See `Schedule.learn`."""
        if not record.scheduled:
            return
        for outlook, memory in ((self._outlook(active), MEMORY), (self.pool, POOL_MEMORY)):
            fade = 1 - 1 / memory
            reached = min(record.accepted + 1, record.scheduled)
            outlook.taken[:reached] *= fade
            outlook.tried[:reached] *= fade
            outlook.taken[: record.accepted] += 1
            outlook.tried[:reached] += 1
        if proposal.confidence:
            predicted = float(np.cumprod(proposal.confidence).sum())
            self._fits += (record.accepted - self._fits * predicted) / POOL_MEMORY
            self._fits = min(max(self._fits, 0.5), 1.5)
