"""The published tables' aggregates, recomputed from their parts by our functions."""

from __future__ import annotations

import pytest
from tests.bench.report_factory import AIME, RULER, length_buckets

from dspark.bench.figures import acceptance, macro_over_buckets, mean_or_none, partition_mean, relative_change
from dspark.bench.metrics import acceptance_length, conditional_acceptance
from dspark.bench.samples import Sample
from dspark.decoding.request import Round

NOVITA = [  # target, draft, n = 3, n = 7, change: as published, each rounded
    ("Kimi-K2.6", "DSpark", 2.17, 2.55, 0.178),
    ("Kimi-K2.6", "Eagle3-MLA", 2.01, 2.01, 0.002),
    ("Kimi-K2.7-Code", "DSpark", 2.12, 2.36, 0.117),
    ("Kimi-K2.7-Code", "Eagle3-MLA", 2.04, 2.05, 0.003),
]
CARD = [4.6594, 5.4176, 4.1329, 5.5121, 5.1980, 3.9342, 2.9893, 4.2553]


def test_aime26_is_the_mean_over_questions() -> None:
    """(13 x 3.1310 + 5 x 2.5773 + 6 x 2.5632 + 4 x 2.7174 + 2 x 4.9194) / 30; the empty buckets weigh nothing."""
    buckets = length_buckets()
    assert sum(one.questions for one in buckets) == 30
    mean = macro_over_buckets(buckets)
    assert mean is not None and f"{mean:.5f}" == "2.98924"
    assert mean == pytest.approx((13 * 3.1310 + 5 * 2.5773 + 6 * 2.5632 + 4 * 2.7174 + 2 * 4.9194) / 30, abs=1e-12)
    rounding = sum(n * 0.5e-4 for n, *_ in AIME) / 30 + 0.5e-4  # of the buckets, and of the published mean itself
    assert abs(mean - 2.9893) < rounding


def test_ruler_is_the_mean_over_partitions() -> None:
    assert partition_mean(RULER) == pytest.approx((4.4658 + 4.3081 + 3.9919) / 3)
    assert partition_mean(RULER) == pytest.approx(4.25527, abs=5e-6)
    assert f"{partition_mean(RULER):.4f}" == "4.2553"


def test_equal_partitions_make_the_questions_mean_the_partitions_mean() -> None:
    """The card's two ways of saying it agree because every partition has 50 questions."""
    lengths = {"MK": 3, "MV": 2, "QA": 1}
    samples = [
        Sample("ruler-v2", f"{part}/{i}", "d", "replay", rounds=[Round(3, 3, accepted)], output_tokens=9)
        for part, accepted in lengths.items()
        for i in range(50)
    ]
    found = acceptance(samples, 3, "replay", {one.question: one.question.split("/")[0] for one in samples})
    assert found.partitions == {"MK": 4.0, "MV": 3.0, "QA": 2.0}
    assert partition_mean(found.partitions) == found.macro_length == 3.0


@pytest.mark.parametrize(("target", "draft", "low", "high", "published"), NOVITA)
def test_the_change_from_n_3_to_n_7(target: str, draft: str, low: float, high: float, published: float) -> None:
    """The published change lies between what the published, rounded speedups can come from."""
    least = relative_change(low + 0.005, high - 0.005)
    most = relative_change(low - 0.005, high + 0.005)
    assert least is not None and most is not None
    assert least - 0.0005 <= published <= most + 0.0005, (target, draft)


def test_the_first_change_to_the_digit() -> None:
    change = relative_change(2.17, 2.55)
    assert change is not None and 0.175 <= change <= 0.178


def test_means_over_suites_are_simple_and_unweighted() -> None:
    assert mean_or_none([2.0, 3.0, 4.0]) == 3.0
    assert mean_or_none([2.0, None]) is None, "a mean over fewer suites than named would be another figure"
    assert mean_or_none([]) is None and relative_change(0.0, 2.0) is None and relative_change(None, 2.0) is None
    assert mean_or_none(CARD) == pytest.approx(sum(CARD) / 8)


def test_accepted_and_acceptance_length_differ_by_the_bonus() -> None:
    """Rounds of 3, 2, 1, 0 accepted: 1.5 accepted on average, an acceptance length of 2.5."""
    rounds = [Round(3, 3, k) for k in (3, 2, 1, 0)]
    assert sum(one.accepted for one in rounds) / len(rounds) == 1.5
    assert acceptance_length(rounds) == 2.5
    assert [slot.rate for slot in conditional_acceptance(rounds, 3)] == [3 / 4, 2 / 3, 1 / 2]
    found = acceptance([Sample("s", "q", "d", "served", rounds=rounds, output_tokens=11)], 3, "served")
    assert (found.macro_length, found.micro_length, found.histogram) == (2.5, 2.5, [1, 1, 1, 1])
    assert found.completion_per_round == 11 / 4, "the prompt pass's token is in it: no acceptance length"
