"""The model card: what is known is in it, what is not is said to be not recorded; shipping a trained folder."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.bench.report_factory import make_report

from dspark.bench.report import Report
from dspark.checkpoints import builtin
from dspark.checkpoints.native import CARD_FILE, PROMPTS_FILE, TRAINING_FILE, load_draft, save_draft, weights_sha256
from dspark.drafts.inspect import parameter_counts
from dspark.errors import DsparkError
from dspark.publishing import card
from dspark.publishing.serving import serving_sections
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


def figures(digest: str | None) -> Report:
    """A report of plain decoding, this draft at n = 3 and 7, and another draft."""
    report = make_report(3)
    report.target = "tiny"
    for one in report.drafters:
        one.weights_sha256 = None if one.kind == "plain" else digest
    other = report.drafters[3]
    other.weights_sha256, other.draft = "cd" * 32, "elsewhere"
    return report


def written(report: Report, path: Path) -> Path:
    path.write_text(report.model_dump_json())
    return path


def trained(make_draft, folder: Path, **changes: Any) -> Path:
    texts = {TRAINING_FILE: json.dumps(TRAINING), PROMPTS_FILE: "0123456789abcdef\n"}
    save_draft(make_draft(**changes), folder, files=texts)
    return folder


def test_everything_recorded_is_in_the_card(make_draft, make_config, tmp_path: Path) -> None:
    folder = trained(make_draft, tmp_path / "best")
    report = written(figures(weights_sha256(make_draft())), tmp_path / "report.json")
    text = card.card_of(folder, report, "mit", "me/mine")
    total = parameter_counts(make_config())["total"]
    head = yaml.safe_load(text.split("---")[1])
    assert head == {
        "license": "mit",
        "library_name": "dspark",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "dspark", "vllm", "sglang"],
        "inference": False,
    }
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *["Overview", "Model Specifications", "Evaluation Results", "Serving with vLLM", "Serving with SGLang"],
        *["Training Details", "Limits"],
    ]
    for line in (
        f"up to {make_config().gamma} tokens",
        f"| parameters | {total:,} (",
        f"safetensors, one file, BF16, {total:,} parameters",
        f"| predictions a block | {make_config().gamma} (bonus-anchor) |",
        "factor 4.0 over 65,536",
        "| mixed.jsonl | the target itself | 1,234 | 99,999 | 0.0, 0.7 | 256 | gsm.jsonl | `1212121212121212` |",
        "| other.jsonl | nothing tells who | not recorded | not recorded | not recorded | not recorded |",
        "| large.jsonl | hub/large | 5 | 9 | not recorded |",
        "1,200 rows trained on, 34 held out (all turns of a prompt on one side), of which 2 on prompts",
        "| hours of the run | 2.00, of which validation 0.10 |",
        "| best by replay | 2.345 at step 1200, n = 7, 24 held-out rows; bonus counted, macro |",
        "| lr | 0.001 |",
        "| machine 1 | processor Abacus; torch 9.9 |",
        "2.25 hours in all",
        "| first | target-layers | best | 900 | 0.75 |",
        "| 600 | 0.70 | 2.100 | 1.250 | 0.500 |",
        "| 1,200 | 1.50 | 2.345 | 1.000 | not recorded |",
    ):
        assert line in text, line


def test_the_evaluation_is_the_report_of_this_draft_alone(make_draft, tmp_path: Path) -> None:
    folder, given = trained(make_draft, tmp_path / "best"), figures(weights_sha256(make_draft()))
    text = card.card_of(folder, written(given, tmp_path / "report.json"))
    section = text.split("## Evaluation Results")[1].split("## Serving with vLLM")[0]
    acceptance = given.suites[0].columns["DSpark n = 7"].acceptance
    speed = given.suites[0].columns["DSpark n = 7"].speed[0].speedup
    assert acceptance is not None and speed is not None and speed.low is not None and speed.high is not None
    assert f"| GSM8K | 30 | {acceptance.macro_length:.4f} | {acceptance.micro_length:.4f} |" in section
    assert f"| {speed.value:.2f}x ({speed.low:.2f}–{speed.high:.2f}) |" in section
    for words in (
        "bonus counted",
        "### n = 3",
        "### n = 7",
        "Accepted by slot",
        "not weighted by the number of prompts",
    ):
        assert words in section, words
    assert "AIME26: acc_len by output length" in section and "| 54,545–224,703 |" in section
    assert "4.4658 for MK" in section and "1,000,432–1,047,925 tokens" in section
    assert "DFlash" not in section and "elsewhere" not in section  # the other draft's
    limits = text.split("## Limits")[1]
    assert "0 of 150 prompts are in the draft's training set" in limits


def test_serving_comes_from_the_launch_builder(make_config) -> None:
    vllm, sglang = serving_sections(make_config(layer_types=("full_attention",) * 2), True, "me/mine")
    assert '--speculative-config \'{"model": "me/mine", "num_speculative_tokens": 7, "method": "dspark"}\'' in vllm
    assert "vllm serve TARGET" in vllm and "TARGET: the target's folder." in vllm
    assert "--speculative-dspark-block-size 7" in sglang and "--to sglang --target TARGET --expand" in sglang
    whole = {"sample_from_anchor": True, "block_size": 7, "draft_vocab_size": 30}
    config = make_config(**whole, layer_types=("full_attention",) * 2, target_name="org/model")
    vllm, sglang = serving_sections(config, False, None)
    assert "--speculative-draft-model-path FOLDER" in sglang and "--model-path org/model" in sglang
    assert "FOLDER: this draft's folder." in sglang and "dspark convert" not in vllm + sglang
    turned = serving_sections(config.model_copy(update={"target_layer_ids": (2, 1)}), False, None)
    assert all("dspark convert FOLDER for-" in section for section in turned)
    reduced = make_config(**{**whole, "draft_vocab_size": 12}, layer_types=("full_attention",) * 2)
    vllm, sglang = serving_sections(reduced, False, None)
    assert "dspark convert FOLDER for-vllm --to vllm --target TARGET" in vllm
    assert "--to sglang --target TARGET --expand" in sglang
    gated = make_config(**whole, layer_types=("full_attention",) * 2, markov_head_type="gated")
    vllm, sglang = serving_sections(gated, False, "me/mine")
    assert "cannot serve this draft: markov_head_type" in vllm and "vllm serve" not in vllm
    assert "cannot serve" not in sglang and "sglang serve" in sglang
    assert "dspark convert me/mine for-vllm" in serving_sections(reduced, False, "me/mine")[0]


def test_published_flags_are_in_the_card_of_a_draft_for_that_target(make_config) -> None:
    config = make_config(target_name="moonshotai/Kimi-K2.6", max_position_embeddings=262144)
    vllm, _ = serving_sections(config.model_copy(update={"layer_types": ("full_attention",) * 2}), True, "me/mine")
    assert "--tensor-parallel-size 8" in vllm and '"model": "me/mine"' in vllm and "novita" not in vllm


def test_what_is_not_known_is_said_so(make_draft, make_config, tmp_path: Path) -> None:
    text = card.model_card(make_config(), None, None)
    for line in ("its data is not recorded", "How it was trained is not recorded", "public suites are not recorded"):
        assert line in text
    assert "license" not in yaml.safe_load(text.split("---")[1])
    text = card.model_card(make_config(), {**TRAINING, "started_from": None, "seconds": None}, None)
    assert "hours in all: not recorded; the draft `best` before them is not recorded" in text
    assert "| hours of the run | not recorded, of which validation 0.10 |" in text


def test_front_matter(make_draft, tmp_path: Path) -> None:
    folder = trained(make_draft, tmp_path / "best", target_name="org/model")
    (folder / CARD_FILE).write_text(card.card_of(folder, licence="mit"))
    assert card.front_matter(folder)["base_model"] == "org/model"
    assert card.front_matter(folder)["license"] == "mit"
    assert "license: mit" in card.card_of(folder)  # written again, it keeps its licence
    assert "license: apache-2.0" in card.card_of(folder, licence="apache-2.0")
    folder = trained(make_draft, tmp_path / "embedded", target_name=EMBEDDED)
    text = card.card_of(folder)
    assert "license: apache-2.0" in text and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text


def test_the_command_writes_a_drafts_card(run, make_draft, tmp_path: Path) -> None:
    folder = trained(make_draft, tmp_path / "best")
    code, out, err = run("card", folder, "--license", "mit")
    assert code == 0 and out == f"written to {folder / CARD_FILE}\n", err
    assert (folder / CARD_FILE).read_text() == card.card_of(folder)
    code, _, err = run("card", folder, "--out", tmp_path / "elsewhere.md", "--repo", "me/mine")
    assert code == 0 and "me/mine" in (tmp_path / "elsewhere.md").read_text(), err
    assert "me/mine" not in (folder / CARD_FILE).read_text()


def test_figures_are_not_lost_by_writing_the_card_again(run, make_draft, tmp_path: Path) -> None:
    folder, report = trained(make_draft, tmp_path / "best"), tmp_path / "report.json"
    report.write_text(figures(weights_sha256(make_draft())).model_dump_json())
    assert run("card", folder, "--report", report)[0] == 0
    written = (folder / CARD_FILE).read_text()
    code, out, err = run("card", folder)
    assert (code, out) == (2, "") and "report = None: give the report.json" in err
    assert (folder / CARD_FILE).read_text() == written
    assert run("card", folder, "--report", report)[0] == 0


def test_bad_input_of_the_command_is_one_line_and_writes_nothing(run, make_draft, tmp_path: Path) -> None:
    folder = trained(make_draft, tmp_path / "best")
    further = make_draft()  # same shape, other weights
    with torch.no_grad():
        further.norm.weight.mul_(2)
    report = tmp_path / "report.json"
    own = figures(weights_sha256(make_draft())).model_dump_json()
    unnamed = figures(None)
    unnamed.drafters = unnamed.drafters[:3]
    peers = figures(weights_sha256(make_draft()))
    peers.drafters = [
        one.model_copy(update={"kind": "transformers-dflash"}) if one.n else one for one in peers.drafters
    ]
    for text, words in (
        (figures(weights_sha256(further)).model_dump_json(), "holds figures of other weights"),
        (unnamed.model_dump_json(), "does not say which weights"),
        (peers.model_dump_json(), "holds figures of other weights"),
        ("[" * 9999, "cannot be read as JSON"),
        (own.replace('"version":1', '"version":2'), "reads version 1"),
        (own.replace('"created"', '"made"', 1), "created"),
    ):
        report.write_text(text)
        code, out, err = run("card", folder, "--report", report)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1, (words, err)
    rows = tmp_path / "rows.jsonl"
    for arguments, words in (
        ([folder, "--report", tmp_path / "none.json"], "is not there"),
        ([folder, folder], "must be one draft folder"),
        ([folder, "--sample", "1"], "is for rows files"),
        ([tmp_path], "config.json"),
        ([rows, "--license", "mit"], "is for a draft's folder"),
        ([rows, "--report", report], "is for a draft's folder"),
    ):
        code, out, err = run("card", *arguments)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1, (words, err)
    for content, words in (
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        (json.dumps({"steps": "many"}), "does not have the form"),
    ):
        (folder / TRAINING_FILE).write_text(content)
        code, out, err = run("card", folder)
        assert (code, out) == (2, "") and words in err, err
    assert not (folder / CARD_FILE).exists() and not list(folder.glob("*.tmp"))


def test_shipping_carries_all_of_it(make_draft, tmp_path: Path, capsys) -> None:
    folder, goal = trained(make_draft, tmp_path / "best"), tmp_path / "shipped"
    with pytest.raises(DsparkError, match="write it: dspark card"):
        builtin.ship(folder, goal)
    assert builtin.main([str(folder)]) == 2 and not goal.exists()
    (folder / CARD_FILE).write_text(card.card_of(folder))
    there = builtin.ship(folder, goal)
    names = {path.name for path in there.iterdir()}
    assert names == {"config.json", "model.safetensors", TRAINING_FILE, PROMPTS_FILE, CARD_FILE}
    assert {stat.S_IMODE(path.stat().st_mode) for path in there.iterdir()} == {0o644}
    assert json.loads((there / TRAINING_FILE).read_text()) == TRAINING
    assert (there / CARD_FILE).read_text() == (folder / CARD_FILE).read_text()
    assert load_draft(there).own_head_rows is None and load_draft(folder).own_head_rows is not None

    # A draft that does not say what it was trained on must not inherit the list of the one before it.
    for name in (TRAINING_FILE, PROMPTS_FILE):
        (folder / name).unlink()
    builtin.ship(folder, there)
    assert {path.name for path in there.iterdir()} == {"config.json", "model.safetensors", CARD_FILE}
