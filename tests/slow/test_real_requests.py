"""Request features, joining, prefix hits and preemption with the real pair. Slow; `make test-slow`."""

import pytest

from dspark.checkpoints.builtin import load_named_draft
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import demo_prompts
from dspark.decoding.engine import Engine
from dspark.decoding.grammar import Constraint
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, SamplingSettings
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target

pytestmark = pytest.mark.slow

SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 5}
SCHEMA = (
    '{"type": "object", "properties": {"answer": {"type": "integer"}, "why": {"type": "string", "maxLength": 40}},'
    ' "required": ["answer", "why"], "additionalProperties": false}'
)
FEATURES = {
    "greedy": Request([0]),
    "seeded": Request([0], sampling=SamplingSettings(**SEEDED), logprobs=2),
    "penalties": Request([0], sampling=SamplingSettings(presence_penalty=0.6, frequency_penalty=0.3)),
    "repetition": Request([0], sampling=SamplingSettings(**SEEDED, repetition_penalty=1.2)),
    "stop": Request([0], stop=("\n\n", ". "), min_tokens=6),
    "json": Request([0], constraint=Constraint("json_schema", SCHEMA)),
    "json, seeded": Request([0], sampling=SamplingSettings(**SEEDED), constraint=Constraint("json_object")),
}


@pytest.fixture(scope="module")
def target():
    return load_target(EMBEDDED)


@pytest.fixture(scope="module")
def draft():
    return load_named_draft("embedded")


@pytest.fixture(scope="module")
def prompts(target):
    renderer = ChatRenderer(target.tokenizer)
    return [renderer.prompt_ids([{"role": "user", "content": p.turns[0]}]) for p in demo_prompts()[::2]]


def of(prompt, feature, tokens):
    fields = {name: getattr(FEATURES[feature], name) for name in FEATURES[feature].__dataclass_fields__}
    return Request(**fields | {"prompt_ids": prompt, "max_tokens": tokens})


def answer(result):
    assert result.error is None, result.error
    return result.output_ids, result.text, result.finish_reason, result.stop_reason


@pytest.fixture(scope="module")
def asked(prompts):
    return [of(prompt, feature, 32) for feature in FEATURES for prompt in prompts[:2]]


@pytest.fixture(scope="module")
def expected(target, asked):
    return [answer(result) for _, result in sorted(Engine(target, None).run(asked))]


@pytest.mark.parametrize(("n", "batch"), [(3, 4), (7, 1), (7, 16)])
def test_features(target, draft, asked, expected, n, batch):
    results = [r for _, r in sorted(Engine(target, make_proposer(target, draft, n), batch).run(asked))]
    assert [answer(result) for result in results] == expected
    assert sum(r.accepted for result in results for r in result.rounds) > 60


@pytest.mark.parametrize("n", [3, 7])
def test_joining_leaving_and_making_way(target, draft, asked, expected, n, monkeypatch):
    monkeypatch.setattr("dspark.decoding.memory.GROWTH", 8)
    engine = Engine(target, make_proposer(target, draft, n), 16, kv_tokens=320, prefill_tokens=32, prefix_cache=True)
    actives, left = [], list(asked)
    while left or engine.busy:
        if left:
            actives.append(engine.add(left.pop(0)))
        engine.step()
        assert engine.memory.held(engine.running) <= 320
    assert [answer(active.result) for active in actives] == expected
    assert sum(active.result.preemptions for active in actives) > 0


def test_acceptance_with_a_prefix_hit_equals_acceptance_without(target, draft, prompts):
    """A second turn whose first is cached: the same rounds as when everything is read anew."""
    proposer = make_proposer(target, draft, 7)
    first = [result for _, result in sorted(Engine(target, proposer, 8).run([Request(p, 64) for p in prompts]))]
    renderer = ChatRenderer(target.tokenizer)
    second = []
    for prompt, result in zip(prompts, first, strict=True):
        more = renderer.prompt_ids([{"role": "user", "content": "Say it again in one short sentence."}])
        second.append(Request([*prompt, *result.output_ids, *more], 64))
    without = [result for _, result in sorted(Engine(target, proposer, 1).run(second))]
    engine = Engine(target, proposer, 1, prefix_cache=True)
    for prompt in prompts:
        list(engine.run([Request(prompt, 64)]))
    hits = [result for _, result in sorted(engine.run(second))]
    assert [r.output_ids for r in hits] == [r.output_ids for r in without]
    assert [r.rounds for r in hits] == [r.rounds for r in without]
    assert all(hit.cached_tokens >= len(p) for hit, p in zip(hits, prompts, strict=True))
    rounds = [r for result in hits for r in result.rounds]
    print(f"acceptance length with hits and without: {1 + sum(r.accepted for r in rounds) / len(rounds):.2f}")
