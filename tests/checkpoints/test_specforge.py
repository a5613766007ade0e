"""SpecForge's nested form, and z-lab's, which nests less and means the other layout."""

from __future__ import annotations

import json

import pytest

from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.read import detect, read_checkpoint
from dspark.checkpoints.specforge import specforge_to_json
from dspark.errors import DsparkError

WHOLE = {
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "draft_vocab_size": 30,
    "sample_from_anchor": True,
    "block_size": 7,
}
DFLASH = {
    **WHOLE,
    "sample_from_anchor": False,
    "block_size": 8,
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
STATED = {"target_name": "tiny", "training_length": 64}


def export(make_draft, tmp_path, changes, form, edit):
    """Somebody else's file: ours without our object, then edited."""
    save_draft(make_draft(**changes), tmp_path / "draft")
    convert(tmp_path / "draft", form, tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    values = json.loads(path.read_text())
    del values["dspark"]
    values.pop("target_name", None)
    edit(values)
    path.write_text(json.dumps(values))
    return tmp_path / "theirs"


@pytest.mark.parametrize("architecture", ["DSparkDraftModel", "DFlashDraftModel", "Qwen3DSparkModel"])
def test_an_export_becomes_the_native_form(make_draft, tmp_path, architecture) -> None:
    def edit(values) -> None:
        values["architectures"] = [architecture]
        values["dflash_config"] |= {"confidence_head_alpha": 1.0}
        values |= {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "initializer_range": 0.02, "eos_token_id": 1}
        del values["rope_parameters"]

    folder = export(make_draft, tmp_path, WHOLE, "specforge", edit)
    read = convert(folder, "native", tmp_path / "out", **STATED)
    assert read.form == "specforge" and read.config.sample_from_anchor and read.config.gamma == 7
    assert not any("left out" in note for note in read.notes) and any("anchor-first" in note for note in read.notes)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in values
    assert values["mask_token_id"] == 29 and values["target_layer_ids"] == [0, 2] and values["markov_rank"] == 3
    draft, loaded = make_draft(**WHOLE), load_draft(tmp_path / "out")
    assert all((loaded.state_dict()[n] == t).all() for n, t in draft.state_dict().items())


@pytest.mark.parametrize(
    "edit, field",
    [
        (lambda v: v["dflash_config"].pop("mask_token_id"), "mask_token_id"),
        (lambda v: v["dflash_config"].update(projector_type="domino"), "dflash_config.projector_type"),
        (lambda v: v["dflash_config"].update(attention_mode="mla"), "dflash_config.attention_mode"),
        (lambda v: v["dflash_config"].update(causal=True), "dflash_config.causal"),
        (lambda v: v.update(mask_token_id=3), "mask_token_id"),
        (lambda v: v.update(architectures=["Other"]), "architectures"),
        (lambda v: v.pop("num_target_layers"), "num_target_layers"),
        (lambda v: v.pop("hidden_act"), "hidden_act"),
        (lambda v: v["dflash_config"].pop("enable_confidence_head"), "enable_confidence_head"),
        (lambda v: v.update(layer_types=["full_attention", "sliding_attention"], sliding_window=4), None),
    ],
)
def test_faults_are_named(make_draft, tmp_path, edit, field) -> None:
    folder = export(make_draft, tmp_path, WHOLE, "specforge", edit)
    with pytest.raises(DsparkError) as caught:
        read_checkpoint(folder, **STATED)
    assert caught.value.field == (field or "sliding_window_non_causal")


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"sample_from_anchor": False, "block_size": 8}, "sample_from_anchor"),
        ({"draft_vocab_size": 12}, "draft_vocab_size"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}, "layer_types"),
    ],
)
def test_what_it_cannot_say_is_refused(make_config, changes, field) -> None:
    with pytest.raises(DsparkError) as caught:
        specforge_to_json(make_config(**{**WHOLE, **changes}), False)
    assert caught.value.field == field


def test_zlab_is_bonus_anchor_by_origin(make_draft, tmp_path) -> None:
    folder = export(make_draft, tmp_path, DFLASH, "z-lab", lambda v: v["dflash_config"].pop("mask_token_id"))
    assert detect(json.loads((folder / "config.json").read_text())) == "z-lab"
    with pytest.raises(DsparkError, match="mask_token_id"):
        read_checkpoint(folder, **STATED)
    read = convert(folder, "native", tmp_path / "out", **STATED, mask_token_id=29)
    assert not read.config.sample_from_anchor and read.config.block_size == 8 and read.config.gamma == 7
    assert any("bonus-anchor" in note for note in read.notes)
    with pytest.raises(DsparkError, match="contradicts"):
        read_checkpoint(folder, **STATED, mask_token_id=29, sample_from_anchor=True)
    draft, loaded = make_draft(**DFLASH), load_draft(tmp_path / "out")
    assert all((loaded.state_dict()[n] == t).all() for n, t in draft.state_dict().items())


def test_zlab_that_says_anchor_first_is_refused(make_draft, tmp_path) -> None:
    folder = export(make_draft, tmp_path, DFLASH, "z-lab", lambda v: v.update(sample_from_anchor=True))
    with pytest.raises(DsparkError, match="sample_from_anchor"):
        read_checkpoint(folder, **STATED)
