"""The command line as a user meets it: help with an example, JSON, and bad input as one line and exit code 2."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.decoding.conftest import draft_config

from dspark.checkpoints.native import save_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.kernels.library import kind

COMMANDS = ["generate", "invent", "regenerate", "card", "train", "replay", "inspect", "doctor", "demo", "serve"]
COMMANDS += ["launch", "publish"]


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory):
    """A small random draft for the tiny target."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("drafts") / "tiny"
    save_draft(DSparkDraft(draft_config(markov_rank=8, target_name="tiny")), folder)
    return folder


@pytest.fixture
def copied(draft_folder, tmp_path):
    """A copy of the draft to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in draft_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Example" in out
    assert f"dspark {command}" in out


def test_json_has_the_named_fields_and_equals_plain(run, tiny_llama_folder, draft_folder):
    base = ["generate", "--target", tiny_llama_folder, "--prompt", "abc", "--max-tokens", "20", "--json", "--draft"]
    code, out, _ = run(*base, "none")
    assert code == 0
    plain = json.loads(out)
    named = ["text", "token_ids", "finish_reason", "tokens_per_s", "acceptance_length", "rounds", "schedule"]
    assert list(plain) == named and plain["schedule"] == "plain decoding"
    for n in (1, 3, 7):
        answer = json.loads(run(*base, draft_folder, "-n", n)[1])
        assert answer["token_ids"] == plain["token_ids"]
        assert answer["text"] == plain["text"]
        assert {r["proposed"] for r in answer["rounds"]} == {n}
        assert set(answer["rounds"][0]) == {"proposed", "scheduled", "accepted"}


def test_a_model_without_a_chat_template_is_given_plain_text(run, tiny_llama_folder, tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    for file in tiny_llama_folder.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).write_bytes(file.read_bytes())
    ask = ["generate", "--target", folder, "--draft", "none", "--prompt", "abc", "--max-tokens", "6", "--json"]
    code, _, err = run(*ask)
    assert code == 2
    assert "none" in err
    plain, chat = (
        json.loads(run(*ask, "--target", t, *extra)[1])
        for t, extra in ((folder, ["--template", "none"]), (tiny_llama_folder, []))
    )
    assert plain["token_ids"] != chat["token_ids"]


def test_streamed_text_and_summary(run, tiny_llama_folder, draft_folder):
    base = ["generate", "--target", tiny_llama_folder, "--draft", draft_folder, "--prompt", "abc", "--max-tokens", "9"]
    code, out, _ = run(*base)
    assert code == 0
    assert json.loads(run(*base, "--json")[1])["text"] in out
    assert "bonus counted" in out


def test_a_seed_gives_the_same_ids_with_and_without_a_draft(run, tiny_llama_folder, draft_folder):
    base = ["generate", "--target", tiny_llama_folder, "--prompt", "abc", "--max-tokens", "15", "--json"]
    base += ["--temperature", "0.9", "--seed", "5", "--draft"]
    ids = {tuple(json.loads(run(*base, draft)[1])["token_ids"]) for draft in ("none", draft_folder)}
    assert len(ids) == 1


def refusals(tiny, draft, tmp_path):
    """Bad input of every kind, and the field the message must name."""
    long = "a" * 300
    return {
        "missing target": (["--target", tmp_path / "no"], "target"),
        "missing draft": (["--target", tiny, "--draft", tmp_path / "no"], "draft"),
        "n > gamma": (["--target", tiny, "--draft", draft, "-n", "8"], "n ="),
        "n = 0": (["--target", tiny, "--draft", draft, "-n", "0"], "n ="),
        "n without a draft": (["--target", tiny, "--draft", "none", "-n", "3"], "n = 3: plain decoding"),
        "empty prompt": (["--target", tiny, "--draft", draft, "--prompt", "  "], "prompt"),
        "long prompt": (["--target", tiny, "--draft", draft, "--prompt", long], "prompt"),
        "temperature": (["--target", tiny, "--draft", draft, "--temperature", "-1"], "temperature"),
        "top_p": (["--target", tiny, "--draft", draft, "--top-p", "0"], "top_p"),
        "max_tokens": (["--target", tiny, "--draft", draft, "--max-tokens", "0"], "max_tokens"),
        "unknown option": (["--target", tiny, "--no-such"], "no-such"),
        "not a number": (["--target", tiny, "-n", "many"], "integer"),
    }


@pytest.mark.parametrize("kind", refusals("", "", Path()))
def test_bad_input_is_one_line_and_exit_code_2(run, kind, tiny_llama_folder, draft_folder, tmp_path):
    arguments, field = refusals(tiny_llama_folder, draft_folder, tmp_path)[kind]
    code, out, err = run("generate", "--prompt", "abc", "--max-tokens", "4", *arguments)
    assert code == 2, (out, err)
    assert field in err
    assert "Traceback" not in err
    if kind not in ("unknown option", "not a number"):
        assert err.strip().splitlines()[-1].startswith("error: ")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_target_layers": 5}, "num_target_layers"),
        ({"target_layer_ids": [0, 2, 4]}, "target_layer_ids"),
        ({"mask_token_id": 100}, "mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id"),
        ({"sample_from_anchor": None}, "sample_from_anchor"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_a_wrong_draft_config_is_named(run, copied, tiny_llama_folder, changes, field):
    folder = edit(copied, **changes)
    code, _, err = run("generate", "--prompt", "abc", "--target", tiny_llama_folder, "--draft", folder)
    assert code == 2
    assert field in err
    assert "Traceback" not in err


@pytest.mark.parametrize("damage", ["truncated", "missing tensor", "extra tensor", "non-finite", "wrong shape"])
def test_damaged_weights_are_named(run, copied, tiny_llama_folder, damage):
    path = copied / "model.safetensors"
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-50])
        field = "safetensors"
    else:
        tensors = load_file(path)
        field = "fc.weight"
        if damage == "missing tensor":
            del tensors[field]
        elif damage == "extra tensor":
            field = "something.weight"
            tensors[field] = torch.zeros(2)
        elif damage == "non-finite":
            tensors[field][0, 0] = float("inf")
        else:
            tensors[field] = tensors[field][:-1].contiguous()
        save_file(tensors, path)
    code, _, err = run("generate", "--prompt", "abc", "--target", tiny_llama_folder, "--draft", copied)
    assert code == 2
    assert field in err
    assert "Traceback" not in err


def test_doctor_says_which_kernels_are_used(run, monkeypatch):
    code, out, _ = run("doctor")
    line = next(line for line in out.splitlines() if line.startswith("kernels"))
    assert code == 0 and (line.split()[1].rstrip(",") == kind() or (kind() is None and "none were built" in line))
    monkeypatch.setenv("DSPARK_KERNELS", "none")
    assert "none (DSPARK_KERNELS is none); linear layers go through PyTorch" in run("doctor")[1]
    monkeypatch.setenv("DSPARK_KERNELS", "fast")
    code, _, err = run("doctor")
    assert code == 2 and "DSPARK_KERNELS" in err and "avx512" in err


def test_inspect_prints_the_published_count(run):
    code, out, _ = run("inspect", "kimi-k3")
    assert code == 0
    assert "2,249,289,601" in out


def test_regenerate_train_replay_in_a_row(run, tiny_llama_folder, tmp_path):
    """The data flow of the README, by its commands, on a tiny target: rows, features, a draft, its acceptance."""
    prompts, rows = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p/{i}", "turns": [f"say {i} twice"]}) + "\n" for i in range(12)))
    recipe = tmp_path / "recipe.yaml"
    draft = draft_config(markov_rank=8, training_length=256).model_dump(mode="json")
    draft.pop("target_name")
    settings = {
        "name": "tiny",
        "target": str(tiny_llama_folder),
        "draft": draft,
        "data": {"rows": str(rows), "features": str(tmp_path / "rows.features"), "held_out": 3},
        "training": {"steps": 4, "rows_per_step": 2, "anchors_per_row": 4, "out": str(tmp_path / "run")},
    }
    recipe.write_text(json.dumps(settings))
    ask = ["regenerate", "--target", tiny_llama_folder, "--prompts", prompts, "--out", rows, "--max-tokens", "24"]
    code, out, err = run(*ask, "--capture", recipe, "--batch", "4")
    assert code == 0, err
    assert len(rows.read_text().splitlines()) == 12
    assert run(*ask, "--capture", recipe)[0] == 0, "running it again has nothing to do and says so"
    emitted = {token for line in rows.read_text().splitlines() for token in json.loads(line)["answer_ids"]}
    mask = f"draft.mask_token_id={min(set(range(100)) - emitted - {2})}"
    assert run("train", recipe, f"draft.mask_token_id={min(emitted)}")[0] == 2, "the target emits it"
    code, out, err = run("train", recipe, mask)
    assert code == 0, err
    program, *words = shlex.split(out.splitlines()[-1])  # to be copied: one line, whatever the terminal's width
    assert program == "dspark" and run(*words, "--max-tokens", "4")[0] == 0
    code, _, err = run(*words[:3], "--draft", tmp_path / "run", "--prompt", "a")
    assert code == 2 and f"give a draft in it, {tmp_path / 'run' / 'best'}" in err
    assert run("train", recipe, mask)[0] == 2, "a finished run is not overwritten"
    replayed = ["replay", "--target", tiny_llama_folder, "--draft", tmp_path / "run" / "last", "--rows", rows, "--json"]
    code, out, err = run(*replayed)
    assert code == 0, err
    everything = json.loads(out)
    assert everything["macro_length"] >= 1.0
    code, table, _ = run(*replayed[:-1])
    assert code == 0
    assert "bonus counted" in table
    # nine of the twelve prompts were trained on, and three were held out
    assert (everything["overlap"]["asked"], everything["overlap"]["in_training_set"]) == (12, 9)
    assert everything["overlap"]["line"].startswith("WARNING: 9 of 12 prompts are in the draft's training set")
    assert everything["overlap"]["line"] in table
    code, out, err = run(*replayed, "--unseen")
    assert code == 0, err
    unseen = json.loads(out)
    assert unseen["overlap"]["line"] == "0 of 3 prompts are in the draft's training set"
    assert len(unseen["rounds_by_row"]) == 3 and unseen["rounds_by_row"].items() <= everything["rounds_by_row"].items()
    (tmp_path / "run" / "last" / "training_prompts.txt").unlink()
    assert json.loads(run(*replayed)[1])["overlap"]["in_training_set"] is None
    assert "overlap with the training prompts: unknown" in run(*replayed[:-1])[1]
    code, _, err = run(*replayed, "--unseen")
    assert code == 2
    assert "unseen" in err


def test_the_installed_command_answers():
    done = subprocess.run(
        [sys.executable, "-m", "dspark.cli", "--version"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0
    assert done.stdout.strip() == "0.1.0"


def write_rows(path, **changes):
    row = {"id": "a", "source": "p/0", "prompt_ids": [5, 6], "answer_ids": [7, 8, 9], "finish": "length"}
    path.write_text(json.dumps({**row, **changes}) + "\n")
    return path


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({"answer_ids": [7, 8, 7000]}, [], "7000"),
        ({"prompt_ids": [5, -1]}, [], "-1"),
        ({"answer_ids": [7]}, [], "rows"),
        ({}, ["--limit", "-1"], "limit"),
        ({}, ["--batch", "0"], "batch"),
    ],
)
def test_replay_refuses_rows_and_counts_that_cannot_be(
    run, tiny_llama_folder, draft_folder, tmp_path, changes, options, field
):
    rows = write_rows(tmp_path / "rows.jsonl", **changes)
    code, _, err = run("replay", "--target", tiny_llama_folder, "--draft", draft_folder, "--rows", rows, *options)
    assert code == 2
    assert field in err
    assert len(err.strip().splitlines()) == 1


def test_replay_refuses_rows_of_another_target(run, tiny_llama_folder, draft_folder, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl.meta.json").write_text(json.dumps({"target": "another"}))
    code, _, err = run("replay", "--target", tiny_llama_folder, "--draft", draft_folder, "--rows", rows)
    assert code == 2
    assert "another" in err


def test_an_undecodable_prompt_is_named(run, tiny_llama_folder):
    code, _, err = run("generate", "--target", tiny_llama_folder, "--draft", "none", "--prompt", "a\udcff")
    assert code == 2
    assert "Unicode" in err
