"""vLLM's speculators form: ids + 1, the layout's key and count, and what vLLM cannot say."""

from __future__ import annotations

import json

import pytest

from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import save_draft
from dspark.checkpoints.read import import_draft, read_checkpoint
from dspark.checkpoints.speculators import speculators_fields, speculators_to_json
from dspark.errors import DsparkError

FULL = {"layer_types": ["full_attention", "full_attention"], "sliding_window": None}
PLAIN = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}


@pytest.fixture
def folder(make_draft, tmp_path):
    save_draft(make_draft(**FULL), tmp_path / "draft")
    convert(tmp_path / "draft", "speculators", tmp_path / "spec")
    return tmp_path / "spec"


def change(folder, **changes) -> None:
    values = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        outer, _, inner = key.rpartition("__")
        at = values[outer] if outer else values
        if value is ...:
            del at[inner]
        else:
            at[inner] = value
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize("anchor, block", [(True, 7), (False, 8)])
def test_keys_that_vllm_reads(make_config, anchor, block) -> None:
    values = speculators_to_json(make_config(**FULL, sample_from_anchor=anchor, block_size=block), True)
    assert values["aux_hidden_state_layer_ids"] == [1, 3] and values["speculators_model_type"] == "dspark"
    assert values["sample_from_anchor"] is anchor and values["block_size"] == block
    assert values["mask_token_id"] == 29 and values["draft_vocab_size"] == 12 and values["markov_rank"] == 3
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert values["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    layer = values["transformer_layer_config"]
    assert layer["model_type"] == "qwen3" and layer["vocab_size"] == 30 and layer["rope_scaling"]["factor"] == 4.0
    assert "model_type" not in values  # vLLM would not take it for speculators'


def test_a_plain_dflash_draft_becomes_dflash(make_config) -> None:
    values = speculators_to_json(make_config(**FULL, **PLAIN, draft_vocab_size=30), False)
    assert values["speculators_model_type"] == "dflash" and "markov_rank" not in values
    assert values["sliding_window_non_causal"] is True  # false would make vLLM's full layers causal


@pytest.mark.parametrize(
    "changes, field",
    [
        ({**FULL, "markov_head_type": "gated"}, "markov_head_type"),
        ({**FULL, "markov_head_type": "rnn"}, "markov_head_type"),
        ({"sliding_window_non_causal": True}, "sliding_window_non_causal"),
        ({**PLAIN}, "layer_types"),
        ({**FULL, **PLAIN, "enable_confidence_head": True}, "enable_confidence_head"),
    ],
)
def test_what_vllm_cannot_say_is_refused(make_config, changes, field) -> None:
    with pytest.raises(DsparkError) as caught:
        speculators_to_json(make_config(**changes), True)
    assert caught.value.field == field


def test_somebody_elses_file(folder) -> None:
    change(folder, dspark=..., sample_from_anchor=..., draft_vocab_size=None, made_with="a trainer")
    with pytest.raises(DsparkError, match="num_target_layers"):
        read_checkpoint(folder)
    change(folder, draft_vocab_size=12)
    read = read_checkpoint(folder, num_target_layers=4, training_length=64)
    assert read.config.target_layer_ids == (0, 2) and read.config.target_name == "tiny"
    assert not read.config.sample_from_anchor and read.config.gamma == 7 and read.lm_head
    assert any("bonus-anchor" in note for note in read.notes) and any("made_with" in note for note in read.notes)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type"),
        ({"aux_hidden_state_layer_ids": [0, 2]}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": ...}, "aux_hidden_state_layer_ids"),
        ({"aux_hidden_state_layer_ids": [1, 5]}, "target_layer_ids"),
        ({"transformer_layer_config": 3}, "transformer_layer_config"),
        ({"transformer_layer_config__model_type": "llama"}, "transformer_layer_config.model_type"),
        ({"transformer_layer_config__head_dim": ...}, "head_dim"),
        ({"transformer_layer_config__rope_theta": 5.0}, "rope_theta / rope_scaling"),
        ({"transformer_layer_config__is_causal": True}, "transformer_layer_config.is_causal"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"mask_token_id": ...}, "mask_token_id"),
        ({"mask_token_id": 30}, "mask_token_id"),
        ({"block_size": 7}, "speculative_tokens"),
        ({"dspark": 3}, "dspark"),
        ({"markov_rank": ...}, "markov_rank"),
    ],
)
def test_faults_are_named(folder, changes, field) -> None:
    change(folder, **changes)
    with pytest.raises(DsparkError) as caught:
        read_checkpoint(folder)
    assert caught.value.field == field


def test_an_imported_draft_is_the_draft(make_draft, folder) -> None:
    draft, loaded = make_draft(**FULL), import_draft(folder)
    assert loaded.config == draft.config and loaded.own_head_rows is not None
    assert all((loaded.state_dict()[n] == t).all() for n, t in draft.state_dict().items())


def test_dflash_with_causal_full_layers_is_another_model(make_config) -> None:
    values = speculators_to_json(make_config(**FULL, **PLAIN, draft_vocab_size=30), False)
    with pytest.raises(DsparkError, match="causal"):
        speculators_fields({**values, "sliding_window_non_causal": False}, [])
