"""The schedules against brute force, what they may look at, and the law of the tokens that come out."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.decoding.laws import chi_square_p

from dspark.decoding.request import SamplingSettings
from dspark.decoding.scheduler import above, alone, budget, early_stop, look_ahead, spend, survivals
from dspark.decoding.verify import draft_token, verify_rejection

SHARES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.9, 1.0])  # with ties


@st.composite
def rounds(draw, most_rows=4):
    """(survival [R, n], seconds [R * n + 1], rows): the pass may get dearer in jumps, or not at all."""
    rows, n = draw(st.integers(1, most_rows)), draw(st.integers(1, 4))
    confidences = draw(st.lists(st.lists(SHARES, min_size=n, max_size=n), min_size=rows, max_size=rows))
    more = draw(st.lists(st.sampled_from([0.0, 0.0, 0.1, 0.4, 2.0]), min_size=rows * n, max_size=rows * n))
    return survivals(confidences, n), np.cumsum([1.0, *more]), rows + draw(st.integers(0, 3))


def one_by_one(survival, seconds, rows):
    """Algorithm 1 as it is written: a loop over sorted candidates."""
    candidates = sorted((-a, j, r) for r, row in enumerate(survival) for j, a in enumerate(row))
    lengths, tau, theta = [0] * len(survival), float(rows), rows / seconds[0]
    for k, (a, _, r) in enumerate(candidates, 1):
        tau -= a
        if not tau / seconds[k] > theta:
            break
        theta = tau / seconds[k]
        lengths[r] += 1
    return lengths


def theta(survival, seconds, rows, lengths):
    got = sum(survival[r, :length].sum() for r, length in enumerate(lengths))
    return (rows + got) / seconds[sum(lengths)]


@given(rounds())
def test_early_stop_is_algorithm_1(case):
    assert early_stop(*case).tolist() == one_by_one(*case)


@given(rounds(most_rows=3))
def test_looking_ahead_finds_the_best_of_all_schedules(case):
    survival, seconds, rows = case
    every = product(range(survival.shape[1] + 1), repeat=len(survival))
    best = max(theta(survival, seconds, rows, lengths) for lengths in every)
    found = look_ahead(*case)
    assert theta(*case, found) == pytest.approx(best, rel=1e-12)
    assert theta(*case, found) >= theta(*case, early_stop(*case)) - 1e-12
    assert theta(*case, spend(survival, budget(*case))) == pytest.approx(best, rel=1e-12)


@given(rounds(most_rows=1))
def test_a_request_alone_gets_what_it_gets_among_others(case):
    survival, seconds, rows = case
    for ahead, among in ((True, look_ahead), (False, early_stop)):
        assert alone(survival[0].tolist(), seconds.tolist(), rows, ahead) == among(survival, seconds, rows)[0]


@given(rounds(), st.data())
def test_slots_that_come_later_change_nothing_before_them(case, data):
    """Non-anticipation: whether slot j is verified is a function of the request's slots 1..j."""
    survival, seconds, rows = case
    row = data.draw(st.integers(0, len(survival) - 1))
    slot = data.draw(st.integers(0, survival.shape[1] - 1))
    other = survival.copy()
    other[row, slot + 1 :] = survival[row, slot] * data.draw(SHARES)
    lossless = np.array([data.draw(st.booleans()) for _ in survival])
    lossless[row] = False
    schedules = [early_stop, lambda *a: look_ahead(*a, lossless), lambda s, *_: spend(s, 3)]
    for schedule in schedules:
        lengths = [schedule(one, seconds, rows)[row] for one in (survival, other)]
        assert min(lengths[0], slot + 1) == min(lengths[1], slot + 1)


@given(rounds(), st.integers(0, 20))
def test_spending_takes_the_likeliest(case, count):
    survival = case[0]
    lengths = spend(survival, count)
    assert lengths.sum() == min(count, (survival > 0).sum())
    kept = np.arange(survival.shape[1]) < lengths[:, None]
    assert not kept.any() or kept.all() or survival[kept].min() >= survival[~kept].max()


def test_ties_go_to_the_earlier_slot_and_nothing_is_no_schedule():
    even = survivals([[0.5, 1.0], [0.5, 1.0]], 2)
    assert early_stop(even, np.array([1.0, 1.0, 1.0, 9.0, 9.0]), 2).tolist() == [1, 1]
    assert early_stop(np.zeros((0, 7)), np.ones(1), 0).tolist() == []
    assert look_ahead(np.zeros((2, 7)), np.ones(15), 2).tolist() == [0, 0]
    assert survivals([[0.5, 0.5], [], [1.0]], 2).tolist() == [[0.5, 0.25], [0.0, 0.0], [1.0, 0.0]]


def test_threshold():
    assert above([[0.9, 0.4, 0.9], [], [0.1], [0.8, 0.8]], 0.5).tolist() == [1, 0, 0, 2]


# The counterexample: the law of a sampled request under a schedule that anticipates


LAW = torch.tensor([0.5, 0.5]).log()
JUMP = np.array([1.0, 1.6, 1.6])
"""One more token is not worth its price alone; with a second one that survives, both are."""


PAYS = np.array([1.0, 1.2, 2.0])
"""Slot 1 is worth its price."""


def emitted(schedule, draws, seconds=JUMP):
    """First tokens of `draws` rounds of two slots; target and draft are the same fair coin, and slot 2 is sure to
    survive after token 0 and sure to be lost after token 1."""
    settings, tokens = SamplingSettings(1.0), []
    for seed in range(draws):
        drafts, laws = zip(*(draft_token(LAW, settings, seed, 1, k, k, "rejection") for k in range(2)), strict=True)
        survival = survivals([[0.55, 1.0 if drafts[0] == 0 else 0.0]], 2)
        length = int(schedule(survival, seconds, 1)[0])
        rows = LAW.expand(length + 1, 2)
        accepted, own = verify_rejection(rows, drafts[:length], laws[:length], settings, seed, 1)
        tokens.append([*drafts[:accepted], own][0])
    return np.array(tokens)


def test_a_schedule_that_looks_ahead_biases_a_sampled_request_and_ours_does_not():
    law, draws = np.array([0.5, 0.5]), 4_000
    biased = emitted(look_ahead, draws)
    assert chi_square_p(biased, law) < 1e-9
    assert (biased == 0).mean() == pytest.approx(0.75, abs=0.03)  # kept when it is token 0, drawn again when it is not
    ours = [early_stop, lambda *case: look_ahead(*case, np.array([False])), lambda s, *_: spend(s, 2)]
    for schedule, seconds in product(ours, (JUMP, PAYS)):
        assert chi_square_p(emitted(schedule, draws, seconds), law) > 1e-3
