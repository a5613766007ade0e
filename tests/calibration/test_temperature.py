"""Sequential temperature scaling on rounds whose true temperatures are known, and the measures against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from scipy.special import expit, logit

from dspark.calibration.rounds import Rounds
from dspark.calibration.temperature import (
    GRID,
    area_under_curve,
    assess,
    calibration_error,
    fit_scaling,
    fit_temperatures,
    of_temperatures,
    survival,
)
from dspark.errors import DsparkError

TRUE = (GRID[30], GRID[20], GRID[8])  # 3.16, 1, 0.25


def rounds(count: int, seed: int, prompts: int = 60, temperatures: tuple[float, ...] = TRUE) -> Rounds:
    """Rounds whose slots survive with sigmoid(z / T)."""
    generator = np.random.default_rng(seed)
    chances = generator.beta(2, 1.2, size=(count, len(temperatures)))
    survived = np.cumprod(generator.random(chances.shape) < chances, axis=1)
    names = generator.integers(prompts, size=count).astype(str)
    return Rounds(
        domain=np.where(generator.random(count) < 0.5, "a", "b"),
        prompt=names,
        logits=logit(chances) * np.array(temperatures),
        scheduled=np.full(count, len(temperatures)),
        accepted=survived.sum(axis=1),
    )


def test_the_true_temperatures_come_out_and_held_out_rounds_are_calibrated() -> None:
    found = fit_temperatures(rounds(40_000, 1))
    assert found[0] == pytest.approx(TRUE[0], rel=0.2) and found[1] == pytest.approx(TRUE[1], rel=0.2)
    assert found[2] == pytest.approx(TRUE[2], rel=0.3)
    held_out = rounds(20_000, 2)
    raw, scaled = assess(held_out, of_temperatures([1.0] * 3)), assess(held_out, of_temperatures(found))
    assert max(one.error for one in scaled) < 0.012 < max(one.error for one in raw)
    assert all(one.low <= one.error + 0.01 and one.error - 0.01 <= one.high for one in scaled)
    assert [one.rounds for one in scaled] == [20_000] * 3
    assert sum(count for count, _, _ in scaled[0].bins) == 20_000


def test_an_offset_is_found_that_no_temperature_can_mend() -> None:
    """The head says logit(p) + 0.6 where p is true."""
    shifted = [rounds(20_000, seed, temperatures=(1.0, 1.0)) for seed in (5, 6)]
    fit, held_out = (Rounds(r.domain, r.prompt, r.logits + 0.6, r.scheduled, r.accepted) for r in shifted)
    found = fit_scaling(fit)
    assert [value for pair in found for value in pair] == pytest.approx([1.0, -0.6, 1.0, -0.6], abs=0.15)
    errors = [
        max(one.error for one in assess(held_out, scaling))
        for scaling in (found, of_temperatures(fit_temperatures(fit)))
    ]
    assert errors[0] < 0.015 and errors[1] > 2 * errors[0], errors


def test_temperatures_that_need_no_scaling_stay_at_one() -> None:
    sure = Rounds(*(np.array([v] * 10) for v in ("a", "p")), np.full((10, 2), 60.0), np.full(10, 2), np.full(10, 2))
    assert fit_temperatures(sure) == (1.0, 1.0)


def test_rounds_that_an_end_cut_short_say_nothing_of_later_slots() -> None:
    whole = rounds(3_000, 3)
    cut = np.arange(3_000) % 3 == 0
    known = np.minimum(whole.accepted, 1)
    short = Rounds(
        whole.domain,
        whole.prompt,
        whole.logits,
        np.where(cut, known, whole.scheduled),
        np.where(cut, known, whole.accepted),
    )
    assert [one.rounds for one in assess(short, of_temperatures(TRUE))][2] == int((short.scheduled == 3).sum()) < 3_000
    with pytest.raises(DsparkError, match="slot 2"):
        fit_temperatures(Rounds(short.domain, short.prompt, short.logits, known * 0 + 1, known))


def by_hand(predicted: np.ndarray, happened: np.ndarray) -> float:
    total = 0.0
    for low in range(15):
        inside = [i for i, p in enumerate(predicted) if low <= min(p * 15, 14.999) < low + 1]
        if inside:
            gap = sum(predicted[i] for i in inside) / len(inside) - sum(happened[i] for i in inside) / len(inside)
            total += abs(gap) * len(inside) / len(predicted)
    return total


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=40))
@hypothesis_settings(max_examples=60, deadline=None)
def test_measures_equal_loops(pairs: list[tuple[float, bool]]) -> None:
    p, y = np.array([a for a, _ in pairs]), np.array([float(b) for _, b in pairs])
    assert calibration_error(p, y) == pytest.approx(by_hand(p, y), abs=1e-9)
    good, bad = p[y == 1], p[y == 0]
    wins = [(a > b) + 0.5 * (a == b) for a in good for b in bad]
    assert area_under_curve(p, y) == (pytest.approx(sum(wins) / len(wins)) if wins else None)


def test_halves_share_no_prompt_and_files_come_back(tmp_path) -> None:
    whole = rounds(1_000, 4)
    first, second = whole.halves()
    assert len(first) + len(second) == 1_000 and min(len(first), len(second)) > 300
    names = [set(zip(one.domain.tolist(), one.prompt.tolist(), strict=True)) for one in (first, second)]
    assert not names[0] & names[1] and {d for d, _ in names[0]} == {d for d, _ in names[1]} == {"a", "b"}
    whole.save(tmp_path / "runs" / "rounds.npz")
    back = Rounds.load(tmp_path / "runs" / "rounds.npz")
    assert all(np.array_equal(getattr(back, name), getattr(whole, name)) for name in ("domain", "logits", "accepted"))
    (tmp_path / "torn.npz").write_bytes(b"PK")
    with pytest.raises(DsparkError, match="collect them again"):
        Rounds.load(tmp_path / "torn.npz")
    with pytest.raises(DsparkError, match=r"scaling = '2 slots'.*3 slots"):
        assess(whole, of_temperatures([1.0, 1.0]))
    assert survival(whole.logits, of_temperatures(TRUE))[:, 0] == pytest.approx(expit(whole.logits[:, 0] / TRUE[0]))
