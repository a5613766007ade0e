"""Whether the asked prompts are said to be in the training set, or not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from dspark.bench.compare import Question
from dspark.bench.overlap import NO_HASHES, UNKNOWN, find_overlap, rows_overlap, unseen_rows
from dspark.checkpoints.native import PROMPTS_FILE
from dspark.data.prompts import prompt_hash, write_prompt_hashes
from dspark.data.rows import Row
from dspark.errors import DsparkError

QUESTIONS = [Question(f"q/{i}", f"What is {i}?", [1]) for i in range(40)]


def test_no_file_is_unknown_not_zero(tmp_path: Path) -> None:
    overlap = find_overlap(tmp_path, QUESTIONS)
    assert str(overlap) == UNKNOWN and not overlap.warning
    assert overlap.to_json() == {"asked": 40, "in_training_set": None, "ids": None}


def test_none_of_them(tmp_path: Path) -> None:
    write_prompt_hashes(tmp_path / PROMPTS_FILE, [prompt_hash("something else")])
    overlap = find_overlap(tmp_path, QUESTIONS)
    assert str(overlap) == "0 of 40 prompts are in the draft's training set" and not overlap.warning


def test_some_of_them_are_named_aloud(tmp_path: Path) -> None:
    write_prompt_hashes(tmp_path / PROMPTS_FILE, [prompt_hash(f" what IS {i}?\n") for i in range(7)])
    overlap = find_overlap(tmp_path, QUESTIONS)
    assert overlap.warning and overlap.to_json()["in_training_set"] == 7
    assert str(overlap).startswith("WARNING: 7 of 40 prompts are in the draft's training set (q/0, q/1, q/2, q/3, q/4 ")
    assert "and 2 more" in str(overlap)


def row(source: str, turn: int, text: str | None) -> Row:
    found = None if text is None else prompt_hash(text)
    return Row(
        id=f"{source}/{turn}",
        source=source,
        turn=turn,
        prompt_ids=[1],
        answer_ids=[2],
        finish="stop",
        prompt_hash=found,
    )


ROWS = [row("talk/0", 0, "Hi"), row("talk/0", 1, "Again"), row("q/0", 0, "What?"), row("q/1", 0, "Why?")]


def test_a_prompt_of_rows_is_trained_on_when_any_of_its_turns_is(tmp_path: Path) -> None:
    assert str(rows_overlap(tmp_path, ROWS)) == UNKNOWN
    write_prompt_hashes(tmp_path / PROMPTS_FILE, [prompt_hash("again"), prompt_hash("why?")])
    overlap = rows_overlap(tmp_path, ROWS)
    assert overlap.to_json() == {"asked": 3, "in_training_set": 2, "ids": ["talk/0", "q/1"]}
    assert str(overlap).startswith("WARNING: 2 of 3 prompts") and unseen_rows(tmp_path, ROWS) == [ROWS[2]]
    assert str(rows_overlap(tmp_path, [ROWS[2]])) == "0 of 1 prompts are in the draft's training set"


def test_rows_that_cannot_be_told_apart_are_not_called_unseen(tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match=r"unseen = .*does not list"):
        unseen_rows(tmp_path, ROWS)
    write_prompt_hashes(tmp_path / PROMPTS_FILE, [prompt_hash("what?")])
    with pytest.raises(DsparkError, match=r"unseen = .*carry no hash"):
        unseen_rows(tmp_path, [*ROWS, row("q/2", 0, None)])
    assert str(rows_overlap(tmp_path, [*ROWS, row("q/2", 0, None)])) == NO_HASHES
    with pytest.raises(DsparkError, match=r"unseen = .*every prompt"):
        unseen_rows(tmp_path, ROWS[2:3])


@pytest.mark.parametrize("text", ["no hash\n", ""])
def test_a_broken_file_is_an_error_and_no_clean_bill(tmp_path: Path, text: str) -> None:
    (tmp_path / PROMPTS_FILE).write_text(text)
    with pytest.raises(DsparkError, match=PROMPTS_FILE):
        find_overlap(tmp_path, QUESTIONS)
