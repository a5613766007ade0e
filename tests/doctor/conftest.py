"""A tiny pair that really works: a random target, and a draft trained on the target's own answers to a few prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from dspark.checkpoints.native import save_draft
from dspark.data.chat import ChatRenderer
from dspark.data.rows import Row, row_id
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request
from dspark.doctor.diagnose import Diagnosis, Settings, diagnose
from dspark.doctor.findings import Finding
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget, load_target
from dspark.training.features import InProcessFeatures
from dspark.training.recipe import Recipe
from dspark.training.trainer import train

TOKENS = 32
TEXTS = [
    "abc",
    "12 + 7 = ?",
    "Say hi.",
    "xyzzy",
    "Why?",
    "list: a, b",
    "2 * 3",
    "Go on",
    "no way",
    "Q and A",
    "ok",
    "{}",
]


@pytest.fixture(scope="session")
def target_folder(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with a head that never emits its special tokens (but the stop id)."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    shutil.copytree(tiny_llama_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][[0, 1, 3]] = 0.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> TransformersTarget:
    return load_target(str(target_folder))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prompts file that the doctor is given."""
    path = tmp_path_factory.mktemp("prompts") / "tiny.jsonl"
    path.write_text("".join(json.dumps({"id": f"t/{i}", "turns": [text]}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def draft_fields(target: TransformersTarget, **changes: Any) -> dict[str, Any]:
    fields = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "sliding_window_non_causal": False,
        "vocab_size": 100,
        "draft_vocab_size": 100,
        "target_layer_ids": [1, 2],
        "num_target_layers": 4,
        "mask_token_id": 3,
        "sample_from_anchor": True,
        "block_size": 4,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "training_length": 128,
        "prompt_recipe": ChatRenderer(target.tokenizer).recipe(),
    }
    return {**fields, **changes}


@pytest.fixture(scope="session")
def healthy(target: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a draft that has learned the target's answers by heart."""
    renderer = ChatRenderer(target.tokenizer)
    asked = [renderer.prompt_ids([{"role": "user", "content": text}]) for text in TEXTS]
    results = dict(Engine(target, max_batch=4).run([Request(ids, max_tokens=TOKENS) for ids in asked]))
    rows = [
        Row(
            id=row_id(ids, {"test": True}),
            source=f"t/{i}",
            prompt_ids=ids,
            answer_ids=results[i].output_ids,
            finish="stop" if results[i].finish_reason == "stop" else "length",
        )
        for i, ids in enumerate(asked)
    ]
    out = tmp_path_factory.mktemp("trained")
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "target": target.name,
            "draft": draft_fields(target),
            "data": {"rows": ["unused.jsonl"], "held_out": 0, "max_length": 128},
            "training": {
                "steps": 250,
                "rows_per_step": 6,
                "anchors_per_row": 16,
                "accumulation": 1,
                "lr": 6e-3,
                "log_every": 100,
                "validate_every": 0,
                "save_every": 0,
                "block_widths": "all",
                "out": str(out / "run"),
            },
        }
    )
    trained = load_target(target.name, packed=False)
    source = InProcessFeatures(trained, (1, 2))
    with torch.random.fork_rng(devices=[]):
        train(recipe, target=trained, source=source, rows=rows, console=Console(quiet=True))
    return out / "run" / "last"


@pytest.fixture
def copied(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy draft, to be damaged."""
    return Path(shutil.copytree(healthy, tmp_path / "draft"))


def edit(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Change or drop keys of a folder's config.json."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if name not in drop}))


def retensor(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of a folder's model.safetensors in place."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def random_draft(folder: Path, target: TransformersTarget, **changes: Any) -> Path:
    """A random draft for the target in place of what the folder held, with its rows of the head where it needs them."""
    fields = {"target_name": target.name, **draft_fields(target, **changes)}
    fields |= {name: tuple(fields[name]) for name in ("layer_types", "target_layer_ids")}
    draft = DSparkDraft(DraftConfig(**fields))
    if draft.config.reduced:
        draft.set_vocabulary(range(20, 20 + draft.config.draft_vocab_size))
        draft.bind(target.embedding_weight, torch.as_tensor(target.head_weight))
    shutil.rmtree(folder)
    save_draft(draft, folder)
    return folder


@pytest.fixture
def check(target_folder: Path, prompts: Path) -> Callable[..., Diagnosis]:
    """Run the doctor on a draft folder; keyword arguments are settings, `run` also tries the pair."""

    def call(draft: Path | str, run: bool = False, **changes: Any) -> Diagnosis:
        settings = {"target": str(target_folder), "draft": str(draft), "static": not run, "prompts": str(prompts)}
        return diagnose(Settings(**{**settings, "tokens": TOKENS, **changes}))

    return call


def levels(found: Diagnosis, name: str) -> list[str]:
    """The levels that one check gave."""
    return [one.level for one in found.findings if one.check == name]


def texts(findings: list[Finding]) -> str:
    """All of them, one a line, to be shown by a failing test."""
    return "\n".join(f"{one.level:8}{one.check:16}{one.text}" for one in findings)
