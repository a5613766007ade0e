"""Unseeded sampling through the whole engine: penalties, bias, grammar and filters at once keep the target's law."""

from itertools import cycle, islice

import numpy as np
import pytest
import torch
from tests.decoding.conftest import PROMPTS, bigram_draft
from tests.decoding.laws import chi_square_p, reference_law, sequence_p, shift_two_percent

from dspark.decoding.engine import Engine
from dspark.decoding.grammar import Constraint
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, SamplingSettings

DRAWS = 20_000
LETTERS = "abcdefgh"
SETTINGS = {
    "temperature": SamplingSettings(0.9),
    "filters": SamplingSettings(1.3, top_k=6, top_p=0.95, min_p=0.02),
    "penalties": SamplingSettings(
        1.2, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.3, logit_bias=((70, 1.0),)
    ),
}

SPECULATES = {"speculating": [True], "plain": [True], "side by side": [True, False]}
CASES = [*((name, "speculating") for name in SETTINGS), ("filters", "plain"), ("penalties", "side by side")]


@pytest.fixture(scope="module")
def letters(target):
    return [target.tokenizer.convert_tokens_to_ids(letter) for letter in LETTERS]


def law_by_hand(target, settings, ids, made, letters):
    """Probabilities over `letters` after prompt + made, from the definitions."""
    logits = target.forward([(target.new_state(len(ids) + len(made)), torch.tensor([*ids, *made]))], logits="last")
    row = logits.logits[0].clone()
    mask = torch.full_like(row, -torch.inf)
    mask[letters] = 0
    row += mask
    for token, bias in settings.logit_bias:
        row[token] += bias
    for token in {*ids, *made}:
        row[token] = (
            row[token] / settings.repetition_penalty if row[token] > 0 else row[token] * settings.repetition_penalty
        )
    for token in set(made):
        row[token] -= settings.presence_penalty + settings.frequency_penalty * made.count(token)
    return reference_law(row, settings)[letters]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_three_letters(target, pairs, letters, name, mode):
    """Three tokens of eight letters: the first is the prompt's own, the others are drafted and verified, or not."""
    settings, prompt = SETTINGS[name], PROMPTS[0]
    constraint = Constraint("regex", f"[{LETTERS}]{{3}}")
    proposer = make_proposer(target, None if mode == "plain" else bigram_draft(pairs))
    asked = [Request(prompt, 4, settings, constraint=constraint, speculate=on) for on in SPECULATES[mode]]
    engine = Engine(target, proposer, max_batch=64)
    results = [result for _, result in engine.run(islice(cycle(asked), DRAWS))]
    drawn = np.array([[letters.index(token) for token in result.output_ids[:3]] for result in results])
    law = np.zeros((8, 8, 8))
    first = law_by_hand(target, settings, prompt, [], letters)
    for i in np.flatnonzero(first):
        second = law_by_hand(target, settings, prompt, [letters[i]], letters)
        for j in np.flatnonzero(second):
            law[i, j] = first[i] * second[j] * law_by_hand(target, settings, prompt, [letters[i], letters[j]], letters)
    if mode == "speculating":
        assert sum(r.accepted for result in results for r in result.rounds) > 0.05 * DRAWS, "nothing was verified"
    assert sequence_p(drawn, law) > 1e-3 / len(CASES)
    second_law = law.sum(axis=(0, 2))
    assert chi_square_p(shift_two_percent(drawn[:, 1], second_law), second_law) < 1e-3, "the test sees a 2 % fault"
