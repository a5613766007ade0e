"""Export to the forms that Transformers and z-lab's readers load."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from dspark.checkpoints.zlab import config_for, export_zlab, over_whole_vocabulary
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.rope import inverse_frequencies
from dspark.errors import DsparkError

DFLASH: dict[str, Any] = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
    "draft_vocab_size": 30,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 65536}


@pytest.fixture
def make_dflash(make_draft) -> Callable[..., DSparkDraft]:
    return lambda **changes: make_draft(**{**DFLASH, **changes})


def test_transformers_loads_exactly_what_was_written(make_dflash, tmp_path) -> None:
    draft = make_dflash()
    export_zlab(draft, tmp_path / "dflash")
    assert sorted(os.listdir(tmp_path)) == ["dflash"]
    assert sorted(os.listdir(tmp_path / "dflash")) == ["config.json", "model.safetensors"]
    model, report = AutoModel.from_pretrained(tmp_path / "dflash", dtype=torch.float32, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state, mine = model.state_dict(), draft.state_dict()
    assert torch.equal(state.pop("encoder.fc.weight"), mine.pop("fc.weight"))
    assert torch.equal(state.pop("encoder.output_norm_enc.weight"), mine.pop("hidden_norm.weight"))
    assert set(state) == set(mine) and all(torch.equal(state[name], mine[name]) for name in mine)
    frequencies, factor = inverse_frequencies(draft.config)
    assert torch.equal(model.rotary_emb.inv_freq, frequencies) and model.rotary_emb.attention_scaling == factor
    config = model.config
    assert config.block_size == 8 and config.mask_token_id == 29 and list(config.target_layer_ids) == [0, 2]
    assert list(config.layer_types) == ["full_attention"] * 2 and config.eos_token_id is None
    assert config.rope_parameters == YARN and config.rms_norm_eps == draft.config.rms_norm_eps


def test_the_z_lab_form(make_dflash, tmp_path) -> None:
    draft = make_dflash(attention_bias=True)
    export_zlab(draft, tmp_path / "dflash", form="z-lab")
    values = json.loads((tmp_path / "dflash" / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"] and values["model_type"] == "qwen3"
    assert values["dflash_config"] == {"mask_token_id": 29, "target_layer_ids": [0, 2]}
    assert values["block_size"] == 8 and values["num_target_layers"] == 4 and values["attention_bias"] is True
    assert values["rope_theta"] == 100.0 and values["rope_parameters"] == YARN
    assert {**values["rope_scaling"], "rope_theta": 100.0} == YARN
    assert not {"target_layer_ids", "sample_from_anchor", "markov_rank"} & set(values)
    tensors, mine = load_file(tmp_path / "dflash" / "model.safetensors"), draft.state_dict()
    assert set(tensors) == set(mine) and {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert all(torch.equal(tensors[name].float(), mine[name]) for name in mine)
    assert (
        config_for(make_dflash(rope_parameters={"rope_type": "default", "rope_theta": 5.0}).config, "z-lab")[
            "rope_scaling"
        ]
        is None
    )


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "markov": ({"markov_rank": 3}, "markov_rank"),
    "confidence": ({"enable_confidence_head": True}, "enable_confidence_head"),
    "anchor-first": ({"sample_from_anchor": True, "block_size": 7}, "sample_from_anchor"),
    "reduced": ({"draft_vocab_size": 12}, "draft_vocab_size"),
    "last layer": ({"target_layer_ids": [0, 3]}, "target_layer_ids"),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}},
        "rope_parameters.rope_type",
    ),
}


@pytest.mark.parametrize("form", ["transformers", "z-lab"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_neither_form_can_say_is_refused(make_dflash, tmp_path, case, form) -> None:
    changes, field = REFUSED[case]
    with pytest.raises(DsparkError) as caught:
        export_zlab(make_dflash(**changes), tmp_path / "dflash", form)
    assert caught.value.field == field and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("form", "changes", "field"),
    [
        ("transformers", {"attention_bias": True}, "attention_bias"),
        ("transformers", SLIDING, "sliding_window_non_causal"),
        ("transformers", {**SLIDING, "sliding_window_non_causal": True, "sliding_window": 1}, "sliding_window"),
        (
            "transformers",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5}},
            "rope_parameters.partial_rotary_factor",
        ),
        ("z-lab", {**SLIDING, "sliding_window_non_causal": True}, "layer_types"),
        ("gguf", {}, "form"),
    ],
)
def test_what_one_form_cannot_say_is_refused(make_dflash, tmp_path, form, changes, field) -> None:
    with pytest.raises(DsparkError) as caught:
        export_zlab(make_dflash(**changes), tmp_path / "dflash", form)
    assert caught.value.field == field and os.listdir(tmp_path) == []


def test_the_window_counts_as_transformers_does(make_dflash) -> None:
    config = make_dflash(**SLIDING, sliding_window_non_causal=True).config
    assert config_for(config, "transformers")["sliding_window"] == 4


def test_a_reduced_draft_can_be_exported_over_the_whole_vocabulary(make_dflash, tmp_path) -> None:
    draft = make_dflash(draft_vocab_size=12)
    whole = over_whole_vocabulary(draft)
    assert whole.config.draft_vocab_size == 30 and draft.config.draft_vocab_size == 12 and not whole.bound
    export_zlab(whole, tmp_path / "dflash")
    whole.bind(draft._target().embedding, draft._target().head_weight)
    hidden = torch.randn(3, 16)
    assert torch.allclose(whole.base_logits(hidden)[:, draft.draft_ids], draft.base_logits(hidden))
    with torch.no_grad():
        whole.norm.weight.fill_(7.0)
    assert not torch.equal(draft.norm.weight, whole.norm.weight)


def test_a_broken_draft_or_a_taken_folder_writes_nothing(make_dflash, tmp_path) -> None:
    draft = make_dflash()
    with torch.no_grad():
        draft.norm.weight[3] = 3.4e38  # finite in fp32, infinite in BF16
    with pytest.raises(DsparkError, match=r"norm\.weight"):
        export_zlab(draft, tmp_path / "dflash")
    assert os.listdir(tmp_path) == []
    (tmp_path / "dflash").mkdir()
    export_zlab(make_dflash(), tmp_path / "dflash")  # an empty folder is as good as none
    before = (tmp_path / "dflash" / "model.safetensors").read_bytes()
    with pytest.raises(DsparkError, match="exists already"):
        export_zlab(make_dflash(), tmp_path / "dflash")
    assert (tmp_path / "dflash" / "model.safetensors").read_bytes() == before and os.listdir(tmp_path) == ["dflash"]


def test_a_killed_export_leaves_nothing_behind(make_dflash, tmp_path, monkeypatch) -> None:
    def fails(*_args: Any, **_kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError):
            export_zlab(make_dflash(), tmp_path / "dflash")
    assert os.listdir(tmp_path) == []


def test_a_packed_draft_is_refused(make_dflash, tmp_path) -> None:
    draft = make_dflash()
    draft.fc = torch.nn.Identity()  # what packing does to a layer's place in the state
    for attempt in (lambda: export_zlab(draft, tmp_path / "dflash"), lambda: over_whole_vocabulary(draft)):
        with pytest.raises(DsparkError, match="packed"):
            attempt()
