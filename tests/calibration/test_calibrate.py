"""Rounds of a real pair, what is stored of it, and who uses it: `dspark calibrate`, `serve`, `generate`, engines."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.decoding.conftest import bigram_draft, draft_config

from dspark.calibration.cost import CostProfile
from dspark.calibration.export import COSTS_FLAG, TEMPERATURES_FLAG, export, read_exported
from dspark.calibration.profiles import changes, measure_profile, profile_path
from dspark.calibration.rounds import Rounds, collect_rounds
from dspark.calibration.schedule import choose_schedule
from dspark.calibration.stored import Calibration, read_calibration
from dspark.checkpoints.native import CALIBRATION_FILE, load_draft, save_draft, weights_sha256
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt
from dspark.decoding.engine import Engine
from dspark.decoding.planner import Planner, Threshold
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget

Run = Callable[..., tuple[int, str, str]]
PROMPTS = [Prompt(f"q/{i}", (text,)) for i, text in enumerate(["abc", "What?", "12 + 3", "x", "Tell me", "zzz"])]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(target: TransformersTarget, tmp_path: Path) -> Path:
    """A draft on disk that is sometimes right, its confidences depending on what it has drafted."""
    ids = [token for prompt in PROMPTS for token in ChatRenderer(target.tokenizer).prompt_ids(_asked(prompt))]
    [(_, result)] = Engine(target).run([Request(ids[-200:], 50, ignore_eos=True)])
    made = bigram_draft(dict(zip(result.output_ids, result.output_ids[1:], strict=False)))
    with torch.no_grad():
        made.confidence_head.proj.weight.normal_(std=0.3)
    made.bind(target.embedding_weight, target.head_weight)
    save_draft(made, tmp_path / "draft")
    return tmp_path / "draft"


def _asked(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.turns[0]}]


def sha(folder: Path) -> str:
    return weights_sha256(load_draft(folder))


def calibration(folder: Path, **changes: object) -> Calibration:
    fields = {"weights_sha256": sha(folder), "target": "t", "temperatures": (1.0,) * 7, "datasets": ("q",)}
    fields["scaling"] = ((1.0, 0.0),) * 7
    return Calibration(**{**fields, "rounds": 10, "prompts": 2, **changes})


def profile_of(target: TransformersTarget, folder: Path) -> CostProfile:
    found = measure_profile(target, load_draft(folder), "d", tokens=(1, 8), requests=(1, 2), repeats=1)
    found.save(profile_path(target, sha(folder)))
    return found


def test_collected_rounds_are_those_of_serving(target: TransformersTarget, folder: Path) -> None:
    draft, renderer = load_draft(folder), ChatRenderer(target.tokenizer)
    proposer = make_proposer(target, draft, confidence=True)
    found = collect_rounds(target, proposer, renderer, {"q": PROMPTS}, 30)
    engine = Engine(target, proposer)
    for prompt in PROMPTS:
        steps = list(engine.stream(Request(renderer.prompt_ids(_asked(prompt)), 30)))
        served = [(step.round.accepted, step.confidence) for step in steps if step.round and step.round.scheduled]
        own = found.where(found.prompt == prompt.id)
        assert own.accepted.tolist() == [accepted for accepted, _ in served]
        confidences = 1 / (1 + np.exp(-own.logits))
        assert np.allclose(confidences, [confidence for _, confidence in served], atol=1e-6)
        assert (own.scheduled[:-1] == 7).all() and (own.scheduled >= own.accepted).all()
    assert found.accepted.sum() > 5, "rounds in which nothing is accepted prove nothing"


def test_rows_give_the_rounds_that_their_prompts_give(
    target: TransformersTarget, tiny_llama_folder: Path, folder: Path, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"id": prompt.id, "turns": prompt.turns}) for prompt in PROMPTS]
    (tmp_path / "data" / "q.jsonl").write_text("\n".join(lines))
    rows = tmp_path / "rows.jsonl"
    code, _, err = run(
        "regenerate", "--target", tiny_llama_folder, "--prompts", tmp_path / "data", "--out", rows, "--max-tokens", 30
    )
    assert code == 0, err
    options = ["calibrate", "--target", tiny_llama_folder, "--draft", folder, "--no-profile", "--out"]
    asked = run(*options, tmp_path / "asked", "--data", tmp_path / "data", "--max-tokens", 30)
    read = run(*options, tmp_path / "read", "--rows", rows)
    assert asked[0] == 0 and read[0] == 0, asked[2] + read[2]
    one, other = (Rounds.load(tmp_path / name / "rounds.npz") for name in ("asked", "read"))
    assert sorted(one.accepted.tolist()) == sorted(other.accepted.tolist()) and set(other.domain) == {"q"}
    assert np.allclose(sorted(one.logits[:, 0]), sorted(other.logits[:, 0]), atol=1e-4)
    code, _, err = run(*options, tmp_path / "both", "--rows", rows, "--suite", "q")
    assert code == 2 and "suite = 'rows and suite': give one of" in err


def test_the_command_fits_stores_reports_and_draws(
    target: TransformersTarget, tiny_llama_folder: Path, folder: Path, tmp_path: Path, run: Run
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name in ("one", "two", "other"):
        lines = [json.dumps({"id": f"{name}/{i}", "turns": [f"{name} {p.turns[0]}"]}) for i, p in enumerate(PROMPTS)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    options = ["--target", tiny_llama_folder, "--draft", folder, "--data", data, "--max-tokens", 40]
    out = tmp_path / "out"
    code, said, err = run(
        "calibrate", *options, "--suite", "one,two", "--unseen", "other", "--by-domain", "--no-profile", "--out", out
    )
    assert code == 0, err
    stored = read_calibration(folder)
    assert stored is not None and len(stored.temperatures) == 7 and set(stored.domains) == {"one", "two"}
    assert stored.weights_sha256 == sha(folder) and "whether these are held out is not known" in err
    assert {"all", "one", "two", "other (not fitted on)"} <= set(stored.measured)
    assert "few to fit on" in err and "other (not fitted on): " in said
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64" in (out / "reliability.html").read_text()
    again = ["--rounds", out / "rounds.npz", "--no-profile", "--save-to", tmp_path]
    assert run("calibrate", *options[:4], *again)[0] == 0
    assert read_calibration(tmp_path).temperatures == stored.temperatures


def test_bad_input_of_the_command(folder: Path, tiny_llama_folder: Path, run: Run, tmp_path: Path) -> None:
    pair = ["--target", tiny_llama_folder, "--draft", folder]
    for options, message in (
        ([], "suite = None"),
        (["--profile-only", "--no-profile"], "profile_only"),
        (["--data", tmp_path / "none", "--suite", "x"], "no such file"),
        (["--rounds", tmp_path / "none.npz"], "cannot be read"),
        (["--export", "sglang", "--export-out", tmp_path / "o"], "there are no temperatures and no costs"),
        (["--export", "vllm"], "export_out = None"),
    ):
        code, _, err = run("calibrate", *pair, *options)
        assert code == 2 and message in err.replace("\n", " "), (options, err)
    assert not (tmp_path / "o").exists() and not (folder / CALIBRATION_FILE).exists()
    headless = DSparkDraft(draft_config(enable_confidence_head=False, confidence_head_with_markov=False))
    save_draft(headless, tmp_path / "headless")
    (tmp_path / "q.jsonl").write_text('{"id": "q", "turns": ["hello"]}')
    pair = ["--target", tiny_llama_folder, "--draft", tmp_path / "headless"]
    code, _, err = run("calibrate", *pair, "--data", tmp_path, "--suite", "q")
    assert code == 2 and "past acceptance is used instead" in err


def test_what_is_scheduled_and_why_not(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    def line(**options: object) -> str:
        return choose_schedule(target, load_draft(folder), folder, **options).line

    assert "fixed: all 7" in line() and "no calibration.json" in line() and "no cost profile" in line()
    calibration(folder, scaling=((0.5, -0.1),) * 7).save(folder)
    profile = profile_of(target, folder)
    chosen = choose_schedule(target, load_draft(folder), folder)
    assert isinstance(chosen.schedule, Planner) and chosen.scaling == ((0.5, -0.1),) * 7
    assert "scheduled (auto): up to 7 drafts, by calibrated" in chosen.line
    assert (
        "scheduled (delayed)" in line(choice="delayed") and line(choice="fixed") == "fixed: all 7 drafts are verified"
    )
    assert isinstance(choose_schedule(target, load_draft(folder), folder, threshold=0.5).schedule, Threshold)
    calibration(folder, weights_sha256="0" * 64).save(folder)
    assert "fixed: all 7" in line() and "is of other weights (00000000" in line()
    with pytest.raises(DsparkError, match="other weights"):
        line(choice="early-stop")
    calibration(folder, temperatures=(1.0,) * 5).save(folder)
    assert "5 temperatures" in line() and "predicts 7 slots" in line()
    (folder / CALIBRATION_FILE).write_text('{"version": 1')
    assert "fit it again" in line()
    calibration(folder).save(folder)
    other = profile.model_copy(update={"machine": {**profile.machine, "processor": "another"}})
    other.save(profile_path(target, sha(folder)))
    assert "measured otherwise (processor another -> " in line()
    assert changes(profile, target, 7) == []
    for options, message in (
        ({"choice": "never"}, "must be one of"),
        ({"threshold": 1.5}, "must be in 0..1"),
        ({"choice": "delayed", "threshold": 0.5}, "does not go with --confidence-threshold"),
    ):
        with pytest.raises(DsparkError, match=message):
            line(**options)
    with pytest.raises(DsparkError, match="no drafts to schedule"):
        choose_schedule(target, None, folder, choice="delayed")


def test_a_draft_without_a_confidence_head_goes_by_its_past(target: TransformersTarget, tmp_path: Path) -> None:
    headless = DSparkDraft(draft_config(enable_confidence_head=False, confidence_head_with_markov=False))
    save_draft(headless, tmp_path / "headless")
    profile_of(target, tmp_path / "headless")
    chosen = choose_schedule(target, load_draft(tmp_path / "headless"), tmp_path / "headless")
    assert isinstance(chosen.schedule, Planner) and "by past acceptance" in chosen.line
    with pytest.raises(DsparkError, match="no confidence head"):
        choose_schedule(target, load_draft(tmp_path / "headless"), tmp_path / "headless", threshold=0.5)


def test_generate_says_what_it_schedules_by(
    target: TransformersTarget, tiny_llama_folder: Path, folder: Path, run: Run
) -> None:
    options = ["generate", "--target", tiny_llama_folder, "--draft", folder, "--prompt", "abc", "--json"]
    options += ["--max-tokens", 30]
    plain = json.loads(run(*options, "--schedule", "fixed")[1])
    assert plain["schedule"] == "fixed: all 7 drafts are verified"
    calibration(folder).save(folder)
    profile_of(target, folder)
    code, said, err = run(*options)
    assert code == 0, err
    found = json.loads(said)
    assert found["schedule"].startswith("scheduled (auto)") and found["token_ids"] == plain["token_ids"]
    sure = json.loads(run(*options, "--confidence-threshold", "1")[1])
    assert {one["scheduled"] for one in sure["rounds"]} == {0} and sure["token_ids"] == plain["token_ids"]


def test_exports_are_what_the_engines_read(target: TransformersTarget, folder: Path, tmp_path: Path) -> None:
    """SGLang's own checks of its two files; vLLM's fields."""
    profile = profile_of(target, folder)
    stored = calibration(folder, temperatures=(0.5, 2.0, 1.0, 1.0, 1.0, 1.0, 3.0))
    paths, notes = export("sglang", tmp_path / "sgl", "d", 7, stored, profile)
    temperatures, costs = (json.loads(path.read_text()) for path in paths)
    assert set(temperatures) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert temperatures["temperatures"] == list(stored.temperatures) and min(temperatures["temperatures"]) > 0
    assert set(costs) == {"sample_batch_tokens", "sample_steps_per_sec", "max_batch_tokens"}
    tokens, rates = costs["sample_batch_tokens"], costs["sample_steps_per_sec"]
    assert tokens == sorted(set(tokens)) and len(tokens) == len(rates) and costs["max_batch_tokens"] >= tokens[-1]
    assert all(a >= b > 0 for a, b in pairwise(rates))
    assert any("static" in note for note in notes)
    assert set(read_exported(tmp_path / "sgl", 7)) == {TEMPERATURES_FLAG, COSTS_FLAG}
    shorter, _ = export("sglang", tmp_path / "sgl", "d", 3, stored, None)
    assert json.loads(shorter[0].read_text())["temperatures"] == list(stored.temperatures[:3])
    [path], notes = export("vllm", tmp_path / "vllm", "d", 7, None, None)
    assert json.loads(path.read_text()) == {
        "method": "dspark",
        "model": "d",
        "num_speculative_tokens": 7,
        "enable_adaptive_verification": True,
    }
    assert any("no place for temperatures" in note for note in notes)


def test_a_copied_draft_keeps_its_calibration(folder: Path, tmp_path: Path) -> None:
    calibration(folder).save(folder)
    shutil.copytree(folder, tmp_path / "copy")
    assert read_calibration(tmp_path / "copy") == calibration(folder)
    load_draft(tmp_path / "copy")
    os.remove(tmp_path / "copy" / CALIBRATION_FILE)
    assert read_calibration(tmp_path / "copy") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path, arrays: path.write_bytes(path.read_bytes()[:200]), "cannot be read"),
        (lambda path, arrays: path.write_bytes(b""), "cannot be read"),
        (lambda path, arrays: np.save(path.open("wb"), arrays["logits"]), "cannot be read"),
        (lambda path, arrays: arrays["logits"].__setitem__((0, 0), np.nan), "no finite numbers"),
        (lambda path, arrays: arrays["accepted"].__setitem__(0, 99), "accept more than was verified"),
        (lambda path, arrays: arrays.update(accepted=arrays["accepted"].astype(str)), "accepted is <U"),
    ],
)
def test_faulty_rounds_are_named(tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    names = np.array(["a"] * 20)
    arrays = {"domain": names, "prompt": names, "logits": np.zeros((20, 7))}
    arrays |= {"scheduled": np.full(20, 7), "accepted": np.full(20, 2)}
    path = tmp_path / "rounds.npz"
    Rounds(**arrays).save(path)
    assert len(Rounds.load(path)) == 20
    change(path, arrays)
    if message != "cannot be read":
        Rounds(**arrays).save(path)
    with pytest.raises(DsparkError, match=message):
        Rounds.load(path)
