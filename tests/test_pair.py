"""The real pair: the embedded target and the shipped draft. Slow; `make test-slow`."""

import math

import numpy as np
import pytest
import torch
from tests.decoding.laws import chi_square_p, shift_two_percent

from dspark.checkpoints.builtin import load_named_draft
from dspark.checkpoints.native import load_draft, save_draft
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import demo_prompts
from dspark.data.rows import Row
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Request, SamplingSettings
from dspark.decoding.sampling import log_distribution
from dspark.decoding.verify import draft_token, verify_rejection
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import load_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    return load_target(EMBEDDED)


@pytest.fixture(scope="module")
def draft():
    return load_named_draft("embedded")


@pytest.fixture(scope="module")
def prompts(target):
    renderer = ChatRenderer(target.tokenizer)
    return [renderer.prompt_ids([{"role": "user", "content": p.turns[0]}]) for p in demo_prompts()[::3]]


def serve(target, proposer, prompts, sampling, tokens=48, batch=1):
    requests = [Request(ids, tokens, sampling) for ids in prompts]
    return [result for _, result in sorted(Engine(target, proposer, max_batch=batch).run(requests))]


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(0.8, top_p=0.95, seed=11)])
def test_ids_equal_plain_ones(target, draft, prompts, sampling):
    plain = serve(target, make_proposer(target, None), prompts, sampling)
    for n in range(1, 8):
        batch = 5 if n % 2 else 1
        ours = serve(target, make_proposer(target, draft, n), prompts, sampling, batch=batch)
        assert [r.output_ids for r in ours] == [r.output_ids for r in plain], f"n = {n}, batch {batch}"
    rounds = [r for result in ours for r in result.rounds]
    assert sum(r.accepted for r in rounds) / len(rounds) > 0.3, "the shipped draft is of use"


def test_replay_equals_served(target, draft, prompts):
    taps = {}
    engine = Engine(target, None, capture_taps=tuple(draft.config.target_layer_ids))
    requests = [Request(ids, 60) for ids in prompts]
    results = sorted(engine.run(requests, capture=lambda i, t, _l: taps.__setitem__(i, t)))
    rows = [
        Row(
            id=str(i),
            source=str(i),
            prompt_ids=list(r.request.prompt_ids),
            answer_ids=r.output_ids,
            finish=r.finish_reason,
        )
        for i, r in results
    ]
    for n in (3, 7):
        proposer = make_proposer(target, draft, n)
        served = [r.rounds for r in serve(target, proposer, prompts, SamplingSettings(), 60)]
        assert replay(proposer, [(row, taps[i]) for i, row in enumerate(rows)], 1, target.max_context) == served


def test_emitted_law_of_two_tokens(target, draft, prompts):
    """20,000 rounds of `rejection` with the pair's own logits: the first two emitted tokens follow the target's law.

    The target's logits after every prefix the draft can propose are computed once; drawing and verifying are real.
    """
    sampling = SamplingSettings(temperature=1.2, top_k=3)
    proposer = make_proposer(target, draft, 2)
    engine = Engine(target, proposer)
    active = engine.add(Request(prompts[2], 16, sampling))
    engine.step()
    anchor, vocabulary = active.ids[-1], target.vocab_size
    hidden = draft.block_hidden([(active.context, anchor)], 2)
    base = draft.base_logits(hidden)

    def draft_logits(slot, previous):
        logits, _ = draft.slot_logits(base[:, slot], hidden[:, slot], torch.tensor([previous]), None)
        full = torch.full((vocabulary,), -math.inf)
        full[draft.draft_ids] = logits[0]
        return full

    def target_logits(tokens):
        state = target.new_state(len(active.ids) + 4)
        return target.forward([(state, torch.tensor([*active.ids, *tokens]))], logits="last").logits[0]

    first_q = draft_logits(0, anchor)
    firsts = log_distribution(first_q, sampling).isfinite().nonzero()[:, 0].tolist()
    second_q = {x: draft_logits(1, x) for x in firsts}
    after = {(): target_logits([])}
    for x in set(firsts) | set(log_distribution(after[()], sampling).isfinite().nonzero()[:, 0].tolist()):
        after[x,] = target_logits([x])
    pairs: list[tuple[int, int]] = []
    end = target_logits([anchor])  # the row after both drafts: its token is the third and is not looked at
    for seed in range(20_000):
        x1, q1 = draft_token(first_q, sampling, seed, 1, 0, 0, "rejection")
        x2, q2 = draft_token(second_q[x1], sampling, seed, 1, 1, 0, "rejection")
        logits = torch.stack([after[()], after[x1,], end])
        accepted, token = verify_rejection(logits, [x1, x2], [q1, q2], sampling, seed, 1)
        emitted = [x1, x2, token] if accepted == 2 else [*[x1, x2][:accepted], token]
        if len(emitted) == 1:  # the next round would go on; plain decoding from here has the same law
            emitted.append(verify_rejection(after[emitted[0],][None], [], [], sampling, seed, 2)[1])
        pairs.append((emitted[0], emitted[1]))
    law: dict[tuple[int, int], float] = {}
    p1 = log_distribution(after[()], sampling).exp()
    for x in p1.nonzero()[:, 0].tolist():
        p2 = log_distribution(after[x,], sampling).exp()
        for y in p2.nonzero()[:, 0].tolist():
            law[x, y] = float(p1[x] * p2[y])
    index = {key: number for number, key in enumerate(law)}
    observed = np.array([index[pair] for pair in pairs])
    expected = np.array(list(law.values()))
    assert chi_square_p(observed, expected) > 1e-3
    assert chi_square_p(shift_two_percent(observed, expected), expected) < 1e-3, "a 2 % bias is seen"


def test_export_adds_the_head_rows_and_loads_the_same(target, draft, prompts, tmp_path):
    make_proposer(target, draft)
    save_draft(draft, tmp_path / "export")
    loaded = load_draft(tmp_path / "export")
    assert loaded.own_head_rows is not None
    ours = serve(target, make_proposer(target, loaded, 7), prompts[:2], SamplingSettings(), 24)
    plain = serve(target, make_proposer(target, None), prompts[:2], SamplingSettings(), 24)
    assert [r.output_ids for r in ours] == [r.output_ids for r in plain]
