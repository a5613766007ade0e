"""The forecast: what every n would gain, from the acceptance on real answers and the costs of the engine.

speedup(n) = (tokens / rounds) * T(1) / R(n), over decoding after the first token; tokens / rounds is that of the same
answers replayed with blocks of n, and R(n) the seconds of a round. Where nothing gains, it says so, and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.bench.metrics import Interval as Ratio
from dspark.bench.metrics import Timing, paired_speedup
from dspark.decoding.request import Round
from dspark.doctor.costs import EngineCosts
from dspark.doctor.trial import Answers, Interval, lengths, mean_interval

WORTH = 1.05
"""Expected speedup from which a draft is worth its memory and trouble."""


@dataclass(frozen=True)
class Expected:
    """n draft tokens a round. length: macro, bonus counted; tokens: a round, all answers pooled; cost: R(n) / T(1),
    which is also the tokens a round that it takes to break even."""

    n: int
    length: Interval
    tokens: float
    cost: float
    speedup: Ratio


@dataclass(frozen=True)
class Forecast:
    """rows by n; best: the one with the highest expected speedup."""

    costs: EngineCosts
    rows: tuple[Expected, ...]

    @property
    def best(self) -> Expected:
        return max(self.rows, key=lambda one: one.speedup.value)

    @property
    def worth_it(self) -> bool:
        """Whether the best n is expected to gain what a second model is worth."""
        return self.best.speedup.value >= WORTH

    @property
    def advice(self) -> str:
        """One line: which n, or that it is not worth it, with the reason."""
        best = self.best
        why = f"a round costs {best.cost:.2f} plain passes and makes {best.tokens:.2f} tokens"
        if not self.worth_it:
            return f"do not bother: the best, n = {best.n}, is expected to run at {best.speedup}; {why}"
        if best.speedup.low is not None and best.speedup.low <= 1.0:
            return f"n = {best.n} may gain: {best.speedup} expected, not beyond doubt; {why}"
        return f"serve it with n = {best.n}: {best.speedup} expected; {why}"

    def to_json(self) -> dict[str, Any]:
        """Everything of it as JSON values."""
        rows = [
            {
                "n": one.n,
                "acceptance_length": [one.length.value, one.length.low, one.length.high],
                "tokens_per_round": one.tokens,
                "round_cost": one.cost,
                "speedup": [one.speedup.value, one.speedup.low, one.speedup.high],
            }
            for one in self.rows
        ]
        best = self.best.n if self.worth_it else None
        return {"best_n": best, "advice": self.advice, "rows": rows, "costs": self.costs.model_dump(mode="json")}


def forecast(answers: Answers, walked: Mapping[int, Sequence[Sequence[Round]]], costs: EngineCosts) -> Forecast:
    """walked: n -> the rounds of every answer. Only n whose costs are known are forecast; at least one must be."""
    rows = []
    for n in sorted(set(walked) & set(costs.rounds)):
        rounds = walked[n]
        tokens = [len(one.answer_ids) - 1 for one in answers.rows]
        plain = [Timing(count, count * costs.plain) for count in tokens]
        drafted = [Timing(t, len(r) * costs.rounds[n]) for t, r in zip(tokens, rounds, strict=True)]
        rows.append(
            Expected(
                n,
                mean_interval(lengths(rounds)),
                sum(tokens) / sum(map(len, rounds)),
                costs.rounds[n] / costs.plain,
                paired_speedup(plain, drafted),
            )
        )
    return Forecast(costs, tuple(rows))
