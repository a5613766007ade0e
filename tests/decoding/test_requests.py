"""What a request may ask for comes out as if tokens had been made one at a time: feature x proposer x batch x joining.

`by_hand` is the reference: one token at a time, the whole prefix read anew for each, with none of the engine's code.
"""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.decoding.conftest import PROMPTS, bigram_draft

from dspark.decoding.engine import Engine
from dspark.decoding.grammar import Constraint
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, SamplingSettings
from dspark.errors import DsparkError

SEEDED = {"temperature": 0.9, "seed": 11}
FEATURES = {
    "greedy": ({}, {}),
    "seeded": (SEEDED, {}),
    "top-k": (SEEDED | {"top_k": 6}, {}),
    "top-p, min-p": (SEEDED | {"top_p": 0.85, "min_p": 0.02}, {}),
    "presence": ({"presence_penalty": 1.5}, {}),
    "frequency": ({"frequency_penalty": 0.7}, {}),
    "repetition": ({"repetition_penalty": 1.4}, {}),
    "penalties, seeded": (SEEDED | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}, {}),
    "bias": ({"logit_bias": ((40, 6.0), (41, -100.0), (33, 5.0))}, {}),
    "bias, seeded": (SEEDED | {"logit_bias": ((40, 2.0), (70, 2.0))}, {}),
    "min tokens": ({"logit_bias": ((2, 4.0),)}, {"min_tokens": 9}),
    "min tokens, seeded": (SEEDED | {"logit_bias": ((2, 6.0),)}, {"min_tokens": 6}),
    "stop ids": ({}, {"stop_ids": frozenset(range(30, 45))}),
    "ignore eos": ({"logit_bias": ((2, 4.0),)}, {"ignore_eos": True}),
    "logprobs": ({}, {"logprobs": 3}),
    "logprobs, seeded": (SEEDED, {"logprobs": 0}),
    "regex": ({}, {"constraint": Constraint("regex", "[a-f]{3,9}[0-9]+x")}),
    "regex, seeded": (SEEDED, {"constraint": Constraint("regex", "([a-f]{2}|[0-9]{3}|xyz){2,12}")}),
    "json": (
        {"frequency_penalty": 0.5},
        {
            "constraint": Constraint(
                "json_schema",
                '{"type": "object", "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},'
                ' "required": ["n", "ok"], "additionalProperties": false}',
            )
        },
    ),
}
MODES = ["plain", 3, 7]


@pytest.fixture(scope="module")
def draft(pairs):
    return bigram_draft(pairs)


def engine(target, draft, mode, batch, **settings):
    return Engine(
        target,
        make_proposer(target, None if mode == "plain" else draft, 3 if mode == "plain" else mode),
        batch,
        **settings,
    )


def asked(feature):
    sampling, fields = FEATURES[feature]
    return [Request(prompt, 26 - 2 * i, SamplingSettings(**sampling), **fields) for i, prompt in enumerate(PROMPTS)]


def joined(engine, requests, every=2):
    """Serve requests that join one after the other, `every` steps apart, so that all rounds are mixed ones."""
    waiting, actives = list(enumerate(requests)), []
    while waiting or engine.busy:
        if waiting:
            actives.append(engine.add(waiting[0][1], waiting.pop(0)[0]))
        for _ in range(every):
            engine.step()
    return [active.result for active in actives]


def same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert a.error is None, a.error
        assert (a.output_ids, a.text, a.finish_reason, a.stop_reason) == (
            b.output_ids,
            b.text,
            b.finish_reason,
            b.stop_reason,
        )
        assert len(a.logprobs) == len(b.logprobs)
        for one, other in zip(a.logprobs, b.logprobs, strict=True):
            assert one.token == other.token and math.isclose(one.logprob, other.logprob, abs_tol=1e-4)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
            torch.testing.assert_close([v for _, v in one.top], [v for _, v in other.top], atol=1e-4, rtol=0)


@pytest.mark.parametrize("feature", FEATURES)
def test_matrix(target, draft, feature):
    requests = asked(feature)
    expected = [r for _, r in sorted(engine(target, draft, "plain", 1).run(requests))]
    assert any(len(result.output_ids) > 3 for result in expected)
    accepted = 0
    for mode in MODES:
        for batch in (1, 4):
            ours = [r for _, r in sorted(engine(target, draft, mode, batch).run(requests))]
            same(ours, expected)
            accepted += sum(record.accepted for result in ours for record in result.rounds)
        same(joined(engine(target, draft, mode, 16, prefix_cache=True, prefill_tokens=3), requests), expected)
    assert accepted > 0, "a matrix in which nothing is accepted proves nothing"


def test_sixteen_of_all_kinds_that_join_and_leave(target, draft):
    requests = [replace(asked(feature)[i % 5], max_tokens=30 + i) for i, feature in enumerate(FEATURES)]
    expected = [r for _, r in sorted(engine(target, draft, "plain", 1).run(requests))]
    for mode in MODES:
        same([r for _, r in sorted(engine(target, draft, mode, 16).run(requests))], expected)
        same(joined(engine(target, draft, mode, 16, kv_tokens=700, prefix_cache=True), requests, 1), expected)


def by_hand(target, request):
    """Greedy ids with every penalty and bias, from the formulas of OpenAI's and Transformers' documentation."""
    settings, ids, out = request.sampling, list(request.prompt_ids), []
    while len(out) < request.max_tokens:
        logits = target.forward([(target.new_state(len(ids)), torch.tensor(ids))], logits="last").logits[0].clone()
        if len(out) < request.min_tokens:
            logits[list(target.stop_ids)] = -math.inf
        for token, bias in settings.logit_bias:
            logits[token] += bias
        for token in set(ids):
            value = logits[token]
            logits[token] = value / settings.repetition_penalty if value > 0 else value * settings.repetition_penalty
        for token, count in Counter(out).items():
            logits[token] -= settings.presence_penalty + count * settings.frequency_penalty
        ids.append(int(logits.argmax()))
        out.append(ids[-1])
        if out[-1] in target.stop_ids:
            break
    return out


@pytest.mark.parametrize("feature", ["presence", "frequency", "repetition", "bias", "min tokens"])
def test_shaped_greedy_ids_equal_those_made_by_hand(target, draft, feature):
    for request, (_, result) in zip(
        asked(feature), sorted(engine(target, draft, 7, 4).run(asked(feature))), strict=True
    ):
        assert result.output_ids == by_hand(target, request)


def test_features_change_the_answer(target, draft):
    """Each of them, so that the matrix does not compare a setting that nobody reads."""
    plain = {}
    for feature in FEATURES:
        plain[feature] = [r.output_ids for _, r in sorted(engine(target, draft, "plain", 4).run(asked(feature)))]
    for feature in FEATURES:
        base = "seeded" if FEATURES[feature][0].get("seed") else "greedy"
        if "logprobs" not in feature and feature != base:
            assert plain[feature] != plain[base], feature


def test_min_tokens_then_a_stop(target, draft):
    for _, result in engine(target, draft, 7, 4).run(asked("min tokens")):
        assert 2 not in result.output_ids[:9]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_anywhere(target, draft, mode, include):
    """Every string of 1 to 4 characters of a plain answer ends it where one-at-a-time decoding would."""
    [(_, whole)] = engine(target, draft, "plain", 1).run([Request(PROMPTS[0], 30)])
    for length in (1, 2, 4):
        for start in range(0, len(whole.text) - length):
            stop = whole.text[start : start + length]
            first = whole.text.index(stop)
            request = Request(PROMPTS[0], 30, stop=("never there", stop), include_stop=include)
            [(_, result)] = engine(target, draft, mode, 1).run([request])
            assert result.text == whole.text[: first + (length if include else 0)]
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
            assert result.output_ids == whole.output_ids[: len(result.output_ids)]
            assert result.output_ids != whole.output_ids or first + length == len(whole.text)


def test_steps_never_show_the_beginning_of_a_stop_string(target, draft):
    [(_, whole)] = engine(target, draft, "plain", 1).run([Request(PROMPTS[0], 30)])
    stop = whole.text[8:14]
    ours = engine(target, draft, 7, 1)
    shown = "".join(step.text for step in ours.stream(Request(PROMPTS[0], 30, stop=(stop,))))
    assert shown == ours.last_result.text == whole.text[: whole.text.index(stop)]


def test_a_grammar_ends_the_answer(target, draft):
    for mode in MODES:
        for _, result in engine(target, draft, mode, 4).run(asked("regex")):
            if result.finish_reason == "stop":
                assert result.text.endswith("x") and result.text[0] in "abcdef"
            else:
                assert result.finish_reason == "length"
    [(_, result)] = engine(target, draft, 7, 1).run(
        [Request(PROMPTS[0], 30, constraint=Constraint("regex", "abc"), logprobs=1)]
    )
    assert (result.text, result.finish_reason, len(result.logprobs)) == ("abc", "stop", len(result.output_ids))


def test_logprobs_are_the_targets_own(target, draft):
    [(_, result)] = engine(target, draft, 7, 1).run([Request(PROMPTS[0], 20, logprobs=2)])
    ids = torch.tensor([*PROMPTS[0], *result.output_ids])[:-1]
    logits = target.forward([(target.new_state(len(ids)), ids)]).logits[len(PROMPTS[0]) - 1 :]
    for row, entry in zip(torch.log_softmax(logits, -1), result.logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-4) and entry.logprob < 0
        assert entry.top[0][0] == entry.token  # greedy
        assert len(entry.top) == 2


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 300}, "min_tokens"),
        ({"stop": ("",)}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"timeout": 0.0}, "timeout"),
        ({"min_tokens": 1, "constraint": Constraint("regex", "a")}, "min_tokens"),
        ({"sampling": SamplingSettings(logit_bias=((100, 1.0),))}, "logit_bias"),
        ({"constraint": Constraint("regex", "[")}, "regex"),
        ({"constraint": Constraint("json_schema", "{")}, "json_schema"),
        ({"constraint": Constraint("json_schema", '{"type": "nonsense"}')}, "json_schema"),
    ],
)
def test_what_cannot_be_asked(target, draft, fields, name):
    with pytest.raises(DsparkError, match=name):
        engine(target, draft, 3, 1).add(Request(PROMPTS[0], **fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_settings_out_of_range(name, value):
    with pytest.raises(DsparkError, match=name):
        SamplingSettings(**{name: value})
