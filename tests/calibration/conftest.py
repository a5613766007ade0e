"""A tiny target and a random draft for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.decoding.conftest import draft_config

from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget, load_target


@pytest.fixture(scope="session")
def target(tiny_llama_folder: Path) -> TransformersTarget:
    return load_target(str(tiny_llama_folder))


@pytest.fixture(scope="session")
def draft(target: TransformersTarget) -> DSparkDraft:
    config = draft_config(num_hidden_layers=1, layer_types=("full_attention",), target_layer_ids=(0, 2), markov_rank=8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return DSparkDraft(config)
