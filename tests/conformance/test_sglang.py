"""Our files for SGLang, which does not run on a CPU, against a table of what its loader expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder
from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.tensors import Shapes, tensor_shapes
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft

SHIPPED = draft_folder(EMBEDDED_DRAFT)
TABLE = yaml.safe_load(Path(__file__).with_name("sglang-0.5.23.yaml").read_text(encoding="utf-8"))


def expected(config: dict[str, Any]) -> Shapes:
    """The table's tensors for the sizes of a config.json."""
    d, r = config["hidden_size"], config["markov_rank"]
    sizes = {
        "d": d,
        "m * d": len(config["target_layer_ids"]) * d,
        "f": config["intermediate_size"],
        "q": config["num_attention_heads"] * config["head_dim"],
        "k": config["num_key_value_heads"] * config["head_dim"],
        "h": config["head_dim"],
        "v": config["vocab_size"],
        "r": r,
        "c": d + r if config.get("confidence_head_with_markov", r > 0) else d,
        1: 1,
    }
    shapes = dict(TABLE["tensors"]["once"])
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in TABLE["tensors"]["layer"].items()}
    return {name: tuple(sizes[letter] for letter in shape) for name, shape in shapes.items()}


def check(folder: Path, config: DraftConfig) -> None:
    """The folder is what the table says, and means the draft of `config`."""
    found, table = json.loads((folder / "config.json").read_text()), TABLE["config"]
    assert found["architectures"] == [TABLE["architecture"]]
    assert [name for name in (*table["required"], *table["backbone"], table["rotary"]) if found.get(name) is None] == []
    assert not {"dflash_config", "dspark_config", "text_config"} & set(found)  # they would win
    assert table["block_size"] == "predictions" and found["block_size"] == config.gamma
    assert table["layer_ids"] == "outputs" and found["target_layer_ids"] == list(config.target_layer_ids)
    assert found.get("sample_from_anchor", table["sample_from_anchor"]) is config.sample_from_anchor
    assert found["markov_head_type"] in table["markov_head_types"]
    assert found["markov_rank"] >= table["smallest_markov_rank"]
    assert all(0 <= found[name] < found["vocab_size"] for name in table["below_vocab_size"])
    assert found["vocab_size"] == config.vocab_size and "rope_theta" in found[table["rotary"]]
    shapes = {
        name: shape
        for name, shape in tensor_shapes(folder)[0].items()
        if not name.startswith(tuple(TABLE["tensors"]["skipped"]))
    }
    assert shapes == expected(found)


def test_the_shipped_draft_expanded(tmp_path: Path) -> None:
    convert("embedded", "sglang", tmp_path / "out", expanded=True)
    check(tmp_path / "out", load_draft(SHIPPED).config)


def test_a_whole_vocabulary(tmp_path: Path) -> None:
    config = load_draft(SHIPPED).config.model_copy(update={"draft_vocab_size": 49152, "markov_rank": 8})
    save_draft(DSparkDraft(config), tmp_path / "draft")
    convert(tmp_path / "draft", "sglang", tmp_path / "out")
    check(tmp_path / "out", config)


def test_the_table_finds_what_is_wrong(tmp_path: Path) -> None:
    """A file of another form, and one with its reduced vocabulary, are not what SGLang loads."""
    config = load_draft(SHIPPED).config
    convert("embedded", "speculators", tmp_path / "speculators")
    with pytest.raises(AssertionError):
        check(tmp_path / "speculators", config)
    with pytest.raises(AssertionError, match="d2t"):
        check(SHIPPED, config)
