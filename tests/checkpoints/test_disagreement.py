"""Files that disagree with themselves, with the target that is given, or with what goes along."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.conftest import FIRST, FULL, WHOLE
from tests.drafts.test_eagle3 import eagle3_draft

from dspark.checkpoints.convert import convert
from dspark.checkpoints.gguf import export_gguf
from dspark.checkpoints.native import save_draft
from dspark.checkpoints.read import read_checkpoint, read_header
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError


def target_folder(folder: Path, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    facts = {"num_hidden_layers": 4, "hidden_size": 16, "vocab_size": 30, **changes}
    (folder / "config.json").write_text(json.dumps(facts))
    return str(folder)


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("form", ["native", "speculators", "gguf", "eagle3"])
def test_a_target_of_another_depth_is_refused_and_one_of_another_name_noted(
    make_draft, write_target, tmp_path, form
) -> None:
    source, sizes = tmp_path / "draft", {}
    if form == "eagle3":
        draft = eagle3_draft()
        sizes = {"hidden_size": draft.config.hidden_size, "vocab_size": draft.config.vocab_size}
        sizes["num_hidden_layers"] = draft.config.num_target_layers
        save_draft(draft, source)
    elif form == "gguf":
        source = tmp_path / "draft.gguf"
        rope = {"rope_type": "default", "rope_theta": 100.0}
        export_gguf(make_draft(**WHOLE, rope_parameters=rope, confidence_head_with_markov=True), source, write_target())
    else:
        save_draft(make_draft(**WHOLE), tmp_path / "first")
        convert(tmp_path / "first", form, source)
    assert not read_header(source, target_folder(tmp_path / "tiny", **sizes)).notes
    (note,) = read_header(source, target_folder(tmp_path / "other", **sizes)).notes
    assert "made for tiny" in note and "other" in note
    deeper = target_folder(tmp_path / "tiny", **{**sizes, "num_hidden_layers": 9})
    with pytest.raises(DsparkError, match=r"num_target_layers.*9"):
        read_header(source, deeper)


@pytest.mark.parametrize("value", [None, 5, "x", []])
def test_a_strange_text_config_is_one_line(make_draft, tmp_path, value) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    target = target_folder(tmp_path / "tiny", text_config=value)
    if value is None:
        assert not read_header(tmp_path / "draft", target).notes
    else:
        with pytest.raises(DsparkError, match="text_config"):
            read_header(tmp_path / "draft", target)


def test_head_rows_that_are_added_are_said(tmp_path) -> None:
    assert any("lm_head.weight is added" in note for note in convert("embedded", "vllm", tmp_path / "out").notes)


@pytest.mark.parametrize("held", [True, False])
def test_lm_head_in_file_and_the_weights_must_agree(make_draft, tmp_path, held) -> None:
    save_draft(make_draft(**FULL), tmp_path / "draft", lm_head=not held)
    edit(tmp_path / "draft", lm_head_in_file=held)
    with pytest.raises(DsparkError, match=f"lm_head_in_file = {held}.*mend config.json"):
        read_header(tmp_path / "draft")


def test_a_card_with_other_figures_does_not_go_along(make_draft, tmp_path) -> None:
    save_draft(make_draft(**FULL, **FIRST), tmp_path / "draft", files={"README.md": "12 ids", "training.json": "{}"})
    notes = convert(tmp_path / "draft", "sglang", tmp_path / "out", expanded=True).notes
    assert any("README.md is left out" in note for note in notes)
    assert not (tmp_path / "out" / "README.md").exists() and (tmp_path / "out" / "training.json").exists()
    assert (tmp_path / "draft" / "README.md").exists()


def test_ids_in_the_place_of_offsets_are_noted_where_no_t2d_tells(make_config, tmp_path) -> None:
    draft = DSparkDraft(make_config(**FULL, vocab_size=300, draft_vocab_size=20))
    for ids, noted in ((range(3, 43, 2), True), ([*range(12), *range(20, 28)], False)):
        draft.set_vocabulary(ids)
        draft.bind(torch.randn(300, 16), torch.randn(300, 16))
        save_draft(draft, tmp_path / "draft")
        assert not read_checkpoint(tmp_path / "draft").notes, "t2d tells"
        change_tensors(tmp_path / "draft", lambda tensors: tensors.pop("t2d"))
        notes = read_checkpoint(tmp_path / "draft").notes  # a sparse map looks the same: noted, and read
        assert any("offsets" in note for note in notes) == noted


def test_thousands_of_brackets_are_one_line(make_draft, tmp_path, run) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    deep = "[" * 100_000
    words = ["convert", tmp_path / "draft", tmp_path / "out", "--to", "native"]
    code, _, complaint = run(*words, "--state", f"training_length={deep}")
    assert code == 2 and complaint.count("\n") == 1 and "deeply" in complaint
    (tmp_path / "draft" / "model.safetensors").unlink()
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / "draft" / name).write_text(deep)
        code, _, complaint = run(*words)
        assert code == 2 and complaint.count("\n") == 1 and name in complaint
