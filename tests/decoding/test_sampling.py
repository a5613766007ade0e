"""Laws against an independent reference, noise that never repeats, draws that follow their law."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy.stats import kstest
from tests.decoding.laws import chi_square_p, reference_law, shift_two_percent

from dspark.decoding.request import SamplingSettings
from dspark.decoding.sampling import (
    Use,
    draw,
    draw_weights,
    greedy_token,
    gumbel,
    gumbel_argmax,
    log_distribution,
    uniform,
)
from dspark.errors import DsparkError

DRAWS = 20_000
ALPHA = 0.01

SETTINGS = [
    SamplingSettings(temperature=0.6),
    SamplingSettings(temperature=1.0, top_k=5),
    SamplingSettings(temperature=1.0, top_p=0.7),
    SamplingSettings(temperature=1.0, min_p=0.2),
    SamplingSettings(temperature=1.7, top_k=20, top_p=0.9, min_p=0.05),
    SamplingSettings(temperature=2.5, top_p=0.995),
]


def logits_of(size: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


# ---------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("size", [4, 37, 3000])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_law_is_the_definition(size: int, settings: SamplingSettings) -> None:
    logits = logits_of(size, seed=size)
    law = log_distribution(logits, settings).exp().numpy()
    np.testing.assert_allclose(law, reference_law(logits, settings), rtol=1e-9, atol=0)
    assert law.dtype == np.float64 and abs(law.sum() - 1) < 1e-12


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.integers(-3, 3), min_size=2, max_size=12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, 13),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_ties_keep_the_lower_ids(values: list[int], temperature: float, top_k: int, min_p: float) -> None:
    settings = SamplingSettings(temperature=temperature, top_k=top_k, min_p=min_p)
    logits = torch.tensor(values, dtype=torch.float32)
    law = log_distribution(logits, settings).exp().numpy()
    np.testing.assert_allclose(law, reference_law(logits, settings), rtol=1e-9, atol=0)


def test_top_p_cuts_ties_at_the_lower_ids_and_keeps_at_least_one() -> None:
    flat = torch.zeros(8)
    assert (log_distribution(flat, SamplingSettings(1.0, top_p=0.49)) > -math.inf).tolist() == [True] * 4 + [False] * 4
    assert (log_distribution(flat, SamplingSettings(1.0, top_p=1e-9)) > -math.inf).tolist() == [True] + [False] * 7


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of all four, 0.4 + 0.3 is short of 0.75; of the three that top-k keeps it is 0.78.
    assert log_distribution(logits, SamplingSettings(1.0, top_p=0.75)).exp().count_nonzero() == 3
    assert log_distribution(logits, SamplingSettings(1.0, top_p=0.75, top_k=3)).exp().count_nonzero() == 2


def test_nucleus_larger_than_the_first_guess() -> None:
    settings = SamplingSettings(temperature=1.0, top_p=0.9)
    logits = logits_of(5000, spread=0.1)
    law = log_distribution(logits, settings).exp().numpy()
    assert np.count_nonzero(law) > 4000
    np.testing.assert_allclose(law, reference_law(logits, settings), rtol=1e-9, atol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(settings: SamplingSettings) -> None:
    logits = torch.stack([logits_of(1001, seed=s) for s in range(6)]).reshape(2, 3, 1001)
    together = log_distribution(logits, settings)
    assert together.shape == logits.shape
    for i, j in itertools.product(range(2), range(3)):
        assert torch.equal(together[i, j], log_distribution(logits[i, j], settings))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_dtype_and_the_smallest_temperature(dtype: torch.dtype) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0], dtype=dtype)
    law = log_distribution(logits, SamplingSettings(temperature=5e-324)).exp()
    assert law.tolist() == [0.0, 0.5, 0.0, 0.5]
    assert log_distribution(logits, SamplingSettings(1.0, top_k=1)).exp().tolist() == [0.0, 1.0, 0.0, 0.0]
    assert greedy_token(logits) == 1


def test_input_is_left_alone_and_excluded_tokens_stay_excluded() -> None:
    logits = torch.tensor([1.0, -math.inf, 0.5, -math.inf], dtype=torch.float64)
    before = logits.clone()
    for settings in [SamplingSettings(1.0), SamplingSettings(1.0, top_k=3), SamplingSettings(1.0, 0, 0.999, 1e-6)]:
        assert (log_distribution(logits, settings)[[1, 3]] == -math.inf).all()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_unusable_logits_are_refused(bad: list[float]) -> None:
    logits = torch.tensor(bad)
    for call in [greedy_token, lambda x: log_distribution(x, SamplingSettings(1.0))]:
        with pytest.raises(DsparkError, match="logits"):
            call(logits)
    with pytest.raises(DsparkError, match="logits"):
        log_distribution(torch.stack([torch.zeros(2), logits]), SamplingSettings(1.0, top_k=1))


def test_greedy_settings_have_no_law() -> None:
    with pytest.raises(DsparkError, match="temperature"):
        log_distribution(torch.zeros(3), SamplingSettings())


# --------------------------------------------------------------------------------------------------------------- noise


def test_no_two_keys_share_a_number() -> None:
    seen = [uniform(seed, *key) for seed in (0, 1, 2**63) for key in itertools.product(range(6), range(6), Use)]
    seen += [uniform(0, *key) for key in [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (2**40, 0, 0)]]
    noise = torch.cat([gumbel(seed, position, 97) for seed in (0, 1) for position in (0, 1, 2, 97, 2**40)])
    # The same bits in either form: exp(-exp(-G)) is the uniform behind a Gumbel number.
    behind = (-(-noise).exp()).exp().tolist()
    numbers = sorted(seen + behind)
    assert min(b - a for a, b in itertools.pairwise(numbers)) > 1e-10
    assert 0 <= numbers[0] and numbers[-1] < 1


def test_noise_is_a_function_of_its_key() -> None:
    assert uniform(3, 1, 2, Use.ACCEPT) == uniform(3, 1, 2, Use.ACCEPT)
    assert torch.equal(gumbel(3, 5, 64), gumbel(3, 5, 4096)[:64])
    # Values frozen from the first release: a seed must mean the same text in every version.
    assert uniform(1234, 5, 6, Use.RESIDUAL) == pytest.approx(0.4797923456809934, abs=1e-15)
    np.testing.assert_allclose(
        gumbel(1234, 5, 3).numpy(), [0.6419232502305772, 2.6432442969938523, 3.8175985415680755], rtol=1e-12
    )


def test_too_long_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 3"):
        uniform(1, 2, 3, 4, 5)


def test_noise_has_its_distribution() -> None:
    uniforms = [uniform(9, round_index, slot, Use.ACCEPT) for round_index in range(1000) for slot in range(4)]
    assert kstest(uniforms, "uniform").pvalue > ALPHA / 3
    assert kstest(gumbel(9, 1, 50_000).numpy(), "gumbel_r").pvalue > ALPHA / 3
    across = torch.stack([gumbel(9, position, 4) for position in range(2000)])
    assert kstest(across[:, 3].numpy(), "gumbel_r").pvalue > ALPHA / 3


# --------------------------------------------------------------------------------------------------------------- draws


def test_draw_is_the_inverse_cdf_and_skips_impossible_tokens() -> None:
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    points = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1.0 - 2.0**-53, 1.0]
    assert [draw_weights(weights, u) for u in points] == [1, 1, 3, 3, 4, 4, 4]
    assert [draw((weights / 4).log(), u) for u in [0.0, 0.2, 0.3, 0.7, 0.8, 1.0]] == [1, 1, 3, 3, 4, 4]
    for bad in [torch.zeros(3), torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])]:
        with pytest.raises(ValueError, match="weights"):
            draw_weights(bad, 0.5)


@hypothesis_settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1000), u=st.floats(0.0, 1.0, exclude_max=True), size=st.integers(2, 300))
def test_draw_never_returns_an_excluded_token(seed: int, u: float, size: int) -> None:
    law = log_distribution(logits_of(size, seed), SamplingSettings(1.0, top_k=1 + seed % size))
    assert law[draw(law, u)] > -math.inf
    assert law[gumbel_argmax(law, gumbel(seed, 0, size))] > -math.inf


@pytest.mark.parametrize("size", [4, 1000])
@pytest.mark.parametrize("how", ["inverse", "gumbel"])
def test_draws_follow_their_law_and_a_two_percent_bias_is_seen(how: str, size: int) -> None:
    settings = SamplingSettings(temperature=1.3, top_p=0.98)
    logits = logits_of(size, seed=5, spread=1.0 if size == 4 else 2.5)
    law = log_distribution(logits, settings)
    if how == "inverse":
        tokens = [draw(law, uniform(11, i, 0, Use.BONUS)) for i in range(DRAWS)]
    else:
        tokens = [gumbel_argmax(law, gumbel(11, i, size)) for i in range(DRAWS)]
    drawn, reference = np.array(tokens), reference_law(logits, settings)
    threshold = ALPHA / 4  # Bonferroni over the cases of this test
    assert chi_square_p(drawn, reference) > threshold
    assert chi_square_p(shift_two_percent(drawn, reference), reference) < threshold
