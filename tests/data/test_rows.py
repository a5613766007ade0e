from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dspark.data.rows import (
    Row,
    RowWriter,
    detect_loop,
    group_rows,
    notes_path,
    pack,
    read_rows,
    row_id,
    row_notes,
    split_held_out,
    unique_rows,
    write_rows,
)
from dspark.errors import DsparkError


def _row(name: str, prompt: int = 3, answer: int = 2, finish: str = "stop", source: str | None = None) -> Row:
    return Row(
        id=name,
        source=source or f"set/{name}",
        prompt_ids=list(range(10, 10 + prompt)),
        answer_ids=list(range(50, 50 + answer)),
        finish=finish,
    )


def test_write_and_read_back(tmp_path):
    rows = [_row("a"), _row("b", finish="length")]
    write_rows(tmp_path / "deep" / "rows.jsonl", rows)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize("kept", [0, 1, -2, -1])
def test_a_torn_last_line_is_cut_off_on_resume(tmp_path, kept):
    """kept: bytes of the second line that reached the disk (-1: all but the line break)."""
    path = tmp_path / "rows.jsonl"
    first, second = (row.model_dump_json().encode() + b"\n" for row in (_row("a"), _row("b")))
    path.write_bytes(first + second[:kept])
    with RowWriter(path) as writer:
        assert list(writer.existing) == ["a"]
        writer.append(_row("b"))
    assert [row.id for row in read_rows(path)] == ["a", "b"]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = _row("a").model_dump_json()
    path.write_text(good + "\n" + good[:20] + "\n" + good + "\n")
    for opened in (read_rows, RowWriter):
        with pytest.raises(DsparkError, match=r"rows\.jsonl:2"):
            opened(path)


def test_rows_with_no_or_only_supervised_tokens_are_refused(tmp_path):
    for row, said in ((_row("a", answer=0), "no token"), (_row("a", prompt=0), "every token")):
        with pytest.raises(DsparkError, match=said):
            write_rows(tmp_path / "rows.jsonl", [row])
        with pytest.raises(DsparkError, match=said):
            pack([row])
        (tmp_path / "rows.jsonl").write_text(row.model_dump_json() + "\n")
        with pytest.raises(DsparkError, match=said):
            read_rows(tmp_path / "rows.jsonl")


def test_reading_errors(tmp_path):
    with pytest.raises(DsparkError, match="no such file"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DsparkError, match="holds no row"):
        read_rows(tmp_path / "rows.jsonl")
    write_rows(tmp_path / "rows.jsonl", [_row("a"), _row("a")])
    with pytest.raises(DsparkError, match="twice"):
        read_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text(_row("a").model_dump_json().replace('"stop"', '"eos"') + "\n")
    with pytest.raises(DsparkError, match=r"rows\.jsonl:1: finish = 'eos'"):
        read_rows(tmp_path / "rows.jsonl")


def test_row_id_depends_on_content_alone():
    settings = {"temperature": 0.7, "seed": 1}
    assert row_id([1, 2], settings) == row_id((1, 2), {"seed": 1, "temperature": 0.7})
    others = {row_id([1, 2, 3], settings), row_id([12], settings), row_id([1, 2], {**settings, "seed": 2})}
    assert len(others | {row_id([1, 2], settings)}) == 4


def test_packing_restarts_everything_at_a_document():
    packed = pack([_row("a", 2, 3), _row("b", 1, 1), _row("c", 3, 2)])
    assert packed.ids.tolist() == [10, 11, 50, 51, 52, 10, 50, 10, 11, 12, 50, 51]
    assert packed.loss_mask.tolist() == [bool(i) for i in (0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 1)]
    assert packed.document_ids.tolist() == [0] * 5 + [1] * 2 + [2] * 5
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3, 4]
    assert packed.lengths.tolist() == [5, 2, 5]
    assert packed.ids.dtype == packed.positions.dtype == torch.int64
    with pytest.raises(DsparkError):
        pack([])


def test_groups_keep_every_row_once_and_the_budget():
    rows = [_row(str(i), 2, 1 + i % 4) for i in range(9)] + [_row("long", 30, 30)]
    groups = list(group_rows(rows, 12))
    assert [row.id for group in groups for row in group] == [row.id for row in rows]
    assert all(sum(len(row.ids) for row in group) <= 12 or len(group) == 1 for group in groups)
    assert max(len(group) for group in groups) > 1


def test_held_out_keeps_a_prompt_together_and_never_moves_it():
    rows = [_row(f"{i}-{turn}", source=f"p/{i}") for i in range(300) for turn in range(2)]
    train, held = split_held_out(rows, 0.1, seed=3)
    assert {row.source for row in train}.isdisjoint(row.source for row in held)
    assert len(train) + len(held) == 600 and 30 <= len(held) <= 96
    assert split_held_out(rows[:100], 0.1, seed=3)[1] == [row for row in held if row in rows[:100]]
    assert {r.id for r in held} != {r.id for r in split_held_out(rows, 0.1, seed=4)[1]}
    assert split_held_out(rows, 0.0) == (rows, [])
    few_train, few_held = split_held_out(rows[:4], 1e-9)
    assert len(few_train) == len(few_held) == 2
    with pytest.raises(DsparkError):
        split_held_out(rows, 1.0)


@given(
    head=st.lists(st.integers(0, 5), max_size=20),
    gram=st.lists(st.integers(0, 5), min_size=1, max_size=16),
    extra=st.integers(0, 15),
)
def test_loops_of_up_to_16_tokens_are_found(head, gram, extra):
    assert detect_loop(head + gram * 4 + gram[: extra % len(gram)])


def test_what_is_no_loop():
    assert not detect_loop([])
    assert not detect_loop([1, 2, 3] * 3)
    assert not detect_loop([7] * 3)
    assert not detect_loop([1] * 8 + [2])  # repeated, but not up to the end
    assert not detect_loop(list(range(17)) * 5)  # the repeated part is too long to count
    assert not detect_loop([1, 2, 3, 4] * 3 + [9, 2, 3, 4])


def test_a_row_is_dropped_when_prompt_and_answer_are_both_known():
    first = _row("a")
    other_prompt = _row("b", prompt=4)
    other_answer = _row("c", answer=3)
    shifted = first.model_copy(update={"id": "d", "prompt_ids": first.ids[:-1], "answer_ids": first.ids[-1:]})
    again = first.model_copy(update={"id": "e", "source": "else/0", "temperature": 0.5, "finish": "length"})
    rows = [first, other_prompt, again, other_answer, shifted]
    assert unique_rows(rows) == [first, other_prompt, other_answer, shifted]
    assert unique_rows([again, first]) == [again]


@pytest.mark.parametrize("value", ["", "0" * 15, "G" * 16, "A" * 16, 7])
def test_a_prompt_hash_is_16_hex_digits(tmp_path, value):
    line = json.loads(_row("a").model_dump_json())
    (tmp_path / "rows.jsonl").write_text(json.dumps({**line, "prompt_hash": "0123456789abcdef"}) + "\n")
    assert read_rows(tmp_path / "rows.jsonl")[0].prompt_hash == "0123456789abcdef"
    (tmp_path / "rows.jsonl").write_text(json.dumps({**line, "prompt_hash": value}) + "\n")
    with pytest.raises(DsparkError, match=r"rows\.jsonl:1: prompt_hash"):
        read_rows(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"answer_ids": [3, 2**63]}, "token id"),
        ({"prompt_ids": [-1, 3]}, "token id"),
    ],
)
def test_numbers_that_no_row_can_have_are_refused(tmp_path, change, field):
    line = {"id": "a", "source": "s", "prompt_ids": [1], "answer_ids": [2], "finish": "stop", **change}
    (tmp_path / "rows.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(DsparkError, match=rf"rows\.jsonl:1: {field}"):
        read_rows(tmp_path / "rows.jsonl")


def test_a_file_of_prompts_is_no_file_of_rows(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "turns": ["Hello"]}\n')
    with pytest.raises(DsparkError, match=r"prompts\.jsonl:1: source = None: is missing; .* `dspark regenerate`"):
        read_rows(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 99999, '{"a": ' * 99999, b"\xff"])
def test_notes_that_are_no_json_object_are_named(tmp_path, text):
    notes_path(tmp_path / "rows.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DsparkError, match=r"rows\.jsonl\.meta\.json.*under another name"):
        row_notes(tmp_path / "rows.jsonl")
