"""Compiled drafts against their own modules, and decoding with a compiled target and a compiled draft."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.decoding.conftest import draft_config
from tests.drafts.conftest import tiny_draft
from tests.kernels.conftest import small_model, small_target
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from dspark.decoding.compiled import compile_draft
from dspark.decoding.drafting import Proposal
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import NoProposer, Proposer, make_proposer
from dspark.decoding.request import Request, Result, SamplingSettings
from dspark.drafts.context import DraftContext
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.kernels import library
from dspark.targets.transformers import TransformersTarget

pytestmark = pytest.mark.skipif(library.kind() is None, reason="no kernels here: none built, or none wanted")

SHAPE = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "vocab_size": 128, "draft_vocab_size": 128}
DRAFTS: dict[str, dict[str, Any]] = {
    "full": {},
    "bonus-anchor": {"sample_from_anchor": False, "block_size": 6},
    "a block of 1": {"block_size": 1},
    "a block of 16": {"block_size": 16},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 11},
    "sliding, shorter than a block": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 3,
        "sample_from_anchor": False,
    },
    "non-causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "sliding_window_non_causal": True},
    "non-causal, short": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 2,
        "sliding_window_non_causal": True,
        "block_size": 7,
    },
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "block_size": 7},
    "partial rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    "yarn rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "bias": {"attention_bias": True},
    "4 heads on 1": {"num_key_value_heads": 1, "head_dim": 64},
    "4 heads on 4": {"num_key_value_heads": 4},
    "3 taps, 3 layers": {"target_layer_ids": [3, 0, 1], "num_hidden_layers": 3, "rms_norm_eps": 0.01},
}


def three(**changes: Any) -> tuple[DSparkDraft, DSparkDraft, DSparkDraft]:
    """The same draft compiled, plain, and in float64."""
    plain = tiny_draft(torch.float32, **{**SHAPE, "markov_rank": 32, **changes})
    ours, true = copy.deepcopy(plain), copy.deepcopy(plain).double()
    target = [torch.randn(128, 64) for _ in range(2)]
    ours.bind(*target)
    plain.bind(*target)
    true.bind(*[weight.double() for weight in target])
    ours.compiled = compile_draft(ours)
    assert ours.compiled is not None
    return ours, plain, true


def taps_of(draft: DSparkDraft, count: int, seed: int) -> Tensor:
    width = len(draft.config.target_layer_ids) * 64
    taps = torch.randn(count, width, generator=torch.Generator().manual_seed(seed))
    return taps.to(draft.norm.weight.dtype)


def spoil(draft: DSparkDraft, contexts: list[DraftContext]) -> None:
    """What a context does not hold may be anything: 0 times NaN is NaN."""
    if draft.compiled is not None:
        for context in contexts:
            context.keys[:, :, context.length :] = torch.nan
            context.values[:, :, context.length :] = torch.nan


def story(draft: DSparkDraft) -> Iterator[tuple[str, Tensor]]:
    """Contexts of several lengths that are written, used, cut, grown and taken over: every number there is."""
    a, b, c = contexts = [draft.new_context(size) for size in (40, 20, 60)]
    gamma = draft.config.gamma
    spoil(draft, contexts)

    def held(name: str, *contexts: DraftContext) -> Iterator[tuple[str, Tensor]]:
        for context in contexts:
            yield f"{name}: keys", context.keys[:, :, : context.length].clone()
            yield f"{name}: values", context.values[:, :, : context.length].clone()

    yield "nothing written", draft.block_hidden([(a, 5)], gamma)
    draft.write_context([(a, taps_of(draft, 17, 1)), (b, taps_of(draft, 0, 2)), (c, taps_of(draft, 46, 3))])
    yield from held("written", a, c)
    draft.write_context([(b, taps_of(draft, 3, 4))])
    spoil(draft, contexts)
    yield "a round", draft.block_hidden([(c, 7), (a, 90), (b, 11)], gamma)
    yield "a short round", draft.block_hidden([(a, 90), (c, 7)], max(1, gamma - 2))
    wide = torch.cat((taps_of(draft, 2, 5), taps_of(draft, 2, 6)), 1)
    draft.write_context([(b, wide[:, : wide.shape[1] // 2])])  # a part of what an engine taps
    a.truncate(14)
    draft.write_context([(c, taps_of(draft, 1, 7)), (a, taps_of(draft, 4, 8))])
    spoil(draft, contexts)
    yield from held("more", a, b, c)
    yield "after more", draft.block_hidden([(a, 3), (b, 4), (c, 5)], gamma)
    b.grow(90)
    spoil(draft, contexts)
    draft.write_context([(b, taps_of(draft, 50, 9))])
    d = draft.new_context(30)
    d.copy_prefix(c, 25)
    spoil(draft, [d])
    draft.write_context([(d, taps_of(draft, 2, 10))])
    yield from held("grown and taken over", b, d)
    yield "at the end", draft.block_hidden([(d, 1), (b, 2)], 1)


@pytest.mark.parametrize("name", DRAFTS)
@torch.no_grad()
def test_the_compiled_passes_compute_what_the_draft_does(name: str) -> None:
    """As near to float64 as PyTorch's float32 is, number for number."""
    ours, plain, true = three(**DRAFTS[name])
    for (part, found), (_, near), (_, wanted) in zip(story(ours), story(plain), story(true), strict=True):
        assert found.shape == near.shape == wanted.shape and found.dtype == torch.float32, part
        lost, theirs = (float((one - wanted).norm()) for one in (found, near))
        assert lost <= 3 * theirs + 1e-6 * float(wanted.norm()), (part, lost, theirs)


@pytest.mark.parametrize("name", ["full", "bonus-anchor", "mixed", "non-causal"])
@torch.no_grad()
def test_a_block_has_the_same_bits_beside_others(name: str) -> None:
    """A request's drafts must not depend on who else is there, nor on how its context was written."""
    draft = three(**DRAFTS[name])[0]
    lengths, gamma = (0, 1, 17, 40, 8), draft.config.gamma
    contexts = [draft.new_context(40) for _ in lengths]
    draft.write_context([(context, taps_of(draft, n, n)) for context, n in zip(contexts, lengths, strict=True)])
    together = draft.block_hidden([(context, i) for i, context in enumerate(contexts)], gamma)
    for i, n in enumerate(lengths):
        alone = draft.new_context(64)
        for part in taps_of(draft, n, n).split(3):
            draft.write_context([(alone, part)])
        assert torch.equal(alone.keys[:, :, :n], contexts[i].keys[:, :, :n])
        assert torch.equal(alone.values[:, :, :n], contexts[i].values[:, :, :n])
        assert torch.equal(draft.block_hidden([(alone, i)], gamma)[0], together[i])


def test_what_does_not_fit_is_refused_as_before() -> None:
    """Past the capacity, or taps of another width: they would be written or read past their ends."""
    draft = three()[0]
    context = draft.new_context(8)
    with pytest.raises(DsparkError, match="do not fit the 8"):
        draft.write_context([(context, taps_of(draft, 9, 1))])
    for width in (64, 192):
        with pytest.raises(DsparkError, match="taps"):
            draft.write_context([(context, torch.randn(3, width))])
    with pytest.raises(DsparkError, match="n = 9"):
        draft.block_hidden([(context, 1)], 9)
    assert context.length == 0


UNFIT = {
    "head_dim 16": {"head_dim": 16},
    "hidden 48": {"hidden_size": 48},
    "intermediate 80": {"intermediate_size": 80},
    "gelu": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_draft_that_does_not_fit_is_not_compiled(name: str) -> None:
    assert compile_draft(tiny_draft(torch.float32, **{**SHAPE, **UNFIT[name]})) is None


def test_a_draft_of_another_type_or_without_kernels_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_draft(torch.float32, **SHAPE)
    assert compile_draft(tiny_draft(torch.bfloat16, **SHAPE)) is None and compile_draft(draft) is not None
    monkeypatch.setenv("DSPARK_KERNELS", "none")
    assert compile_draft(draft) is None


# With a target


PROMPTS = [
    [5, 6, 7, 8, 9],
    [40],
    [11 + i for i in range(70)],
    [70, 71, 72],
    [33, 20, 33],
    [99] * 17,
    [1, 2],
    [88, 4, 31],
]
LENGTHS = [30, 3, 25, 33, 1, 12, 40, 18]
GREEDY, SEEDED = SamplingSettings(), SamplingSettings(temperature=0.9, seed=7)


def requests(sampling: SamplingSettings, count: int = 8, **fields: Any) -> list[Request]:
    """Most of them go on to their last token, whatever the ids are."""
    return [
        Request(
            [(id + 3 * (i // 8)) % 128 for id in PROMPTS[i % 8]],
            LENGTHS[(3 * i) % 8],
            sampling,
            ignore_eos=i % 3 > 0,
            **fields,
        )
        for i in range(count)
    ]


def serve(target: TransformersTarget, proposer: Proposer, asked: list[Request], **settings: Any) -> list[Result]:
    return [result for _, result in sorted(Engine(target, proposer, **settings).run(asked), key=lambda pair: pair[0])]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def target(request: pytest.FixtureRequest) -> TransformersTarget:
    """Compiled; the second one's window is shorter than most requests."""
    shape = {"vocab_size": 128, "num_hidden_layers": 4}
    if request.param == "llama":
        found = small_target(**shape)
    else:
        model = small_model(MistralForCausalLM, MistralConfig, sliding_window=24, **shape)
        found = TransformersTarget("small", model, None)
    assert found._compiled is not None
    return found


def asked_for() -> list[Request]:
    return [*requests(GREEDY, 10, logprobs=3), *requests(SEEDED, 10, logprobs=3)]


@pytest.fixture(scope="module")
def plain(target: TransformersTarget) -> list[Result]:
    """Plain decoding, one request at a time: half of them greedy, half seeded."""
    return serve(target, NoProposer(), asked_for())


def guessing_draft(plain: list[Result] | None, **changes: Any) -> DSparkDraft:
    """A random draft, whose Markov head knows the target's own successors where they are given."""
    config = draft_config(**{**SHAPE, "markov_rank": 128, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        draft = DSparkDraft(config)
        if plain is None:
            for parameter in draft.parameters():
                torch.nn.init.normal_(parameter, std=0.15)
    if config.reduced:
        draft.set_vocabulary(range(128 - config.draft_vocab_size, 128))
    if plain is not None:
        with torch.no_grad():
            draft.markov_head.markov_w1.weight.copy_(torch.eye(128))
            draft.markov_head.markov_w2.weight.zero_()
            for result in plain:
                for before, after in pairwise([*result.request.prompt_ids, *result.output_ids]):
                    draft.markov_head.markov_w2.weight[after, before] = 8.0
    return draft


def same(ours: list[Result], plain: list[Result]) -> None:
    """Ids, ends and log-probabilities, these to the last bit."""
    for a, b in zip(ours, plain, strict=True):
        assert (a.output_ids, a.finish_reason, a.logprobs) == (b.output_ids, b.finish_reason, b.logprobs)


BLOCKS = [*[("llama", n) for n in range(1, 8)], ("mistral", 2), ("mistral", 7)]


@pytest.mark.parametrize(("target", "n"), BLOCKS, indirect=["target"])
def test_nothing_about_an_answer_depends_on_speculation(
    target: TransformersTarget, plain: list[Result], n: int
) -> None:
    """Greedy and seeded requests, 1, 4 and 16 at a time: others join and leave, prompts are read in parts."""
    proposer = make_proposer(target, guessing_draft(plain), n)
    rounds = []
    for batch in (1, 4, 16):
        ours = serve(target, proposer, asked_for(), max_batch=batch, prefill_tokens=32)
        same(ours, plain)
        rounds.append([result.rounds for result in ours[:10]])
        assert sum(r.accepted for result in ours for r in result.rounds) > 20, "nothing accepted proves nothing"
    assert rounds[0] == rounds[1] == rounds[2]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab_size": 90, "markov_rank": 32},
        {"sample_from_anchor": False, "block_size": 8, "markov_rank": 0, "enable_confidence_head": False},
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 9, "sliding_window_non_causal": True},
    ],
    ids=["random", "reduced", "dflash", "sliding"],
)
def test_nothing_depends_on_a_draft_that_is_wrong(
    target: TransformersTarget, plain: list[Result], changes: dict[str, Any]
) -> None:
    if changes.get("markov_rank") == 0:
        changes = {**changes, "confidence_head_with_markov": False}
    proposer = make_proposer(target, guessing_draft(None, **changes))
    assert proposer.draft.compiled is not None
    same(serve(target, proposer, asked_for(), max_batch=5), plain)


def test_nothing_depends_on_what_is_kept_of_others(
    target: TransformersTarget, plain: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefixes taken over from finished requests, and requests that made way and were read again."""
    monkeypatch.setattr("dspark.decoding.memory.GROWTH", 3)
    proposer = make_proposer(target, guessing_draft(plain), 5)
    for settings, count in (({"prefix_cache": True}, "cached_tokens"), ({"kv_tokens": 140}, "preemptions")):
        engine = Engine(target, proposer, max_batch=6, prefill_tokens=40, **settings)
        for _ in range(2):
            ours = [result for _, result in sorted(engine.run(asked_for()), key=lambda pair: pair[0])]
            same(ours, plain)
        assert sum(getattr(result, count) for result in ours) > 1


def recorded(proposer: Proposer) -> list[list[list[int]]]:
    """The drafts of every pass, as they come."""
    seen: list[list[list[int]]] = []
    propose = proposer.propose

    def record(batch: Any, n: int | None = None) -> list[Proposal]:
        proposals = propose(batch, n)
        seen.append([list(proposal.tokens) for proposal in proposals])
        return proposals

    proposer.propose = record  # type: ignore[method-assign]
    return seen


MARKOV: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "vanilla of rank 32, reduced": {"markov_rank": 32, "draft_vocab_size": 75},
    "vanilla of rank 6, reduced": {"markov_rank": 6, "draft_vocab_size": 75},
    "gated": {"markov_head_type": "gated", "markov_rank": 32},
    "rnn": {"markov_head_type": "rnn", "markov_rank": 32},
    "rnn, reduced": {"markov_head_type": "rnn", "markov_rank": 32, "draft_vocab_size": 75},
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
    "bonus-anchor": {"sample_from_anchor": False, "block_size": 8},
    "sliding": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    "bias": {"attention_bias": True},
}


WAYS = [
    *[(name, 7, "block") for name in MARKOV],
    *[(name, n, mode) for name in ("vanilla", "bonus-anchor", "rnn") for n, mode in ((3, "prefix"), (1, "block"))],
]


@pytest.mark.parametrize(("name", "n", "mode"), WAYS)
def test_the_drafts_are_those_of_the_plain_draft(name: str, n: int, mode: Any) -> None:
    """Greedy and seeded, alone and among others, whatever the Markov head is."""
    target = small_target(vocab_size=128, num_hidden_layers=4)
    proposers = [make_proposer(target, guessing_draft(None, **MARKOV[name]), n, mode) for _ in range(2)]
    assert proposers[0].draft.compiled is not None
    proposers[1].draft.compiled = None
    seen = [recorded(proposer) for proposer in proposers]
    asked = [Request(prompt, 14, (GREEDY, SEEDED)[i == 3], ignore_eos=True) for i, prompt in enumerate(PROMPTS[:4])]
    for batch in (1, 4):  # greedy ones alone go another way than beside others
        ours, theirs = (serve(target, proposer, asked, max_batch=batch) for proposer in proposers)
        assert [r.output_ids for r in ours] == [r.output_ids for r in theirs]
    assert seen[0] == seen[1] and len(seen[0]) > 20
    assert all(len(tokens) == n for batch in seen[0] for tokens in batch)
    assert len({token for batch in seen[0] for tokens in batch for token in tokens}) > 8


@torch.no_grad()
def test_a_draft_whose_numbers_break_says_so() -> None:
    target = small_target(vocab_size=128, num_hidden_layers=4)
    for part in ("fc.weight", "norm.weight", "layers.1.self_attn.v_proj.weight"):
        draft = guessing_draft(None)
        draft.get_parameter(part).view(-1)[3] = torch.nan
        proposer = make_proposer(target, draft)
        assert draft.compiled is not None
        with pytest.raises(DsparkError, match="gave non-finite logits"):
            serve(target, proposer, requests(GREEDY))


@torch.no_grad()
def test_a_markov_head_whose_numbers_break_changes_no_answer(plain: list[Result], target: TransformersTarget) -> None:
    """Drafts are only proposals; they are the plain draft's also then."""
    seen = []
    for compiled in (True, False):
        draft = guessing_draft(None)
        draft.markov_head.markov_w2.weight[40] = torch.nan
        draft.markov_head.markov_w2.weight[60, 5] = torch.inf
        proposer = make_proposer(target, draft, 4)
        if not compiled:
            draft.compiled = None
        seen.append(recorded(proposer))
        same(serve(target, proposer, asked_for()[:10], max_batch=4), plain[:10])
    assert seen[0] == seen[1]


def test_confidences_are_those_of_the_plain_draft() -> None:
    target = small_target(vocab_size=128, num_hidden_layers=4)
    found = []
    for compiled in (True, False):
        draft = guessing_draft(None)
        proposer = make_proposer(target, draft, 5, confidence=True)
        draft.compiled = draft.compiled if compiled else None
        steps = list(Engine(target, proposer).stream(requests(GREEDY)[1]))
        found.append(torch.tensor([step.confidence for step in steps if step.round is not None and step.confidence]))
    assert found[0].numel() > 30
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_weights_that_were_changed_after_packing_are_refused() -> None:
    """They would be served as they were, or half and half: acceptance drops and nobody knows why."""
    target = small_target(vocab_size=128, num_hidden_layers=4)
    for change in (lambda d: d.load_state_dict(d.state_dict()), lambda d: d.to(torch.bfloat16)):
        draft = guessing_draft(None)
        make_proposer(target, draft, 2)
        make_proposer(target, draft, 3)
        change(draft)
        with pytest.raises(DsparkError, match="load it again"):
            make_proposer(target, draft, 2)


def test_a_packed_draft_cannot_be_trained() -> None:
    """Its packed parts give no gradient: without a word they would stay as they are."""
    target = small_target(vocab_size=128, num_hidden_layers=4)
    draft = guessing_draft(None)
    make_proposer(target, draft, 2)
    draft.requires_grad_(True)
    hidden = torch.zeros(1, 2, draft.config.hidden_size, requires_grad=True)
    with pytest.raises(DsparkError, match="no gradient"):
        draft.teacher_logits(hidden, torch.zeros(1, 2, dtype=torch.int64))
