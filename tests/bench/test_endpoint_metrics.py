"""Acceptance from counters, beside what round records say of the same rounds."""

import json

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.bench.endpoints import IDS, VllmCounters

from dspark.bench.endpoint_metrics import Received, added, counted_acceptance, difference, read_counters
from dspark.bench.metrics import conditional_acceptance, histogram
from dspark.decoding.request import Round
from dspark.errors import DsparkError


def counted(counters, answers=2, received=None, tokens=None):
    """What one suite of so many answers comes to."""
    before = read_counters(counters.page())
    counters.answers += answers
    after = read_counters(counters.page())
    received = received or Received(answers, answers, tokens or answers * len(IDS), complete=True)
    return counted_acceptance(difference(before, after, "http://x"), received)


def test_the_difference_of_two_readings_gives_what_the_rounds_give():
    counters = VllmCounters()
    counters.answers = 5  # of a warm-up and of others before us
    acceptance, notes = counted(counters)
    rounds = [Round(3, 3, 3), Round(3, 3, 1), Round(3, 3, 0)] * 2
    assert acceptance.source == "server" and acceptance.rounds == 6 and acceptance.macro_length is None
    assert acceptance.micro_length == pytest.approx(1 + 4 / 3)
    assert acceptance.histogram == histogram(rounds, 3)
    rates = [(one.slot, one.accepted, one.verified, one.rate) for one in acceptance.conditional]
    assert rates == [(one.slot, one.accepted, one.verified, one.rate) for one in conditional_acceptance(rounds, 3)]
    assert acceptance.completion_per_round is None and notes == ["its counters leave out rounds that drafted nothing"]


def test_parts_that_are_added_are_the_whole():
    counters = VllmCounters()
    first, parts = read_counters(counters.page()), []
    for answers in (1, 0, 3):
        before = read_counters(counters.page())
        counters.answers += answers
        parts.append(difference(before, read_counters(counters.page()), "x").rows())
    whole, received = difference(first, read_counters(counters.page()), "x"), Received(4, 4, 4 * len(IDS), True)
    assert counted_acceptance(added(json.loads(json.dumps(parts))), received) == counted_acceptance(whole, received)
    assert added([]).values == {} and added([[]]).values == {}


def test_tokens_of_other_clients_are_noticed():
    counters = VllmCounters()
    counters.others = 3
    before = read_counters(counters.page())
    counters.answers, counters.others = 1, 45
    delta = difference(before, read_counters(counters.page()), "x")
    acceptance, notes = counted_acceptance(delta, Received(1, 1, 7, complete=True))
    assert acceptance is not None and "49 tokens where 7 were received" in notes[0]
    _, notes = counted_acceptance(delta, Received(1, 1, 7, complete=False))
    assert "requests failed" in notes[0]


def test_a_restart_is_noticed():
    counters = VllmCounters()
    counters.answers = 2
    before = read_counters(counters.page())
    counters.answers = 1
    with pytest.raises(DsparkError, match="was restarted while it was measured"):
        difference(before, read_counters(counters.page()), "http://x")
    counters.answers, counters.born = 3, 1.8e9  # counted beyond what it was before
    with pytest.raises(DsparkError, match=r"_created.*was restarted"):
        difference(before, read_counters(counters.page()), "http://x")
    with pytest.raises(DsparkError, match="was restarted"):
        difference(before, read_counters("other 1\n"), "http://x")


def test_rounds_of_different_widths_leave_a_gap_by_slot():
    counters = VllmCounters()
    counters.per_answer |= {"draft_tokens": 7}
    acceptance, notes = counted(counters)
    assert acceptance.conditional == [] and acceptance.micro_length == pytest.approx(1 + 4 / 3)
    assert "acceptance by slot is not known" in notes[0]
    counters.per_answer = {"drafts": 300, "draft_tokens": 898, "accepted": 400, "places": (200, 100, 100)}
    acceptance, notes = counted(counters)
    assert [one.rate for one in acceptance.conditional] == [2 / 3, 1 / 2, 1]
    assert "counts 4 unverified of 1800 drafts as rejected" in notes[0]


def test_no_counters_no_figure():
    for page in (None, "", "nonsense {", generate_latest(CollectorRegistry()).decode()):
        nothing = read_counters(page)
        acceptance, notes = counted_acceptance(difference(nothing, nothing, "x"), Received(1, 1, 7, True))
        assert acceptance is None and "acceptance is not known" in notes[0]
    acceptance, notes = counted(VllmCounters(), answers=0, tokens=0)
    assert acceptance is None and "nothing was drafted" in notes[0]


def test_sglang_counts_verification_calls_only():
    def page(calls, tokens):
        labels = 'model_name="m",tp_rank="0"'
        return (
            f"sglang:spec_verify_calls_total{{{labels}}} {calls}\nsglang:spec_accept_length{{{labels}}} 9.0\n"
            f"sglang:generation_tokens_total{{{labels}}} {tokens}\n"
        )

    delta = difference(read_counters(page(10, 100)), read_counters(page(16, 114)), "x")
    acceptance, notes = counted_acceptance(delta, Received(2, 2, 14, True))
    assert acceptance.micro_length is None and acceptance.completion_per_round == pytest.approx(14 / 6)
    assert acceptance.rounds == 6 and "no acceptance length" in notes[0]
    acceptance, notes = counted_acceptance(delta, Received(1, 1, 7, True))
    assert acceptance.completion_per_round is None and len(notes) == 2
