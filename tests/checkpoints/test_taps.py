"""Layer ids that do not ascend: engines sort them, so what is written for one is in order, and is the same draft."""

from __future__ import annotations

import shutil

import pytest
import torch
from tests.checkpoints.conftest import FIRST, PLAIN, WHOLE
from tests.drafts.conftest import MLA
from tests.drafts.test_eagle3 import eagle3_draft

from dspark.checkpoints.convert import convert, document_for
from dspark.checkpoints.engines import check_eagle3, check_sglang, check_vllm
from dspark.checkpoints.gguf import export_gguf
from dspark.checkpoints.native import save_draft
from dspark.checkpoints.read import import_draft, read_header
from dspark.errors import DsparkError

IDS = [2, 0, 1]
DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
FORMS = {
    "vllm": FIRST,
    "sglang": FIRST,
    "speculators": FIRST,
    "k3_dspark": {**FIRST, **MLA, "q_lora_rank": 8},
    "specforge": FIRST,
    "z-lab": PLAIN,
    "gguf": {**FIRST, **DEFAULT_ROPE, "confidence_head_with_markov": True},
}


def same_fusion(one, other) -> bool:
    """Whether two drafts make the same of a target's layers, each reading them in its own order."""
    layers = torch.randn(5, 4, one.config.hidden_size)
    fused = [draft.fc(torch.cat([layers[:, i] for i in draft.config.target_layer_ids], -1)) for draft in (one, other)]
    return torch.allclose(*fused, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_ids_and_columns_are_put_in_order_together(make_draft, write_target, tmp_path, form) -> None:
    draft = make_draft(**{**WHOLE, "target_layer_ids": IDS, **FORMS[form]})
    save_draft(draft, tmp_path / "draft")
    gguf = form == "gguf"
    there = tmp_path / ("there.gguf" if gguf else "there")
    notes = convert(
        tmp_path / "draft", form, there, str(write_target()) if gguf else None, kind="f32" if gguf else None
    ).notes
    assert any("[2, 0, 1]" in note for note in notes)
    read = import_draft(there)
    assert read.config.target_layer_ids == (0, 1, 2) and same_fusion(draft, read)
    assert not torch.equal(draft.fc.weight, read.fc.weight)


def test_the_form_for_transformers_is_in_order_too(make_draft, tmp_path) -> None:
    save_draft(make_draft(**{**WHOLE, **PLAIN, "target_layer_ids": IDS}), tmp_path / "draft")
    assert any("in order" in note for note in convert(tmp_path / "draft", "transformers", tmp_path / "there").notes)


@pytest.mark.parametrize("form", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["gqa", "mla-low-rank"])
def test_eagle3(tmp_path, form, kind) -> None:
    save_draft(eagle3_draft(kind), tmp_path / "given")
    ids = list(import_draft(tmp_path / "given").config.target_layer_ids)
    save_draft(eagle3_draft(kind, target_layer_ids=tuple(ids[::-1])), tmp_path / "draft")
    draft = import_draft(tmp_path / "draft")
    assert any("in order" in note for note in convert(tmp_path / "draft", form, tmp_path / "there").notes)
    read = import_draft(tmp_path / "there")
    assert list(read.config.target_layer_ids) == sorted(ids) and same_fusion(draft, read)


def test_native_and_drafts_in_order_stay_as_they_are(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE, target_layer_ids=IDS), tmp_path / "draft")
    assert not convert(tmp_path / "draft", "native", tmp_path / "same").notes
    shutil.copytree(tmp_path / "draft", tmp_path / "copy")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("same", "copy")]
    assert weights[0] == weights[1]


def test_what_is_given_to_an_engine_as_it_lies_there_is_refused(make_draft, write_target, tmp_path) -> None:
    draft = make_draft(**{**WHOLE, **FORMS["gguf"], "target_layer_ids": IDS})
    save_draft(draft, tmp_path / "draft")
    header, target = read_header(tmp_path / "draft"), write_target()
    eagle3 = eagle3_draft(target_layer_ids=(2, 0, 1)).config
    for attempt in (
        lambda: check_vllm(draft.config, []),
        lambda: check_sglang(draft.config, []),
        lambda: check_eagle3(eagle3, "vllm", ("vllm",), []),
        lambda: document_for(draft.config, "speculators", False, header),
        lambda: export_gguf(draft, tmp_path / "draft.gguf", target),
    ):
        with pytest.raises(DsparkError, match=r"target_layer_ids.*must ascend"):
            attempt()
