"""From logits and request settings to a law, and from a law and counter-based noise to a token.

`log_distribution` is the only function that makes a law: the target's p and the draft's q both come from it, so a
filter can never be applied to one and forgotten on the other (method section 4). All laws are float64: the accept
rule divides them and the residual subtracts them.

Noise is a pure function of what it is for. numpy's Philox is keyed by the seed and counted by (round, slot, use) or by
the position, so no order of evaluation, batch or schedule can change a number, and no number serves two purposes. Only
the raw 64-bit stream is used: numpy keeps that one stable between releases, its distributions it may change.
"""

from __future__ import annotations

import math
import threading
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from dspark.decoding.request import SamplingSettings
from dspark.errors import DsparkError

_FIRST_NUCLEUS_GUESS = 256  # most nuclei are smaller than this, and a top-256 is far cheaper than a sort of V
_GUMBEL_DOMAIN = 1 << 32  # second key word of position noise; uniforms use the number of their key integers (<= 3)


class Use(IntEnum):
    """What a number of the noise stream is for; part of its key."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    COUPLED = 4


# ---------------------------------------------------------------------------------------------------------------- laws


def greedy_token(logits: Tensor) -> int:
    """Id of the largest entry of logits [V]; the lowest id among equals. NaN or no finite entry: DsparkError."""
    token = int(torch.argmax(logits))
    _check_peak(logits[token])
    return token


def log_distribution(logits: Tensor, settings: SamplingSettings) -> Tensor:
    """Log-probabilities [..., V] float64 of the law that `settings` asks for, from logits [..., V]; -inf = excluded.

    Order, as in Transformers: temperature, top-k, top-p (of the mass that top-k left), min-p (relative to the largest
    probability, so the renormalisation before it does not matter). top-k keeps exactly k tokens and top-p the smallest
    set that reaches the mass; among equal logits the lower id is kept, so top_k = 1 is `greedy_token`. Entries that
    come in as -inf stay excluded. A row's law does not depend on the rows beside it, to the last bit.

    Raises DsparkError for greedy settings (a law needs temperature > 0), and for NaN, +inf or all-excluded rows.
    """
    if settings.greedy:
        raise DsparkError("temperature", settings.temperature, "a law needs temperature > 0 (0 takes the argmax)")
    logits = logits.detach().to(torch.float64)
    peak = logits.amax(dim=-1, keepdim=True)
    _check_peak(peak)
    scaled = (logits - peak).div_(settings.temperature)  # peak first: no overflow at the smallest temperature
    vocab = scaled.shape[-1]
    if not (0 < settings.top_k < vocab or settings.top_p < 1.0 or settings.min_p > 0.0):
        return torch.log_softmax(scaled, dim=-1)
    if scaled.dim() == 1:
        return _filtered_row(scaled, settings)
    rows = [_filtered_row(row, settings) for row in scaled.reshape(-1, vocab)]
    return torch.stack(rows).reshape(scaled.shape)


def _check_peak(peak: Tensor) -> None:
    bad = peak[~torch.isfinite(peak)]
    if bad.numel():
        raise DsparkError("logits", float(bad[0]), "the largest logit must be finite: check the model's weights")


def _filtered_row(scaled: Tensor, settings: SamplingSettings) -> Tensor:
    """One row [V] whose largest entry is 0, filtered and normalised."""
    kept = scaled
    if 0 < settings.top_k < kept.shape[0]:
        kept = _keep_largest(kept, torch.topk(kept, settings.top_k).values)
    if settings.top_p < 1.0:
        kept = _keep_largest(kept, _nucleus(kept, settings.top_p))
    if settings.min_p > 0.0:
        kept = kept.masked_fill(kept < math.log(settings.min_p), -math.inf)
    return torch.log_softmax(kept, dim=0)


def _keep_largest(values: Tensor, largest: Tensor) -> Tensor:
    """values [N] with everything but its `largest` [count], sorted descending, set to -inf; lower indices win ties.

    torch.topk promises no order among equals, so its values are used and its indices are not.
    """
    threshold = largest[-1]
    enough = values >= threshold
    kept = torch.where(enough, values, -math.inf)
    surplus = int(torch.count_nonzero(enough)) - largest.shape[0]
    if surplus > 0:
        kept[torch.nonzero(values == threshold).flatten()[-surplus:]] = -math.inf
    return kept


def _nucleus(values: Tensor, top_p: float) -> Tensor:
    """The largest of values [N], descending: as few as carry the share top_p of the sum of exp(values), at least 1."""
    total = torch.logsumexp(values, dim=0)
    size = min(_FIRST_NUCLEUS_GUESS, values.shape[0])
    while True:
        largest = torch.topk(values, size).values
        mass = torch.exp(largest - total).cumsum(dim=0)
        reached = int(torch.searchsorted(mass, top_p))  # first index whose cumulative mass is >= top_p
        if reached < size or size == values.shape[0]:
            return largest[: reached + 1]
        size = min(size * 8, values.shape[0])


# --------------------------------------------------------------------------------------------------------------- noise


class _Philox(threading.local):
    """One generator a thread, moved to its key for every use: making a new one costs several times as much."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)

    def at(self, seed: int, domain: int, counter: tuple[int, int, int]) -> np.random.Philox:
        """Key (seed, domain). The lowest counter word runs while numbers are taken, the others are `counter`."""
        self.bits.state = {
            "bit_generator": "Philox",
            "state": {
                "key": np.array([seed, domain], dtype=np.uint64),
                "counter": np.array([0, *counter], dtype=np.uint64),
            },
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,  # empty
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self.bits


_philox = _Philox()


def uniform(seed: int, *key_ints: int) -> float:
    """One number in [0, 1) that depends on (seed, key_ints) only; up to three key integers in [0, 2**64).

    The decoder's key is (seed, round, slot, use). Keys of different lengths are different streams.
    """
    if len(key_ints) > 3:
        raise ValueError(f"at most 3 key integers, got {len(key_ints)}")
    first, second, third = (*key_ints, 0, 0, 0)[:3]
    raw = int(_philox.at(seed, len(key_ints), (first, second, third)).random_raw())
    return (raw >> 11) * 2.0**-53


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Standard Gumbel noise [size] float64 of one position: entry v belongs to token id v, whatever `size` is."""
    raw = _philox.at(seed, _GUMBEL_DOMAIN + Use.COUPLED, (position, 0, 0)).random_raw(size)
    # 52 bits and a half step: strictly inside (0, 1) at both ends, so neither logarithm can be infinite.
    u = torch.from_numpy((raw >> np.uint64(12)).astype(np.float64)).add_(0.5).mul_(2.0**-52)
    return u.log_().neg_().log_().neg_()


# --------------------------------------------------------------------------------------------------------------- draws


def draw(log_probs: Tensor, u: float) -> int:
    """Token of the law log_probs [V] at the point u in [0, 1) of its CDF; never a token of probability 0."""
    return draw_weights(log_probs.to(torch.float64).exp(), u)


def draw_weights(weights: Tensor, u: float) -> int:
    """As `draw`, from weights [V] >= 0 that need not sum to 1. All zero: ValueError."""
    cdf = weights.to(torch.float64).cumsum(dim=0)
    total = float(cdf[-1])
    if not 0.0 < total < math.inf:
        raise ValueError(f"weights must have a finite, positive sum, got {total}")
    # right=True: the first id whose CDF exceeds the point, hence one with weight > 0. The bound guards u * total
    # rounding up to total: the first id that reaches the total is the last one with weight.
    token = int(torch.searchsorted(cdf, u * total, right=True))
    return token if token < cdf.shape[0] else int(torch.searchsorted(cdf, total))


def gumbel_argmax(log_probs: Tensor, noise: Tensor) -> int:
    """argmax(log_probs [V] + noise [V]): a draw from the law when the noise is standard Gumbel."""
    return int(torch.argmax(log_probs + noise.to(log_probs.device)))
