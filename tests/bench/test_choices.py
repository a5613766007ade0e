"""benchmarks/choices.py on a tiny target: equal compute, the same held-out rows, resuming, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks import choices as benchmark

from dspark.data.rows import Row, row_id, write_rows
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget, load_target
from dspark.training.batches import split_rows
from dspark.training.recipe import load_recipe


@dataclass
class Setup:
    options: list[str]
    choices: Path
    out: Path

    def run(self, *more: str) -> int:
        return benchmark.main([*self.options, f"--choices={self.choices}", f"--out={self.out}", *more])

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "choices.jsonl").read_text().splitlines()]


CHOICES = {
    "answers": {"greedy": ["data.answers=greedy"], "both": ["data.answers=all"]},
    "depth": {"2 layers": ["draft.num_hidden_layers=2", "draft.layer_types=[full_attention, full_attention]"]},
    "taps": {"last": ["draft.target_layer_ids=[3, 0]"]},
    "baseline": {"as it is": []},
}


@pytest.fixture(scope="module")
def loaded(tiny_llama_folder: Path) -> TransformersTarget:
    return load_target(str(tiny_llama_folder), packed=False)


@pytest.fixture(scope="module")
def rows(loaded: TransformersTarget) -> list[Row]:
    """Greedy answers of two sets of prompts; half as many are said to be sampled."""
    prompts = [[1, *(4 + (7 * i + j) % 80 for j in range(3 + i % 3))] for i in range(16)]
    requests = [Request(prompt, max_tokens=14, ignore_eos=True) for prompt in prompts]
    results = dict(Engine(loaded, max_batch=8).run(requests))
    return [
        Row(
            id=row_id(prompt, {}),
            source=f"{'maths' if i % 2 else 'code'}/{i}",
            prompt_ids=prompt,
            answer_ids=results[i].output_ids,
            finish="length",
            temperature=0.0 if i % 3 else 0.7,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture
def setup(loaded: TransformersTarget, rows: list[Row], tmp_path: Path) -> Setup:
    write_rows(tmp_path / "rows.jsonl", rows)
    draft = load_recipe("smollm2-135m").draft
    emitted = {token for row in rows for token in row.answer_ids} | set(loaded.stop_ids)
    draft |= {"hidden_size": loaded.hidden_size, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    draft |= {"num_key_value_heads": 1, "intermediate_size": 32, "layer_types": ["full_attention"], "markov_rank": 4}
    draft |= {"vocab_size": loaded.vocab_size, "draft_vocab_size": 50, "target_layer_ids": [0, 2], "block_size": 4}
    draft |= {"num_target_layers": loaded.num_layers}
    draft |= {"mask_token_id": min(set(range(loaded.vocab_size)) - emitted)}
    recipe = {
        "name": "tiny",
        "target": loaded.name,
        "draft": draft,
        "data": {"rows": str(tmp_path / "rows.jsonl"), "features": str(tmp_path / "features"), "held_out": 5},
        "training": {"rows_per_step": 2, "anchors_per_row": 3, "init": "random"},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "choices.yaml").write_text(yaml.safe_dump(CHOICES, sort_keys=False))
    options = [f"--base={tmp_path / 'recipe.yaml'}", "training.lr=1.0e-2", "--seconds=0.2", "--timed-steps=3"]
    return Setup([*options, "--ns=4,2", "--repeats=2"], tmp_path / "choices.yaml", tmp_path / "out")


def test_every_choice_gets_equal_compute_and_the_same_rows(
    setup: Setup, rows: list[Row], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes = []
    real = benchmark.train

    def watched(recipe: Any, **given: Any) -> Any:
        recipes.append(recipe)
        return real(recipe, **given)

    monkeypatch.setattr(benchmark, "train", watched)
    assert setup.run() == 0
    told = capsys.readouterr()
    records = {record["name"]: record for record in setup.records()}
    assert list(records) == ["as it is", "greedy", "both", "2 layers", "last"]
    for record in records.values():
        assert record["steps"] == max(1, int(0.2 / record["step_seconds"]))
        assert 0 < record["kept_mass"] <= 1.0001 and 1 <= record["tau_teacher_forced"] <= 5
        assert record["replay"]["4"]["prompts"].keys() == records["as it is"]["replay"]["4"]["prompts"].keys()
        for n, most in (("4", 5), ("2", 3)):
            found, passes = record["replay"][n], record["passes"][n]
            assert set(found["sets"]) == {"maths", "code"} and 1 <= found["macro"] <= most
            assert passes["share_of_verify_1"] == pytest.approx(passes["draft_ms"] / passes["verify_1_ms"])
    assert records["2 layers"]["parameters"] > records["as it is"]["parameters"]
    held = set(records["as it is"]["replay"]["4"]["prompts"])
    assert held < {row.source for row in rows if row.temperature == 0.0}
    timed, whole = recipes[:2]
    assert (timed.training.steps, whole.training.steps) == (5, records["as it is"]["steps"])
    assert {recipe.training.lr for recipe in recipes} == {1e-2}
    held_sources = {row.source for row in split_rows(rows, recipes[0].data)[1]}
    poorest = sum(row.temperature == 0.0 and row.source not in held_sources for row in rows)
    assert {recipe.data.training_rows for recipe in recipes} == {None, poorest}
    amounts = {name: [o for o in records[name]["overrides"] if "training_rows" in o] for name in records}
    assert amounts["greedy"] == amounts["both"] != [] and amounts["last"] == []
    assert told.out.count("| 2 layers |") == 2 and "gain n=4" in told.out
    assert [path.name for path in setup.out.iterdir()] == ["choices.jsonl"]

    # A torn last line is run again, the whole ones are not; another setting is another result.
    lines = (setup.out / "choices.jsonl").read_text().splitlines(keepends=True)
    (setup.out / "choices.jsonl").write_text("".join(lines[:-1]) + lines[-1][:30])
    recipes.clear()
    assert setup.run() == 0
    assert len(recipes) == 2 and recipes[0].draft_config().target_layer_ids == (3, 0)
    assert setup.run("--only=depth", "--held-rows=2") == 0
    assert len(recipes) == 6 and len(setup.records()) == 7
    assert len(setup.records()[-1]["replay"]["4"]["prompts"]) == 2


def test_ctrl_c_leaves_what_is_done(
    setup: Setup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fourth training, which is the second choice's long one, is interrupted while it runs."""
    real, calls = benchmark.Workbench._train, []

    def interrupt(metrics: Path) -> None:
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(self: Any, recipe: Any, steps: int, out: Path) -> Any:
        calls.append(out)
        if len(calls) == 4:
            steps = 100_000
            threading.Thread(target=interrupt, args=(out / "metrics.jsonl",), daemon=True).start()
        return real(self, recipe, steps, out)

    monkeypatch.setattr(benchmark.Workbench, "_train", interrupted)
    assert setup.run("--only=depth") == 130
    told = capsys.readouterr()
    assert len(setup.records()) == 1 and "as it is" in told.out and "stopped" in told.err
    assert [path.name for path in setup.out.iterdir()] == ["choices.jsonl"]


def test_a_choice_that_fails_does_not_stop_the_others(setup: Setup, capsys: pytest.CaptureFixture[str]) -> None:
    broken = {"baseline": {"it": []}, "rate": {"absurd": ["training.lr=1.0e+30", "training.clip=1.0e+30"]}}
    setup.choices.write_text(yaml.safe_dump(broken))
    assert setup.run() == 1
    told = capsys.readouterr()
    assert len(setup.records()) == 1 and "failed" in told.err and "non-finite" in told.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": {"b": ["training.stepps=3"]}}, "unknown key"),
        ({"a": {"b": ["data.held_out=3"]}}, "must keep the target"),
        ({"a": {"b": ["draft.block_size=3"]}}, "predict 4 tokens"),
        (["a"], "must be {group"),
    ],
)
def test_wrong_choices_are_refused_before_anything_runs(content: Any, message: str, setup: Setup) -> None:
    setup.choices.write_text(yaml.safe_dump(content))
    with pytest.raises(DsparkError, match=message):
        setup.run()
    assert not (setup.out / "choices.jsonl").exists()


def test_groups_that_are_not_there_are_refused(setup: Setup) -> None:
    with pytest.raises(DsparkError, match=r"only.*answers, depth, taps, baseline"):
        setup.run("--only=depht")


def test_the_choices_of_the_repository_fit_its_recipe() -> None:
    choices = benchmark.read_choices(Path(benchmark.__file__).with_name("choices.yaml"), None)
    base = load_recipe("smollm2-135m")
    assert choices[0].group == "baseline" and choices[0].recipe("smollm2-135m", []) == base
    by_group: dict[str, list[str]] = {}
    for choice in choices:
        by_group.setdefault(choice.group, []).append(choice.recipe("smollm2-135m", []).model_dump_json())
    assert len(by_group) > 10 and all(len(set(recipes)) == len(recipes) for recipes in by_group.values())
