from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark.data.prompts import (
    Prompt,
    demo_prompts,
    prompt_hash,
    read_prompt_hashes,
    read_prompts,
    shard_prompts,
    write_prompt_hashes,
)
from dspark.errors import DsparkError


def _write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_reads_turns_in_order(tmp_path):
    path = _write(tmp_path / "p.jsonl", {"id": "a", "turns": ["one", "two"]}, "", {"id": "b", "turns": ["three"]})
    assert [(p.id, p.turns) for p in read_prompts(path)] == [("a", ("one", "two")), ("b", ("three",))]


def test_folder_is_read_by_name_and_limit_cuts(tmp_path):
    _write(tmp_path / "2.jsonl", {"id": "late", "turns": ["x"]})
    _write(tmp_path / "1.jsonl", {"id": "early", "turns": ["x"]}, {"id": "mid", "turns": ["x"]})
    (tmp_path / "notes.txt").write_text("not prompts")
    assert [p.id for p in read_prompts(tmp_path)] == ["early", "mid", "late"]
    assert [p.id for p in read_prompts(tmp_path, limit=2)] == ["early", "mid"]


def test_a_seed_gives_a_stable_shuffle_whose_every_beginning_is_a_mixture(tmp_path):
    path = _write(tmp_path / "p.jsonl", *({"id": f"p{i:03d}", "turns": ["x"]} for i in range(200)))
    chosen = [p.id for p in read_prompts(path, limit=20, seed=1)]
    assert chosen != sorted(chosen) and len(set(chosen)) == 20
    assert [p.id for p in read_prompts(path, limit=40, seed=1)][:20] == chosen
    assert sorted(p.id for p in read_prompts(path, seed=1)) == sorted(p.id for p in read_prompts(path))
    assert chosen == [p.id for p in read_prompts(path, limit=20, seed=1)]
    assert chosen != [p.id for p in read_prompts(path, limit=20, seed=2)]
    assert max(chosen) > "p020"


@pytest.mark.parametrize(
    ("line", "field", "said"),
    [
        ("{not json", "p.jsonl:2", "not JSON"),
        ("[1]", "p.jsonl:2", "must be an object"),
        ({"id": "x"}, "p.jsonl:2: turns", "at least one text"),
        ({"id": "x", "turns": []}, "p.jsonl:2: turns", "at least one text"),
        ({"id": "x", "turns": "hi"}, "p.jsonl:2: turns", "'hi'"),
        ({"id": "x", "turns": ["ok", "  "]}, "p.jsonl:2: turns[1]", "not blank"),
        ({"id": "x", "turns": [3]}, "p.jsonl:2: turns[0]", "3"),
        ({"turns": ["hi"]}, "p.jsonl:2: id", "non-empty"),
        ({"id": "x", "turns": ["hi"], "answer": "4"}, "p.jsonl:2: answer", "unknown field"),
        ({"id": "first", "turns": ["ho"]}, "p.jsonl:2: id", "p.jsonl:1"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, field, said):
    path = _write(tmp_path / "p.jsonl", {"id": "first", "turns": ["hi"]}, line)
    with pytest.raises(DsparkError) as caught:
        read_prompts(path)
    assert caught.value.field.endswith(field)
    assert said in str(caught.value)


def test_an_id_for_two_prompts_is_refused_and_a_prompt_in_two_files_is_read_once(tmp_path):
    _write(tmp_path / "a.jsonl", {"id": "same", "turns": ["hi"]})
    _write(tmp_path / "b.jsonl", {"id": "same", "turns": ["hi"]}, {"id": "more", "turns": ["ho"]})
    assert [one.id for one in read_prompts(tmp_path)] == ["same", "more"]
    _write(tmp_path / "c.jsonl", {"id": "same", "turns": ["hi", "again"]})
    with pytest.raises(DsparkError, match=r"already used at .*a\.jsonl:1"):
        read_prompts(tmp_path)


def test_nothing_to_read_is_an_error(tmp_path):
    for path in (tmp_path / "missing.jsonl", tmp_path, _write(tmp_path / "empty.jsonl")):
        with pytest.raises(DsparkError):
            read_prompts(path)
    with pytest.raises(DsparkError, match="limit"):
        read_prompts(tmp_path, limit=0)
    with pytest.raises(DsparkError, match=r"known are .*gsm8k, gsm8k-train"):
        read_prompts("hub:nothing-like-it")


def test_not_utf8_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"id": "a", "turns": ["\xff"]}\n')
    with pytest.raises(DsparkError, match="UTF-8"):
        read_prompts(tmp_path / "p.jsonl")


def test_demo_prompts_cover_three_kinds():
    prompts = demo_prompts()
    assert [p.id for p in prompts] == [f"{kind}/{i}" for kind in ("maths", "code", "chat") for i in range(5)]
    assert len({p.turns for p in prompts}) == 15


@pytest.mark.parametrize(
    "line",
    ['{"id": "a", "turns": ["\\ud800"]}', '{"id": "\\ud800", "turns": ["a"]}', "1" * 5000, "[" * 100_000],
    ids=["turn", "id", "digits", "brackets"],
)
def test_what_no_tokenizer_or_parser_takes_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DsparkError, match=r"prompts\.jsonl:1"):
        read_prompts(path)


def test_prompt_hash_sees_through_case_space_and_unicode_form():
    plain = prompt_hash("Straße in the Café?")
    assert len(plain) == 16 and int(plain, 16) >= 0
    assert plain == prompt_hash("  STRASSE in\n\tthe  Cafe\u0301? ") == prompt_hash("straße\u00a0in the caf\u00e9?")
    assert plain != prompt_hash("Straße in the Cafe?")
    assert plain != prompt_hash("Straße in the Café")


def test_shards_are_disjoint_whole_and_decided_by_the_id_alone():
    prompts = [Prompt(f"p/{i}", ("x",)) for i in range(300)]
    parts = [shard_prompts(prompts, index, 3) for index in range(3)]
    assert sorted((p for part in parts for p in part), key=prompts.index) == prompts
    assert min(map(len, parts)) > 70
    assert shard_prompts(prompts[::-1], 1, 3) == parts[1][::-1]
    assert shard_prompts(prompts[:100], 1, 3) == [p for p in parts[1] if p in prompts[:100]]
    assert shard_prompts(prompts, 0, 1) == prompts
    for index, count in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(DsparkError, match="shard"):
            shard_prompts(prompts, index, count)


def test_prompt_hashes_are_written_once_each_sorted_and_read_back(tmp_path):
    hashes = [prompt_hash(text) for text in ("b", "a", "c", "A ")]
    write_prompt_hashes(tmp_path / "deep" / "seen.txt", iter(hashes))
    assert (tmp_path / "deep" / "seen.txt").read_text().splitlines() == sorted(set(hashes))
    assert read_prompt_hashes(tmp_path / "deep" / "seen.txt") == frozenset(hashes) and len(set(hashes)) == 3
    with pytest.raises(DsparkError, match="prompt hash"):
        write_prompt_hashes(tmp_path / "deep" / "seen.txt", ["0" * 16, "a text"])
    assert read_prompt_hashes(tmp_path / "deep" / "seen.txt") == frozenset(hashes), "the old file is still there"
    assert sorted(file.name for file in (tmp_path / "deep").iterdir()) == ["seen.txt"]


def test_no_prompt_hashes_are_not_a_list_of_them(tmp_path):
    path = tmp_path / "none.txt"
    with pytest.raises(DsparkError, match="prompt hashes"):
        write_prompt_hashes(path, [])
    path.touch()
    with pytest.raises(DsparkError, match=r"none\.txt.*is empty"):
        read_prompt_hashes(path)


@pytest.mark.parametrize("line", [b"", b"0" * 15, b"0" * 17, b"A" * 16, b"\xff" * 16, b" " + b"0" * 16])
def test_a_bad_line_of_prompt_hashes_is_named(tmp_path, line):
    path = tmp_path / "seen.txt"
    path.write_bytes(b"0123456789abcdef\n" + line + b"\n")
    with pytest.raises(DsparkError, match=r"seen\.txt:2"):
        read_prompt_hashes(path)
    with pytest.raises(DsparkError, match="no such file"):
        read_prompt_hashes(tmp_path / "missing.txt")
