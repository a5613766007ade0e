"""Lossless decoding: the ids do not depend on the proposer, on n, on the batch or on where a round ends."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decoding.conftest import PROMPTS, bigram_draft, draft_config
from tests.drafts.conftest import MLA

from dspark.decoding.engine import Engine
from dspark.decoding.proposers import DSparkProposer, NoProposer, make_proposer
from dspark.decoding.request import Request, Round, SamplingSettings
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError

LAYOUTS = {"anchor-first": {}, "bonus-anchor": {"sample_from_anchor": False, "block_size": 8}, "mla": MLA}
LENGTHS = [40, 3, 25, 33, 1]


def serve(target, proposer, requests, batch=1):
    return [result for _, result in sorted(Engine(target, proposer, max_batch=batch).run(requests))]


def requests(sampling=None, **fields):
    sampling = sampling or SamplingSettings()
    return [Request(p, n, sampling, **fields) for p, n in zip(PROMPTS, LENGTHS, strict=True)]


def same(ours, plain):
    for a, b in zip(ours, plain, strict=True):
        assert (a.output_ids, a.finish_reason) == (b.output_ids, b.finish_reason)


def accepted(results):
    return sum(r.accepted for result in results for r in result.rounds)


@pytest.fixture(scope="module")
def plain(target):
    return serve(target, NoProposer(), requests())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", range(1, 8))
def test_greedy_ids_equal_plain_ones(target, pairs, plain, layout, n):
    draft = bigram_draft(pairs, **LAYOUTS[layout])
    ours = serve(target, make_proposer(target, draft, n), requests())
    same(ours, plain)
    assert accepted(ours) > 5, "a test in which nothing is accepted proves nothing"
    ragged = serve(target, make_proposer(target, draft, n), requests(), batch=5)
    same(ragged, plain)
    assert [r.rounds for r in ragged] == [r.rounds for r in ours]


@pytest.mark.parametrize(
    "changes",
    [
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"draft_vocab_size": 60},
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 4, "sliding_window_non_causal": True},
        {**MLA, "q_lora_rank": 16, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
        {**MLA, "draft_vocab_size": 60, "sample_from_anchor": False},
    ],
    ids=["dflash", "reduced", "sliding", "sliding-non-causal", "mla-sliding", "mla-reduced-bonus"],
)
def test_greedy_with_other_drafts(target, pairs, plain, changes):
    if changes.get("markov_rank") == 0:
        torch.manual_seed(2)
        draft = DSparkDraft(draft_config(**changes))
    else:
        draft = bigram_draft(pairs, **changes)
    same(serve(target, make_proposer(target, draft), requests(), batch=3), plain)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_greedy_with_other_markov_heads(target, plain, head):
    draft = DSparkDraft(draft_config(markov_head_type=head, markov_rank=8))
    torch.nn.init.normal_(draft.markov_head.markov_w2.weight)
    same(serve(target, make_proposer(target, draft, 4), requests(), batch=2), plain)


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 8}, {"top_p": 0.8, "min_p": 0.02}])
def test_seeded_ids_equal_plain_ones(target, pairs, n, filters):
    sampling = SamplingSettings(temperature=0.8, seed=7, **filters)
    expected = serve(target, NoProposer(), requests(sampling))
    for batch in (1, 5):
        ours = serve(target, make_proposer(target, bigram_draft(pairs), n), requests(sampling), batch)
        same(ours, expected)
    assert accepted(ours) > 0
    other = serve(target, NoProposer(), requests(SamplingSettings(temperature=0.8, seed=8, **filters)))
    assert [r.output_ids for r in other] != [r.output_ids for r in expected]


def test_requests_of_every_kind_side_by_side(target, pairs):
    kinds = [SamplingSettings(), SamplingSettings(1.0, seed=3), SamplingSettings(0.7), SamplingSettings(0.5, 5, seed=4)]
    mixed = [Request(p, 20, kinds[i % 4]) for i, p in enumerate(PROMPTS)]
    ours = serve(target, make_proposer(target, bigram_draft(pairs), 5), mixed, batch=5)
    for request, result in zip(mixed, ours, strict=True):
        if request.sampling.greedy or request.sampling.seed is not None:
            same([result], serve(target, NoProposer(), [request]))
        assert len(result.output_ids) <= 20


def test_a_second_shorter_request_sees_nothing_of_the_first(target, pairs, plain):
    engine = Engine(target, make_proposer(target, bigram_draft(pairs), 7))
    long, short = requests()[2], Request(PROMPTS[1], 12)
    first = [r.output_ids for _, r in engine.run([long, short])]
    assert first[1] == serve(target, NoProposer(), [short])[0].output_ids
    assert [r.output_ids for _, r in engine.run([long, short])] == first


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 38), n=st.integers(1, 7), batch=st.integers(1, 3))
def test_a_stop_id_anywhere_ends_the_answer_there(target, pairs, plain, cut, n, batch):
    """Also in the middle of an accepted run, and at its last token."""
    stop = frozenset([plain[0].output_ids[min(cut, len(plain[0].output_ids) - 1)]])
    asked = requests(stop_ids=stop)
    expected = serve(target, NoProposer(), asked)
    ours = serve(target, make_proposer(target, bigram_draft(pairs), n), asked, batch)
    same(ours, expected)
    for result in ours:
        assert result.finish_reason == ("stop" if result.output_ids[-1] in stop else "length")
        assert not stop & set(result.output_ids[:-1])


def test_a_stop_at_the_token_limit_is_a_stop(target, plain):
    stop = plain[0].output_ids[4]
    first = plain[0].output_ids.index(stop)
    result = serve(target, NoProposer(), [Request(PROMPTS[0], first + 1, stop_ids=frozenset([stop]))])[0]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("limit", range(1, 13))
def test_token_limit_inside_a_block(target, pairs, plain, limit):
    result = serve(target, make_proposer(target, bigram_draft(pairs), 7), [Request(PROMPTS[0], limit)])[0]
    assert result.output_ids == plain[0].output_ids[:limit]
    kept = 1 + sum(r.accepted + 1 for r in result.rounds)
    assert len(result.output_ids) in (kept, kept - 1), "accepted counts kept tokens only; a cut round has no bonus"


@pytest.mark.parametrize("room", [1, 2, 3, 5, 9])
def test_context_limit_inside_a_block(target, pairs, room):
    """256 positions: the last rounds verify less, and nothing is read or written past the end."""
    prompt = [5 + i % 90 for i in range(256 - room)]
    asked = Request(prompt, 100, ignore_eos=True)
    expected = serve(target, NoProposer(), [asked])[0]
    ours = serve(target, make_proposer(target, bigram_draft(pairs), 7), [asked])[0]
    same([ours], [expected])
    assert len(ours.output_ids) == room
    assert ours.finish_reason == "length"
    for record in ours.rounds:
        assert record.proposed == 7
        assert record.scheduled <= 7


def test_prefix_mode_runs_the_whole_block(target, pairs, plain):
    draft = bigram_draft(pairs)
    proposer = make_proposer(target, draft, 3, "prefix")
    assert (proposer.n, proposer.width) == (3, 7)
    same(serve(target, proposer, requests()), plain)


def test_streaming_equals_running(target, pairs):
    request = Request(PROMPTS[0], 30)
    engine = Engine(target, make_proposer(target, bigram_draft(pairs), 5))
    steps = list(engine.stream(request))
    assert [t for s in steps for t in s.new_ids] == engine.last_result.output_ids
    assert steps[0].round is None
    assert [s.round for s in steps[1:]] == engine.last_result.rounds
    assert all(s.round.accepted <= len(s.new_ids) <= s.round.accepted + 1 for s in steps[1:])


def test_capture_gives_every_read_token_once(target, pairs):
    """The captured states are those of a fresh pass over the row, whatever was drafted and rolled back."""
    captured = {}
    engine = Engine(target, make_proposer(target, bigram_draft(pairs), 5), max_batch=3, capture_taps=(1, 3))
    results = dict(engine.run(requests(), capture=lambda i, taps, last: captured.__setitem__(i, (taps, last))))
    for index, result in results.items():
        ids = torch.tensor([*result.request.prompt_ids, *result.output_ids])[:-1]
        fresh = target.forward([(target.new_state(len(ids)), ids)], taps=(1, 3))
        torch.testing.assert_close(captured[index][0], fresh.taps, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(captured[index][1], fresh.last_hidden, rtol=1e-4, atol=1e-4)


def test_nothing_to_do(target):
    assert serve(target, NoProposer(), []) == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request([], 5), "prompt"),
        (Request([1] * 256, 5), "prompt"),
        (Request([100], 5), "prompt"),
        (Request([-1], 5), "prompt"),
    ],
)
def test_requests_that_cannot_be_served(target, request_, field):
    with pytest.raises(DsparkError, match=field):
        serve(target, NoProposer(), [request_])


@pytest.mark.parametrize("n", [0, 8, -1])
def test_n_out_of_range_is_refused(target, pairs, n):
    with pytest.raises(DsparkError, match=r"n = .*1\.\.7"):
        make_proposer(target, bigram_draft(pairs), n)


@pytest.mark.parametrize("field", ["num_target_layers", "vocab_size"])
def test_a_draft_for_another_target_is_refused(target, field):
    other = {"num_target_layers": 5} if field == "num_target_layers" else {"vocab_size": 99, "draft_vocab_size": 99}
    with pytest.raises(DsparkError, match=field):
        make_proposer(target, DSparkDraft(draft_config(**other)), 3)


def test_a_non_finite_draft_is_named(target, pairs):
    draft = bigram_draft(pairs)
    proposer = make_proposer(target, draft, 3)
    with torch.no_grad():
        draft.norm.weight.fill_(float("nan"))
    with pytest.raises(DsparkError, match="non-finite"):
        serve(target, proposer, requests())


def test_rounds_are_counted_for_plain_decoding_too(target):
    result = serve(target, NoProposer(), [Request(PROMPTS[0], 6)])[0]
    assert result.rounds == [Round(0, 0, 0)] * (len(result.output_ids) - 1)
    assert isinstance(make_proposer(target, None), NoProposer)
    assert not isinstance(make_proposer(target, None), DSparkProposer)
