"""benchmarks/load.py: a closed loop of a tiny pair, and simulated GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks import load as benchmark
from tests.decoding.conftest import draft_config

from dspark.calibration.rounds import Rounds
from dspark.calibration.stored import Calibration
from dspark.checkpoints.native import load_draft, save_draft, weights_sha256
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError

GPUS = Path(benchmark.__file__).with_name("gpus.yaml")


def test_measured(tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_draft(DSparkDraft(draft_config()), tmp_path / "draft")
    prompts = [json.dumps({"id": f"q/{i}", "turns": [f"question {i}"]}) for i in range(6)]
    (tmp_path / "q.jsonl").write_text("\n".join(prompts))
    options = [f"--target={tiny_llama_folder}", f"--draft={tmp_path / 'draft'}", f"--data={tmp_path / 'q.jsonl'}"]
    options += ["--users=1,2", "--least=3", "--max-tokens=12", "--repeats=2", f"--out={tmp_path / 'out'}"]
    options += [f"--profile={tmp_path / 'cost.json'}"]
    with pytest.raises(DsparkError, match=r"no calibration\.json"):
        benchmark.main(options)
    sha256 = weights_sha256(load_draft(tmp_path / "draft"))
    fields = {"temperatures": (1.0,) * 7, "scaling": ((1.0, 0.0),) * 7, "datasets": ("q",)}
    Calibration(weights_sha256=sha256, target="t", rounds=1, prompts=1, **fields).save(tmp_path / "draft")
    assert benchmark.main(options) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    for level, count in zip(found["levels"], (3, 4), strict=True):
        assert level["prompts"] == count and set(level["modes"]) == set(benchmark.MODES)
        assert set(level["answers_other_than_plain"].values()) == {0}, "the same ids in every mode"
        assert level["modes"]["plain"]["scheduled"] == 0 < level["modes"]["fixed 3"]["scheduled"] <= 3
        assert all(one["tokens_per_s"] > 0 for one in level["modes"].values())
    assert (tmp_path / "out" / "load.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def rounds(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    chances = generator.beta(3, 2, size=(400, 7))
    accepted = np.cumprod(generator.random(chances.shape) < chances, axis=1).sum(axis=1)
    names = np.arange(400) // 20
    logits = np.log(chances / (1 - chances))
    whole = Rounds(np.array(["q"] * 400), names.astype(str), logits, np.full(400, 7), accepted)
    whole.save(tmp_path / "rounds.npz")
    return tmp_path / "rounds.npz"


def test_simulated(rounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Few users gain by long blocks, many by none; the schedule keeps up with the best of them everywhere."""
    options = ["--simulate", str(GPUS), "--rounds", str(rounds), "--draft", str(tmp_path), "--seconds", "2"]
    assert benchmark.main([*options, "--users", "1,64,512", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    for gpu in found["gpus"].values():
        few, _, many = (level["modes"] for level in gpu["levels"])
        assert few["fixed 7"]["tokens_per_s"] > few["fixed 3"]["tokens_per_s"] > few["plain"]["tokens_per_s"]
        assert many["plain"]["tokens_per_s"] > many["fixed 3"]["tokens_per_s"] > many["fixed 7"]["tokens_per_s"]
        assert few["scheduled"]["scheduled"] > 5 > 1 > many["scheduled"]["scheduled"]
        assert all(level["scheduled_over_best_other"]["median"] > 0.97 for level in gpu["levels"])
        assert max(level["scheduled_over_best_other"]["median"] for level in gpu["levels"]) > 1.05


def test_bad_input(rounds: Path, tmp_path: Path) -> None:
    for options, message in (
        (["--simulate", str(GPUS)], "rounds = None"),
        ([], "data = None"),
        (["--simulate", str(GPUS), "--rounds", str(tmp_path / "none")], "cannot be read"),
    ):
        with pytest.raises(DsparkError, match=message):
            benchmark.main([*options, "--out", str(tmp_path)])
