"""`dspark inspect` on drafts of every form: names, shapes and counts from the headers alone."""

from __future__ import annotations

import json
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints.conftest import FIRST, PLAIN, WHOLE
from tests.drafts.conftest import MLA
from tests.drafts.test_eagle3 import eagle3_draft

from dspark.checkpoints.convert import convert
from dspark.checkpoints.gguf import export_gguf
from dspark.checkpoints.native import config_to_json, save_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.inspect import parameter_counts
from dspark.training.recipe import load_recipe

Run = Callable[..., tuple[int, str, str]]


def sparse_checkpoint(folder: Path, draft: DSparkDraft) -> int:
    """A folder whose model.safetensors has its whole header and, for data, a hole of the right length, in bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_to_json(draft.config, False)))
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in draft.state_dict().items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def test_two_billion_parameters_are_inspected_by_their_header_in_under_a_second(tmp_path: Path, run: Run) -> None:
    config = load_recipe("kimi-k3").draft_config()
    with torch.device("meta"):
        size = sparse_checkpoint(tmp_path / "k3", DSparkDraft(config))
    assert size == 2 * 2_249_289_601 and (tmp_path / "k3" / "model.safetensors").stat().st_blocks * 512 < 2**20
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    code, out, _ = run("inspect", tmp_path / "k3")
    taken = time.perf_counter() - start
    assert code == 0 and "2,249,289,601" in out and "native form; its 62 tensors" in out
    assert taken < 1, f"{taken:.2f} s"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024, "tensor data was read"


def test_a_header_that_does_not_fit_is_named(tmp_path: Path, run: Run) -> None:
    with torch.device("meta"):
        sparse_checkpoint(tmp_path / "k3", DSparkDraft(load_recipe("kimi-k3").draft_config()))
    path = tmp_path / "k3" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 128}))
    code, _, complaint = run("inspect", tmp_path / "k3")
    assert code == 2 and "q_proj.weight has shape [4096, 7168], the config gives [8192, 7168]" in complaint
    weights = tmp_path / "k3" / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    assert "not a whole safetensors file" in run("inspect", tmp_path / "k3")[2]


FORMS = {
    "speculators": {**WHOLE, **FIRST},
    "specforge": {**WHOLE, **FIRST},
    "z-lab": {**WHOLE, **PLAIN},
    "k3_dspark": {**WHOLE, **FIRST, **MLA, "q_lora_rank": 8},
}


@pytest.mark.parametrize("form", FORMS)
def test_foreign_forms(make_draft, tmp_path, run, form) -> None:
    draft = make_draft(**FORMS[form])
    save_draft(draft, tmp_path / "draft")
    convert(tmp_path / "draft", form, tmp_path / "out")
    code, out, complaint = run("inspect", tmp_path / "out")
    assert code == 0 and f"{form} form" in out, complaint
    assert f"{parameter_counts(draft.config)['total']:,}" in out and "[0, 2]" in out


def test_gguf_and_eagle3(make_draft, write_target, tmp_path, run) -> None:
    draft = make_draft(**WHOLE, **FIRST)
    export_gguf(draft, tmp_path / "draft.gguf", write_target(), "q8_0")
    _, out, _ = run("inspect", tmp_path / "draft.gguf")
    assert "gguf form" in out and f"{parameter_counts(draft.config)['total']:,}" in out
    save_draft(eagle3_draft("mla-low-rank"), tmp_path / "eagle3")
    _, out, _ = run("inspect", tmp_path / "eagle3")
    assert "EAGLE-3, mla attention" in out and "eagle3 form" in out


def test_records_that_are_missing_do_not_hinder(make_draft, tmp_path, run) -> None:
    """DeepSpec's own files do not say who they were made for."""
    save_draft(make_draft(**WHOLE, **FIRST), tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    values = json.loads(path.read_text())
    for name in ("target_name", "training_length", "lm_head_in_file", "draft_vocab_size"):
        del values[name]
    path.write_text(json.dumps(values))
    code, out, _ = run("inspect", tmp_path / "draft")
    assert code == 0 and "not in the file: target_name" in out and "not in the file: training_length" in out
    del values["sample_from_anchor"]
    path.write_text(json.dumps(values))
    assert "sample_from_anchor" in run("inspect", tmp_path / "draft")[2]
    assert "bonus-anchor" in run("inspect", tmp_path / "draft", "--state", "sample_from_anchor=false")[1]
