"""What sampling is tested against: an independent law in plain NumPy, and a chi-square test of draws from it."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import chi2

from dspark.decoding.request import SamplingSettings

MIN_EXPECTED = 5.0


def reference_law(logits: torch.Tensor, settings: SamplingSettings) -> np.ndarray:
    """Probabilities [V] by the definition: sort, cut, renormalise after every filter."""
    scaled = logits.double().numpy() / settings.temperature
    law = np.exp(scaled - scaled.max())
    law /= law.sum()
    order = np.lexsort((np.arange(law.size), -scaled))  # descending, lower id first among equals
    if settings.top_k:
        law[order[settings.top_k :]] = 0.0
        law /= law.sum()
    if settings.top_p < 1.0:
        before = np.concatenate([[0.0], np.cumsum(law[order])[:-1]])
        law[order[before >= settings.top_p]] = 0.0
        law /= law.sum()
    law[law < settings.min_p * law.max()] = 0.0
    return law / law.sum()


def chi_square_p(tokens: np.ndarray, law: np.ndarray) -> float:
    """p-value of draws [N] of ids against law [V]; bins expecting fewer than 5 draws are pooled."""
    counts = np.bincount(tokens, minlength=law.size).astype(float)
    expected = law * tokens.size
    if counts[law == 0].any():
        return 0.0
    order = np.argsort(-expected, kind="stable")
    counts, expected = counts[order], expected[order]
    alone = int((expected >= MIN_EXPECTED).sum())
    while 0 < alone < expected.size and 0.0 < expected[alone:].sum() < MIN_EXPECTED:
        alone -= 1
    counts = np.append(counts[:alone], counts[alone:].sum())
    expected = np.append(expected[:alone], expected[alone:].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.size > 1, "one bin proves nothing"
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), expected.size - 1))


def sequence_p(sequences: np.ndarray, law: np.ndarray) -> float:
    """p-value of sequences [N, L] against their joint law [V] * L, two looks: the joint one and the first token's."""
    joint = np.ravel_multi_index(tuple(sequences.T), law.shape)
    first = law.sum(axis=tuple(range(1, law.ndim)))
    return min(1.0, 2.0 * min(chi_square_p(joint, law.ravel()), chi_square_p(sequences[:, 0], first)))


def markov_law(rows: np.ndarray, start: int, length: int) -> np.ndarray:
    """Joint law [V] * length of a Markov chain with transition probabilities rows [V, V], from `start`."""
    law = rows[start]
    for _ in range(length - 1):
        law = law[..., None] * rows
    return law


def shift_two_percent(tokens: np.ndarray, law: np.ndarray) -> np.ndarray:
    """A sampler's fault of the size a test must see: 2 % of all draws [N] move from the likeliest token to the next."""
    source, destination = np.argsort(-law, kind="stable")[:2]
    shifted = tokens.copy()
    shifted[np.flatnonzero(tokens == source)[: round(0.02 * tokens.size)]] = destination
    return shifted
