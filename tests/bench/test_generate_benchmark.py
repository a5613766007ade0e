"""benchmarks/generate.py on a tiny target: its arithmetic, both sides doing the same work, and every part's JSON."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from benchmarks import generate as benchmark

from dspark.bench import throughput
from dspark.bench.compare import Question
from dspark.data.rows import Row
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget, load_target
from dspark.training.features import InProcessFeatures

TAPS = (0, 2)


@pytest.fixture(scope="module")
def whole_target(tiny_llama_folder: Path) -> TransformersTarget:
    """The folder as it is: what both sides load."""
    return load_target(str(tiny_llama_folder))


@pytest.fixture(scope="module")
def reference(whole_target: TransformersTarget) -> throughput.Transformers:
    return throughput.Transformers(whole_target)


@pytest.fixture(scope="module")
def options(whole_target: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("generate")
    draft = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "sliding_window_non_causal": False,
        "vocab_size": whole_target.vocab_size,
        "draft_vocab_size": 40,
        "target_layer_ids": list(TAPS),
        "num_target_layers": whole_target.num_layers,
        "mask_token_id": 3,
        "sample_from_anchor": True,
        "block_size": 3,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "training_length": 64,
        "prompt_recipe": {"template_sha256": None, "thinking": None},
    }
    recipe = {"name": "tiny", "target": whole_target.name, "draft": draft, "training": {"anchors_per_row": 3}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    lines = [json.dumps({"id": f"p/{i}", "turns": [f"say {i} " + "please " * (i % 3), "more"]}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join([*lines, json.dumps({"id": "long", "turns": ["word " * 30]})]))
    sizes = {"recipe": folder / "recipe.yaml", "data": folder / "prompts.jsonl", "max-prompt-tokens": 80}
    counts = {"max-tokens": 8, "capture-rows": 5, "capture-batch": 2, "repeats": 2, "budget": 1000, "in-flight": "2,5"}
    return [f"--{name}={value}" for name, value in {**sizes, **counts, "rows-per-step": "1,3"}.items()]


def test_ratios_are_of_pairs_from_one_repetition() -> None:
    taken = {
        "ours": [{"tokens_per_s": 10.0, "seconds": 1.0}, {"tokens_per_s": 40.0, "seconds": 2.0}],
        "theirs": [{"tokens_per_s": 5.0, "seconds": 3.0}, {"tokens_per_s": 10.0, "seconds": 5.0}],
    }
    result = throughput.summarise(taken, ("theirs",))
    assert result["ratio"] == {"theirs": {"ours": {"tokens_per_s": {"median": 3.0, "min": 2.0, "max": 4.0, "n": 2}}}}
    assert result["sides"]["theirs"]["seconds"] == {"median": 4.0, "min": 3.0, "max": 5.0, "n": 2}


def test_decoding_leaves_out_the_prompts_passes_and_their_tokens() -> None:
    sample = throughput.generation_sample([[1, 2, 3], [4]], seconds=4.0, prefill=3.0)
    assert (sample["tokens"], sample["tokens_per_s"], sample["decode_tokens_per_s"]) == (4, 1.0, 2.0)


def test_sides_take_turns_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=10)  # every look at it is 10 s later: one at the start, one after each repetition
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    order: list[str] = []

    def side(name: str) -> Any:
        return lambda: order.append(name) or {"x_per_s": 1.0}

    throughput.repeat({"a": side("a"), "b": side("b")}, repeats=5, budget=30.0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    order.clear()
    throughput.repeat({"a": side("a"), "b": side("b")}, repeats=2, budget=1000.0)
    assert order == ["a", "b", "b", "a"]


def test_only_tokens_up_to_the_stop_count() -> None:
    assert throughput.until_stop([5, 2, 0, 0], frozenset({2})) == [5, 2]
    assert throughput.until_stop([5, 6], frozenset({2})) == [5, 6]


def test_both_sides_write_the_same_ids_and_a_changed_one_is_found(
    whole_target: TransformersTarget, reference: throughput.Transformers
) -> None:
    """Prompts of unequal length: a wrong mask or position would change the shorter ones' answers."""
    prompts = [[1, *(4 + (7 * i + j) % 90 for j in range(3 + 4 * i))] for i in range(5)]
    questions = [Question(f"q/{i}", "", ids) for i, ids in enumerate(prompts)]
    ours, sample = throughput.generate(whole_target, prompts, 12)
    captured, _ = throughput.generate(whole_target, prompts, 12, TAPS)
    theirs, their_sample = reference.generate(prompts, 12)
    assert ours == captured and throughput.compare_ids(whole_target, questions, ours, theirs)["differ"] == 0
    for one in (sample, their_sample):
        assert one["tokens"] == sum(map(len, ours)) and 0 < one["prefill_seconds"] < one["seconds"]
    theirs[3][4] = (theirs[3][4] + 1) % whole_target.vocab_size
    theirs[1].pop()
    found = throughput.compare_ids(whole_target, questions, ours, theirs)
    assert (found["rows"], found["differ"], found["ties"]) == (5, 2, 0)
    assert [(one["question"], one["position"]) for one in found["not_ties"]] == [("q/1", len(ours[1]) - 1), ("q/3", 4)]


def test_every_way_to_capture_gives_the_same_features(
    whole_target: TransformersTarget, reference: throughput.Transformers
) -> None:
    rows = [
        Row(
            id=str(i),
            source="s",
            prompt_ids=[1, *range(10, 12 + 3 * i)],
            answer_ids=[7, *range(40, 44 + i)],
            finish="length",
        )
        for i in range(3)
    ]
    alone = InProcessFeatures(whole_target, TAPS)
    wanted = [alone.get(row) for row in rows]
    packed = throughput.capture_packed(whole_target, rows, TAPS)
    padded = reference.capture(rows, TAPS)
    for found in (packed, padded, [reference.capture([row], TAPS)[0] for row in rows]):
        assert max(throughput.largest_error(found, wanted).values()) < 1e-4
    for ours, theirs in zip(wanted, padded, strict=True):  # Transformers gives the last state behind the final norm
        head = whole_target.model.get_output_embeddings()
        assert torch.allclose(head(theirs.last_hidden), whole_target.head(ours.last_hidden), atol=1e-3)
    padded[1].lse[-1] += 1.0
    assert throughput.largest_error(padded, wanted)["lse"] > 1e-2


def test_all_parts(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([*options, "--processes=0"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["settings"]["prompts"] == 6 and "torch" in result["machine"]  # the long one is left out
    assert [one["in_flight"] for one in result["generate"]] == [2, 5]
    for one in result["generate"]:
        assert set(one["sides"]) == {"dspark", "dspark, capture", "transformers"}
        assert all(side["tokens"]["n"] == 2 for side in one["sides"].values())
        assert one["sides"]["dspark"]["tokens"]["max"] <= 8 * one["in_flight"]
        assert {"tokens_per_s", "decode_tokens_per_s"} == set(one["ratio"]["transformers"]["dspark"])
        assert all(found["differ"] == 0 for found in one["ids_against_dspark"].values())
    capture = result["capture"]
    assert capture["rows"] == 5 and len(capture["ratio"]["transformers, padded"]) == 3
    assert all(value < 1e-4 for error in capture["error"].values() for value in error.values())
    train = result["train"]
    assert list(train["sides"]) == ["1 rows, fp32", "1 rows, bf16", "3 rows, fp32", "3 rows, bf16"]
    blocks = {side: figures["blocks"] for side, figures in train["sides"].items()}
    assert blocks["1 rows, fp32"] == blocks["1 rows, bf16"] and blocks["1 rows, fp32"]["max"] <= 3
    assert blocks["3 rows, fp32"]["min"] > blocks["1 rows, fp32"]["max"]
    assert set(train["ratio_to_fp32_of_same_rows"]) == {"1 rows, bf16", "3 rows, bf16"}
    assert "rows in flight" in printed.err and "training" in printed.err


def test_one_part_alone_and_bad_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([*options, "--parts=train", "--compute-dtypes=bf16"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert "generate" not in result and result["train"]["ratio_to_fp32_of_same_rows"] == {}
    with pytest.raises(DsparkError, match="6 prompts are there"):
        benchmark.main([*options, "--parts=generate", "--in-flight=7"])
    with pytest.raises(DsparkError, match="must be of generate"):
        benchmark.main([*options, "--parts=serve"])
    with pytest.raises(DsparkError, match="give --data"):
        benchmark.main(["--parts=train"])


@pytest.mark.slow
def test_processes(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([*options, "--parts=generate", "--in-flight=5", "--processes=2"]) == 0
    result = json.loads(capsys.readouterr().out)
    sides = result["processes"]["sides"]
    assert list(sides) == ["1 process, 2 threads", "2 processes, 1 thread"]
    tokens = result["generate"][0]["sides"]["dspark"]["tokens"]["median"]
    assert all(side["tokens"]["median"] == tokens for side in sides.values())
