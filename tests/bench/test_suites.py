"""The journal of a suite's results: it goes on with its own, and refuses others' and what is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dspark.bench.compare import Question, Run, modes_for
from dspark.bench.suites import Journal, Record, prompts_sha256
from dspark.errors import DsparkError

MODES = modes_for([3])
SETTINGS = {"draft": "mine", "weights_sha256": "12"}


def record(question: str) -> Record:
    runs = {mode.name: Run(mode.name, question, [5, 6], "length", [], False) for mode in MODES}
    return Record("maths", question, False, runs)


@pytest.fixture
def written(tmp_path: Path) -> list[str]:
    """The lines of a journal of two records."""
    journal = Journal(tmp_path / "decode.jsonl", SETTINGS, MODES)
    for question in ("a", "b"):
        journal.add(record(question))
    return (tmp_path / "decode.jsonl").read_text().splitlines(keepends=True)


def test_it_goes_on_after_a_torn_line(tmp_path: Path, written: list[str]) -> None:
    path = tmp_path / "decode.jsonl"
    path.write_text("".join(written)[:-9])
    journal = Journal(path, SETTINGS, MODES)
    assert list(journal.records) == [("maths", "a")]
    assert path.read_text() == "".join(written[:2])
    journal.add(record("b"))
    assert path.read_text() == "".join(written)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({**SETTINGS, "weights_sha256": "34"}, "weights_sha256 = '34': .* holds results of '12'"),
        ({"draft": "mine"}, "weights_sha256 = None"),
        ({**SETTINGS, "more": 1}, "more = 1: .* holds results of None"),
    ],
)
def test_results_of_others_are_refused_by_field(
    tmp_path: Path, written: list[str], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(DsparkError, match=named):
        Journal(tmp_path / "decode.jsonl", settings, MODES)


@pytest.mark.parametrize("header", ["", '{"draft": "mi', "[]\n", "{}}\n", "[" * 9999 + "\n", "\x00\n"])
def test_a_damaged_header_is_no_other_setting(tmp_path: Path, header: str) -> None:
    path = tmp_path / "decode.jsonl"
    path.write_text(header)
    with pytest.raises(DsparkError, match=r"decode.jsonl:1.* is damaged; remove .*decode.jsonl"):
        Journal(path, SETTINGS, MODES)
    assert path.read_text() == header


@pytest.mark.parametrize("line", ["{}", "null", "", "[" * 9999, '{"suite": "a", "question": "b"}', "no plain run"])
def test_a_damaged_record_is_named(tmp_path: Path, written: list[str], line: str) -> None:
    path = tmp_path / "decode.jsonl"
    if line == "no plain run":
        line = json.dumps({**json.loads(written[1]), "runs": {}})
    text = "".join([*written[:2], line + "\n", written[2][:-9]])
    path.write_text(text)
    with pytest.raises(DsparkError, match=r"decode.jsonl:3.* is damaged"):
        Journal(path, SETTINGS, MODES)
    assert path.read_text() == text


def test_prompts_are_known_by_what_is_asked() -> None:
    def suites(**changes: Any) -> dict[str, list[Question]]:
        values: dict[str, Any] = {"id": "a", "text": "one", "ids": [1, 2], **changes}
        return {"maths": [Question(**values)], "code": []}

    known = prompts_sha256(suites())
    assert known == prompts_sha256(suites(ids=(1, 2)))
    for changes in ({"id": "b"}, {"text": "two"}, {"ids": [1, 3]}):
        assert prompts_sha256(suites(**changes)) != known
