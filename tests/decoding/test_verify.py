"""Accept rules on a toy pair (Markov target, another Markov chain as draft): nothing but the target's law comes out.

A block of drafts is verified and the joint law of all the tokens it can give is tested, so that a wrong residual, a
wrong q or a reused random number shows up as a dependence between tokens as well as in each one's law.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.decoding.laws import markov_law, reference_law, sequence_p, shift_two_percent

from dspark.decoding import sampling, verify
from dspark.decoding.request import Rule, SamplingSettings
from dspark.decoding.sampling import Use

DRAWS = 20_000
START = 0
SEED = 2024


@dataclass(frozen=True)
class Case:
    """length: tokens whose joint law is tested, block + 1 but for a vocabulary too large for pairs."""

    rule: Rule
    draft: Rule
    settings: SamplingSettings
    vocab: int = 4
    block: int = 2
    length: int = 3


CASES = {
    "rejection, temperature": Case("rejection", "rejection", SamplingSettings(0.8)),
    "rejection, top-k": Case("rejection", "rejection", SamplingSettings(1.0, top_k=3), block=1, length=2),
    "rejection, top-p": Case("rejection", "rejection", SamplingSettings(1.0, top_p=0.85), block=1, length=2),
    "rejection, min-p": Case("rejection", "rejection", SamplingSettings(1.2, min_p=0.25), block=1, length=2),
    "rejection, greedy draft": Case("rejection", "greedy", SamplingSettings(1.5, 3, 0.95, 0.1)),
    "rejection, 600 ids": Case("rejection", "rejection", SamplingSettings(1.0, 200, 0.95, 0.002), 600, 1, 1),
    "coupled, temperature": Case("coupled", "coupled", SamplingSettings(0.8), block=1, length=2),
    "coupled, all filters": Case("coupled", "coupled", SamplingSettings(1.5, 3, 0.95, 0.1)),
}
THRESHOLD = 0.01 / len(CASES)


@cache
def pair(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the target and of the draft, [previous token, token]; they differ by about as much as a real pair."""
    generator = torch.Generator().manual_seed(vocab)
    spread = 1.0 if vocab < 10 else 2.0
    target = torch.randn(vocab, vocab, generator=generator) * spread
    return target, target + torch.randn(vocab, vocab, generator=generator)


@cache
def target_rows(vocab: int, settings: SamplingSettings) -> np.ndarray:
    return np.stack([reference_law(row, settings) for row in pair(vocab)[0]])


def one_round(case: Case, index: int) -> list[int]:
    """Draft, verify: the tokens that round `index` emits after START."""
    target, draft = pair(case.vocab)
    position = index * (case.block + 1)  # disjoint position noise: every round is a sample of its own
    drafts: list[int] = []
    laws: list[torch.Tensor | None] = []
    for slot in range(case.block):
        logits = draft[drafts[-1] if drafts else START]
        token, law = verify.draft_token(logits, case.settings, SEED, index, slot, position + slot, case.draft)
        drafts.append(token)
        laws.append(law)
    logits = target[[START, *drafts]]
    if case.rule == "rejection":
        accepted, bonus = verify.verify_rejection(logits, drafts, laws, case.settings, SEED, index)
    else:
        accepted, bonus = verify.verify_coupled(logits, drafts, case.settings, SEED, position)
    return [*drafts[:accepted], bonus]


def emit(case: Case, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """`draws` independent rounds: sequences [draws, length] (what a round left open is drawn from the reference law)
    and how many tokens each round emitted [draws]."""
    rng = np.random.default_rng(1)
    rounds = [one_round(case, index) for index in range(draws)]
    emitted = np.array([len(tokens) for tokens in rounds])
    sequences = np.full((draws, case.block + 1), -1)
    for row, tokens in zip(sequences, rounds, strict=True):
        row[: len(tokens)] = tokens
    cdf = target_rows(case.vocab, case.settings).cumsum(axis=1)
    for column in range(1, case.length):
        open_rows = np.flatnonzero(sequences[:, column] < 0)
        points = rng.random(open_rows.size)
        before = cdf[sequences[open_rows, column - 1]]
        sequences[open_rows, column] = (before <= (points * before[:, -1])[:, None]).sum(axis=1)
    return sequences[:, : case.length], emitted


@pytest.fixture(autouse=True)
def _remember_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy pair has few distinct rows, and making a law is a pure function of row and settings: make each one once."""
    made: dict[tuple[bytes, SamplingSettings], torch.Tensor] = {}

    def remembered(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
        key = (logits.numpy().tobytes(), settings)
        if key not in made:
            made[key] = sampling.log_distribution(logits, settings)
        return made[key]

    monkeypatch.setattr(verify, "log_distribution", remembered)


def reference(case: Case) -> np.ndarray:
    return markov_law(target_rows(case.vocab, case.settings), START, case.length)


# ------------------------------------------------------------------------------------------------------ the emitted law


@pytest.mark.parametrize("name", CASES)
def test_emitted_tokens_follow_the_target(name: str) -> None:
    case = CASES[name]
    sequences, emitted = emit(case, DRAWS)
    law = reference(case)
    assert sequence_p(sequences, law) > THRESHOLD
    biased = sequences.copy()
    biased[:, 0] = shift_two_percent(sequences[:, 0], target_rows(case.vocab, case.settings)[START])
    assert sequence_p(biased, law) < THRESHOLD, "the test is blind to a bias of 2 %"
    if case.rule == case.draft:
        check_acceptance(case, float((emitted > 1).mean()))


def check_acceptance(case: Case, rate: float) -> None:
    """First slot: exactly 1 - TV for rejection, at least (1 - TV) / (1 + TV) for the coupling (4 standard errors)."""
    p = target_rows(case.vocab, case.settings)[START]
    q = reference_law(pair(case.vocab)[1][START], case.settings)
    distance = np.abs(p - q).sum() / 2
    margin = 4 * math.sqrt(rate * (1 - rate) / DRAWS)
    assert 0.1 < distance < 0.9, "the toy pair should neither agree nor disagree"
    if case.rule == "rejection":
        assert abs(rate - (1 - distance)) < margin
    else:
        assert rate > (1 - distance) / (1 + distance) - margin


def _residual_is_p(log_p: torch.Tensor, draft: int, law: torch.Tensor | None) -> torch.Tensor:
    return log_p.exp()


def _one_number_for_all_uses(seed: int, *key: int) -> float:
    return sampling.uniform(seed, *key[:2], Use.DRAFT)


def _residual_reuses_accept(seed: int, *key: int) -> float:
    return sampling.uniform(seed, *key[:2], Use.ACCEPT if key[2] == Use.RESIDUAL else key[2])


def _same_noise_for_every_slot(seed: int, *key: int) -> float:
    return sampling.uniform(seed, key[0], 0, key[2])


@pytest.mark.parametrize(
    ("attribute", "fault"),
    [
        ("_residual", _residual_is_p),
        ("uniform", _one_number_for_all_uses),
        ("uniform", _residual_reuses_accept),
        ("uniform", _same_noise_for_every_slot),
    ],
)
def test_the_test_sees_real_faults(attribute: str, fault: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["rejection, temperature"]
    monkeypatch.setattr(verify, attribute, fault)
    assert sequence_p(emit(case, DRAWS // 4)[0], reference(case)) < THRESHOLD


def test_the_test_sees_an_unfiltered_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field's classic: the draft token comes from the filtered law, the q handed on does not."""
    case = CASES["rejection, top-k"]
    honest = verify.draft_token

    def raw_q(logits: torch.Tensor, *args: object) -> tuple[int, torch.Tensor]:
        return honest(logits, *args)[0], torch.log_softmax(logits.double(), dim=-1)

    monkeypatch.setattr(verify, "draft_token", raw_q)
    assert sequence_p(emit(case, DRAWS // 4)[0], reference(case)) < THRESHOLD


# --------------------------------------------------------------------------------------------- the coupled rule's ids

TOKENS = st.integers(0, 5)


def history_logits(history: list[int]) -> torch.Tensor:
    """Logits [6] of a toy target that depend on everything before."""
    return torch.randn(6, generator=torch.Generator().manual_seed(hash(tuple(history)) % 2**31)) * 2


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 2**63 - 1),
    prompt=st.lists(TOKENS, min_size=1, max_size=4),
    settings=st.sampled_from([SamplingSettings(1.0), SamplingSettings(1.4, top_k=4, top_p=0.9, min_p=0.05)]),
)
def test_coupled_ids_are_the_plain_ids_for_any_drafts(
    data: st.DataObject, seed: int, prompt: list[int], settings: SamplingSettings
) -> None:
    length = 12
    plain = list(prompt)
    while len(plain) < len(prompt) + length:
        plain.append(verify.verify_coupled(history_logits(plain)[None], [], settings, seed, len(plain))[1])

    ids = list(prompt)
    while len(ids) < len(plain):
        # Arbitrary drafts of arbitrary number, some of them right, as a draft of any quality and schedule gives.
        right = plain[len(ids) : len(ids) + data.draw(st.integers(0, 4))]
        drafts = right + data.draw(st.lists(TOKENS, max_size=3))
        logits = torch.stack([history_logits(ids + drafts[:k]) for k in range(len(drafts) + 1)])
        accepted, token = verify.verify_coupled(logits, drafts, settings, seed, len(ids))
        assert accepted >= min(len(right), len(drafts))
        ids += [*drafts[:accepted], token]
    assert ids[: len(plain)] == plain


# -------------------------------------------------------------------------------------------------------------- details


def test_greedy_accepts_the_longest_right_prefix() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([3, 1, 4, 2]), 5).float()
    assert verify.verify_greedy(logits, [3, 1, 4]) == (3, 2)
    assert verify.verify_greedy(logits, [3, 0, 4]) == (1, 1)
    assert verify.verify_greedy(logits, [2, 1, 4]) == (0, 3)
    assert verify.verify_greedy(logits[:1], []) == (0, 3)
    assert verify.verify_greedy(torch.zeros(2, 5), [1]) == (0, 0), "ties go to the lowest id"


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_identical_laws_are_always_accepted(rule: Rule) -> None:
    settings = SamplingSettings(0.9, top_k=3)
    target = pair(4)[0]
    for index in range(200):
        token, law = verify.draft_token(target[0], settings, SEED, index, 0, index, rule)
        logits = target[[0, token]]
        if rule == "rejection":
            accepted, _ = verify.verify_rejection(logits, [token], [law], settings, SEED, index)
        else:
            accepted, _ = verify.verify_coupled(logits, [token], settings, SEED, index)
        assert accepted == 1


def test_nothing_is_computed_after_the_first_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []

    def counting(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
        looked.append(1)
        return sampling.log_distribution(logits, settings)

    monkeypatch.setattr(verify, "log_distribution", counting)
    certain = torch.full((8, 4), -1e4).index_fill_(1, torch.tensor([2]), 0.0)
    settings = SamplingSettings(1.0)
    assert verify.verify_rejection(certain, [2, 2, 0, 2, 2, 2, 2], [None] * 7, settings, 1, 0) == (2, 2)
    assert verify.verify_coupled(certain, [2, 2, 0, 2, 2, 2, 2], settings, 1, 0) == (2, 2)
    assert len(looked) == 6


def test_point_mass_residual_leaves_the_draft_out() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 2)
    rejected = []
    for index in range(300):
        accepted, token = verify.verify_rejection(logits, [0], [None], SamplingSettings(1.0), SEED, index)
        if not accepted:
            rejected.append(token)
    assert 50 < len(rejected) < 200 and 0 not in rejected


def test_residual_that_rounds_to_nothing_falls_back_to_p() -> None:
    log_p = sampling.log_distribution(pair(4)[0][0], SamplingSettings(1.0))
    assert torch.equal(verify._residual(log_p, 1, log_p), log_p.exp())


@pytest.mark.parametrize("rule", ["greedy", "rejection", "coupled"])
def test_reduced_vocabulary_is_the_full_one_with_excluded_ids(rule: Rule) -> None:
    ids = torch.tensor([1, 4, 5, 9])
    settings = SamplingSettings(1.0, top_p=0.9)
    for index in range(50):
        logits = torch.randn(4)
        full = torch.full((12,), -math.inf).index_copy_(0, ids, logits)
        token, law = verify.draft_token(logits, settings, 3, index, 1, index, rule, ids=ids, vocab_size=12)
        full_token, full_law = verify.draft_token(full, settings, 3, index, 1, index, rule)
        assert token == full_token
        if rule == "rejection":
            assert law is not None and full_law is not None and law.shape == (12,)
            torch.testing.assert_close(law.exp(), full_law.exp(), rtol=1e-12, atol=0)
        else:
            assert law is None and full_law is None


def test_wrong_arguments_are_refused() -> None:
    settings = SamplingSettings(1.0)
    logits = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="logits"):
        verify.verify_greedy(logits, [1])
    with pytest.raises(ValueError, match="logits"):
        verify.verify_coupled(logits[0], [], settings, 0, 0)
    with pytest.raises(ValueError, match="laws"):
        verify.verify_rejection(logits, [1, 2], [None], settings, 0, 0)
    with pytest.raises(ValueError, match="probability 0"):
        law = torch.tensor([0.0, -math.inf, -math.inf, -math.inf])
        verify.verify_rejection(logits[:2], [1], [law], settings, 0, 0)
    with pytest.raises(ValueError, match="go together"):
        verify.draft_token(logits[0], settings, 0, 0, 0, 0, "greedy", ids=torch.arange(4))
    with pytest.raises(ValueError, match="rule"):
        verify.draft_token(logits[0], settings, 0, 0, 0, 0, "typical")  # type: ignore[arg-type]
