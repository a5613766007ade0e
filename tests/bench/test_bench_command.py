"""`dspark bench` as it is typed: files written, going on, live servers, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.serving.conftest import Live

from dspark.bench.report import read_report
from dspark.checkpoints.native import save_draft
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pair(tiny_llama_folder: Path, draft: DSparkDraft, tmp_path: Path) -> list[str]:
    """Options for the tiny target, its draft at 3 and 7, and a folder of two suites."""
    save_draft(draft, tmp_path / "draft")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("gsm8k", "mine"):
        lines = [json.dumps({"id": f"{name}/{i}", "turns": [f"{name} {i} please"]}) for i in range(3)]
        (data / f"{name}.jsonl").write_text("\n".join(lines))
    own = [f"--target={tiny_llama_folder}", f"--draft=d={tmp_path / 'draft'}", "--max-tokens=8", "--speed-limit=1"]
    return [*own, f"--data={data}", "--suite=gsm8k,mine", "--limit=2", f"--out={tmp_path / 'out'}"]


def test_three_reports_and_nothing_is_done_twice(run: Run, pair: list[str], tmp_path: Path) -> None:
    code, out, _ = run("bench", *pair)
    assert code == 0
    assert [line.rsplit("/", 1)[1] for line in out.split()[:3]] == ["report.json", "report.md", "report.html"]
    assert "Same tokens" in out and "d n = 7" in out
    report = read_report(tmp_path / "out")
    assert [one.name for one in report.drafters] == ["plain", "d n = 3", "d n = 7"]
    assert [(one.name, one.questions, one.speed_questions) for one in report.suites] == [
        ("gsm8k", 2, 1),
        ("mine", 2, 1),
    ]
    assert report.settings["limit"] == 2 and report.suites[0].source == "folder: gsm8k.jsonl (2 of 3 prompts)"
    assert report.rendered is not None and "gsm8k 0 please" in report.rendered.text
    assert {one.drafter for one in report.answers} == {"d n = 3", "d n = 7"}
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert run("bench", *pair)[0] == 0
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before
    code, _, error = run("bench", *pair, "--max-tokens=9")
    assert code == 2 and "max_tokens = 9" in error and "give another --out or remove it" in error


def test_the_gate_and_the_comparison_read_it(run: Run, pair: list[str], tmp_path: Path) -> None:
    assert run("bench", *pair)[0] == 0
    out = tmp_path / "out"
    assert run("gate", out, "--min-acceptance", "1.0")[0] == 0
    assert run("gate", out, "--min-acceptance", "9")[0] == 1
    code, shown, _ = run("report", out)
    assert code == 0 and "d n = 7" in shown


def test_a_suite_that_cannot_be_had_is_told(
    run: Run, pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as where it is not installed
    assert run("bench", *pair, "--suite=gsm8k,aime26")[0] == 0
    report = read_report(tmp_path / "out")
    assert [one.name for one in report.suites] == ["gsm8k"]
    (missing,) = report.missing
    assert missing.name == "aime26" and "needs the datasets package" in missing.reason
    code, _, error = run("bench", *pair, "--suite=aime26", f"--out={tmp_path / 'none'}")
    assert code == 2 and "suite = 'aime26': none can be had" in error


def test_long_prompts_are_written_for_the_target(run: Run, embedded_path: Path, tmp_path: Path) -> None:
    options = ["--suite=ruler-v2", "--long-tokens=400", "--long-questions=1", "--speed-limit=0", "--max-tokens=6"]
    assert run("bench", *options, f"--out={tmp_path}", "--n=3")[0] == 0
    report = read_report(tmp_path)
    (ruler,) = report.suites
    assert (ruler.name, ruler.shortest_prompt, ruler.longest_prompt) == ("ruler-v2", 400, 400)
    assert ruler.source == "written here: 3 prompts of 400 to 400 tokens"
    found = ruler.columns["dspark n = 3"].acceptance
    assert found is not None and found.partition_questions == {"mk": 1, "mv": 1, "qa": 1}
    assert any("answers hold" in note for note in report.notes)


def test_transformers_own_dflash_is_a_column(run: Run, pair: list[str], draft: DSparkDraft, tmp_path: Path) -> None:
    changes = {"markov_rank": 0, "sample_from_anchor": False, "block_size": 4, "target_layer_ids": (0, 1)}
    config = DraftConfig(**{**draft.config.model_dump(), **changes})
    save_draft(DSparkDraft(config), tmp_path / "dflash")
    flash = [f"--draft=flash={tmp_path / 'dflash'}@3", "--transformers=flash", "--suite=mine"]
    assert run("bench", *pair, *flash)[0] == 0
    report = read_report(tmp_path / "out")
    names = ["plain", "d n = 3", "d n = 7", "flash n = 3", "plain in Transformers", "flash in Transformers n = 3"]
    assert [one.name for one in report.drafters] == names
    (suite,) = report.suites
    assert suite.replay_checked == 4 and suite.replay_faults == [] and suite.not_lossless == []
    for name in names[-2:]:
        assert suite.columns[name].speed[0].requests == 1
    found = suite.columns[names[-1]].acceptance
    assert found is not None and found.source == "served"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--suite=gsm9k"], "suite = 'gsm9k': is no suite; did you mean gsm8k"),
        (["--suite="], "suite = ''"),
        (["--draft=nonsense"], "draft = 'nonsense': must be NAME=PATH"),
        (["--draft=e=nowhere"], "draft = 'nowhere': is not a folder"),
        (["--n=0"], "n = '0'"),
        (["--batch=1,1"], "batch = '1,1'"),
        (["--max-tokens=1"], "max_tokens = 1"),
        (["--temperature=1"], "seed = None"),
        (["--data=nowhere"], "data = 'nowhere': no such folder"),
        (["--baseline-endpoint=http://127.0.0.1:9"], "means nothing when this process is measured"),
        (["--concurrency=2"], "concurrency = 2: means nothing when this process is measured"),
        (["--endpoint=http://127.0.0.1:9"], "means nothing when a live engine is measured"),
        (["--transformers=other"], "transformers = 'other': must be one of the drafts: d"),
        (["--transformers=d"], "must be a DFlash draft"),
    ],
)
def test_bad_input_is_one_line(run: Run, pair: list[str], tmp_path: Path, options: list[str], words: str) -> None:
    code, out, error = run("bench", *pair, *options)
    assert code == 2 and out == ""
    assert words in error and error.startswith("error: ") and "Traceback" not in error
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_malformed_line_is_named(run: Run, pair: list[str], tmp_path: Path) -> None:
    with (tmp_path / "data" / "mine.jsonl").open("a") as file:
        file.write('\n{"id": 3}\n')
    code, _, error = run("bench", *pair)
    assert code == 2 and "mine.jsonl:4" in error


@pytest.fixture
def servers(target: TransformersTarget, draft: DSparkDraft) -> Iterator[tuple[Live, Live]]:
    both = Live(target, None, None), Live(target, draft, 3)
    yield both
    for one in both:
        one.stop()


def test_live_engines(run: Run, pair: list[str], tmp_path: Path, servers: tuple[Live, Live]) -> None:
    plain, drafted = servers
    common = [one for one in pair if not one.startswith(("--target", "--draft", "--speed-limit"))]
    options = [*common, f"--endpoint={drafted.url}", f"--baseline-endpoint={plain.url}", "--engine=dspark"]
    assert run("bench", *options)[0] == 0
    report = read_report(tmp_path / "out")
    assert (report.kind, report.baseline, [one.name for one in report.drafters]) == (
        "live",
        "baseline",
        ["baseline", "endpoint"],
    )
    for suite in report.suites:
        column = suite.columns["endpoint"]
        assert column.acceptance is not None and column.acceptance.questions == 2 and column.failed == 0
        assert column.speed[0].speedup is not None and column.speed[0].first_token is not None
        assert suite.columns["baseline"].acceptance is None and suite.not_lossless == []
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    assert run("bench", *options)[0] == 0
    assert (tmp_path / "out" / "samples.jsonl").read_bytes() == before


def test_a_dead_endpoint_is_told_before_anything_is_written(run: Run, pair: list[str], tmp_path: Path) -> None:
    common = [one for one in pair if not one.startswith(("--target", "--draft", "--speed-limit"))]
    code, _, error = run("bench", *common, "--endpoint=http://127.0.0.1:9")
    assert code == 2 and error.startswith("error: endpoint = ") and "cannot be reached" in error
    assert not (tmp_path / "out").exists()
