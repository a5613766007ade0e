"""Requests that join, leave, make way, come back, share beginnings and fail: same output, and nothing leaks."""

import time

import pytest
from tests.decoding.conftest import PROMPTS, bigram_draft
from tests.drafts.conftest import MLA

from dspark.decoding import engine as engines
from dspark.decoding.engine import Engine
from dspark.decoding.prefixes import PrefixCache
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, SamplingSettings
from dspark.errors import DsparkError

LONG = [5 + (7 * i) % 90 for i in range(60)]


@pytest.fixture(scope="module", params=["gqa", "mla"])
def draft(pairs, request):
    return bigram_draft(pairs, **(MLA if request.param == "mla" else {}))


def make(target, draft, batch=4, n=5, **settings):
    return Engine(target, make_proposer(target, draft, n), batch, **settings)


def finish(engine):
    steps = []
    while engine.busy:
        steps += engine.step()
    return steps


def plain(target, request):
    [(_, result)] = Engine(target, None).run([request])
    return result


def requests():
    return [Request(p, 30, SamplingSettings(*kind)) for p in PROMPTS for kind in ((), (0.8, 0, 1.0, 0.0, 5))]


@pytest.mark.parametrize("part", [1, 2, 7, 64])
def test_prompts_in_parts(target, draft, part):
    """Whatever the size of a part: same ids, same rounds, and running requests go on meanwhile."""
    whole = make(target, draft)
    [(_, expected)] = whole.run([Request(LONG, 20)])
    engine = make(target, draft, prefill_tokens=part)
    first = engine.add(Request(PROMPTS[0], 40))
    while not first.result.output_ids:
        engine.step()
    second = engine.add(Request(LONG, 20))
    before = len(first.result.output_ids)
    while not second.result.output_ids and not first.finished:
        engine.step()
    if part == 1:
        assert len(first.result.output_ids) > before + 5, "a long prompt must not hold up the others"
    finish(engine)
    assert second.result.output_ids == expected.output_ids
    assert second.result.rounds == expected.rounds
    assert first.result.output_ids == plain(target, Request(PROMPTS[0], 40)).output_ids


@pytest.mark.parametrize("kv_tokens", [60, 90, 200])
def test_those_who_make_way_come_back_unchanged(target, draft, kv_tokens, monkeypatch):
    monkeypatch.setattr("dspark.decoding.memory.GROWTH", 3)
    engine = make(target, draft, batch=8, kv_tokens=kv_tokens)
    actives = [engine.add(request) for request in requests()]
    while engine.busy:
        engine.step()
        assert engine.memory.held(engine.running) <= kv_tokens
    for active in actives:
        expected = plain(target, active.request)
        assert active.result.output_ids == expected.output_ids
        assert active.result.text == expected.text
    if kv_tokens < 100:
        assert sum(active.result.preemptions for active in actives) > 0
    assert engine.memory.held([]) == 0


def test_preemption_does_not_change_an_unseeded_request_either(target, draft, monkeypatch):
    """Noise is keyed by the request's own rounds, so even its ids stay the same."""
    monkeypatch.setattr("dspark.decoding.memory.GROWTH", 3)
    monkeypatch.setattr(engines.secrets, "randbits", lambda bits: 77)
    wanted = [Request(p, 30, SamplingSettings(0.9)) for p in PROMPTS]
    alone = [r.output_ids for _, r in sorted(make(target, draft, 1).run(wanted))]
    tight = make(target, draft, 5, kv_tokens=70)
    actives = [tight.add(request) for request in wanted]
    finish(tight)
    assert sum(active.result.preemptions for active in actives) > 0
    assert [active.result.output_ids for active in actives] == alone


def test_a_hit_in_the_prefix_cache_changes_nothing(target, draft):
    """Same ids and the same rounds: the draft's context comes with the target's K/V."""
    [(_, begun)] = make(target, draft, 1).run([Request(PROMPTS[0], 40)])
    long = [*PROMPTS[0], *begun.output_ids]
    wanted = [Request([*long, *tail], 25) for tail in ([20, 21], [30], [20, 21, 22, 23])]
    expected = [r for _, r in sorted(make(target, draft, 1).run(wanted))]
    engine = make(target, draft, 1, prefix_cache=True)
    for request, without in zip(wanted, expected, strict=True):
        active = engine.add(request)
        finish(engine)
        assert active.result.output_ids == without.output_ids
        assert active.result.rounds == without.rounds
        hit = active.result.cached_tokens
        assert hit == 0 if request is wanted[0] else hit >= len(long)
    assert sum(r.accepted for result in expected for r in result.rounds) > 0
    follow_up = Request([*wanted[0].prompt_ids, *expected[0].output_ids, 40, 41], 20)
    active = engine.add(follow_up)
    finish(engine)
    assert active.result.cached_tokens >= len(wanted[0].prompt_ids) + len(expected[0].output_ids) - 1
    [(_, without)] = make(target, draft, 1).run([follow_up])
    assert (active.result.output_ids, active.result.rounds) == (without.output_ids, without.rounds)


def test_the_whole_prompt_in_the_cache_still_reads_its_last_token(target, draft):
    engine = make(target, draft, 1, prefix_cache=True)
    for expected_hit in (0, len(LONG) - 1):
        active = engine.add(Request(LONG, 10))
        finish(engine)
        assert active.result.cached_tokens == expected_hit
        assert active.result.output_ids == plain(target, Request(LONG, 10)).output_ids


def test_prefixes_make_way_for_requests(target, draft):
    engine = make(target, draft, 2, prefix_cache=True, kv_tokens=150)
    for start in range(6):
        prompt = [5 + (start * 11 + i) % 90 for i in range(50)]
        active = engine.add(Request(prompt, 10))
        finish(engine)
        assert active.result.output_ids == plain(target, Request(prompt, 10)).output_ids
        assert engine.memory.held([]) <= 150
    assert len(engine.memory.prefixes) >= 1


def test_prefix_cache_finds_the_longest_and_drops_what_is_contained():
    class State:
        capacity = 40

    cache = PrefixCache()
    cache.keep(range(20), State(), None)
    cache.keep([*range(18), 99, 98], State(), None)
    assert cache.find([*range(19), 7])[1] == 19
    assert cache.find([*range(18), 99])[1] == 19
    assert cache.find([5, *range(30)]) is None
    assert cache.find(range(15)) is None, "too short to be worth it"
    cache.keep(range(30), State(), None)
    assert len(cache) == 2 and cache.tokens == 80
    cache.keep(range(25), State(), None)
    assert len(cache) == 2, "what an entry holds already is not kept twice"
    assert cache.evict() == 40 and cache.evict() == 40 and cache.evict() == 0


def test_plain_requests_beside_speculating_ones(target, draft):
    engine = make(target, draft, 4, prefix_cache=True)
    pairs_ = [(engine.add(Request(p, 25, speculate=False)), engine.add(Request(p, 25))) for p in (*PROMPTS, LONG, LONG)]
    finish(engine)
    for slow, fast in pairs_:
        assert slow.result.output_ids == fast.result.output_ids
        assert all((r.proposed, r.scheduled) == (0, 0) for r in slow.result.rounds)
        assert len(fast.result.rounds) <= len(slow.result.rounds)


def test_cancelled_within_one_round(target, draft):
    engine = make(target, draft, 2)
    running, other, waiting = (engine.add(Request(p, 40)) for p in PROMPTS[:3])
    engine.step()
    engine.step()
    engine.cancel(running)
    engine.cancel(waiting)
    engine.step()
    assert running not in engine.running and waiting not in engine.waiting
    assert running.result.finish_reason == waiting.result.finish_reason == "cancelled"
    assert running.state.capacity == 0 and running.context is None
    finish(engine)
    assert other.result.output_ids == plain(target, other.request).output_ids


def test_out_of_time(target, draft):
    engine = make(target, draft, 1)
    slow = engine.add(Request(PROMPTS[0], 40, timeout=0.05))
    queued = engine.add(Request(PROMPTS[1], 40, timeout=0.05))
    engine.step()
    time.sleep(0.06)
    steps = engine.step()
    assert {active.result.finish_reason for active, _ in steps} == {"timeout"}
    assert slow.finished and queued.finished and not engine.busy
    assert slow.result.output_ids, "what was made before is in the result"


def test_a_failed_pass_ends_its_requests_and_no_other(target, draft, monkeypatch):
    engine = make(target, draft, 2)
    first, second, third = (engine.add(Request(p, 20)) for p in PROMPTS[:3])
    engine.step()
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("out of memory")))
    engine.step()
    monkeypatch.setattr(target, "forward", forward)
    assert first.result.finish_reason == second.result.finish_reason == "error"
    assert str(first.result.error) == "out of memory"
    assert not engine.running
    finish(engine)
    assert third.result.output_ids == plain(target, third.request).output_ids


def test_what_was_committed_before_a_pass_failed_is_told(target, draft, monkeypatch):
    engine = make(target, draft, 2)
    short, long = engine.add(Request(PROMPTS[0], 2)), engine.add(Request(PROMPTS[1], 20))
    engine.step()
    monkeypatch.setattr(engine, "_observe", lambda *_: (_ for _ in ()).throw(RuntimeError("no room")))
    steps = engine.step()
    assert [active for active, _ in steps][:2] == [short, long]
    assert short.result.finish_reason == "length" and sum(len(s.new_ids) for a, s in steps if a is short) == 1
    assert long.result.finish_reason == "error" and not engine.busy


def test_a_request_that_fails_alone(target, draft, monkeypatch):
    """Its own processor raises: the others in the pass do not notice."""
    engine = make(target, draft, 3)
    broken, other = (engine.add(Request(p, 20)) for p in PROMPTS[:2])
    engine.step()

    class Broken:
        def __call__(self, logits, drafts):
            raise ValueError("broken")

    broken.processor = Broken()
    monkeypatch.setattr(engine.proposer, "propose", lambda batch, n: [engines.Proposal() for _ in batch])
    engine.step()
    monkeypatch.undo()
    assert broken.result.finish_reason == "error" and "broken" in str(broken.result.error)
    assert not other.finished
    finish(engine)
    assert other.result.output_ids == plain(target, other.request).output_ids


def test_a_tokenizer_that_fails_is_told(target, draft, monkeypatch):
    """Not even the text of the end can be had: the request must not vanish without a word."""

    def fail(*_, **__):
        raise RuntimeError("no text")

    monkeypatch.setattr(type(target.tokenizer), "decode", fail)
    monkeypatch.setattr(type(target.tokenizer), "convert_ids_to_tokens", fail)
    with pytest.raises(RuntimeError, match="no text"):
        list(make(target, draft).run([Request(PROMPTS[0], 5)]))


def test_a_request_that_cannot_be_let_in(target, draft, monkeypatch):
    engine = make(target, draft, 2)
    first = engine.add(Request(PROMPTS[0], 10))
    monkeypatch.setattr(target, "new_state", lambda capacity: (_ for _ in ()).throw(MemoryError("no memory")))
    [(active, _)] = engine.step()
    monkeypatch.undo()
    assert active is first and first.result.finish_reason == "error" and not engine.busy


def test_run_raises_what_went_wrong_and_can_run_again(target, draft, monkeypatch):
    engine = make(target, draft, 2)
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("gone")))
    with pytest.raises(RuntimeError, match="gone"):
        list(engine.run(requests()))
    monkeypatch.setattr(target, "forward", forward)
    assert not engine.busy
    [(_, result)] = engine.run([Request(PROMPTS[0], 10)])
    assert result.output_ids == plain(target, Request(PROMPTS[0], 10)).output_ids


def test_a_stream_given_up_leaves_nothing(target, draft):
    engine = make(target, draft, 1)
    stream = engine.stream(Request(PROMPTS[0], 30))
    next(stream)
    stream.close()
    assert not engine.busy and engine.memory.held(engine.running) == 0


def test_what_is_refused(target, draft):
    engine = make(target, draft, 1, kv_tokens=40, max_waiting=1)
    assert engine.max_context == 40
    with pytest.raises(DsparkError, match="prompt = '60 tokens'"):
        engine.add(Request(LONG, 5))
    engine.add(Request(PROMPTS[0], 5))
    with pytest.raises(DsparkError, match="requests = 1"):
        engine.add(Request(PROMPTS[0], 5))
    with pytest.raises(DsparkError, match="kv_tokens"):
        make(target, draft, kv_tokens=1)
    with pytest.raises(DsparkError, match="prefill_tokens"):
        make(target, draft, prefill_tokens=0)
    with pytest.raises(DsparkError, match="capture_taps"):
        make(target, draft, capture_taps=(1,), prefix_cache=True)


def test_bytes_per_token_are_what_the_memory_takes(target, draft):
    engine = make(target, draft, 1)
    active = engine.add(Request(PROMPTS[0], 10))
    engine.step()
    state, context = active.state, active.context
    held = sum(t.numel() * t.element_size() for t in (*state.keys, *state.values))
    assert held == state.capacity * target.bytes_per_token
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (context.keys, context.values)}
    per_token = sum(kept.values()) // context.keys.shape[2]
    assert engine.memory.bytes_per_token == target.bytes_per_token + per_token
