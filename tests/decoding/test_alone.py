"""One request's faults are its own, and its noise is never used twice."""

import pytest
from tests.decoding.conftest import PROMPTS, bigram_draft

from dspark.decoding import verify
from dspark.decoding.engine import Engine
from dspark.decoding.grammar import MAX_TEXT, Constraint
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, SamplingSettings
from dspark.errors import DsparkError

DEAD_END = (
    '{"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"],'
    ' "$defs": {"x": {"$ref": "#/$defs/x"}}}'
)


@pytest.mark.parametrize(("n", "speculate"), [(None, True), (7, False), (7, True)])
def test_no_number_is_used_twice(target, pairs, monkeypatch, n, speculate):
    keys, uniform = [], verify.uniform
    monkeypatch.setattr(verify, "uniform", lambda *key: keys.append(key) or uniform(*key))
    proposer = make_proposer(target, None if n is None else bigram_draft(pairs), n)
    request = Request(PROMPTS[0], 20, SamplingSettings(1.0), ignore_eos=True, speculate=speculate)
    [(_, result)] = Engine(target, proposer).run([request])
    assert len(result.output_ids) == 20
    assert len(keys) >= 20 or n == 7
    assert len(set(keys)) == len(keys)


def test_a_dead_end_ends_its_own_request_only(target, pairs):
    engine = Engine(target, make_proposer(target, bigram_draft(pairs), 5), 2)
    other = engine.add(Request(PROMPTS[1], 25))
    try:
        engine.add(Request(PROMPTS[0], 25, constraint=Constraint("json_schema", DEAD_END)))
    except DsparkError as error:
        assert "<state>" not in str(error)
    while engine.busy:
        engine.step()
    [(_, expected)] = Engine(target, None).run([other.request])
    assert other.result.error is None and other.result.output_ids == expected.output_ids


def test_what_cannot_be_drafted_is_decoded_plainly(target, pairs, monkeypatch):
    proposer = make_proposer(target, bigram_draft(pairs), 5)
    monkeypatch.setattr(proposer, "_draw", lambda *a: (_ for _ in ()).throw(ValueError("no way on")))
    request = Request(PROMPTS[0], 15, SamplingSettings(presence_penalty=0.5))
    [(_, result)] = Engine(target, proposer).run([request])
    [(_, expected)] = Engine(target, None).run([request])
    assert result.output_ids == expected.output_ids and not any(r.proposed for r in result.rounds)


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(0.9, seed=4)])
@pytest.mark.parametrize("last", range(1, 12))
def test_what_fails_on_the_way_fails_at_the_token_where_plain_decoding_does(target, pairs, sampling, last):
    """Drafts accepted before that stand, however far into a block they are."""

    class Dead:
        """Settings that work for `last` tokens of an answer."""

        ended, made = False, 0

        def __call__(self, logits, drafts):
            if self.made + len(drafts) >= last:
                raise DsparkError("request", "its settings", "go no further")
            return logits

        def commit(self, token):
            self.made += 1

    answers = []
    for proposer in (make_proposer(target, None), make_proposer(target, bigram_draft(pairs), 7)):
        engine = Engine(target, proposer)
        active = engine.add(Request(PROMPTS[0], 30, sampling, logprobs=1))
        active.processor = Dead()
        while engine.busy:
            engine.step()
        answers.append((active.result.output_ids, [one.token for one in active.result.logprobs], active.result.text))
        assert active.result.finish_reason == "error" and "go no further" in str(active.result.error)
    assert answers[0] == answers[1] and len(answers[0][0]) == last


@pytest.mark.parametrize("text", ["[a&&b]", "a" * (MAX_TEXT + 1)])
def test_expressions_that_match_nothing_or_too_much(target, text):
    with pytest.raises(DsparkError, match="regex"):
        Engine(target, None).add(Request(PROMPTS[0], 5, constraint=Constraint("regex", text)))
