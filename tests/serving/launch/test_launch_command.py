"""`dspark launch` as a user meets it: what it prints, converts, runs and refuses."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.decoding.conftest import draft_config

from dspark.checkpoints.native import read_config, save_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.serving.launch.pair import ready_draft


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "cache"))


def make_draft(folder: Path, target: Path, **changes):
    torch.manual_seed(3)
    draft = DSparkDraft(draft_config(**{"markov_rank": 8, "target_name": str(target), **changes}))
    if draft.config.reduced:
        draft.set_vocabulary(range(3, 3 + draft.config.draft_vocab_size))
    save_draft(draft, folder, lm_head=False)
    return folder


@pytest.fixture
def pair(tiny_llama_folder, tmp_path):
    """Arguments of a pair that needs no conversion."""
    draft = make_draft(tmp_path / "draft", tiny_llama_folder)
    return ["--target", tiny_llama_folder, "--draft", draft]


def command_of(out: str) -> list[str]:
    return shlex.split(out.replace("\\\n", ""))


def test_published_pairs_by_recipe_and_by_name(run):
    code, out, err = run("launch", "vllm", "kimi-k2.7-code", "--dry-run")
    assert code == 0, err
    assert command_of(out)[:5] == ["vllm", "serve", "moonshotai/Kimi-K2.7-Code", "--tensor-parallel-size", "8"]
    assert all(line.startswith("note: ") for line in err.splitlines())
    names = ["--target", "moonshotai/Kimi-K2.7-Code", "--draft", "novita/kimi-k2.7-code-dspark"]
    assert run("launch", "vllm", *names, "--dry-run")[1] == out


def test_a_recipe_without_a_command_for_the_engine_says_so(run):
    for engine, said in (("vllm", True), ("sglang", False)):
        code, _, err = run("launch", engine, "kimi-k3", "--dry-run")
        assert code == 0 and ("kimi-k3 has no published command for" in err) == said, err
        assert "num_speculative_tokens is always given" not in err  # an anchor-first draft


def test_a_draft_in_the_form_is_given_as_it_is(run, pair):
    for engine, flag in (("vllm", "--speculative-config"), ("sglang", "--speculative-draft-model-path")):
        code, out, err = run("launch", engine, *pair, "--context", 200, "--dry-run")
        assert code == 0, err
        words = command_of(out)
        value = words[words.index(flag) + 1]
        assert str(pair[3]) in (value, json.loads(value)["model"] if value.startswith("{") else None)


def test_another_form_is_converted_once_and_the_dry_run_says_how(run, tiny_llama_folder, tmp_path, monkeypatch):
    draft = make_draft(tmp_path / "reduced", tiny_llama_folder, draft_vocab_size=40)
    base = ["launch", "vllm", "--target", tiny_llama_folder, "--draft", draft, "--out", tmp_path / "made"]
    code, out, err = run(*base, "--dry-run")
    assert code == 0 and not (tmp_path / "made").exists(), err
    first, second = out.split(" &&\n", 1)
    made = str(tmp_path / "made")
    assert shlex.split(first) == [
        "dspark",
        "convert",
        str(draft),
        made,
        "--to",
        "vllm",
        "--target",
        str(tiny_llama_folder),
    ]
    assert json.loads(command_of(second)[-1])["model"] == made

    seen = fake_engine(tmp_path, "vllm", monkeypatch)
    line = [sys.executable, "-m", "dspark.cli", *map(str, base), "--port", "8001"]
    done = subprocess.run(line, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 7, done.stderr  # the engine's own exit code: the process became it
    assert read_config(made)[1]  # holds the head's rows now
    assert seen()[:2] == ["serve", str(tiny_llama_folder)] and seen()[2:4] == ["--port", "8001"]
    code, out, err = run(*base, "--dry-run")
    assert (code, out) == (2, "") and "exists already; give it as --draft" in err
    assert run(*base[:-2], "--draft", made, "--dry-run")[1] == second


def fake_engine(folder: Path, name: str, monkeypatch):
    """A program that writes its arguments down and exits with 7."""
    place = folder / "bin"
    place.mkdir()
    program = place / name
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/seen\necho "$SGLANG_RAGGED_VERIFY_MODE" > {folder}/mode\nexit 7\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return lambda: (folder / "seen").read_text().splitlines()


def test_the_engine_gets_the_arguments_and_the_environment(pair, tmp_path, monkeypatch):
    seen = fake_engine(tmp_path, "sglang", monkeypatch)
    line = [sys.executable, "-m", "dspark.cli", "launch", "sglang", *map(str, pair), "--adaptive", "-n", "3"]
    done = subprocess.run(line, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 7, done.stderr
    assert seen()[0] == "serve" and seen()[-2:] == ["--speculative-dspark-block-size", "3"]
    assert (tmp_path / "mode").read_text() == "compact\n"


def test_an_engine_that_is_not_installed(run, pair, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    code, out, err = run("launch", "vllm", *pair)
    assert code == 2 and out == ""
    assert "error: engine = 'vllm': is not on the PATH: install vLLM 0.32.0" in err


def test_what_the_doctor_finds_broken_is_refused(run, tiny_llama_folder, tmp_path):
    other = make_draft(tmp_path / "deeper", tiny_llama_folder, num_target_layers=5, target_layer_ids=(0, 2, 4))
    code, out, err = run("launch", "vllm", "--target", tiny_llama_folder, "--draft", other, "--dry-run")
    assert code == 2 and out == ""
    assert [line for line in err.splitlines() if line.startswith("error: ") and "num_target_layers" in line], err
    code, out, err = run("launch", "sglang", "kimi-k2.6", "--dry-run")
    assert code == 2 and out == "" and "dspark convert novita/kimi-k2.6-dspark OUT --to sglang --expand" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tgi", "kimi-k3"], "engine = 'tgi': must be one of vllm, sglang, llamacpp"),
        (["vllm"], "target = None: give --target, or the recipe"),
        (["vllm", "--target", "a/b"], "draft = None: a draft is needed; give --draft"),
        (["vllm", "smollm2-135m"], "draft = None: recipe smollm2-135m names no published draft"),
        (["vllm", "nothing"], "recipe = 'nothing': no such file"),
        (["vllm", "--target", "a/b", "--draft", "./nowhere"], "is not on this disk"),
        (["llamacpp", "kimi-k3"], "give --target FILE.gguf"),
        (["vllm", "--target", "./nowhere", "--draft", "embedded"], "target = './nowhere': is not on this disk"),
        (["llamacpp", "--target", "nowhere.gguf", "--draft", "embedded"], "'nowhere.gguf': is not on this disk"),
        (["llamacpp", "--target", "a/b", "--draft", "embedded"], "must be a .gguf file for llama.cpp"),
        (["vllm", "kimi-k2.6", "-n", "8"], "n = 8: must be 1..7"),
        (["vllm", "kimi-k2.6", "--tp", "0"], "tp = 0: must be at least 1"),
        (["vllm", "kimi-k2.6", "--context", "262145"], "context = 262145: must be at most 262144"),
        (["vllm", "kimi-k2.6", "--flag", "max-model-len=1e3"], "max-model-len = '1e3': must be a whole number"),
        (["vllm", "kimi-k2.6", "--flag", "speculative-config=5"], "speculative-config = '5': must be a JSON object"),
        (["vllm", "kimi-k2.6", "--flag", 'compilation-config={"a":' + "[" * 100000], "is not JSON"),
        (["vllm", "kimi-k2.6", "--target=-x"], "target = '-x': would be taken for a flag"),
        (["vllm", "kimi-k2.6", "--flag", "no-such-flag"], "flag = 'no-such-flag': is not known to vLLM 0.32.0"),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    code, out, err = run("launch", *arguments, "--dry-run")
    assert code == 2 and out == ""
    assert words in err and err.count("error: ") == 1 and "Traceback" not in err


def test_a_folder_without_a_config(run, tiny_llama_folder, tmp_path):
    code, _, err = run("launch", "vllm", "--target", tiny_llama_folder, "--draft", tmp_path, "--dry-run")
    assert code == 2 and "config.json" in err.splitlines()[-1]


def test_llamacpp_gets_a_gguf_of_the_shipped_draft(embedded_path, run, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPARK_CACHE", str(embedded_path.parent))
    out = tmp_path / "draft.gguf"
    base = ["launch", "llamacpp", "--target", "embedded", "--draft", "embedded", "--out", out]
    code, printed, err = run(*base, "--dry-run")
    assert code == 0 and not out.exists(), err
    by_hand, command = printed.split(" &&\n", 1)
    assert shlex.split(by_hand)[:2] == ["dspark", "convert"]
    words = command_of(command)
    assert words[words.index("--model-draft") + 1] == str(out)
    target = words[words.index("--model") + 1]
    ready = ready_draft("llamacpp", target, "embedded", out)
    assert ready.convert is not None
    ready.convert()
    again = ready_draft("llamacpp", target, str(out))
    assert again.convert is None and again.path == str(out) and again.config == ready.config


def test_the_cache_is_used_again_for_the_same_files_only(tiny_llama_folder, tmp_path):
    draft = make_draft(tmp_path / "reduced", tiny_llama_folder, draft_vocab_size=40)
    first = ready_draft("vllm", str(tiny_llama_folder), str(draft))
    assert first.convert is not None
    first.convert()
    again = ready_draft("vllm", str(tiny_llama_folder), str(draft))
    assert again.convert is None and again.path == first.path and again.config == first.config
    make_draft(draft, tiny_llama_folder, draft_vocab_size=50)
    changed = ready_draft("vllm", str(tiny_llama_folder), str(draft))
    assert changed.convert is not None and changed.path != first.path


def test_the_cache_follows_every_file_that_a_conversion_reads(tiny_llama_folder, tmp_path, monkeypatch):
    draft = make_draft(tmp_path / "reduced", tiny_llama_folder, draft_vocab_size=40)
    target = tmp_path / "target"
    shutil.copytree(tiny_llama_folder, target)
    found = [ready_draft("vllm", str(target), str(draft)).path]
    for path in (draft / "model.safetensors.index.json", draft / "model-2.safetensors", target / "model.safetensors"):
        path.touch()
        found.append(ready_draft("vllm", str(target), str(draft)).path)
    monkeypatch.setattr("dspark.serving.launch.pair.__version__", "another")
    found.append(ready_draft("vllm", str(target), str(draft)).path)
    assert len(set(found)) == 5


def test_layer_ids_out_of_order_are_converted(tiny_llama_folder, tmp_path):
    for ids, converted in (((0, 2), False), ((2, 0), True)):
        draft = make_draft(tmp_path / str(ids[0]), tiny_llama_folder, target_layer_ids=ids)
        for engine in ("vllm", "sglang"):
            assert (ready_draft(engine, str(tiny_llama_folder), str(draft)).convert is not None) == converted


def test_a_folder_with_a_published_name_is_itself_checked(run, tiny_llama_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "novita/kimi-k2.6-dspark"
    draft = make_draft(tmp_path / name, tiny_llama_folder)
    zero(draft, "fc.weight")
    code, out, err = run("launch", "vllm", "--target", tiny_llama_folder, "--draft", name, "--dry-run")
    assert (code, out) == (2, "") and "error: doctor, weights: fc.weight" in err


def zero(folder: Path, name: str) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, name: torch.zeros_like(tensors[name])}, path, metadata={"format": "pt"})


def test_what_the_files_tell_is_checked_without_the_target(run, tmp_path):
    draft = make_draft(tmp_path / "zero", Path("no-such-model"))
    zero(draft, "fc.weight")
    target, other = tmp_path / "target.gguf", tmp_path / "other.gguf"
    for path in (target, other):
        path.write_bytes(b"garbage")
    base = ["launch", "llamacpp", "--target", target, "--dry-run", "-n", "3"]
    code, out, err = run(*base, "--draft", draft)
    assert (code, out) == (2, "") and "error: doctor, weights: fc.weight" in err
    code, out, err = run(*base, "--draft", other)
    assert (code, out) == (2, "") and "cannot be read as GGUF" in err and "not on this disk" not in err


DFLASH = {"sample_from_anchor": False, "block_size": 8, "target_layer_ids": (0, 1, 2)}


@pytest.mark.parametrize(("engine", "flag"), [("vllm", "--speculative-config"), ("sglang", "--speculative-algorithm")])
def test_plain_dflash_is_converted_to_its_own_form(run, tiny_llama_folder, tmp_path, engine, flag):
    plain = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    draft = make_draft(tmp_path / "plain", tiny_llama_folder, **plain, **DFLASH)
    code, out, err = run("launch", engine, "--target", tiny_llama_folder, "--draft", draft, "--dry-run")
    assert code == 0, err
    by_hand, command = out.split(" &&\n", 1)
    assert "--to z-lab" in by_hand
    words = command_of(command)
    assert "dflash" in words[words.index(flag) + 1].lower()
    ready = ready_draft(engine, str(tiny_llama_folder), str(draft))
    assert ready.convert is not None
    ready.convert()
    assert (Path(ready.path) / "model.safetensors").is_file()
    assert run("launch", engine, "--target", tiny_llama_folder, "--draft", draft, "--dry-run")[1] == command


def test_what_no_form_can_express_is_refused_before_anything_is_written(run, tiny_llama_folder, tmp_path):
    gated = make_draft(tmp_path / "gated", tiny_llama_folder, markov_head_type="gated")
    code, out, err = run("launch", "vllm", "--target", tiny_llama_folder, "--draft", gated, "--dry-run")
    assert (code, out) == (2, "") and err == (
        "error: markov_head_type = 'gated': vLLM serves vanilla Markov heads only\n"
    )
    bonus = make_draft(
        tmp_path / "bonus", tiny_llama_folder, sample_from_anchor=False, block_size=8, draft_vocab_size=40
    )
    code, out, err = run("launch", "vllm", "--target", tiny_llama_folder, "--draft", bonus, "--dry-run")
    assert code == 0 and 'num_speculative_tokens": 7' in out, err


def test_sglang_is_told_how_many_tokens_a_bonus_anchor_draft_gives(run, tiny_llama_folder, tmp_path):
    bonus = make_draft(tmp_path / "bonus", tiny_llama_folder, sample_from_anchor=False, block_size=8)
    code, out, err = run("launch", "sglang", "--target", tiny_llama_folder, "--draft", bonus, "--dry-run")
    assert code == 0 and "--speculative-dspark-block-size 7" in out and str(bonus) in out, err
