from __future__ import annotations

import hashlib
import json
import re

import pytest

from dspark.data.card import data_card, distinct_share, quantile
from dspark.data.notes import Part
from dspark.data.prompts import Prompt
from dspark.data.regenerate import RegenerateSettings, regenerate
from dspark.data.rows import read_rows, unique_rows, write_rows
from dspark.decoding.engine import Engine
from dspark.errors import DsparkError

PROMPTS = [Prompt(f"maths/{i}", (f"Question {i}?",)) for i in range(8)] + [
    Prompt("chat/0", ("Hi", "Again")),
    Prompt("chat/1", ("Hi",)),
    Prompt("long/0", ("x" * 300,)),
]


@pytest.fixture(scope="module")
def files(tiny_target, tmp_path_factory):
    """Greedy and sampled rows of the same prompts, written by a real target."""
    folder = tmp_path_factory.mktemp("rows")
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps({"id": p.id, "turns": p.turns}) + "\n" for p in PROMPTS))
    for name, temperatures in (("greedy", (0.0,)), ("sampled", (0.5, 1.0))):
        settings = RegenerateSettings(temperatures, top_p=0.9, seed=4, max_tokens=12)
        engine = Engine(tiny_target, None, max_batch=4)
        out = folder / f"{name}.jsonl"
        part = Part(prompts=source.name)
        regenerate(engine, tiny_target, PROMPTS, out, settings, quiet=True, prompt_files=[source], part=part)
    return [folder / "greedy.jsonl", folder / "sampled.jsonl"]


def _line(card: str, first: str) -> list[str]:
    (line,) = [line for line in card.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_card_says_what_the_files_hold(files):
    card = data_card(files)
    rows = [row for file in files for row in read_rows(file)]
    assert card == data_card(files) and str(files[0].parent) not in card
    maths = [row for row in rows if row.source.startswith("maths/")]
    cells = _line(card, "maths")
    assert cells[1:5] == [
        str(len({row.source for row in maths})),
        str(len(maths)),
        str(sum(len(row.prompt_ids) for row in maths)),
        str(sum(len(row.answer_ids) for row in maths)),
    ]
    lengths = sorted(len(row.answer_ids) for row in maths)
    p50, p90, longest = map(int, cells[5].split(" / "))
    assert longest == lengths[-1]
    for value, share in ((p50, 0.5), (p90, 0.9)):
        assert sum(one <= value for one in lengths) >= share * len(lengths) > sum(one < value for one in lengths)
    assert cells[6] == f"{sum(r.finish == 'stop' for r in maths)} / {sum(r.finish == 'length' for r in maths)}"
    assert _line(card, "long") == ["long", "0", "0", "0", "0", "-", "0 / 0", "0", "-", "-", "0", "2", "0"]
    assert _line(card, "all")[2] == str(len(rows))
    for name, temperature in (("0 (greedy)", 0.0), ("0.5", 0.5), ("1", 1.0)):
        mine = [row for row in rows if row.temperature == temperature]
        assert _line(card, name)[1:3] == [str(len(mine)), str(sum(len(row.answer_ids) for row in mine))]


def test_a_card_says_how_the_files_were_made(files):
    card = data_card(files)
    notes = json.loads((files[1].parent / "sampled.jsonl.meta.json").read_text())
    assert "Answers written by `tiny` itself" in card
    assert notes["template_sha256"] in card and notes["versions"]["torch"] in card
    assert f"prompts `prompts.jsonl`, sha256 `{notes['prompt_files']['prompts.jsonl']}`" in card
    for file in files:
        assert hashlib.sha256(file.read_bytes()).hexdigest() in card
    assert "- greedy; answers of at most 12 tokens" in card
    assert "- temperature 0.5 or 1, drawn by prompt; top_k 0, top_p 0.9, min_p 0.0, seed 4; answers of" in card
    assert card.count("- asked: all prompts of prompts.jsonl\n") == 2


def _copy(files, tmp_path, **changes):
    """The greedy rows with their notes changed; a change to `...` takes the name away."""
    out, notes = tmp_path / "copy.jsonl", tmp_path / "copy.jsonl.meta.json"
    out.write_bytes(files[0].read_bytes())
    found = {**json.loads((files[0].parent / "greedy.jsonl.meta.json").read_text()), **changes}
    notes.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))
    return out


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"asked": [{"prompts": "p.jsonl", "shard": "0/2"}]}, "asked: part 0/2 of the prompts of p.jsonl"),
        ({"asked": [{"prompts": "p.jsonl", "limit": 1200}]}, "asked: the first 1,200 prompts of p.jsonl"),
        (
            {"asked": [{"prompts": "p.jsonl", "limit": 9, "shuffle": 3, "shard": "1/2"}, {"prompts": "hub:gsm8k"}]},
            "asked: part 1/2 of the first 9 prompts of p.jsonl in the order of seed 3; all prompts of hub:gsm8k",
        ),
        ({"asked": ...}, "asked: which part of the prompts is not recorded"),
        (
            {"asked": [{"prompts": "p.jsonl"}], "complete": False},
            "asked: all prompts of p.jsonl; the last run stopped before all of them were asked",
        ),
    ],
)
def test_a_card_says_which_part_of_the_prompts_was_asked(files, tmp_path, changes, line):
    assert f"- {line}\n" in data_card([_copy(files, tmp_path, **changes)])


def test_only_files_with_notes_are_said_to_be_the_targets_own(files, tmp_path):
    by_hand = tmp_path / "by_hand.jsonl"
    write_rows(by_hand, read_rows(files[1])[:1])
    assert "itself" not in data_card(
        [by_hand]
    ) and "Answers of which nothing tells who wrote them: 1 rows" in data_card([by_hand])
    both = data_card([files[0], by_hand])
    assert "by `tiny` itself, but for those in `by_hand.jsonl`, of which nothing tells who wrote them: " in both
    assert "itself" not in data_card([_copy(files, tmp_path, target=...)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("versions", None),
        ("summary_by_set", []),
        ("summary_by_set", {"maths": []}),
        ("settings", []),
        ("settings", {"temperatures": "warm"}),
        ("summary", {"too_long": "many"}),
        ("prompt_files", "p.jsonl"),
        ("asked", [{}]),
        ("target", 5),
    ],
)
def test_notes_of_another_form_are_named(files, tmp_path, name, value):
    with pytest.raises(DsparkError, match=rf"copy.jsonl.meta.json: {name}"):
        data_card([_copy(files, tmp_path, **{name: value})])


@pytest.mark.parametrize("text", ["[" * 99999, "{", "[]", "\x00"])
def test_notes_that_are_no_object_are_named(files, tmp_path, text):
    out = _copy(files, tmp_path)
    (tmp_path / "copy.jsonl.meta.json").write_text(text)
    with pytest.raises(DsparkError, match=r"copy.jsonl.meta.json"):
        data_card([out])


def test_an_answer_that_two_files_hold_is_counted_as_a_repetition(files, tmp_path):
    greedy, sampled = (read_rows(file) for file in files)
    equal = sampled[0].model_copy(update={"prompt_ids": greedy[0].prompt_ids, "answer_ids": greedy[0].answer_ids})
    write_rows(tmp_path / "equal.jsonl", [equal, sampled[1]])
    known = len(greedy) + 2 - len(unique_rows([*greedy, equal, sampled[1]]))
    assert known >= 1
    card = data_card([files[0], tmp_path / "equal.jsonl"])
    assert re.search(rf"^{known} of the rows repeat", card, re.MULTILINE)
    assert "no `equal.jsonl.meta.json` beside it" in card
    assert _line(card, "maths")[-3:] == ["-", "-", "-"], "what gave no row is not known for a file without notes"


def test_a_card_of_files_that_do_not_belong_together_is_refused(files, tmp_path):
    with pytest.raises(DsparkError, match="at least one"):
        data_card([])
    with pytest.raises(DsparkError, match="named twice"):
        data_card([files[0], files[0].parent / "." / files[0].name])
    with pytest.raises(DsparkError, match="no such file"):
        data_card([tmp_path / "none.jsonl"])
    write_rows(tmp_path / "other.jsonl", read_rows(files[1]))
    (tmp_path / "other.jsonl.meta.json").write_text('{"target": "another"}')
    with pytest.raises(DsparkError, match=r"target = \['another', 'tiny'\]"):
        data_card([files[0], tmp_path / "other.jsonl"])


def test_distinct_ngrams_are_counted_exactly_and_inside_answers():
    answers = [[1, 2, 1, 2], [2, 1], [9], []]
    assert distinct_share(answers, 1) == 3 / 7
    assert distinct_share(answers, 2) == 2 / 4  # (1 2) (2 1) (1 2) | (2 1); never (2 2), over two answers
    assert distinct_share(answers, 4) == 1.0
    assert distinct_share(answers, 5) is None
    large = 200_000
    assert distinct_share([[large, large - 1, large, large - 1, large]], 4) == 1.0


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.91, 10), (1.0, 10)])
def test_quantile_is_a_value_that_occurs(share, value):
    assert quantile(list(range(1, 11)), share) == value
