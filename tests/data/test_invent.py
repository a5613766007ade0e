from __future__ import annotations

import pytest

from dspark.data.chat import ChatRenderer
from dspark.data.invent import _distinct, invent, read_openings, write_prompts
from dspark.data.prompts import prompt_hash, read_prompts
from dspark.decoding.engine import Engine
from dspark.errors import DsparkError

OPENINGS = ["Write a", "How can"]


def _invent(target, count=200, openings=OPENINGS, batch=16, **more):
    engine = Engine(target, None, max_batch=batch)
    return invent(engine, ChatRenderer(target.tokenizer), openings, count, max_tokens=24, quiet=True, **more)


def test_prompts_start_as_asked_and_are_distinct(tiny_target):
    prompts = _invent(tiny_target)
    assert 2 < len(prompts) < 200  # some of a random model's turns end by themselves and are text, not all
    assert {text.split()[0] for (text,) in (one.turns for one in prompts)} <= {"Write", "How"}
    hashes = [prompt_hash(one.turns[0]) for one in prompts]
    assert len(set(hashes)) == len(hashes)
    ids = [one.id for one in prompts]
    assert len(set(ids)) == len(ids) and all(one.startswith("invented/") for one in ids)
    assert not any("<|im_end|>" in one.turns[0] for one in prompts)


def test_the_result_depends_on_the_seed_and_not_on_the_batch(tiny_target):
    assert _invent(tiny_target, count=40, batch=1) == _invent(tiny_target, count=40, batch=7)
    assert _invent(tiny_target) != _invent(tiny_target, seed=1)


def test_what_did_not_end_by_itself_is_left_out(tiny_target):
    engine = Engine(tiny_target, None, max_batch=4)
    one_token = invent(engine, ChatRenderer(tiny_target.tokenizer), OPENINGS, 12, max_tokens=1, quiet=True)
    assert {one.turns[0] for one in one_token} <= set(OPENINGS)


def test_written_prompts_are_read_back(tiny_target, tmp_path):
    prompts = _invent(tiny_target)
    write_prompts(tmp_path / "deep" / "prompts.jsonl", prompts)
    assert read_prompts(tmp_path / "deep" / "prompts.jsonl") == prompts


def test_openings_of_the_package_and_of_a_file(tmp_path):
    own = read_openings()
    assert len(own) > 50 and len(set(own)) == len(own)
    assert any("\n" in opening for opening in own) and not any(opening.startswith("#") for opening in own)
    path = tmp_path / "openings.txt"
    path.write_text("# remark\nGive me\\na list\n\n")
    assert read_openings(path) == ["Give me\na list"]


@pytest.mark.parametrize("content", [None, "", "# only a remark\n"])
def test_openings_that_are_none(tmp_path, content):
    path = tmp_path / "openings.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DsparkError, match="openings"):
        read_openings(path)


def test_two_sets_that_differ_in_case_can_be_read_together(tmp_path):
    for number, texts in enumerate((["What is AI?", "what is  AI?", "Hi"], ["what is AI?", "Hi"])):
        prompts = _distinct(iter(texts))
        assert len(prompts) == 2
        write_prompts(tmp_path / f"{number}.jsonl", prompts)
    assert [one.turns[0] for one in read_prompts(tmp_path)] == ["What is AI?", "Hi", "what is AI?"]


def test_openings_that_are_no_utf8(tmp_path):
    (tmp_path / "openings.txt").write_bytes("Erklär mir".encode("latin-1"))
    with pytest.raises(DsparkError, match=r"openings = .*is not UTF-8 text"):
        read_openings(tmp_path / "openings.txt")


@pytest.mark.parametrize(("field", "value"), [("count", 0), ("temperature", 0.0)])
def test_settings_out_of_range(tiny_target, field, value):
    with pytest.raises(DsparkError, match=field):
        _invent(tiny_target, **{"count": 4, field: value})
