"""Sequential temperature scaling of the confidence head, and how well calibrated it is (method: scheduling).

Slot by slot, left to right: T_k is the one of 41 values whose cumulative product, the sigmoids of z_j / T_j up to slot
k with the earlier T fixed, has the smallest expected calibration error against "slots 1..k were all accepted".

A temperature cannot move a probability of 1/2, so a head that is too sure (or not sure enough) of everything stays so:
`fit_scaling` gives every slot a scale and an offset instead, sigmoid(scale * z + offset), in the same order, each pair
the likeliest for the cumulative product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit
from scipy.stats import rankdata

from dspark.calibration.rounds import Rounds
from dspark.errors import DsparkError

GRID = np.logspace(-1, 1, 41)
BINS = 15
RESAMPLES, LEVEL = 400, 0.95

Floats = NDArray[np.float64]


Scaling = tuple[tuple[float, float], ...]
"""(scale, offset) of slots 1..n."""


def of_temperatures(temperatures: Sequence[float]) -> Scaling:
    """Temperatures as scales without offsets."""
    return tuple((1 / T, 0.0) for T in temperatures)


def survival(logits: Floats, scaling: Scaling) -> Floats:
    """Cumulative products of sigmoid(scale_j z_j + offset_j): logits [N, n] -> [N, n]."""
    scales, offsets = np.array(scaling).T
    return np.asarray(np.cumprod(expit(logits * scales + offsets), axis=1))


def calibration_error(predicted: Floats, happened: Floats, weights: Floats | None = None) -> float:
    """Expected calibration error: |mean predicted - share that happened| of 15 equal bins, weighted by their rounds.

    predicted, happened [N]; weights [N]: how often each round counts (None: once). 0 for no round.
    """
    weights = np.ones(len(predicted)) if weights is None else weights
    gaps = np.bincount(bins_of(predicted), weights * (predicted - happened), BINS)
    return float(np.abs(gaps).sum() / max(weights.sum(), 1e-300))


def bins_of(predicted: Floats) -> NDArray[np.int64]:
    """The bin 0..14 of each probability."""
    return np.minimum((predicted * BINS).astype(np.int64), BINS - 1)


def area_under_curve(scores: Floats, happened: Floats) -> float | None:
    """ROC-AUC by ranks: how often a round that survived was rated above one that did not. None for one kind alone."""
    good = int(happened.sum())
    bad = len(happened) - good
    if not good or not bad:
        return None
    ranks = rankdata(scores)[happened.astype(bool)].sum()
    return float((ranks - good * (good + 1) / 2) / (good * bad))


def fit_temperatures(rounds: Rounds) -> tuple[float, ...]:
    """T_1..T_n on these rounds; of equally good values the one nearest to 1 (no scaling).

    Raises DsparkError when a slot was never verified.
    """
    before, found = np.ones(len(rounds)), []
    order = np.argsort(np.abs(np.log(GRID)), kind="stable")
    for slot in range(rounds.logits.shape[1]):
        known = rounds.scheduled > slot
        if not known.any():
            raise DsparkError("rounds", len(rounds), f"none of them verified slot {slot + 1}; collect more")
        happened = (rounds.accepted > slot).astype(np.float64)[known]
        errors = [calibration_error((before * expit(rounds.logits[:, slot] / T))[known], happened) for T in GRID[order]]
        found.append(float(GRID[order][int(np.argmin(errors))]))
        before = before * expit(rounds.logits[:, slot] / found[-1])
    return tuple(found)


def fit_scaling(rounds: Rounds) -> Scaling:
    """(scale, offset) of every slot, left to right: what happened is likeliest under them, given the earlier ones.

    Scales stay in what the temperatures' grid spans. Raises DsparkError when a slot was never verified.
    """
    before, found = np.ones(len(rounds)), []
    for slot in range(rounds.logits.shape[1]):
        known = rounds.scheduled > slot
        if not known.any():
            raise DsparkError("rounds", len(rounds), f"none of them verified slot {slot + 1}; collect more")
        happened, given, logits = (rounds.accepted > slot)[known], before[known], rounds.logits[known, slot]

        def surprise(pair: Floats) -> float:
            p = np.clip(given * expit(logits * pair[0] + pair[1]), 1e-9, 1 - 1e-9)  # noqa: B023 - used at once
            return float(-np.log(np.where(happened, p, 1 - p)).mean())  # noqa: B023

        best = minimize(surprise, [1.0, 0.0], method="Nelder-Mead", bounds=[(1 / GRID[-1], 1 / GRID[0]), (-8, 8)]).x
        found.append((float(best[0]), float(best[1])))
        before = before * expit(rounds.logits[:, slot] * best[0] + best[1])
    return tuple(found)


@dataclass(frozen=True)
class SlotFigures:
    """One slot: rounds that tell, share of them accepted up to it, ECE with its bootstrap interval over prompts, AUC of
    the survival; bins: (rounds, mean predicted, share accepted) of the 15."""

    slot: int
    rounds: int
    accepted: float
    error: float
    low: float
    high: float
    auc: float | None
    bins: tuple[tuple[int, float, float], ...]


def assess(rounds: Rounds, scaling: Scaling, seed: int = 0) -> list[SlotFigures]:
    """Every slot's figures under this scaling. Raises DsparkError for another number of slots than the rounds have."""
    if len(scaling) != rounds.logits.shape[1]:
        remedy = f"these rounds have {rounds.logits.shape[1]} slots; fit them again"
        raise DsparkError("scaling", f"{len(scaling)} slots", remedy)
    predicted = survival(rounds.logits, scaling)
    names = np.char.add(np.char.add(rounds.domain, "/"), rounds.prompt)
    _, prompt = np.unique(names, return_inverse=True)
    count = int(prompt.max()) + 1 if len(prompt) else 0
    draws = np.random.default_rng(seed).multinomial(count, [1 / count] * count, RESAMPLES)
    return [_slot(rounds, predicted[:, slot], slot, prompt, draws) for slot in range(predicted.shape[1])]


def _slot(
    rounds: Rounds, predicted: Floats, slot: int, prompt: NDArray[np.int64], draws: NDArray[np.int64]
) -> SlotFigures:
    known = rounds.scheduled > slot
    p, y = predicted[known], (rounds.accepted > slot).astype(np.float64)[known]
    bins = bins_of(p)
    # sums of (predicted - happened) by prompt and bin, so that a resampling is one product
    gaps, sizes = np.zeros((draws.shape[1], BINS)), np.zeros(draws.shape[1])
    np.add.at(gaps, (prompt[known], bins), p - y)
    np.add.at(sizes, prompt[known], 1)
    again = np.abs(draws @ gaps).sum(axis=1) / np.maximum(draws @ sizes, 1)
    low, high = np.quantile(again, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    counts = np.bincount(bins, minlength=BINS)
    means = [np.bincount(bins, values, BINS) / np.maximum(counts, 1) for values in (p, y)]
    return SlotFigures(
        slot=slot + 1,
        rounds=int(known.sum()),
        accepted=float(y.mean()) if len(y) else 0.0,
        error=calibration_error(p, y),
        low=float(low),
        high=float(high),
        auc=area_under_curve(p, y),
        bins=tuple(zip(counts.tolist(), means[0].tolist(), means[1].tolist(), strict=True)),
    )
