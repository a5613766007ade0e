"""The gate and the schedule in the engine: the same ids, the same law, and no drafts where they do not pay."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from itertools import cycle, islice, pairwise

import numpy as np
import pytest
import torch
from tests.decoding.conftest import PROMPTS, bigram_draft, draft_config
from tests.decoding.laws import chi_square_p, reference_law, shift_two_percent

from dspark.decoding.drafting import Proposal
from dspark.decoding.engine import Engine
from dspark.decoding.planner import Fixed, Planner, Threshold
from dspark.decoding.proposers import NoProposer, make_proposer
from dspark.decoding.request import Active, NoState, Request, Round, SamplingSettings
from dspark.drafts.dspark import DSparkDraft

MODES = ["auto", "early-stop", "delayed"]


class Prices:
    """A pass takes 1 + token * (tokens - 1), a draft pass `draft`."""

    widths = (3, 7)

    def __init__(self, token=0.1, draft=0.2):
        self.token, self.draft = token, draft

    def verify_table(self, requests, most):
        return 1 + self.token * (np.maximum(np.arange(most + 1), requests) - 1)

    def draft_seconds(self, requests, n=None):
        return self.draft * (1 + 0.1 * requests) * (1.0 if n in (None, 7) else 0.8)

    def context_seconds(self, tokens):
        return 0.001 * tokens


class Untimed(Planner):
    """Rounds here take other times than Prices says; those of tiny models say nothing."""

    _compared = True

    def took(self, seconds):
        pass


@pytest.fixture(scope="module")
def draft(pairs):
    """One whose confidence depends on the token before, as the real ones' does."""
    made = bigram_draft(pairs)
    with torch.no_grad():
        made.confidence_head.proj.weight.normal_(std=1.5)
        made.confidence_head.proj.bias.fill_(0.5)
    return made


def serve(target, draft, asked, schedule, batch=5, **settings):
    engine = Engine(target, make_proposer(target, draft, confidence=True), batch, schedule=schedule, **settings)
    return [result for _, result in sorted(engine.run(asked))]


def asked(sampling=None, times=1, tokens=40):
    return [Request(p, tokens, sampling or SamplingSettings()) for p in PROMPTS * times]


def lengths(results):
    return Counter(r.scheduled for result in results for r in result.rounds)


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(0.8, seed=7)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("token", [0.01, 0.3])
def test_ids_are_those_of_plain_decoding(target, draft, mode, sampling, token):
    expected = [r.output_ids for _, r in sorted(Engine(target, NoProposer(), 5).run(asked(sampling)))]
    for batch in (1, 3, 5):
        results = serve(target, draft, asked(sampling), Untimed(Prices(token, 0.02), 7, mode), batch)
        assert [r.output_ids for r in results] == expected
        assert len(lengths(results)) > 1, "a schedule that always says the same is none"


@pytest.mark.parametrize("kind", ["no confidence head", "eagle-like width"])
def test_without_confidences_past_acceptance_decides(target, pairs, kind):
    head = {"enable_confidence_head": False, "confidence_head_with_markov": False}
    made = bigram_draft(pairs, **head) if kind == "no confidence head" else bigram_draft(pairs)
    engine = Engine(target, make_proposer(target, made), 5, schedule=Untimed(Prices(), 7))
    results = [result for _, result in sorted(engine.run(asked(times=3)))]
    plain = [r.output_ids for _, r in sorted(Engine(target, NoProposer(), 5).run(asked(times=3)))]
    assert [r.output_ids for r in results] == plain
    assert lengths(results)[0] and sum(k * c for k, c in lengths(results).items())


def test_nobody_drafts_where_it_cannot_pay_but_is_asked_now_and_then(target, draft):
    requests = [Request(PROMPTS[0], 200, ignore_eos=True), Request(PROMPTS[2], 200, ignore_eos=True)]
    results = serve(target, draft, requests, Untimed(Prices(token=1.0, draft=0.5), 7))
    drafted = [r.proposed > 0 for result in results for r in result.rounds]
    assert drafted[0], "the first round tells what there is to know"
    assert 2 < sum(drafted) < 0.1 * len(drafted)
    idle = [i for i, one in enumerate(r.proposed > 0 for r in results[0].rounds) if one]
    assert len(idle) > 1, "each request is probed again"


def test_everybody_drafts_where_tokens_are_free(target, pairs):
    sure = bigram_draft(pairs)  # every slot survives with 1/2
    results = serve(target, sure, asked(), Untimed(Prices(token=0.0, draft=0.001), 7))
    assert all(r.proposed for result in results for r in result.rounds)
    fixed = serve(target, sure, asked(), Fixed())
    assert [r.rounds for r in results] == [r.rounds for r in fixed], "then everything is verified"


def test_a_request_that_loses_goes_without_while_others_draft(target):
    """The draft knows the bigrams of one of the two answers."""
    known, unknown = (Request(prompt, 150, ignore_eos=True) for prompt in PROMPTS[:2])
    [(_, plain)] = Engine(target, NoProposer()).run([known])
    head = {"enable_confidence_head": False, "confidence_head_with_markov": False}
    draft = bigram_draft(dict(pairwise([*known.prompt_ids, *plain.output_ids])), **head)
    results = serve(target, draft, [known, unknown], Untimed(Prices(0.08, 0.02), 7), 2)
    shares = [sum(r.scheduled > 0 for r in one.rounds) / len(one.rounds) for one in results]
    assert shares[0] > 0.8 and shares[1] < 0.3, shares


def test_context_is_written_late_and_all_of_it(target, draft, monkeypatch):
    """A request that did not draft for long proposes what it would have, had it drafted all along."""

    class Every(Fixed):
        rounds = 0

        def choose(self, ready, beside, reading):
            self.rounds += 1
            return (list(ready), None) if self.rounds % 20 == 0 else ([], None)

        def cut(self, drafting, proposals):
            seen.extend((a.ids[:], a.context.length, p.tokens[:]) for a, p in zip(drafting, proposals, strict=True))

    seen = []
    request = Request(PROMPTS[0], 120, ignore_eos=True)
    engine = Engine(target, make_proposer(target, draft), schedule=Every())
    calls = []
    observe = engine.proposer.observe
    monkeypatch.setattr(engine.proposer, "observe", lambda batch: (calls.append(len(batch)), observe(batch))[1])
    list(engine.run([request]))
    assert len(seen) == len(calls) >= 4
    late = list(seen)
    seen.clear()
    monkeypatch.setattr(Every, "choose", lambda self, ready, beside, reading: (list(ready), None))
    list(Engine(target, make_proposer(target, draft), schedule=Every()).run([request]))
    always = {len(ids): tokens for ids, _, tokens in seen}
    common = [(tokens, always[len(ids)]) for ids, _, tokens in late if len(ids) in always]
    assert all(length == len(ids) - 1 for ids, length, _ in late)
    assert common and all(a == b for a, b in common)


def test_pending_context_reaches_the_prefix_cache(target, draft):
    """A request that never drafted leaves a whole prefix behind; one that is cancelled as much as was written."""

    class Never(Fixed):
        def choose(self, ready, beside, reading):
            return [], None

    engine = Engine(target, make_proposer(target, draft), schedule=Never(), prefix_cache=True, kv_tokens=2000)
    [(_, first)] = engine.run([Request(PROMPTS[2], 40, ignore_eos=True)])
    again = Request([*PROMPTS[2], *first.output_ids], 10)
    engine.schedule = Fixed()
    [(_, second)] = engine.run([again])
    assert second.cached_tokens == len(again.prompt_ids) - 1
    [(_, plain)] = Engine(target, make_proposer(target, draft)).run([again])
    assert (second.output_ids, second.rounds) == (plain.output_ids, plain.rounds)
    engine.schedule = Never()
    active = engine.add(Request([9, *PROMPTS[2] * 2], 40))
    for _ in range(5):
        engine.step()
    engine.cancel(active)
    engine.step()
    [(_, third)] = engine.run([Request([9, *PROMPTS[2] * 2, 5], 10)])
    assert third.finish_reason is not None and third.error is None


def test_a_threshold_keeps_what_is_sure(target, draft):
    expected = [r.output_ids for _, r in sorted(Engine(target, NoProposer(), 5).run(asked()))]
    seen = {}
    for threshold in (0.0, 0.6, 1.0):
        results = serve(target, draft, asked(), Threshold(threshold))
        assert [r.output_ids for r in results] == expected
        seen[threshold] = sum(k * count for k, count in lengths(results).items())
    assert seen[0.0] > seen[0.6] > seen[1.0] == 0


def test_shorter_drafts_are_taken_where_they_pay(target, draft):
    prices = Prices(0.2, 0.4)
    prices.draft_seconds = lambda requests, n=None: 0.05 if n == 3 else 3.0
    results = serve(target, draft, asked(times=4), Untimed(prices, 7), 1)
    widths = Counter(r.proposed for result in results for r in result.rounds)
    assert widths[3] > 5 * widths[7]


def idle_request():
    return Active(0, Request([0]), "greedy", 0, [0], 100, frozenset(), NoState())


def play(planner, batch, rounds, beside=0, reading=0, took=lambda drafted: None):
    """Rounds without an engine: every slot has a confidence of 0.7, and is accepted as often. Whether any drafted."""
    seen, generator = [], np.random.default_rng(0)
    for _ in range(rounds):
        drafting, width = planner.choose(batch, beside, reading)
        width = width or planner.n
        proposals = [Proposal([0] * width, [None] * width, [0.7] * width) for _ in drafting]
        planner.cut(drafting, proposals)
        for active, proposal in zip(drafting, proposals, strict=True):
            length = len(proposal.tokens)
            record = Round(width, length, int(min(generator.geometric(0.3) - 1, length)))
            planner.learn(active, proposal, record)
        if (seconds := took(bool(drafting))) is not None:
            planner.took(seconds)
        seen.append(bool(drafting))
    return seen


def test_in_a_batch_that_fills_up_tokens_are_worth_what_they_are_in_the_full_one():
    for reading, expected in ((0, True), (7, False)):
        planner = Planner(Prices(0.1, 0.2), 7)
        batch = [idle_request()]
        play(planner, batch, 1)
        drafted = play(planner, batch, 40, beside=100, reading=reading)
        assert (np.mean(drafted) > 0.9) == expected, reading


def test_a_context_far_behind_is_part_of_the_price():
    for seconds, expected in ((0.0, True), (0.1, False)):
        prices = Prices(0.1, 0.2)
        prices.context_seconds = lambda tokens, seconds=seconds: seconds * tokens
        planner, batch = Planner(prices, 7), [idle_request()]
        play(planner, batch, 1)
        batch[0].pending.append(torch.zeros(400, 4))
        assert (np.mean(play(planner, batch, 40)) > 0.9) == expected


def test_rounds_that_take_longer_than_their_costs_say():
    """Only where those with drafts do so by more than plain ones; who drafts knows what plain ones take."""

    def shares(plain, drafted):
        planner, batch = Planner(Prices(0.1, 0.9), 7), [idle_request()]
        took = play(planner, batch, 1000, took=lambda drafts: (drafted if drafts else plain) * planner._predicted)
        return np.mean(took[500:])

    assert shares(1.0, 1.0) > 0.95 and shares(1.3, 1.3) > 0.95
    assert shares(1.0, 1.5) < 0.1
    assert shares(1.0, 0.9) > 0.95


def test_what_is_not_verified_was_promised_all_the_same():
    planner, batch = Planner(Prices(0.3, 0.2), 7), [idle_request()]
    drafting, width = planner.choose(batch, 0, 0)
    proposal = Proposal([0] * width, [None] * width, [0.9, 0.8, 0.7, 0.6, 0.5, float("nan"), 0.5])
    planner.cut(drafting, [proposal])
    assert len(proposal.confidence) < 5
    planner._look_back()
    assert batch[0].outlook.promise[1, -1, 0] == 7 and batch[0].outlook.promise[0, -1, 0] > 2.4


def test_a_draft_without_confidences_is_found_out_when_it_gets_better():
    planner, generator = Planner(Prices(0.1, 0.2), 7), np.random.default_rng(0)
    verified = []
    for turn in range(6000):
        batch = [idle_request()] if turn % 100 == 0 else batch  # noqa: F821
        drafting, width = planner.choose(batch, 0, 0)
        proposals = [Proposal([0] * width, [None] * width) for _ in drafting]
        planner.cut(drafting, proposals)
        for active, proposal in zip(drafting, proposals, strict=True):
            length = len(proposal.tokens)
            accepted = 0 if turn < 400 else min(int(generator.geometric(0.05)) - 1, length)
            planner.learn(active, proposal, Round(width, length, accepted))
        verified.append(sum(len(proposal.tokens) for proposal in proposals))
    assert np.mean(verified[300:400]) < 0.5 and np.mean(verified[-1000:]) > 3


def test_only_rounds_are_timed_and_one_long_break_is_none():
    def share(first, passes):
        planner, batch = Planner(Prices(0.1, 0.9), 7), [idle_request()]
        times = iter([first])
        took = play(
            planner, batch, 1000, took=lambda drafts: (next(times, 1.0) if drafts else 1.0) * planner._predicted
        )
        for _ in range(passes):
            planner.choose([], 100, 1)
            planner.took(30.0)
        return np.mean(took[500:]), planner._pace["drafted"] / planner._pace["plain"]

    shares, pace = share(30.0, 50)
    assert shares > 0.95 and pace == pytest.approx(1.0, abs=0.05)


def test_nothing_of_ended_requests_is_kept():
    planner, batch = Planner(Prices(0.01, 0.02), 7), [idle_request()]
    play(planner, batch, 20)
    [kept] = [weakref.ref(one) for one in batch]
    planner.choose([], 10, 1)
    batch.clear()
    gc.collect()
    assert kept() is None


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_law_of_sampled_requests(target, draft, mode):
    """Two tokens of unseeded requests whose drafts are scheduled by token-dependent confidences."""
    settings, draws = SamplingSettings(1.0, top_k=6), 20_000
    prompt = PROMPTS[0]
    requests = islice(cycle([Request(prompt, 3, settings, ignore_eos=True)]), draws)

    class Open(Untimed):
        def _gate(self, able, outlooks):
            return list(able), self.n

    results = serve(target, draft, requests, Open(Prices(0.15, 0.02), 7, mode), 16)
    assert len(lengths(results)) > 2 and sum(r.scheduled for one in results for r in one.rounds) > draws / 10
    first = reference_law(logits(target, prompt), settings)
    drawn = np.array([result.output_ids[:2] for result in results])
    assert chi_square_p(drawn[:, 0], first) > 1e-3
    second = sum(
        first[token] * reference_law(logits(target, [*prompt, int(token)]), settings) for token in np.flatnonzero(first)
    )
    assert chi_square_p(drawn[:, 1], second) > 1e-3
    assert chi_square_p(shift_two_percent(drawn[:, 1], second), second) < 1e-3, "the test sees a 2 % fault"


def logits(target, ids):
    return target.forward([(target.new_state(len(ids)), torch.tensor(ids))], logits="last").logits[0]


def test_drafts_of_one_kind_are_what_these_tests_take_them_for(draft):
    assert isinstance(draft, DSparkDraft) and draft.config == draft_config()
