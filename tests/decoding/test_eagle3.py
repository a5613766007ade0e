"""EAGLE-3 drafts through the engine: nothing of an answer depends on them, whatever is batched, shared or given up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.decoding.conftest import PROMPTS, bigram_draft
from tests.decoding.test_replay import rows_of
from tests.drafts.test_eagle3 import KINDS, eagle3_fields

from dspark.decoding import engine as engines
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import NoProposer, draft_proposer, make_proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Request, SamplingSettings
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError

SEEDED = SamplingSettings(temperature=0.8, seed=7)
REDUCED = [2, *range(20, 79)]


def learn(draft, rows, steps=60):
    """Overfit the draft to rows of the target, by the training-time test with hard labels."""
    ids = torch.tensor([token for row, _ in rows for token in [*row.prompt_ids, *row.answer_ids]])
    lengths = [len(row.prompt_ids) + len(row.answer_ids) for row, _ in rows]
    taps = torch.cat([F.pad(taps, (0, 0, 0, n - len(taps))) for (_, taps), n in zip(rows, lengths, strict=True)])
    starts = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    ends = torch.cat([torch.full((n,), sum(lengths[: i + 1])) for i, n in enumerate(lengths)])
    position = torch.arange(len(ids))
    anchors = position[(position > starts) & (position + 7 < ends)]
    previous = torch.stack([ids[anchors + k] for k in range(7)], 1)
    place = torch.full((draft.config.vocab_size,), -100)
    place[draft.draft_ids] = torch.arange(draft.config.draft_vocab_size)
    labels = place[torch.stack([ids[anchors + k + 1] for k in range(7)], 1)]
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        hidden = draft.train_hidden(taps, ids, position - starts, anchors, starts[anchors], previous)
        F.cross_entropy(draft.logits(hidden).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


@pytest.fixture(scope="module")
def learned(target):
    """Untouched drafts by kind, each of which knows the target's greedy answers to PROMPTS by heart."""
    rows = rows_of(target, [Request(p, 50, ignore_eos=True) for p in PROMPTS])
    drafts = {}
    for name in (*KINDS, "reduced"):
        kind, size = ("gqa", 60) if name == "reduced" else (name, 100)
        torch.manual_seed(3)
        fields = eagle3_fields(kind, hidden_size=32, vocab_size=100, draft_vocab_size=size, target_layer_ids=(0, 2, 3))
        draft = Eagle3Draft(Eagle3Config(**fields))
        if name == "reduced":
            draft.set_vocabulary(REDUCED)
        draft.bind(target.embedding_weight)
        learn(draft, rows)
        drafts[name] = draft
    return drafts


def proposer_of(target, learned, kind, n=None):
    return make_proposer(target, copy.deepcopy(learned[kind]), n)


def requests(sampling=None, **fields):
    lengths = (40, 3, 25, 33, 1)
    return [Request(p, n, sampling or SamplingSettings(), **fields) for p, n in zip(PROMPTS, lengths, strict=True)]


def serve(target, proposer, asked, batch=1, **settings):
    return [result for _, result in sorted(Engine(target, proposer, batch, **settings).run(asked))]


def accepted(results):
    return sum(r.accepted for result in results for r in result.rounds)


def ids(results):
    return [(result.output_ids, result.finish_reason) for result in results]


@pytest.fixture(scope="module")
def plain(target):
    return [ids(serve(target, NoProposer(), requests(sampling))) for sampling in (SamplingSettings(), SEEDED)]


@pytest.mark.parametrize(
    ("kind", "n"), [*((kind, n) for kind in ("gqa", "mla") for n in range(1, 8)), ("mla-low-rank", 5), ("reduced", 6)]
)
def test_greedy_and_seeded_ids_equal_plain_ones(target, learned, plain, kind, n):
    proposer = proposer_of(target, learned, kind, n)
    for sampling, expected in zip((SamplingSettings(), SEEDED), plain, strict=True):
        alone = serve(target, proposer, requests(sampling))
        assert ids(alone) == expected
        assert accepted(alone) > 5, "a test in which nothing is accepted proves nothing"
        ragged = serve(target, proposer, requests(sampling), batch=3)
        assert ids(ragged) == expected
        assert [r.rounds for r in ragged] == [r.rounds for r in alone]
        assert {r.proposed for result in alone for r in result.rounds} == {n}


def test_a_learned_draft_is_accepted_to_the_last_step(target, learned):
    """What an off-by-one in pairing tokens, states or positions would not reach."""
    for kind in KINDS:
        results = serve(target, proposer_of(target, learned, kind), requests(ignore_eos=True))
        assert max(r.accepted for result in results for r in result.rounds) == 7, kind
        mean = accepted(results) / sum(len(result.rounds) for result in results)
        assert mean > 2, (kind, mean)


@pytest.mark.parametrize("kind", ["mla", "reduced"])
def test_settings_that_change_logits(target, learned, kind):
    shaped = [
        SamplingSettings(repetition_penalty=1.3),
        SamplingSettings(0.9, seed=5, top_k=9, presence_penalty=0.7, frequency_penalty=0.3),
        SamplingSettings(logit_bias=((20, 3.0), (2, -50.0))),
    ]
    asked = [Request(p, 15, s, min_tokens=4) for p in PROMPTS[:2] for s in shaped]
    ours = serve(target, proposer_of(target, learned, kind), asked, batch=5)
    assert ids(ours) == ids(serve(target, NoProposer(), asked))


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_unseeded_requests_do_not_depend_on_others(target, learned, kind, monkeypatch):
    monkeypatch.setattr(engines.secrets, "randbits", lambda bits: 77)
    asked = requests(SamplingSettings(0.7), ignore_eos=True)
    proposer = proposer_of(target, learned, kind, 5)
    alone, beside = serve(target, proposer, asked), serve(target, proposer, asked, batch=4)
    assert ids(alone) == ids(beside)
    assert accepted(alone) > 5


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_prompts_in_parts_and_requests_that_make_way(target, learned, kind, monkeypatch):
    monkeypatch.setattr("dspark.decoding.memory.GROWTH", 3)
    proposer = proposer_of(target, learned, kind, 5)
    asked = requests() + requests(SEEDED)
    expected = serve(target, proposer, asked)
    for settings in ({"prefill_tokens": 1}, {"kv_tokens": 60}):
        ours = serve(target, proposer, asked, batch=6, **settings)
        assert ids(ours) == ids(expected)
        assert [r.rounds for r in ours] == [r.rounds for r in expected]


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_a_hit_in_the_prefix_cache_changes_no_round(target, learned, kind):
    """The pair of the last shared token differs: it reads the token after it."""
    proposer = proposer_of(target, learned, kind)
    [begun] = serve(target, proposer, [Request(PROMPTS[0], 40, ignore_eos=True)])
    shared = [*PROMPTS[0], *begun.output_ids[:30]]
    asked = [Request([*shared, *tail], 25, ignore_eos=True) for tail in ([20, 21], [], [30], [20, 21, 22])]
    engine = Engine(target, proposer, 1, prefix_cache=True)
    for request in asked:
        [(_, result)] = engine.run([request])
        [without] = serve(target, proposer, [request])
        assert (result.output_ids, result.rounds) == (without.output_ids, without.rounds)
        assert (result.cached_tokens > 0) == (request is not asked[0])


@pytest.mark.parametrize("kind", [*KINDS, "reduced", "dspark"])
@pytest.mark.parametrize("sampling", [None, SamplingSettings(0.6, top_k=20, top_p=0.9, seed=3)])
def test_replay_equals_served_rounds(target, learned, pairs, kind, sampling):
    asked = [
        Request(p, m, sampling or SamplingSettings(), ignore_eos=True)
        for p, m in zip(PROMPTS, (40, 1, 21, 30, 2), strict=True)
    ]
    rows = rows_of(target, asked)
    for n in (1, 5):
        if kind == "dspark":
            proposer = make_proposer(target, bigram_draft(pairs), n)
        else:
            proposer = proposer_of(target, learned, kind, n)
        served = [result.rounds for result in serve(target, proposer, asked)]
        for batch in (1, 3):
            assert replay(proposer, rows, batch, target.max_context, sampling) == served
        assert sum(r.accepted for rounds in served for r in rounds) > 2


def test_rows_that_chance_wrote_cannot_be_replayed(target, learned):
    proposer = proposer_of(target, learned, "gqa")
    with pytest.raises(DsparkError, match=r"sampling\.seed"):
        replay(proposer, [], sampling=SamplingSettings(0.8))
    with pytest.raises(DsparkError, match="temperature, top_k"):
        replay(proposer, [], sampling=SamplingSettings(0.8, seed=1, presence_penalty=1.0))


def test_wrong_taps_are_noticed_by_acceptance(target, learned):
    rows = rows_of(target, [Request(p, 50, ignore_eos=True) for p in PROMPTS])
    proposer = proposer_of(target, learned, "gqa")
    right, wrong = (sum(r.accepted for one in replay(proposer, given) for r in one) for given in (
        rows, [(row, taps.roll(1, 0)) for row, taps in rows]
    ))  # fmt: skip
    assert wrong < 0.7 * right


def test_what_is_refused(target, learned):
    for n in (0, 8):
        with pytest.raises(DsparkError, match=r"n = .*1\.\.7"):
            draft_proposer(learned["gqa"], n)
    with pytest.raises(DsparkError, match="draft_mode"):
        draft_proposer(learned["gqa"], 3, "prefix")
    proposer = proposer_of(target, learned, "gqa", 3)
    engine = Engine(target, proposer)
    active = engine.add(Request(PROMPTS[0], 10))
    engine.step()
    active.pending.clear()
    engine.step()
    assert isinstance(active.result.error, DsparkError) and "anchor" in str(active.result.error)


def test_changed_weights_are_refused_and_broken_ones_named(target, learned):
    draft = copy.deepcopy(learned["gqa"])
    make_proposer(target, draft, 3)
    with torch.no_grad():
        draft.norm.weight.mul_(2)
    with pytest.raises(DsparkError, match="changed"):
        make_proposer(target, draft, 3)
    broken = copy.deepcopy(learned["gqa"])
    proposer = make_proposer(target, broken, 3)
    with torch.no_grad():
        broken.norm.weight.fill_(float("nan"))
    with pytest.raises(DsparkError, match="non-finite"):
        serve(target, proposer, requests())


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_bytes_per_token_are_what_the_memory_takes(target, learned, kind):
    proposer = proposer_of(target, learned, kind)
    context = learned[kind].new_context(1000)
    values = 0 if kind == "mla" else context.values.numel()
    held = 4 * (context.states.numel() * 1007 // 1000 + context.keys.numel() + values)
    assert proposer.bytes_per_token == held // 1007
