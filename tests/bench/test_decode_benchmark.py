"""benchmarks/decode.py on a tiny pair: its JSON, resuming after an interruption, and refusing mixed settings."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import decode as benchmark
from rich.console import Console

from dspark.bench import compare
from dspark.checkpoints.native import PROMPTS_FILE, load_draft, save_draft, weights_sha256
from dspark.data.prompts import prompt_hash, write_prompt_hashes
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget


@pytest.fixture(scope="module")
def arguments(
    target: TransformersTarget, draft: DSparkDraft, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[str], Path]:
    folder = tmp_path_factory.mktemp("decode")
    save_draft(draft, folder / "draft")
    write_prompt_hashes(folder / "draft" / PROMPTS_FILE, [prompt_hash("Maths 1  please"), prompt_hash("other")])
    (folder / "data").mkdir()
    for suite in ("maths", "code"):
        lines = [json.dumps({"id": f"{suite}/{i}", "turns": [f"{suite} {i} please", "more"]}) for i in range(5)]
        (folder / "data" / f"{suite}.jsonl").write_text("\n".join(lines))
    options = {
        "target": target.name,
        "draft": folder / "draft",
        "data": folder / "data",
        "suites": "maths,code",
        "limit": 4,
        "max-tokens": 10,
        "speed-limit": 2,
        "batch": 3,
        "out": folder / "decode.jsonl",
    }
    return [f"--{name}={value}" for name, value in options.items()], folder / "decode.jsonl"


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert benchmark.main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_resume_and_refusal(
    arguments: tuple[list[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, out = arguments
    whole = run(options, capsys)
    assert list(whole["suites"]) == ["maths", "code"]
    for suite in whole["suites"].values():
        assert (suite["questions"], suite["timed_questions"], suite["ids_equal"]) == (4, 2, True)
        plain, widest = suite["modes"]["plain"], suite["modes"]["n = 7"]
        assert plain["acceptance"]["macro_length"] == 1.0
        assert 1.0 <= widest["acceptance"]["macro_length"] <= 8.0 and len(widest["acceptance"]["conditional"]) == 7
        assert widest["acceptance"]["questions"] == 4
        assert widest["speed"]["speedup_end_to_end"]["low"] <= widest["speed"]["speedup_end_to_end"]["high"]
    assert [row["tokens"] for row in whole["passes"]["verify"]] == [1, 8]
    assert set(whole["mean_speedup_over_suites"]) == {"n = 3", "n = 7"}
    lengths = [suite["modes"]["n = 7"]["acceptance"]["macro_length"] for suite in whole["suites"].values()]
    assert whole["mean_acceptance_over_suites"]["n = 7"]["macro_length"] == pytest.approx(sum(lengths) / 2)
    best = whole["speedup_at_best_n"]
    for name, one in best["suites"].items():
        speeds = {m["n"]: m["speed"] for m in whole["suites"][name]["modes"].values() if m["n"]}
        assert one["value"] == max(speed["speedup_end_to_end"]["value"] for speed in speeds.values())
        assert speeds[one["n"]]["speedup_end_to_end"]["value"] == one["value"]
    assert best["mean"] == pytest.approx(sum(one["value"] for one in best["suites"].values()) / 2)
    shortest = whole["suites"]["maths"]["modes"]["n = 7"]["by_output_tokens"]
    assert [(size, one["questions"]) for size, one in shortest.items()] == [("0-63", 4), ("64-127", 0), ("128-", 0)]
    assert (whole["replay"]["answers"], whole["replay"]["equal"], whole["replay"]["faults"]) == (8, 8, [])
    assert whole["replay"]["line"] == "replay equals served on 8 of 8 answers, round by round"
    # case and white space apart, the draft was trained on "maths 1 please"
    assert whole["suites"]["maths"]["overlap"] == {"asked": 4, "in_training_set": 1, "ids": ["maths/1"]}
    assert whole["suites"]["code"]["overlap"] == {"asked": 4, "in_training_set": 0, "ids": []}
    assert whole["overlap"]["line"].startswith("WARNING: 1 of 8 prompts are in the draft's training set (maths/1)")

    # Killed while writing the sixth record: the torn line goes, the five whole ones are not run again.
    lines = out.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 8
    out.write_text("".join(lines[:6]) + lines[6][:40])
    asked: list[str] = []
    real = compare.timed_run

    def counted(engine: Any, mode: Any, question: Any, max_tokens: int) -> Any:
        asked.append(question.id)
        return real(engine, mode, question, max_tokens)

    monkeypatch.setattr(compare, "timed_run", counted)
    again = run(options, capsys)
    assert asked == ["code/1"] * 3
    for suite in ("maths", "code"):
        for mode in ("n = 3", "n = 7"):
            before, after = (one["suites"][suite]["modes"][mode] for one in (whole, again))
            assert before["acceptance"] == after["acceptance"]
    before, after = (one["suites"]["maths"]["modes"]["n = 7"]["speed"] for one in (whole, again))
    assert before == after

    with pytest.raises(DsparkError, match=r"max_tokens = 11: .* holds results of 10"):
        benchmark.main([*options, "--max-tokens=11"])


def test_results_of_another_draft_or_of_other_prompts_are_not_taken_for_these(
    draft: DSparkDraft, arguments: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, prompts, out = tmp_path / "draft", tmp_path / "maths.jsonl", tmp_path / "decode.jsonl"
    save_draft(draft, folder)
    prompts.write_text('{"id": "maths/0", "turns": ["one"]}')
    own = [f"--draft={folder}", f"--data={tmp_path}", f"--out={out}", "--suites=maths", "--ns=3", "--max-tokens=4"]
    options = [*arguments[0], *own]
    first = run(options, capsys)
    assert first["settings"]["weights_sha256"] == weights_sha256(load_draft(folder))
    before = out.read_bytes()
    prompts.write_text('{"id": "maths/0", "turns": ["another"]}')
    with pytest.raises(DsparkError, match=r"prompts_sha256 = .*decode.jsonl holds results of .* remove it"):
        benchmark.main(options)
    prompts.write_text('{"id": "maths/0", "turns": ["one"]}')
    trained = load_draft(folder)  # further, into the same folder
    with torch.no_grad():
        trained.norm.weight.mul_(2)
    save_draft(trained, folder)
    with pytest.raises(DsparkError, match=r"weights_sha256 = .*decode.jsonl holds results of .* remove it"):
        benchmark.main(options)
    assert out.read_bytes() == before
    save_draft(draft, folder)
    assert run(options, capsys)["suites"] == first["suites"]


@pytest.mark.parametrize("ns", ["a", "", "3,", "3;7", "0", "3,-1"])
def test_widths_that_are_no_numbers_are_refused(arguments: tuple[list[str], Path], ns: str) -> None:
    with pytest.raises(DsparkError, match="ns = "):
        benchmark.main([*arguments[0], f"--ns={ns}"])


def test_linear_layers_are_timed_plain_and_packed(
    target: TransformersTarget, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["--linear", f"--target={target.name}"]) == 0
    found = json.loads(capsys.readouterr().out)
    table = found["linear"]
    assert found["storages"] == ["float32"]  # random weights fit nothing smaller
    assert [row["rows"] for row in table] == list(benchmark.LINEAR_ROWS)
    assert all(row["plain_ms"] > 0 and row["packed_ms"] > 0 for row in table)


def test_the_table_is_whole_within_80_columns(
    arguments: tuple[list[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run([*arguments[0], f"--out={tmp_path / 'decode.jsonl'}"], capsys)

    def lines() -> list[str]:
        console = Console(file=io.StringIO(), width=80)
        benchmark.show(whole, console)
        return console.file.getvalue().splitlines()  # type: ignore[attr-defined]

    shown = lines()
    assert max(map(len, shown)) <= 80
    assert "maths: 4 questions, 0 looping answers; 2 timed, the others for acceptance only" in shown
    rows = [line for line in shown if line.startswith(" n = 7")]
    assert len(rows) == 2 and all(re.search(r"x \[\d.\d\d, \d.\d\d\]( +[\d.]+x?){4}( \d+| -){7}$", row) for row in rows)
    assert "macro*: without the answers that end in a loop" in " ".join(" ".join(shown).split())
    whole["suites"]["maths"]["timed_questions"] = 4
    assert "maths: 4 questions, 0 looping answers" in lines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data=nope"], "data = 'nope': must be a folder of <suite>.jsonl files, e.g. nope/gsm8k.jsonl"),
        (["--data={empty}"], "data = '{empty}': must be a folder of <suite>.jsonl files, e.g. {empty}/gsm8k.jsonl"),
        (["--suites=maths,mats"], "suites = 'mats': not in {data}, which has code, maths"),
        (["--suites="], "suites = '': not in {data}, which has code, maths"),
    ],
)
def test_prompts_that_are_not_there_are_named_before_the_target_loads(
    arguments: tuple[list[str], Path], tmp_path: Path, options: list[str], message: str
) -> None:
    names = {"empty": tmp_path, "data": arguments[1].parent / "data"}
    given = [*arguments[0], "--target=./never-loaded", *(option.format(**names) for option in options)]
    with pytest.raises(DsparkError, match=re.escape(message.format(**names))):
        benchmark.main(given)
