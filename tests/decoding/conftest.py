"""A small random target and a draft that guesses it well enough to accept, reject and be cut everywhere."""

from itertools import pairwise

import pytest
import torch

from dspark.decoding.engine import Engine
from dspark.decoding.request import Request
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import load_target

PROMPTS = [[5, 6, 7, 8, 9], [40], [11, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61], [70, 71, 72], [33, 20, 33]]


def draft_config(**changes):
    fields = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ("full_attention", "full_attention"),
        "sliding_window": None,
        "sliding_window_non_causal": False,
        "vocab_size": 100,
        "draft_vocab_size": 100,
        "target_layer_ids": (0, 2, 3),
        "num_target_layers": 4,
        "target_name": "tiny",
        "mask_token_id": 3,
        "sample_from_anchor": True,
        "block_size": 7,
        "markov_rank": 100,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "training_length": 256,
        "prompt_recipe": {"template_sha256": None, "thinking": None},
    }
    return DraftConfig(**{**fields, **changes})


def bigram_draft(pairs, **changes):
    """A DSpark draft whose Markov head knows `pairs` (previous id -> next id): real weights, real acceptance.

    The backbone is random and its logits decide where the table has no entry or a weak one.
    """
    config = draft_config(**changes)
    torch.manual_seed(1)
    draft = DSparkDraft(config)
    known = list(range(config.vocab_size))
    if config.reduced:
        known = sorted({*list(pairs.values()), *range(5, 100)})[: config.draft_vocab_size]
        draft.set_vocabulary(known)
    column = {token: index for index, token in enumerate(known)}
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.eye(100))
        draft.markov_head.markov_w2.weight.zero_()
        for previous, following in pairs.items():
            if following in column:
                draft.markov_head.markov_w2.weight[column[following], previous] = 8.0
    return draft


@pytest.fixture(scope="session")
def target(tiny_llama_folder):
    return load_target(str(tiny_llama_folder))


@pytest.fixture(scope="session")
def pairs(target):
    """The target's own most recent successor of every id, over its plain greedy answers to PROMPTS."""
    known = {}
    long = [5 + i % 90 for i in range(240)]
    requests = [Request(p, max_tokens=60, ignore_eos=True) for p in [*PROMPTS, long]]
    for _, result in Engine(target, None, max_batch=32).run(requests):
        ids = [*result.request.prompt_ids, *result.output_ids]
        known.update(pairwise(ids))
    return known
