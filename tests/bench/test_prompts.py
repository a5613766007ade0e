"""Suites come from a folder or a public data set, whole or not at all, and say where from."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dspark.bench.prompts import Missing, load_suites, suite_names
from dspark.data.prompts import read_prompts
from dspark.data.public import PLACEHOLDER, TABLE
from dspark.errors import DsparkError

try:
    import datasets
except ImportError:  # the package is optional; a list of rows is read in the same way
    datasets = None

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "4"},
    "math500": {"problem": "Find x.", "answer": "2"},
    "aime25": {"problem": "Find y.", "answer": "70", "id": "0"},
    "aime26": {"problem_idx": 1, "problem": "Find z.", "answer": 277},
    "humaneval": {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Double."""\n'},
    "mbpp": {"task_id": 2, "prompt": "Write a function f.", "code": "...", "test_list": ["assert f(1) == 2"]},
    "livecodebench": {"question_content": "Sum the numbers.", "starter_code": "", "private_test_cases": "..."},
    "mt-bench": {"category": "writing", "prompt": ["Write a post.", "Make it shorter."], "reference": []},
    "speed-bench-coding": {"category": "coding", "turns": ["Write a parser.", "Now test it."], "source": "x"},
    "swe-rebench": {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "It crashes."},
    "alpaca": {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"},
    "arena-hard": {"uid": "1", "category": "hard_prompt", "prompt": "Plan a trip."},
}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def numbered(path: Path, name: str, count: int) -> Path:
    return write(path / f"{name}.jsonl", *({"id": f"{name}/{i}", "turns": [f"Question {i}?"]} for i in range(count)))


def instead(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    if datasets is None:
        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    else:
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def hub(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Stands where the hub is: every data set holds these rows. Returns what was asked for, call by call."""
    asked: list[dict[str, Any]] = []

    def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
        asked.append({"path": path, "name": name, **options})
        return list(rows) if datasets is None else datasets.Dataset.from_list(list(rows))

    instead(monkeypatch, load_dataset)
    return asked


def no_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    instead(monkeypatch, load_dataset)


def test_the_table_names_every_suite_and_what_it_measures() -> None:
    assert suite_names() == [
        *("gsm8k", "math500", "aime25", "aime26", "humaneval", "mbpp", "livecodebench", "mt-bench"),
        *("speed-bench-coding", "swe-rebench", "alpaca", "arena-hard", "ruler-v2", "demo"),
    ]
    assert all(entry.measures and "\n" not in entry.measures for entry in TABLE.values())


def test_a_folder_gives_suites_in_the_order_asked_with_all_turns(tmp_path: Path) -> None:
    numbered(tmp_path, "gsm8k", 3)
    write(tmp_path / "mt-bench.jsonl", {"id": "mt-bench/0", "turns": ["One?", "Two?"]})
    suites, missing = load_suites(["mt-bench", "gsm8k"], tmp_path, limit=None, shuffle=None)
    assert [suite.name for suite in suites] == ["mt-bench", "gsm8k"] and not missing
    assert suites[0].prompts[0].turns == ("One?", "Two?")
    assert suites[1].source == "folder: gsm8k.jsonl (3 prompts)"


def test_anybodys_own_file_is_a_suite(tmp_path: Path) -> None:
    numbered(tmp_path, "my-own", 2)
    suites, _ = load_suites(["my-own"], tmp_path, limit=None, shuffle=None)
    assert [prompt.id for prompt in suites[0].prompts] == ["my-own/0", "my-own/1"]


def test_a_limit_says_of_how_many_and_more_than_there_are_is_fine(tmp_path: Path) -> None:
    numbered(tmp_path, "aime25", 30)
    few, _ = load_suites(["aime25"], tmp_path, limit=4, shuffle=None)
    assert few[0].source == "folder: aime25.jsonl (4 of 30 prompts)" and len(few[0].prompts) == 4
    many, _ = load_suites(["aime25"], tmp_path, limit=99, shuffle=None)
    assert many[0].source == "folder: aime25.jsonl (30 prompts)" and len(many[0].prompts) == 30


def test_a_seed_shuffles_as_it_does_everywhere_else(tmp_path: Path) -> None:
    path = numbered(tmp_path, "gsm8k", 60)
    (suite,), _ = load_suites(["gsm8k"], tmp_path, limit=9, shuffle=5)
    assert suite.prompts == read_prompts(path, limit=9, seed=5) != read_prompts(path, limit=9)
    (other,), _ = load_suites(["gsm8k"], tmp_path, limit=9, shuffle=6)
    assert other.prompts != suite.prompts


def test_an_unknown_name_is_told_the_nearest_or_all(tmp_path: Path) -> None:
    numbered(tmp_path, "my-own", 1)
    with pytest.raises(DsparkError, match=r"suite = 'gsm-8k': .*gsm8k"):
        load_suites(["gsm-8k"], None, limit=None, shuffle=None)
    with pytest.raises(DsparkError, match=r"suite = 'my-oven': .*my-own"):
        load_suites(["my-oven"], tmp_path, limit=None, shuffle=None)
    with pytest.raises(DsparkError, match=r"suite = 'zzz': .*gsm8k, .*ruler-v2, demo, my-own"):
        load_suites(["zzz"], tmp_path, limit=None, shuffle=None)
    with pytest.raises(DsparkError, match="suite = "):
        load_suites([f"../{tmp_path.name}/my-own"], tmp_path, limit=None, shuffle=None)


@pytest.mark.parametrize(
    ("names", "limit", "named"),
    [([], None, "suites"), (["gsm8k", "gsm8k"], None, "suites"), (["gsm8k"], 0, "limit = 0")],
)
def test_what_was_asked_for_must_make_sense(tmp_path: Path, names: list[str], limit: int | None, named: str) -> None:
    numbered(tmp_path, "gsm8k", 1)
    with pytest.raises(DsparkError, match=named):
        load_suites(names, tmp_path, limit=limit, shuffle=None)


def test_no_folder_or_one_without_suites_is_an_error(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DsparkError, match="data = "):
            load_suites(["gsm8k"], folder, limit=None, shuffle=None)


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([], r"gsm8k\.jsonl.*no prompt"),
        ([{"id": "a", "turns": ["x"]}, "{torn"], r"gsm8k\.jsonl:2.*not JSON"),
        ([{"id": "a", "turns": ["x"]}, {"id": "b", "turns": []}], r"gsm8k\.jsonl:2: turns"),
        ([{"id": "a", "turns": ["x"]}, "", {"id": "a", "turns": ["x"]}], r"gsm8k\.jsonl:3: id = 'a': .*line 1"),
        ([{"id": "a", "turns": ["x"]}, {"id": "a", "turns": ["y"]}], r"gsm8k\.jsonl:2: id = 'a'"),
    ],
)
def test_a_bad_file_is_an_error_even_past_the_limit(tmp_path: Path, lines: list[object], named: str) -> None:
    write(tmp_path / "gsm8k.jsonl", *lines)
    with pytest.raises(DsparkError, match=named):
        load_suites(["gsm8k"], tmp_path, limit=1, shuffle=None)


@pytest.mark.parametrize("name", [name for name in suite_names() if name not in ("ruler-v2", "demo")])
def test_a_row_of_each_public_set_becomes_a_prompt(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = hub(monkeypatch, ROWS[name], ROWS[name])
    (suite,), missing = load_suites([name], None, limit=None, shuffle=None)
    published = TABLE[name].published
    assert published is not None and not missing
    assert suite.source == f"{published} (2 prompts)"
    assert [prompt.id for prompt in suite.prompts] == [f"{name}/0", f"{name}/1"]
    text = "\n".join(suite.prompts[0].turns)
    question = next(iter(set(ROWS[name]) & {"question", "problem", "question_content", "problem_statement"}), None)
    assert (ROWS[name][question] if question else "") in text and "{" not in text.replace("\\boxed{}", "")
    assert asked[0]["split"] == published.split
    if published.files:
        assert asked[0]["path"] == "json" and len(asked[0]["data_files"]) == len(published.files)
        assert all(one.startswith(f"hf://datasets/{published.repo}@") for one in asked[0]["data_files"])
    else:
        assert (asked[0]["path"], asked[0]["name"]) == (published.repo, published.config)


def test_a_source_says_what_was_read_and_at_which_commit() -> None:
    assert str(TABLE["gsm8k"].published) == "openai/gsm8k main test"
    assert str(TABLE["mt-bench"].published) == "HuggingFaceH4/mt_bench_prompts@e3a795c train"
    lite = str(TABLE["livecodebench"].published)
    assert lite == "livecodebench/code_generation_lite@0fe84c3 test.jsonl and 5 more files"


def test_recipes_keep_what_the_answer_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str, row: dict[str, Any]) -> tuple[str, ...]:
        hub(monkeypatch, row)
        (suite,), _ = load_suites([name], None, limit=None, shuffle=None)
        return suite.prompts[0].turns

    assert "assert f(1) == 2" in asked("mbpp", ROWS["mbpp"])[0]
    assert asked("mt-bench", ROWS["mt-bench"]) == ("Write a post.", "Make it shorter.")
    assert asked("alpaca", ROWS["alpaca"]) == ("Translate.\n\nGuten Tag",)
    assert asked("alpaca", {**ROWS["alpaca"], "input": ""}) == ("Translate.",)
    assert "standard input" in asked("livecodebench", ROWS["livecodebench"])[0]
    assert "class Solution" in asked("livecodebench", {**ROWS["livecodebench"], "starter_code": "class Solution:"})[0]


def test_only_the_coding_rows_of_speed_bench_belong_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["speed-bench-coding"]
    hub(monkeypatch, {**row, "category": "math"}, row, {**row, "category": "rag"}, row)
    (suite,), _ = load_suites(["speed-bench-coding"], None, limit=None, shuffle=None)
    assert [prompt.id for prompt in suite.prompts] == ["speed-bench-coding/0", "speed-bench-coding/1"]


def test_placeholders_are_no_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["speed-bench-coding"]
    hub(monkeypatch, row, {**row, "turns": [f"{PLACEHOLDER} FROM THE SOURCE"]})
    found, missing = load_suites(["speed-bench-coding"], None, limit=1, shuffle=None)
    assert not found and missing[0].reason.startswith("1 of 2 rows of nvidia/SPEED-Bench qualitative test are placeh")


def test_the_folder_comes_before_the_hub_which_gives_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered(tmp_path, "gsm8k", 2)
    asked = hub(monkeypatch, ROWS["math500"])
    suites, missing = load_suites(["gsm8k", "math500"], tmp_path, limit=None, shuffle=None)
    assert [suite.source.split(" (")[0] for suite in suites] == ["folder: gsm8k.jsonl", "HuggingFaceH4/MATH-500 test"]
    assert len(asked) == 1 and not missing


def test_without_a_network_a_suite_is_missing_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch, ConnectionError("Couldn't reach the Hub\nand a long trace"))
    numbered(tmp_path, "gsm8k", 2)
    found, missing = load_suites(["humaneval", "gsm8k"], tmp_path, limit=None, shuffle=None)
    assert [suite.name for suite in found] == ["gsm8k"]
    (only,) = missing
    assert isinstance(only, Missing) and only.name == "humaneval" and "\n" not in only.reason
    assert only.reason.startswith("the folder holds no humaneval.jsonl, and openai/openai_humaneval test cannot be had")
    assert "Couldn't reach the Hub" in only.reason and "give humaneval.jsonl" in only.reason


def test_a_set_that_is_gone_or_has_changed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason() -> str:
        found, missing = load_suites(["gsm8k"], None, limit=None, shuffle=None)
        assert not found
        return missing[0].reason

    no_hub(monkeypatch, FileNotFoundError("Dataset 'openai/gsm8k' doesn't exist"))
    assert "doesn't exist" in reason()
    hub(monkeypatch, {"text": "How many?"})
    assert "row 0 of openai/gsm8k main test" in reason() and "columns are text" in reason()
    hub(monkeypatch)
    assert "holds no row" in reason()


def test_a_blank_prompt_is_not_left_out_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ROWS["arena-hard"], {**ROWS["arena-hard"], "prompt": " "})
    found, missing = load_suites(["arena-hard"], None, limit=None, shuffle=None)
    assert not found and missing[0].reason.startswith("row 1 of lmarena-ai/arena-hard-auto@15f3746 data/aren")


def test_without_the_package_a_suite_is_missing_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    found, missing = load_suites(["gsm8k"], None, limit=None, shuffle=None)
    assert not found and missing[0].reason.endswith("-m pip install datasets")


def test_the_shipped_prompts_are_always_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_hub(monkeypatch, ConnectionError("no network"))
    (found,), missing = load_suites(["demo"], None, limit=4, shuffle=None)
    assert missing == [] and found.source == "shipped with dspark (4 of 15 prompts)"


def test_ruler_has_no_data_set_but_may_be_a_file(tmp_path: Path) -> None:
    _, missing = load_suites(["ruler-v2"], None, limit=None, shuffle=None)
    assert missing[0].name == "ruler-v2" and "--long-tokens" in missing[0].reason
    numbered(tmp_path, "ruler-v2", 1)
    found, missing = load_suites(["ruler-v2"], tmp_path, limit=None, shuffle=None)
    assert found[0].source == "folder: ruler-v2.jsonl (1 prompt)" and not missing
