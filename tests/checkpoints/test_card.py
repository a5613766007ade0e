"""The model card: what is known is in it, what is not is said to be not recorded; shipping a trained folder."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dspark.checkpoints import builtin, card
from dspark.checkpoints.native import CARD_FILE, PROMPTS_FILE, TRAINING_FILE, load_draft, save_draft, weights_sha256
from dspark.drafts.inspect import parameter_counts
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED

CHAIN: dict[str, Any] = {
    "draft": {"which": "best", "step": 900, "hours": 0.75},
    "recipe": {"name": "first", "training": {"init": "target-layers"}},
    "started_from": None,
}
NOTES = {
    "target": "tiny",
    "settings": {"temperatures": [0.0, 0.7], "max_tokens": 256},
    "prompt_files": {"gsm.jsonl": "a"},
}
TRAINING: dict[str, Any] = {
    "format": 1,
    "draft": {"which": "best", "step": 1200, "hours": 1.5},
    "steps": 1300,
    "best": {"step": 1200, "replay_acceptance": 2.345, "n": 7, "rows": 24, "note": None},
    "seconds": 7200.0,
    "validation_seconds": 360.0,
    "curve": [
        {"step": 600, "hours": 0.7, "replay_acceptance": 2.1, "loss_l1": 1.25, "loss_bce": 0.5},
        {"step": 1200, "hours": 1.5, "replay_acceptance": 2.345, "loss_l1": 1.0, "loss_bce": None},
    ],
    "machines": [{"processor": "Abacus", "torch": "9.9"}],
    "started_from": CHAIN,
    "recipe": {"name": "second", "training": {"init": "best", "steps": 1300, "lr": 1e-3, "loss": {"ce": 0.1}}},
    "rows": [
        {"name": "mixed.jsonl", "sha256": "12" * 32, "rows": 1234, "answer_tokens": 99999, "settings": NOTES},
        {"name": "other.jsonl", "sha256": None, "rows": None, "answer_tokens": None, "settings": None},
        {"name": "large.jsonl", "sha256": None, "rows": 5, "answer_tokens": 9, "settings": {"target": "hub/large"}},
    ],
    "training_rows": 1200,
    "held_out_rows": 34,
    "held_out_rows_seen_before": 2,
    "seed": 5,
    "compute_dtype": "fp32",
}


def column(length: float, low: float | None) -> dict[str, Any]:
    speed = {"value": 1.5, "low": low, "high": None if low is None else 1.75, "level": 0.95}
    rates = [{"rate": 0.5}, {"rate": None}]
    acceptance = {"macro_length": length, "macro_length_without_loops": length - 0.25, "conditional": rates}
    return {
        "acceptance": acceptance,
        "speed": [{"speedup": speed, "decode_speedup": speed}],
        "compared": 20,
        "replay_checked": 20,
    }


def figures(digest: str | None = None, draft: str = "best") -> dict[str, Any]:
    """What matters of a report.json, with the columns of one draft."""
    own = [
        {
            "name": f"mine n = {n}",
            "kind": "dspark",
            "n": n,
            "draft": draft,
            "weights_sha256": digest,
            "trained_on": True,
        }
        for n in (3, 7)
    ]
    peer = {**own[1], "name": "mine in Transformers n = 7", "kind": "transformers-dflash"}
    suite = {
        "name": "maths",
        "questions": 40,
        "speed_questions": 15,
        "looping": 3,
        "apart": False,
        "ties": ["tie: q, other n = 3, token 4: 5 where plain decoding gave 6"],
        "not_lossless": [],
        "replay_ties": [],
        "replay_faults": ["REPLAY DIFFERS: q, other n = 3, round 2"],
        "columns": {"plain": {}, "mine n = 3": column(2.25, 1.25), "mine n = 7": column(2.75, None)},
    }
    mean = {"suites": 1, "mean_macro_length": 2.25, "mean_macro_length_without_loops": 2.0, "mean_speedup": 1.5}
    return {
        "target": "/home/x/tiny",
        "settings": {"dtype": "float32", "threads": 2},
        "machine": {"processor": "Abacus"},
        "format": "dspark-bench",
        "version": 1,
        "drafters": [{"name": "plain", "n": 0}, *own, peer],
        "suites": [suite],
        "overall": [{"drafter": "plain", **mean}, {"drafter": "mine n = 3", **mean}],
    }


def of_the_draft(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "drafters": report["drafters"][1:3]}


def test_everything_recorded_is_in_the_card(make_config) -> None:
    config = make_config()
    total = parameter_counts(config)["total"]
    text = card.model_card(config, TRAINING, of_the_draft(figures()))
    head = yaml.safe_load(text.split("---")[1])
    assert head == {"base_model": "tiny", "tags": ["dspark", "speculative-decoding"]}
    embedded = card.model_card(config.model_copy(update={"target_name": EMBEDDED}), TRAINING, None)
    assert yaml.safe_load(embedded.split("---")[1])["license"] == "apache-2.0"
    for line in (
        f"up to {config.gamma} tokens",
        "dspark generate --draft FOLDER --target tiny",
        f"| parameters | {total:,} (",
        "| mixed.jsonl | the target itself | 1,234 | 99,999 | 0.0, 0.7 | 256 | gsm.jsonl | `1212121212121212` |",
        "| other.jsonl | nothing tells who | not recorded | not recorded | not recorded | not recorded |",
        "| large.jsonl | hub/large | 5 | 9 | not recorded |",
        "1,200 rows trained on, 34 held out (all turns of a prompt on one side), of which 2 on prompts",
        "| hours of the run | 2.00, of which validation 0.10 |",
        "| best by replay | 2.345 at step 1200, n = 7, 24 held-out rows; bonus counted, macro |",
        "| lr | 0.001 |",
        "| seed | 5 |",
        "| machine 1 | processor Abacus; torch 9.9 |",
        "2.25 hours in all",
        "| first | target-layers | best | 900 | 0.75 |",
        "| 600 | 0.70 | 2.100 | 1.250 | 0.500 |",
        "| 1,200 | 1.50 | 2.345 | 1.000 | not recorded |",
        "| maths (3 of 40 loop, 15 timed) | 3 | 2.25 | 2.00 | 1.50x [1.25, 1.75] | 1.50x [1.25, 1.75] | 0.50 - |",
        "| maths (3 of 40 loop, 15 timed) | 7 | 2.75 | 2.50 | 1.50x | 1.50x | 0.50 - |",
        "| mean over 1 suites, mine n = 3 | 2.25 | 2.00 | 1.50x |",
        "target tiny in float32",
        "Replay equals served on 40 of 40 answers",
        "0 of 40 prompts are in the draft's training set",
        "All ids of 40 timed answers equal plain decoding's.",
    ):
        assert line in text, line
    assert "/home" not in text


def test_what_was_not_compared_is_not_claimed(make_config) -> None:
    report = of_the_draft(figures())
    suite = report["suites"][0]
    for name in ("mine n = 3", "mine n = 7"):
        suite["columns"][name] |= {"compared": 0, "replay_checked": 0}
    text = card.model_card(make_config(), TRAINING, report)
    assert "were not compared with plain decoding's" in text and "on 0 of 0 answers" in text
    suite["columns"]["mine n = 7"]["compared"] = 8
    suite["not_lossless"] = ["NOT LOSSLESS: q, mine n = 7, token 1"]
    assert "0 at ties of the target, 1 others, of 8" in card.model_card(make_config(), TRAINING, report)


def test_what_is_not_known_is_said_so(make_config) -> None:
    text = card.model_card(make_config(), None, None)
    for line in ("its data is not recorded", "How it was trained is not recorded", "public suites are not recorded"):
        assert line in text
    text = card.model_card(make_config(), {**TRAINING, "started_from": None, "seconds": None}, None)
    assert "hours in all: not recorded; the draft `best` before them is not recorded" in text
    assert "| hours of the run | not recorded, of which validation 0.10 |" in text
    older = {key: value for key, value in TRAINING.items() if key != "held_out_rows_seen_before"}
    assert "of which not recorded on prompts" in card.model_card(make_config(), older, None)


def trained(make_draft, folder: Path) -> Path:
    texts = {TRAINING_FILE: json.dumps(TRAINING), PROMPTS_FILE: "0123456789abcdef\n"}
    save_draft(make_draft(), folder, files=texts)
    return folder


def test_shipping_carries_all_of_it(make_draft, tmp_path: Path) -> None:
    folder = trained(make_draft, tmp_path / "best")
    measured = tmp_path / "report.json"
    measured.write_text(json.dumps(figures(weights_sha256(make_draft()))))
    there = builtin.ship(folder, measured, tmp_path / "shipped")
    names = {path.name for path in there.iterdir()}
    assert names == {"config.json", "model.safetensors", TRAINING_FILE, PROMPTS_FILE, CARD_FILE}
    assert {stat.S_IMODE(path.stat().st_mode) for path in there.iterdir()} == {0o644}
    assert json.loads((there / TRAINING_FILE).read_text()) == TRAINING
    assert (there / PROMPTS_FILE).read_text() == (folder / PROMPTS_FILE).read_text()
    assert "1.50x [1.25, 1.75]" in (there / CARD_FILE).read_text()
    assert load_draft(there).own_head_rows is None and load_draft(folder).own_head_rows is not None

    # A draft that does not say what it was trained on must not inherit the list of the one before it.
    for name in (TRAINING_FILE, PROMPTS_FILE):
        (folder / name).unlink()
    builtin.ship(folder, None, there)
    assert {path.name for path in there.iterdir()} == {"config.json", "model.safetensors", CARD_FILE}
    assert "its data is not recorded" in (there / CARD_FILE).read_text()


def test_only_figures_of_these_weights_are_shipped(make_draft, tmp_path: Path, capsys) -> None:
    folder, measured, there = trained(make_draft, tmp_path / "best"), tmp_path / "report.json", tmp_path / "shipped"
    save_draft(make_draft(), there, files={CARD_FILE: "as it was"})
    further = make_draft()  # same shape, other weights
    with torch.no_grad():
        further.norm.weight.mul_(2)
    for report, words in (
        (figures(weights_sha256(further), "other"), "of other weights, of other;"),
        (figures(), "measure this draft"),
    ):
        measured.write_text(json.dumps(report))
        with pytest.raises(DsparkError, match=words):
            builtin.ship(folder, measured, there)
        assert card.main([str(folder), "--measured", str(measured)]) == 2
        assert "measured = " in capsys.readouterr().err
    assert (there / CARD_FILE).read_text() == "as it was" and not (folder / CARD_FILE).exists()
    peers = figures(weights_sha256(make_draft()))
    peers["drafters"] = peers["drafters"][3:]
    own = json.dumps(figures(weights_sha256(make_draft())))
    for text in ("[" * 9999, json.dumps(peers), own.replace('"version": 1', '"version": 2'), own.replace("1.5", "NaN")):
        measured.write_text(text)
        assert card.main([str(folder), "--measured", str(measured)]) == 2


def test_commands(make_draft, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(make_draft, tmp_path / "best")
    assert card.main([str(folder)]) == 0
    path = folder / CARD_FILE
    assert path.read_text() == card.card_of(folder) and stat.S_IMODE(path.stat().st_mode) == 0o644
    before = path.read_text()
    for content, words in (
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        (json.dumps({"steps": "many"}), "does not have the form"),
    ):
        (folder / TRAINING_FILE).write_text(content)
        assert card.main([str(folder)]) == 2
        assert words in capsys.readouterr().err
    assert card.main([str(folder), "--measured", str(tmp_path / "none.json")]) == 2
    assert builtin.main([str(tmp_path / "nowhere")]) == 2
    assert path.read_text() == before and not list(folder.glob("*.tmp"))
