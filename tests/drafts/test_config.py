from __future__ import annotations

from importlib.resources import files

import pytest
import yaml
from tests.drafts.conftest import MLA

from dspark.drafts.config import OPTIONAL, DraftConfig
from dspark.drafts.inspect import parameter_counts
from dspark.errors import DsparkError


@pytest.mark.parametrize(
    ("recipe", "total"), [("kimi-k3", 2_249_289_601), ("kimi-k2.6", 1_745_747_969), ("kimi-k2.7-code", 1_745_747_969)]
)
def test_published_parameter_counts(recipe: str, total: int) -> None:
    values = yaml.safe_load((files("dspark") / "recipes" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    assert values["name"] == recipe
    assert values["target"] == values["draft"]["target_name"]
    config = DraftConfig(**values["draft"])
    counts = parameter_counts(config)
    assert counts["total"] == total == sum(n for part, n in counts.items() if part != "total")
    assert config.gamma == 7


def test_kimi_k3_parts() -> None:
    values = yaml.safe_load((files("dspark") / "recipes" / "kimi-k3.yaml").read_text(encoding="utf-8"))
    assert parameter_counts(DraftConfig(**values["draft"])) == {
        "fc": 256_901_120,
        "layers": 5 * 381_696_128,
        "norms": 14_336,
        "markov_head": 83_886_080,
        "confidence_head": 7_425,
        "total": 2_249_289_601,
    }


def test_every_missing_field_is_named(fields) -> None:
    for name in DraftConfig.model_fields:
        if name == "hidden_act" or name in OPTIONAL:
            continue
        values = fields()
        del values[name]
        with pytest.raises(DsparkError) as caught:
            DraftConfig(**values)
        assert caught.value.field == name
        assert "\n" not in str(caught.value)


def test_missing_layout_says_how_to_state_it(fields) -> None:
    values = fields()
    del values["sample_from_anchor"]
    with pytest.raises(DsparkError, match=r"sample_from_anchor: true when .* false for"):
        DraftConfig(**values)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"target_layer_ids": [0, 4]}, "target_layer_ids"),
        ({"target_layer_ids": [-1, 2]}, "target_layer_ids"),
        ({"target_layer_ids": [2, 2]}, "target_layer_ids"),
        ({"mask_token_id": 40}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"draft_vocab_size": 41}, "draft_vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_parameters.rope_type"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters"),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}},
            "rope_parameters",
        ),
        ({"block_size": 1, "sample_from_anchor": False}, "block_size"),
        ({"sample_from_anchor": "yes"}, "sample_from_anchor"),
        ({"markov_rank": 0, "confidence_head_with_markov": True}, "confidence_head_with_markov"),
        ({"markov_rank": 0, "confidence_head_with_markov": False, "markov_head_type": "rnn"}, "markov_head_type"),
        ({"markov_head_type": "lstm"}, "markov_head_type"),
        ({"prompt_recipe": {"template_sha256": None}}, "prompt_recipe"),
        ({"blocksize": 7}, "blocksize"),
        ({"hidden_size": 24.5}, "hidden_size"),
        ({"intermediate_size": 2**63 - 1}, "intermediate_size"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"max_position_embeddings": 2**33}, "max_position_embeddings"),
        ({"block_size": 2**33}, "block_size"),
        ({"target_name": "two\nlines"}, "target_name"),
        ({"target_name": "`rm`"}, "target_name"),
        ({"target_name": " "}, "target_name"),
    ],
)
def test_bad_values_name_the_field(fields, changes, field) -> None:
    with pytest.raises(DsparkError) as caught:
        DraftConfig(**fields(**changes))
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({**MLA, name: None}, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")),
        ({**MLA, "v_head_dim": None}, "v_head_dim"),
        ({**MLA, "num_key_value_heads": 2}, "num_key_value_heads"),
        ({**MLA, "head_dim": 8}, "head_dim"),
        ({**MLA, "attention_bias": True}, "attention_bias"),
        ({"kv_lora_rank": 12}, "kv_lora_rank"),
        ({"q_lora_rank": 12}, "q_lora_rank"),
        ({**MLA, "attention": "mqa"}, "attention"),
        ({"aux_hidden_stream": "raw"}, "aux_hidden_stream"),
    ],
)
def test_latent_attention_is_stated_whole_or_not_at_all(fields, changes, field) -> None:
    with pytest.raises(DsparkError) as caught:
        DraftConfig(**fields(**changes))
    assert caught.value.field == field


def test_what_says_nothing_is_not_written(fields) -> None:
    """Files and hashes from before there was a choice of attention stay what they are."""
    plain = {**fields(), "aux_hidden_stream": None}
    assert not set(OPTIONAL) & DraftConfig(**plain).model_dump().keys()
    latent = DraftConfig(**fields(**MLA, aux_hidden_stream="attn_res"))
    assert DraftConfig(**latent.model_dump()) == latent
    assert set(OPTIONAL) - latent.model_dump().keys() == {"q_lora_rank"}


def test_layouts_count_predictions_and_slots(fields) -> None:
    first = DraftConfig(**fields(block_size=7, sample_from_anchor=True))
    bonus = DraftConfig(**fields(block_size=8, sample_from_anchor=False))
    assert (first.gamma, bonus.gamma) == (7, 7)
    assert [first.slots(n) for n in (1, 3, 7)] == [1, 3, 7]
    assert [bonus.slots(n) for n in (1, 3, 7)] == [2, 4, 8]
    for config in (first, bonus):
        for n in (0, 8):
            with pytest.raises(DsparkError, match=r"must be 1\.\.7"):
                config.slots(n)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ((None, 5, 24, 40), "num_target_layers"),
        ((None, 4, 32, 40), "hidden_size"),
        ((None, 4, 24, 41), "vocab_size"),
        (("else", 4, 24, 40), "target_name"),
    ],
)
def test_another_target_is_refused(fields, other, field) -> None:
    config = DraftConfig(**fields())
    config.check_target("tiny", 4, 24, 40)
    config.check_target(None, 4, 24, 40)
    with pytest.raises(DsparkError) as caught:
        config.check_target(*other)
    assert caught.value.field == field
