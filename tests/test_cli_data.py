"""The commands that make data, as a user meets them: invent, regenerate, card."""

import json
import string

import pytest
from tests.decoding.conftest import draft_config

from dspark.data.rows import Row, write_rows
from dspark.training.features import features_folder


def test_a_place_that_cannot_be_written_is_one_line(run, tiny_llama_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "turns": ["x"]}\n')
    code, _, err = run("regenerate", "--target", tiny_llama_folder, "--prompts", prompts, "--out", prompts / "rows")
    assert code == 2
    assert str(prompts) in err
    assert len(err.strip().splitlines()) == 1


def test_a_recipe_for_a_deeper_target_leaves_nothing_behind(run, tiny_llama_folder, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "made" / "rows.jsonl"
    prompts.write_text('{"id": "a", "turns": ["x"]}\n')
    ask = ["regenerate", "--target", tiny_llama_folder, "--prompts", prompts, "--out", out]
    code, _, err = run(*ask, "--capture", "smollm2-135m")
    assert code == 2
    assert "target_layer_ids" in err
    assert not out.parent.exists()


@pytest.mark.parametrize("folder", [".", "..", "made"])
def test_a_folder_is_no_rows_file(run, tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "turns": ["x"]}\n')
    ask = ["regenerate", "--target", "./never-loaded", "--prompts", "prompts.jsonl", "--capture", "smollm2-135m"]
    code, _, err = run(*ask, "--out", folder)
    assert code == 2 and err.startswith(f"error: out = '{folder}': is a folder")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "prompts.jsonl"]


def test_two_shards_answer_every_prompt_once_at_one_of_the_temperatures(run, tiny_llama_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p/{i}", "turns": [f"say {i}"]}) + "\n" for i in range(12)))
    ask = ["regenerate", "--target", tiny_llama_folder, "--prompts", prompts, "--max-tokens", "4", "--threads", "1"]
    found = []
    for part in (0, 1):
        out = tmp_path / f"{part}.jsonl"
        code, _, err = run(*ask, "--out", out, "--shard", f"{part}/2", "--temperature", "0.5,1")
        assert code == 0, err
        found.append([json.loads(line) for line in out.read_text().splitlines()])
    assert all(found)
    rows = [row for part in found for row in part]
    assert sorted(row["source"] for row in rows) == sorted(f"p/{i}" for i in range(12))
    assert {row["temperature"] for row in rows} == {0.5, 1.0}
    code, card, err = run("card", tmp_path / "0.jsonl", tmp_path / "1.jsonl")
    assert code == 0, err
    assert "- asked: part 0/2 of the prompts of prompts.jsonl\n" in card
    assert "- asked: part 1/2 of the prompts of prompts.jsonl\n" in card
    code, _, err = run(*ask, "--out", tmp_path / "first.jsonl", "--limit", "5", "--shuffle", "3")
    assert code == 0, err
    assert (
        "- asked: the first 5 prompts of prompts.jsonl in the order of seed 3\n"
        in run("card", tmp_path / "first.jsonl")[1]
    )


def test_rows_files_of_two_shards_have_features_of_their_own(run, tiny_llama_folder, tmp_path):
    prompts, recipe = tmp_path / "prompts.jsonl", tmp_path / "recipe.yaml"
    prompts.write_text("".join(json.dumps({"id": f"p/{i}", "turns": [f"say {i}"]}) + "\n" for i in range(6)))
    draft = draft_config(target_name="tiny").model_dump(mode="json")
    recipe.write_text(json.dumps({"name": "tiny", "target": str(tiny_llama_folder), "draft": draft}))
    ask = ["regenerate", "--target", tiny_llama_folder, "--prompts", prompts, "--max-tokens", "4", "--capture", recipe]
    for part in (0, 1):
        out = tmp_path / f"rows.{part}"
        code, _, err = run(*ask, "--out", out, "--shard", f"{part}/2")
        assert code == 0, err
        written = {json.loads(line)["id"] for line in out.read_text().splitlines()}
        index = json.loads((tmp_path / f"rows.{part}.features" / "index.json").read_text())
        assert written == set(index["rows"]) and written
    assert features_folder(tmp_path / "rows.jsonl") == tmp_path / "rows.features"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("shard", "2/2"),
        ("shard", "1"),
        ("shard", "-1/2"),
        ("temperature", "0.5,"),
        ("temperature", "warm"),
        ("threads", "0"),
    ],
)
def test_regenerate_refuses_what_it_cannot_split(run, tiny_llama_folder, tmp_path, option, value):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "made" / "rows.jsonl"
    prompts.write_text('{"id": "a", "turns": ["x"]}\n')
    ask = ["regenerate", "--target", tiny_llama_folder, "--prompts", prompts, "--out", out]
    code, _, err = run(*ask, f"--{option}={value}")
    assert code == 2
    assert option in err
    assert len(err.strip().splitlines()) == 1
    assert not out.parent.exists()


def test_card_is_printed_or_written(run, tmp_path):
    rows, out = tmp_path / "rows.jsonl", tmp_path / "card.md"
    write_rows(rows, [Row(id="a", source="p/0", prompt_ids=[5, 6], answer_ids=[7, 8, 9], finish="length")])
    code, card, _ = run("card", rows)
    assert code == 0
    assert card.startswith("# Data card\n")
    assert run("card", rows, "--out", out)[0] == 0
    assert out.read_text() == card
    code, _, err = run("card", rows, rows, "--out", tmp_path / "never.md")
    assert code == 2
    assert "twice" in err
    assert not (tmp_path / "never.md").exists()


def test_a_card_shows_rows_as_text_and_loads_no_weights(run, tiny_llama_folder, tmp_path):
    for file in tiny_llama_folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    ids = {text: [5 + string.printable.index(c) if c != "\n" else 4 for c in text] for text in ("say it\nso", "*it*")}
    made = [
        Row(id=str(i), source=f"p/{i}", prompt_ids=ids["say it\nso"], answer_ids=[*ids["*it*"], 2], finish="stop")
        for i in range(9)
    ]
    rows = tmp_path / "rows.jsonl"
    write_rows(rows, made)
    code, _, err = run("card", rows, "--sample", "2")
    assert code == 2 and "sample = 2: no notes" in err
    (tmp_path / "rows.jsonl.meta.json").write_text(json.dumps({"target": str(tmp_path)}))
    code, card, err = run("card", rows, "--sample", "2")
    assert code == 0, err
    assert card == run("card", rows, "--sample", "2")[1] and card.startswith(run("card", rows)[1])
    assert card.count("\nprompt:\n\n    say it\n    so\n\nanswer:\n\n    *it*<|im_end|>\n") == 2
    assert run("card", rows, "--sample", "20")[1].count("answer:") == 9


def test_invented_prompts_can_be_asked(run, tiny_llama_folder, tmp_path):
    openings, out = tmp_path / "openings.txt", tmp_path / "prompts" / "invented.jsonl"
    ask = ["invent", "--target", tiny_llama_folder, "--out", out, "--count", "40", "--max-tokens", "40"]
    code, _, err = run(*ask, "--openings", openings)
    assert code == 2 and "openings" in err and not out.parent.exists()
    openings.write_text("say\n")
    code, stdout, err = run(*ask, "--openings", openings)
    assert code == 0, err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found and all(one["turns"][0].startswith("say") for one in found)
    assert f"{len(found)} prompts of 40" in stdout
    before = out.read_bytes()
    code, _, err = run("invent", "--target", tmp_path / "never loaded", "--out", out, "--count", "1")
    assert code == 2 and f"out = '{out}': exists already" in err and out.read_bytes() == before
    code, _, err = run("regenerate", "--target", tiny_llama_folder, "--prompts", out, "--out", tmp_path / "rows.jsonl")
    assert code == 0, err
