"""benchmarks/thresholds.py: what a static threshold keeps, on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import thresholds as benchmark
from tests.decoding.conftest import draft_config

from dspark.checkpoints.native import save_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError


def test_a_sweep(tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    draft = DSparkDraft(draft_config())
    assert draft.confidence_head is not None
    torch.nn.init.normal_(draft.confidence_head.proj.weight)
    save_draft(draft, tmp_path / "draft")
    prompts = [json.dumps({"id": f"q/{i}", "turns": [f"question {i}"]}) for i in range(6)]
    (tmp_path / "q.jsonl").write_text("\n".join(prompts))
    options = [f"--target={tiny_llama_folder}", f"--draft={tmp_path / 'draft'}", f"--data={tmp_path / 'q.jsonl'}"]
    options += ["--thresholds=0,0.5,1", "--max-tokens=20", f"--out={tmp_path / 'out'}"]
    assert benchmark.main(options) == 0
    found = json.loads(capsys.readouterr().out)
    none, half, all_ = found["levels"]
    assert found["prompts"] == 6 and found["confidences"] == "raw"
    assert {one["answers_other_than_plain"] for one in found["levels"]} == {0}
    assert none["verified"] > half["verified"] > all_["verified"] == 0 and all_["acceptance_length"] == 1
    assert (tmp_path / "out" / "thresholds.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DsparkError, match="confidence_threshold = 2"):
        benchmark.main([*options, "--thresholds=2"])
    with pytest.raises(DsparkError, match="has no prompt that fits"):
        benchmark.main([*options, "--max-prompt-tokens=1"])
