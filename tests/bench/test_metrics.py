"""Figures over round records, against numbers worked out by hand."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.bench import metrics
from dspark.bench.metrics import Answer, Timing
from dspark.decoding.request import Round
from dspark.errors import DsparkError


def rounds(*accepted: int, n: int = 3) -> list[Round]:
    return [Round(n, n, a) for a in accepted]


def test_acceptance_length_counts_the_bonus() -> None:
    assert metrics.acceptance_length(rounds(0, 3, 1)) == pytest.approx(1 + 4 / 3)
    assert metrics.acceptance_length([Round(0, 0, 0)] * 5) == 1.0
    assert metrics.acceptance_length([]) is None


def test_macro_weighs_questions_and_micro_weighs_rounds() -> None:
    answers = [
        Answer("a", rounds(3, 3, 3, 3)),  # turn 1 of a: 4.0
        Answer("a", rounds(0)),  # turn 2 of a: 1.0
        Answer("b", rounds(1, 0)),  # 1.5
        Answer("c", []),  # ended at the prefill's token: in no figure
    ]
    assert metrics.macro_acceptance_length(answers) == pytest.approx((2.5 + 1.5) / 2)
    assert metrics.micro_acceptance_length(answers) == pytest.approx(1 + 13 / 7)
    summary = metrics.summarise(answers, 3)
    assert (summary.questions, summary.requests, summary.without_rounds, summary.rounds) == (3, 4, 1, 7)
    assert summary.histogram == [2, 1, 0, 4]


def test_looping_answers_are_left_out_of_the_second_figure_only() -> None:
    answers = [Answer("a", rounds(0, 1)), Answer("b", rounds(3, 3), looping=True)]
    summary = metrics.summarise(answers, 3)
    assert summary.looping == 1
    assert (summary.macro_length, summary.macro_length_without_loops) == (2.75, 1.5)
    assert (summary.micro_length, summary.micro_length_without_loops) == (2.75, 1.5)
    assert metrics.summarise(answers[1:], 3).macro_length_without_loops is None


def test_conditional_acceptance_needs_the_earlier_slots_and_verification() -> None:
    records = [Round(3, 3, 3), Round(3, 3, 1), Round(3, 1, 1), Round(3, 3, 0), Round(3, 0, 0)]
    slots = metrics.conditional_acceptance(records, 3)
    # slot 1: verified in four rounds, accepted in three; slot 2: verified after a hit in two; slot 3: in one
    assert [(slot.accepted, slot.verified) for slot in slots] == [(3, 4), (1, 2), (1, 1)]
    assert metrics.conditional_acceptance([Round(3, 0, 0)], 2)[0].rate is None
    assert metrics.summarise([Answer("a", records)], 3).unscheduled_rounds == 1


def test_the_kimi_card_average_is_a_question_mean() -> None:
    buckets = [(13, 3.1310), (5, 2.5773), (6, 2.5632), (4, 2.7174), (2, 4.9194)]
    answers = []
    for bucket, (count, length) in enumerate(buckets):
        accepted = round((length - 1) * 10_000)  # 10,000 rounds whose mean is the bucket's figure
        low, rest = divmod(accepted, 10_000)
        records = rounds(*[low] * (10_000 - rest), *[low + 1] * rest, n=7)
        answers += [Answer(f"{bucket}/{i}", records) for i in range(count)]
    assert metrics.macro_acceptance_length(answers) == pytest.approx(2.98924, abs=1e-5)


@given(st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8), min_size=1, max_size=6))
def test_equal_weights_make_macro_and_micro_meet(accepted: list[list[int]]) -> None:
    answers = [Answer(str(i), rounds(*values, n=7)) for i, values in enumerate(accepted)]
    macro, micro = metrics.macro_acceptance_length(answers), metrics.micro_acceptance_length(answers)
    assert macro == pytest.approx(fmean(1 + fmean(values) for values in accepted))
    assert micro == pytest.approx(1 + fmean(value for values in accepted for value in values))


def test_speedup_is_a_ratio_of_sums() -> None:
    plain = [Timing(10, 1.0), Timing(30, 3.0)]
    fast = [Timing(10, 0.5), Timing(30, 2.5)]
    assert metrics.paired_speedup(plain, fast).value == pytest.approx((40 / 3.0) / (40 / 4.0))


def test_interval_is_seeded_paired_and_covers() -> None:
    generator = np.random.default_rng(5)
    lengths = generator.integers(10, 400, size=30)
    plain = [Timing(int(n), n * 0.1) for n in lengths]
    same = [Timing(int(n), n * 0.05) for n in lengths]
    exact = metrics.paired_speedup(plain, same)
    assert (exact.low, exact.value, exact.high) == pytest.approx((2.0, 2.0, 2.0))  # paired: lengths add no width
    noisy = [Timing(int(n), n * 0.05 * f) for n, f in zip(lengths, generator.uniform(0.7, 1.3, 30), strict=True)]
    first, again = metrics.paired_speedup(plain, noisy), metrics.paired_speedup(plain, noisy)
    assert first == again and first != metrics.paired_speedup(plain, noisy, seed=1)
    assert first.low is not None and first.high is not None and first.low < first.value < first.high


def test_bootstrap_interval_contains_the_truth_about_as_often_as_it_says() -> None:
    hits = 0
    for trial in range(200):
        generator = np.random.default_rng(trial)
        plain = [Timing(100, 10.0)] * 30
        fast = [Timing(100, 10.0 / f) for f in generator.lognormal(0.0, 0.3, 30)]
        truth = 1 / np.exp(0.3**2 / 2)  # harmonic: seconds are averaged, so E[1 / f] counts
        interval = metrics.paired_speedup(plain, fast, resamples=500, seed=trial)
        assert interval.low is not None and interval.high is not None
        hits += interval.low <= truth <= interval.high
    assert 0.87 <= hits / 200 <= 0.99


def test_one_prompt_has_no_interval() -> None:
    interval = metrics.paired_speedup([Timing(10, 1.0)], [Timing(10, 0.5)])
    assert (interval.value, interval.low, interval.high) == (2.0, None, None)
    assert str(interval) == "2.00x"


@pytest.mark.parametrize("other", [[], [Timing(1, 1.0)] * 3, [Timing(0, 0.0)] * 2])
def test_unpaired_or_empty_timings_are_refused(other: list[Timing]) -> None:
    with pytest.raises(DsparkError, match="timings"):
        metrics.paired_speedup([Timing(1, 1.0)] * 2, other)


def test_pass_table_takes_medians_and_the_narrowest_as_base() -> None:
    table = metrics.pass_table({8: [0.12, 0.9, 0.11], 1: [0.1, 0.1, 5.0]})
    assert [(row.tokens, row.seconds) for row in table] == [(1, 0.1), (8, 0.12)]
    assert table[1].ratio == pytest.approx(1.2)
    with pytest.raises(DsparkError):
        metrics.pass_table({1: []})
