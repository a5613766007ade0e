"""Conversion: what is left out, made or stated, foreign files, and files that must not be taken."""

from __future__ import annotations

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tests.checkpoints.conftest import FIRST, FULL, PLAIN, WHOLE, same_files
from tests.drafts.conftest import MLA
from tests.drafts.test_eagle3 import eagle3_draft
from typer.testing import CliRunner

from dspark.checkpoints import convert as conversion
from dspark.checkpoints import hub
from dspark.checkpoints import read as reading
from dspark.checkpoints.builtin import draft_folder
from dspark.checkpoints.convert import convert
from dspark.checkpoints.expand import LOW
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.read import detect, import_draft, read_checkpoint
from dspark.cli import app
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED


def test_there_and_back_keeps_files_and_a_head_left_out(tmp_path) -> None:
    """The shipped draft: its head's rows go in for vLLM, from the target, and come out again."""
    source = draft_folder("embedded")
    read = convert("embedded", "speculators", tmp_path / "there")
    assert any(EMBEDDED in note for note in read.notes)
    assert load_file(tmp_path / "there" / "model.safetensors")["lm_head.weight"].shape == (12288, 576)
    convert(tmp_path / "there", "native", tmp_path / "back")
    assert same_files(source, tmp_path / "back")
    for name in ("README.md", "training.json", "training_prompts.txt", "calibration.json"):
        assert (source / name).read_bytes() == (tmp_path / "back" / name).read_bytes()


@pytest.mark.parametrize("ids", [(0, 1, 2), (2, 0, 1)], ids=["as they are", "put in order"])
def test_a_calibration_goes_with_the_weights_it_was_fitted_on(make_draft, tmp_path, ids) -> None:
    save_draft(make_draft(**{**FULL, "target_layer_ids": ids}), tmp_path / "draft")
    (tmp_path / "draft" / "calibration.json").write_text("{}")
    read = convert(tmp_path / "draft", "vllm", tmp_path / "out")
    kept = (tmp_path / "out" / "calibration.json").is_file()
    assert kept == (ids == (0, 1, 2)) != any("calibrate again" in note for note in read.notes)


def test_the_shipped_draft_through_a_gguf_file_is_the_same_draft(tmp_path) -> None:
    """Its head's rows go in, from the target's own file, whose tokenizer the draft's file needs, and come out again."""
    convert("embedded", "gguf", tmp_path / "draft.gguf", kind="f32")
    convert(tmp_path / "draft.gguf", "native", tmp_path / "back")
    assert same_files(draft_folder("embedded"), tmp_path / "back")


def test_head_rows_need_a_target(make_draft, tmp_path) -> None:
    save_draft(make_draft(**FULL), tmp_path / "draft", lm_head=False)
    with pytest.raises(DsparkError, match=r"lm_head.*--target"):
        convert(tmp_path / "draft", "speculators", tmp_path / "out")
    assert os.listdir(tmp_path) == ["draft"]


@pytest.mark.parametrize("with_markov", [True, False])
def test_expanded_for_sglang_proposes_the_same(make_draft, tmp_path, with_markov) -> None:
    draft = make_draft(**FULL, **FIRST, confidence_head_with_markov=with_markov)
    save_draft(draft, tmp_path / "draft")
    read = convert(tmp_path / "draft", "sglang", tmp_path / "out", expanded=True)
    assert any("lm_head" in note for note in read.notes)
    whole = load_draft(tmp_path / "out")
    assert whole.config.draft_vocab_size == 30 and whole.config.markov_rank == 16
    whole.bind(draft._target().embedding, draft._target().head_weight)
    hidden, ids = torch.randn(40, 7, 16), torch.randint(0, 30, (40, 7))
    few, many = draft.teacher_logits(hidden, ids), whole.teacher_logits(hidden, ids)
    kept = draft.draft_ids
    torch.testing.assert_close(many[..., kept], few, rtol=1e-5, atol=1e-4)
    assert torch.equal(many.argmax(-1), kept[few.argmax(-1)])
    others = torch.ones(30, dtype=torch.bool)
    others[kept] = False
    assert float(many[..., others].detach().max()) < LOW / 2
    torch.testing.assert_close(whole.confidence(hidden, ids), draft.confidence(hidden, ids))


def test_a_head_that_is_not_the_targets_is_not_dropped(make_draft, tmp_path, monkeypatch) -> None:
    draft = make_draft(**FULL, **FIRST)
    save_draft(draft, tmp_path / "draft")
    rows = draft.head_rows.clone()
    monkeypatch.setattr(reading, "_target_facts", lambda target, fields: {})
    monkeypatch.setattr(conversion, "_head_rows", lambda config, d2t, target: rows)
    assert not convert(tmp_path / "draft", "sglang", tmp_path / "out", target="tiny", expanded=True).notes
    rows[3] += 1
    with pytest.raises(DsparkError, match="not the target's rows"):
        convert(tmp_path / "draft", "sglang", tmp_path / "other", target="tiny", expanded=True)
    (tmp_path / "draft" / "README.md").write_bytes(b"\xff\xfe")
    with pytest.raises(DsparkError, match="UTF-8"):
        convert(tmp_path / "draft", "native", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_expansion_is_refused_where_it_makes_no_sense(make_draft, tmp_path) -> None:
    save_draft(make_draft(**FULL, **FIRST, markov_head_type="gated"), tmp_path / "gated")
    with pytest.raises(DsparkError, match=r"markov_head_type.*vanilla"):
        convert(tmp_path / "gated", "sglang", tmp_path / "out", expanded=True)
    with pytest.raises(DsparkError, match="expand"):
        convert(tmp_path / "gated", "native", tmp_path / "out", expanded=True)
    assert not (tmp_path / "out").exists()


def test_sglang_is_told_what_it_ignores(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE, **FIRST, enable_confidence_head=False, target_layer_ids=[0, 3]), tmp_path / "draft")
    notes = convert(tmp_path / "draft", "sglang", tmp_path / "out").notes
    assert any("RAGGED_VERIFY_MODE" in note for note in notes) and any("last layer" in note for note in notes)


def test_fp32_weights_are_rounded_and_said_so(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    save_file({n: t.float() for n, t in load_file(path).items()}, path)
    assert not convert(tmp_path / "draft", "native", tmp_path / "same").notes, "these are exact in BF16"
    save_file({n: t.float() * 1.001 for n, t in load_file(path).items()}, path)
    assert any("rounded" in note for note in convert(tmp_path / "draft", "native", tmp_path / "out").notes)


# DeepSpec's own files: the top-level form without our keys


def deepspec(make_draft, folder: Path, changes: dict[str, Any], dropped: tuple[str, ...] = ()) -> None:
    save_draft(make_draft(**changes), folder)
    values = json.loads((folder / "config.json").read_text())
    ours = ("target_name", "training_length", "prompt_recipe", "lm_head_in_file", "draft_vocab_size")
    for name in (*ours, "rope_parameters", "sliding_window_non_causal", "sample_from_anchor", *dropped):
        del values[name]
    (folder / "config.json").write_text(json.dumps({**values, "num_anchors": 512}))


STATED = {"target_name": "tiny", "training_length": 64}


def test_deepspec_files_need_what_they_lack(make_draft, tmp_path) -> None:
    deepspec(make_draft, tmp_path / "draft", {**WHOLE, **FIRST})
    for name in STATED:
        with pytest.raises(DsparkError, match="state it") as caught:
            convert(tmp_path / "draft", "native", tmp_path / "out", **{k: v for k, v in STATED.items() if k != name})
        assert caught.value.field == name
    read = convert(tmp_path / "draft", "native", tmp_path / "out", **STATED)
    assert read.config.sample_from_anchor and read.config.draft_vocab_size == 30
    assert any("anchor-first" in note for note in read.notes)
    loaded = load_draft(tmp_path / "out")
    assert loaded.config == make_draft(**WHOLE, **FIRST, **STATED, prompt_recipe=loaded.config.prompt_recipe).config


def test_deepspec_dflash_has_rank_0_and_a_stated_layout(make_draft, tmp_path) -> None:
    dropped = ("markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    deepspec(make_draft, tmp_path / "draft", {**WHOLE, **PLAIN}, dropped)
    with pytest.raises(DsparkError, match="sample_from_anchor: true when"):
        convert(tmp_path / "draft", "native", tmp_path / "out", **STATED)
    read = convert(tmp_path / "draft", "z-lab", tmp_path / "out", **STATED, sample_from_anchor=False)
    assert read.config.markov_rank == 0 and not read.config.enable_confidence_head and read.config.gamma == 7


def test_what_is_stated_may_not_contradict(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    for name, value in {"sample_from_anchor": True, "mask_token_id": 3, "nonsense": 1}.items():
        with pytest.raises(DsparkError) as caught:
            convert(tmp_path / "draft", "native", tmp_path / "out", **{name: value})
        assert caught.value.field == name
    convert(tmp_path / "draft", "native", tmp_path / "out", mask_token_id=29, target_layer_ids=[0, 2])


def test_a_target_folder_supplies_name_and_depth(make_draft, tmp_path) -> None:
    deepspec(make_draft, tmp_path / "draft", {**WHOLE, **FIRST}, ("num_target_layers",))
    (tmp_path / "target").mkdir()
    facts = {"text_config": {"num_hidden_layers": 4, "hidden_size": 16, "vocab_size": 30}}
    (tmp_path / "target" / "config.json").write_text(json.dumps(facts))
    target = str(tmp_path / "target")
    read = read_checkpoint(tmp_path / "draft", target, training_length=64)
    assert read.config.num_target_layers == 4 and read.config.target_name == target
    facts["text_config"]["vocab_size"] = 31
    (tmp_path / "target" / "config.json").write_text(json.dumps(facts))
    with pytest.raises(DsparkError, match="vocab_size"):
        read_checkpoint(tmp_path / "draft", target, training_length=64)


# Faulty and foreign folders


def test_tensors_of_the_target_are_left_out_and_t2d_is_made(make_draft, tmp_path) -> None:
    save_draft(make_draft(**FULL), tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    marked = tensors.pop("t2d")
    save_file({**tensors, "embed_tokens.weight": torch.zeros(30, 16)}, path)
    read = read_checkpoint(tmp_path / "draft")
    assert torch.equal(read.tensors["t2d"], marked) and any("embed_tokens" in note for note in read.notes)


FAULTS = {
    "missing": (lambda t: t.pop("norm.weight"), "missing norm.weight"),
    "extra": (lambda t: t.update(mask_embedding=torch.zeros(3)), "unexpected mask_embedding"),
    "absolute ids": (lambda t: t["d2t"].add_(torch.arange(12)), "d2t.*offsets"),
    "nan": (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight.*finite"),
    "no map": (lambda t: t.pop("d2t"), "missing d2t"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", ["native", "speculators"])
def test_faulty_tensors_write_nothing(make_draft, tmp_path, fault, form) -> None:
    change, message = FAULTS[fault]
    save_draft(make_draft(**FULL), tmp_path / "native")
    convert(tmp_path / "native", form, tmp_path / "draft")
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    with pytest.raises(DsparkError, match=message):
        convert(tmp_path / "draft", "vllm", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["draft", "native"]


def test_shards_are_read_and_never_outside_the_folder(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(path)
    path.rename(tmp_path / "outside.safetensors")
    index, names = tmp_path / "draft" / "model.safetensors.index.json", sorted(tensors)
    save_file({n: tensors[n] for n in names[:9]}, tmp_path / "draft" / "a.safetensors")
    save_file({n: tensors[n] for n in names[9:]}, tmp_path / "draft" / "b.safetensors")
    homes = {n: "a.safetensors" if i < 9 else "b.safetensors" for i, n in enumerate(names)}
    index.write_text(json.dumps({"weight_map": homes}))
    read = read_checkpoint(tmp_path / "draft")
    assert all(torch.equal(read.tensors[n], tensors[n]) for n in names)
    for bad in (
        "../outside.safetensors",
        str(tmp_path / "outside.safetensors"),
        "..",
        "weights.bin",
        "",
        7,
        "c.safetensors",
    ):
        index.write_text(json.dumps({"weight_map": {**homes, names[0]: bad}}))
        with pytest.raises(DsparkError, match=r"index\.json"):
            read_checkpoint(tmp_path / "draft")
    for damaged in ("{", "[]", "{}", '{"weight_map": [1]}'):
        index.write_text(damaged)
        with pytest.raises(DsparkError, match="weight_map"):
            read_checkpoint(tmp_path / "draft")


def test_pickles_are_refused_and_cut_files_are_one_line(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    path = tmp_path / "draft" / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-50])
    with pytest.raises(DsparkError, match="whole safetensors") as caught:
        read_checkpoint(tmp_path / "draft")
    assert "\n" not in str(caught.value)
    path.rename(tmp_path / "draft" / "pytorch_model.bin")
    with pytest.raises(DsparkError, match="pickle"):
        read_checkpoint(tmp_path / "draft")


def test_forms_that_are_not_read_are_named() -> None:
    for values, message in (
        ({"model_type": "muse_glimmer_assistant"}, "model_type"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "no form of a draft"),
        ({}, "no form of a draft"),
    ):
        with pytest.raises(DsparkError, match=message):
            detect(values)


def test_unknown_keys_are_noted_and_those_that_make_another_model_refused(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "blocksize": 9}))
    assert any("blocksize = 9" in note for note in convert(tmp_path / "draft", "native", tmp_path / "out").notes)
    path.write_text(json.dumps({**values, "quantization_config": {"bits": 4}}))
    with pytest.raises(DsparkError, match=r"quantization_config.*another model"):
        convert(tmp_path / "draft", "native", tmp_path / "other")


@pytest.mark.parametrize("form", ["native", "speculators", "specforge", "z-lab", "k3_dspark", "eagle3"])
def test_any_value_in_any_key_is_read_or_refused_in_one_line(make_draft, tmp_path, form) -> None:
    latent = {**WHOLE, **FIRST, **MLA, "q_lora_rank": 8}
    changes = {"z-lab": {**WHOLE, **PLAIN}, "k3_dspark": latent}.get(form, {**WHOLE, **FIRST})
    save_draft(eagle3_draft() if form == "eagle3" else make_draft(**changes), tmp_path / "draft")
    convert(tmp_path / "draft", "native" if form == "eagle3" else form, tmp_path / "there")
    path = tmp_path / "there" / "config.json"
    whole = json.loads(path.read_text())
    inner = [key for key, value in whole.items() if isinstance(value, dict)]
    for outer, name in [(None, key) for key in whole] + [(key, name) for key in inner for name in whole[key]]:
        for value in (None, 3, "x", [], [1], {"rope_type": 3}):
            values = json.loads(json.dumps(whole))
            (values if outer is None else values[outer])[name] = value
            path.write_text(json.dumps(values))
            try:
                read_checkpoint(tmp_path / "there")
            except DsparkError as error:
                assert "\n" not in str(error)


def test_an_existing_folder_is_not_touched(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    with pytest.raises(DsparkError, match="exists already"):
        convert(tmp_path / "draft", "native", tmp_path / "draft")
    with pytest.raises(DsparkError, match="must be one of"):
        convert(tmp_path / "draft", "ggml", tmp_path / "out")


@pytest.mark.parametrize("form", ["native", "gguf"])
@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_nothing_is_left_of_a_conversion_that_was_stopped(
    make_draft, write_target, tmp_path, monkeypatch, form, stop
) -> None:
    """In the middle of writing, by Ctrl-C or SIGTERM (which the command line makes the same) or a full disk."""
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    target = str(write_target()) if form == "gguf" else None

    def stopped(_descriptor: int) -> None:
        assert len(os.listdir(tmp_path)) == (3 if form == "gguf" else 2), "the staging name is there"
        raise stop

    monkeypatch.setattr(os, "fsync", stopped)
    with pytest.raises((stop, DsparkError)):
        convert(tmp_path / "draft", form, tmp_path / ("out.gguf" if form == "gguf" else "out"), target)
    assert set(os.listdir(tmp_path)) == {"draft", "target.gguf"} - (set() if target else {"target.gguf"})


def test_a_hub_name_without_a_network_is_one_line(tmp_path, run, monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for words in (["convert", "some/draft", "out", "--to", "native"], ["inspect", "some/draft"]):
        code, _, complaint = run(*words)
        assert code == 2 and complaint.count("\n") == 1 and "some/draft" in complaint and "hub" in complaint
    assert not os.listdir(tmp_path)


def test_a_hub_name_is_fetched_without_pickles(make_draft, tmp_path, monkeypatch) -> None:
    """The one call that needs a network is replaced; what it is asked for, and what becomes of it, is not."""
    save_draft(make_draft(**WHOLE), tmp_path / "cache")
    asked = {}

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path / "cache")

    monkeypatch.setattr(hub, "snapshot_download", fetch)
    convert("some/draft", "native", tmp_path / "out")
    assert same_files(tmp_path / "cache", tmp_path / "out")
    assert asked["name"] == "some/draft" and not any(fnmatch("pytorch_model.bin", p) for p in asked["patterns"])


def test_the_command(make_draft, tmp_path) -> None:
    deepspec(make_draft, tmp_path / "draft", {**WHOLE, **FIRST})
    words = ["convert", str(tmp_path / "draft"), str(tmp_path / "out"), "--to", "speculators"]
    result = CliRunner().invoke(app, [*words, "--state", "target_name=tiny", "--state", "training_length=64"])
    assert result.exit_code == 0, result.output
    assert "(native) ->" in result.output and "7 predictions, anchor-first" in result.output
    assert "note: no layout key" in result.output
    failed = CliRunner().invoke(app, [*words[:2], str(tmp_path / "two"), *words[3:], "--state", "oops"])
    assert isinstance(failed.exception, DsparkError)
    assert import_draft(tmp_path / "out").config.target_name == "tiny"
