"""Replay equals serving, round by round."""

import pytest
import torch
from tests.decoding.conftest import PROMPTS, bigram_draft
from tests.drafts.conftest import MLA

from dspark.data.rows import Row
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Request


def rows_of(target, requests):
    """Rows and taps of plain greedy answers, from one capturing run."""
    taps, rows = {}, {}
    engine = Engine(target, None, max_batch=4, capture_taps=(0, 2, 3))
    for index, result in engine.run(requests, capture=lambda i, t, _l: taps.__setitem__(i, t)):
        rows[index] = Row(
            id=str(index),
            source=str(index),
            prompt_ids=list(result.request.prompt_ids),
            answer_ids=result.output_ids,
            finish=result.finish_reason,
        )
    return [(rows[i], taps[i]) for i in range(len(requests))]


@pytest.mark.parametrize("layout", [{}, {"sample_from_anchor": False, "block_size": 8}, MLA])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_replay_equals_served_rounds(target, pairs, layout, n):
    asked = [Request(p, m, ignore_eos=True) for p, m in zip(PROMPTS, (60, 1, 31, 44, 2), strict=True)]
    asked += [Request(p, 50, stop_ids=frozenset([17, 23, 44])) for p in PROMPTS]
    asked.append(Request([9 + i % 80 for i in range(240)], 60, ignore_eos=True))  # ends at the context limit
    rows = rows_of(target, asked)
    proposer = make_proposer(target, bigram_draft(pairs, **layout), n)
    served = [r.rounds for _, r in sorted(Engine(target, proposer).run(asked))]
    for batch in (1, 4):
        assert replay(proposer, rows, batch, target.max_context) == served
    assert sum(r.accepted for rounds in served for r in rounds) > 10


def test_wrong_taps_are_noticed_by_acceptance(target, pairs):
    """The rounds depend on the taps: shifted by one position, they are other rounds."""
    asked = [Request(p, 60, ignore_eos=True) for p in PROMPTS]
    rows = rows_of(target, asked)
    draft = bigram_draft(pairs)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.mul_(0.2)
    proposer = make_proposer(target, draft, 7)
    shifted = [(row, taps.roll(1, 0) * 3) for row, taps in rows]
    assert replay(proposer, rows) != replay(proposer, shifted)
