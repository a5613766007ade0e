"""The Markov head from counts is the shrunken log-odds of bigrams, as far as its rank goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from dspark.checkpoints.native import load_draft, save_draft
from dspark.data.rows import Row
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training import bigrams
from dspark.training.bigrams import PSEUDO_COUNTS, bigram_log_odds, factorise
from dspark.training.recipe import Recipe
from dspark.training.setup import build_draft, finished_config

V = 12
IDS = [2, 3, 5, 7, 8, 9]


def make_rows(count: int = 40) -> list[Row]:
    """Chains in which 2 is mostly followed by 3 and 5 by 7."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in range(count):
        ids = [2]
        while len(ids) < 30:
            drawn = int(torch.randint(12, (1,), generator=generator))
            ids.append({2: 3, 5: 7}[ids[-1]] if ids[-1] in (2, 5) and drawn < 10 else min(drawn, 10))
        rows.append(Row(id=str(number), source=str(number), prompt_ids=[11, 11], answer_ids=ids, finish="length"))
    return rows


def test_softmax_of_unigram_plus_odds_is_the_smoothed_bigram_law() -> None:
    rows = make_rows()
    odds, weights = bigram_log_odds(rows, IDS, V)
    pairs = Counter((a, b) for row in rows for a, b in zip(row.answer_ids, row.answer_ids[1:]) if b in IDS)
    total = sum(pairs.values())
    share = np.array([sum(n for (_, b), n in pairs.items() if b == token) / total for token in IDS])
    for a in range(V):
        n_a = sum(n for (first, _), n in pairs.items() if first == a)
        assert weights[a] == n_a
        law = np.array([(pairs[a, b] + PSEUDO_COUNTS * p) / (n_a + PSEUDO_COUNTS) for b, p in zip(IDS, share)])
        logits = np.log(share) + odds[[a]].toarray()[0]
        assert np.exp(logits) / np.exp(logits).sum() == pytest.approx(law)
    assert not odds[[11]].nnz and weights[11] == 0  # only ever in prompts


def test_factors_reach_the_matrix_with_their_rank() -> None:
    odds, weights = bigram_log_odds(make_rows(), IDS, V)
    dense, seen = torch.from_numpy(odds.toarray()).float(), torch.from_numpy(np.sqrt(weights)).float()[:, None]
    errors = []
    for rank in (1, 3, 5):
        w1, w2 = factorise(odds, weights, rank)
        assert torch.allclose(w1.norm(dim=0), w2.norm(dim=0), rtol=1e-4)
        best = torch.linalg.svdvals(seen * dense)[rank:].norm()
        errors.append(float((seen * (w1 @ w2.T - dense)).norm()))
        assert errors[-1] == pytest.approx(float(best), rel=1e-3)
    assert errors == sorted(errors, reverse=True) and errors[2] < errors[0] / 2
    wide = factorise(odds, weights, 50)
    assert wide[0].shape == (V, 50) and not wide[0][:, 6:].any() and torch.isfinite(wide[0]).all()
    assert torch.equal(factorise(odds, weights, 3)[0], factorise(odds, weights, 3)[0])


@pytest.mark.parametrize("answers", [3, 40])
def test_few_bigrams_in_a_large_vocabulary_give_the_same_factors_every_time(answers: int) -> None:
    """A matrix of hardly any rows has no rank-50 part: an iteration that restarts at random fills it differently."""
    rows, size = make_rows(answers), 3000
    odds, weights = bigram_log_odds(rows, list(range(2, size)), size)
    first = factorise(odds, weights, 50)
    for _ in range(3):
        again = factorise(odds, weights, 50)
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    assert torch.allclose(first[0] @ first[1].T, torch.from_numpy(odds.toarray()).float(), atol=1e-5)


def test_the_iteration_for_large_matrices_finds_what_all_singular_values_give(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.rand(40, 60, generator=generator) ** 3 * 40).long().tolist()
    rows = [
        Row(id=str(n), source="p", prompt_ids=[1], answer_ids=answer, finish="length") for n, answer in enumerate(drawn)
    ]
    odds, weights = bigram_log_odds(rows, list(range(40)), 40)
    dense = factorise(odds, weights, 5)
    monkeypatch.setattr(bigrams, "DENSE", 0)
    iterated = factorise(odds, weights, 5)
    assert torch.allclose(dense[0] @ dense[1].T, iterated[0] @ iterated[1].T, atol=1e-5)


def test_a_draft_starts_from_bigrams(
    make_recipe: Callable[..., Recipe], target: TransformersTarget, rows: list[Row]
) -> None:
    told: list[str] = []
    recipe = make_recipe(markov_init="bigram", draft={"markov_rank": 30})
    draft = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, told.append)
    assert any("bigrams" in line for line in told)
    ids = draft.draft_ids.tolist()
    odds = torch.from_numpy(bigram_log_odds(rows, ids, target.vocab_size)[0].toarray()).float()
    bias = draft.markov_head.bias(torch.zeros(target.vocab_size, 1), torch.arange(target.vocab_size), None)[0]
    assert float((bias - odds).detach().norm() / odds.norm()) < 0.5
    first = {token for row in rows for token in row.answer_ids[:-1]}
    unseen = [token for token in range(target.vocab_size) if token not in first]
    assert unseen and not draft.markov_head.markov_w1.weight[unseen].any()


def test_the_folder_of_a_draft_brings_its_own_head(
    make_recipe: Callable[..., Recipe], target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    recipe = make_recipe(draft={"markov_rank": 4})
    given = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, lambda _: None)
    save_draft(given, tmp_path / "given")
    again = make_recipe(draft={"markov_rank": 4}, init=str(tmp_path / "given"), markov_init="bigram")
    draft = build_draft(again, finished_config(again, target, rows), target, rows, None, lambda _: None)
    kept = load_draft(tmp_path / "given")
    assert torch.equal(draft.markov_head.markov_w1.weight, kept.markov_head.markov_w1.weight)


def test_heads_that_have_no_bigram_bias_are_refused(make_recipe: Callable[..., Recipe]) -> None:
    for draft, found in (
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "vanilla head of rank 0"),
        ({"markov_head_type": "rnn"}, "rnn head"),
    ):
        with pytest.raises(DsparkError, match=f"markov_init.*{found}"):
            make_recipe(draft=draft, markov_init="bigram").check()
    rows = [Row(id="a", source="a", prompt_ids=[1], answer_ids=[1, 1], finish="length")]
    with pytest.raises(DsparkError, match="no pair of draft tokens"):
        bigram_log_odds(rows, IDS, V)
