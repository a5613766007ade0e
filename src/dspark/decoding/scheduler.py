"""How many draft tokens of each request a round verifies (method: scheduling; the paper's Algorithm 1).

Pure functions over arrays. survival [R, n]: probability that slots 1..j of request r are all accepted, never rising
along j (`survivals`). seconds [R * n + 1]: what a round takes with k = 0, 1, ... draft tokens in the batch beside one
token of each of `rows` requests, so that theta(k) = (rows + sum of the k survivals) / seconds[k] is tokens a second:
the paper's tau * SPS(B). Lengths [R] come back.

Why the early stop: the confidence of slot k + 1 is a function of the token drafted at k. A schedule that reads it to
decide on slot k keeps or drops a token by what it is, and the output no longer follows the target's law. Algorithm 1
takes candidates from the likeliest down and stops at the first that does not pay, so whether slot k is verified depends
on slots 1..k of its own request alone. Looking ahead is harmless where the output is a function of the target alone
(greedy and `coupled` requests).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Lengths = NDArray[np.int64]


def survivals(confidences: Sequence[Sequence[float]], n: int) -> Floats:
    """Running products of per-slot confidences, [R, n]; slots that were not drafted never survive."""
    table = np.zeros((len(confidences), n))
    for row, own in enumerate(confidences):
        table[row, : len(own)] = own
    return np.asarray(np.cumprod(table, axis=1), dtype=np.float64)


def ranked(survival: Floats) -> tuple[NDArray[np.int64], Floats]:
    """All (r, j) by survival descending, then j, then r: the rows [R * n] and the survivals [R * n] in that order."""
    requests = len(survival)
    flat = survival.T.reshape(-1)  # j runs slowest, so that a stable sort leaves ties in the order of j
    order = np.argsort(-flat, kind="stable")
    return (order % requests if requests else order), flat[order]


def rates(values: Floats, seconds: Floats, rows: int, already: float = 0.0) -> Floats:
    """theta after 0, 1, ... admitted candidates, [len(values) + 1]; already: survivals admitted before these."""
    return (rows + already + np.concatenate(([0.0], np.cumsum(values)))) / seconds[: len(values) + 1]


def early_stop(survival: Floats, seconds: Floats, rows: int) -> Lengths:
    """Algorithm 1: admit the likeliest candidates one by one while theta strictly rises."""
    chosen, values = ranked(survival)
    rises = np.diff(rates(values, seconds, rows)) > 0
    count = len(rises) if rises.all() else int(np.argmin(rises))
    return np.bincount(chosen[:count], minlength=len(survival))


def look_ahead(survival: Floats, seconds: Floats, rows: int, lossless: NDArray[np.bool_] | None = None) -> Lengths:
    """The number of candidates with the largest theta of all, for the rows that it cannot harm (`lossless` [R]; None:
    all). The others keep what `early_stop` gives them, and only then do the rest look ahead."""
    if lossless is None:
        chosen, values = ranked(survival)
        return np.bincount(chosen[: np.argmax(rates(values, seconds, rows))], minlength=len(survival))
    lengths = np.zeros(len(survival), dtype=np.int64)
    lengths[~lossless] = early_stop(survival, seconds, rows)[~lossless]
    fixed = int(lengths.sum())
    kept = np.arange(survival.shape[1]) < lengths[:, None]
    chosen, values = ranked(survival[lossless])
    best = int(np.argmax(rates(values, seconds[fixed:], rows, float(survival[kept].sum()))))
    lengths[lossless] = np.bincount(chosen[:best], minlength=int(lossless.sum()))
    return lengths


def alone(survival: Sequence[float], seconds: Sequence[float], rows: int, ahead: bool) -> int:
    """How many slots of a request that drafts alone: `look_ahead`, or `early_stop`, without a sort. survival [n]."""
    best, length, tokens = rows / seconds[0], 0, float(rows)
    for k, value in enumerate(survival, 1):
        tokens += value
        if tokens / seconds[k] > best:
            best, length = tokens / seconds[k], k
        elif not ahead:
            break
    return length


def budget(survival: Floats, seconds: Floats, rows: int) -> int:
    """How many draft tokens have the largest theta; for survivals that decide nothing about their own round."""
    return int(np.argmax(rates(ranked(survival)[1], seconds, rows)))


def spend(survival: Floats, count: int) -> Lengths:
    """The likeliest `count` candidates. With a count known before this round's drafts (from survivals two rounds old)
    nothing is anticipated: a candidate is only outranked by others' and by its own earlier slots."""
    chosen, values = ranked(survival)
    return np.bincount(chosen[: min(count, int((values > 0).sum()))], minlength=len(survival))


def above(confidences: Sequence[Sequence[float]], threshold: float) -> Lengths:
    """Static: slots up to the first whose confidence is below the threshold."""
    found = [next((j for j, c in enumerate(own) if c < threshold), len(own)) for own in confidences]
    return np.array(found, dtype=np.int64)
