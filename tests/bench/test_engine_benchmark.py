"""benchmarks/engine.py on a tiny pair: its JSON, its table, the cost profile, peers that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import engine as benchmark
from gguf import GGUFReader, GGUFWriter

from dspark.bench.compare import Question
from dspark.calibration.cost import CostProfile
from dspark.checkpoints.native import save_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget, load_target
from peers import children, gguf_files


@pytest.fixture(scope="module")
def options(tiny_llama_folder: Path, draft: DSparkDraft, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The target is loaded from its folder, by both sides: the conftest's own has other weights."""
    folder = tmp_path_factory.mktemp("engine")
    save_draft(draft, folder / "draft")
    lines = [json.dumps({"id": f"maths/{i}", "turns": [f"maths {i} please", "more"]}) for i in range(3)]
    (folder / "maths.jsonl").write_text("\n".join(lines))
    given = {
        "target": tiny_llama_folder,
        "draft": folder / "draft",
        "data": folder / "maths.jsonl",
        "limit": 2,
        "max-tokens": 12,
        "context": 40,
        "repeats": 2,
        "outside": 1,
        "cost": folder / "cost.json",
    }
    return [f"--{name}={value}" for name, value in given.items()]


def test_figures_and_table(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "BUFFER", 2**16)
    missing = ["--peers=llamacpp,vllm", "--vllm-python=nowhere"]
    assert benchmark.main([*options, *missing, f"--work={Path(options[-1].partition('=')[2]).parent / 'peers'}"]) == 0
    captured = capsys.readouterr()
    result: dict[str, Any] = json.loads(captured.out)
    sides = result["decode"]["sides"]
    assert list(sides) == ["plain", "n = 3", "n = 7", "transformers"]
    for side in sides.values():
        assert side["equal_ids"] + side["ties"] == side["answers"] == 2
        assert side["end_to_end"]["tokens_per_s"] > 0
        assert side["decode_only"]["ratio"]["plain"]["low"] <= side["decode_only"]["ratio"]["plain"]["high"]
    assert sides["plain"]["end_to_end"]["ratio"]["plain"]["value"] == 1.0
    assert sides["plain"]["acceptance_length"] == 1.0 and 1.0 <= sides["n = 7"]["acceptance_length"] <= 8.0
    assert list(result["decode"]["missing"]) == ["llamacpp", "vllm"]

    passes = result["passes"]
    assert [row["tokens"] for row in passes["verify"]] == [1, 2, 4, 8, 16, 8, 8, 8] and passes["context"] == 40
    assert passes["verify"][0]["ratio"]["value"] == 1.0 and [row["n"] for row in passes["draft"]] == [3, 7]
    for one in result["outside"].values():
        assert one["rounds"] > 0 and 0 < one["outside_seconds"] < one["round_seconds"] and 0 < one["share"] < 1
    layers = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64  # q and o, k and v, the MLP
    assert result["floor"]["bytes"] == 4 * (4 * layers + 100 * 32)
    profile = CostProfile.load(options[-1].partition("=")[2])
    assert profile.model_dump(mode="json") == result["cost"] and profile.settings.n == 7

    table = captured.err
    for line in (
        "llamacpp: not measured, ",
        "8 tokens, 8 requests x 1",
        "draft pass, n = 3",
        "outside the two models, n",
    ):
        assert line in table
    assert max(map(len, table.splitlines())) <= 120


def test_weights_stored_in_float16_are_compared_with_the_same_weights(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "BUFFER", 2**16)
    assert benchmark.main([*options, "--storage=float16", "--max-tokens=24"]) == 0
    result = json.loads(capsys.readouterr().out)
    sides = result["decode"]["sides"].values()
    assert all(side["equal_ids"] + side["ties"] == side["answers"] for side in sides)
    assert result["floor"]["bytes"] == 2 * (4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64) + 100 * 32)


def test_the_clock_counts_what_is_inside_and_lets_go(target: TransformersTarget) -> None:
    ids = torch.tensor([5, 6, 7])
    with benchmark.clocked([(target, ("forward", "embed"))]) as spent:
        target.embed(ids)
        first = spent[0]
        target.forward([(target.new_state(3), ids)])
        assert spent[0] > first > 0
    assert "forward" not in vars(target) and "embed" not in vars(target)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--data=nope"], "data = 'nope': give --data"),
        (["--peers=ollama"], "peers = 'ollama': must be of llamacpp, vllm"),
        (["--ns=3,9"], r"ns = 9: this draft predicts blocks of 1\.\.7"),
        (["--max-prompt-tokens=1"], "no prompt of at most 1 tokens"),
    ],
)
def test_what_cannot_be_measured_is_named(options: list[str], changes: list[str], message: str) -> None:
    with pytest.raises(DsparkError, match=message):
        benchmark.main([*options, *changes])


CHILD = """
import json, sys
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["ids"] == [0]:
        sys.exit("an assertion failed")
    timings = {"prompt_ms": 1.0, **({"draft_n": 6, "draft_n_accepted": 4} if asked["ids"] != [1] else {})}
    print(json.dumps({"ids": asked["ids"][: asked["max_tokens"]], "seconds": 0.5, "timings": timings}), flush=True)
"""


def test_a_child_answers_is_counted_and_its_end_is_told(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    child = children.Child([sys.executable, str(script)], tmp_path / "log")
    peer = children.Peer("other", child, 3)
    run = peer.ask("q", [5, 6, 7], 2)
    assert (run.output_ids, run.seconds, run.first_seconds) == ([5, 6], 0.5, 0.001)
    assert (child.version, peer.drafted, peer.accepted) == ("1", 6, 4)
    with pytest.raises(DsparkError, match="other': did not draft"):
        peer.ask("q", [1], 2)
    with pytest.raises(DsparkError, match="ended with code 1: an assertion failed"):
        peer.ask("q", [0], 2)
    child.close()


def test_gguf_of_a_draft(tiny_llama_folder: Path, draft: DSparkDraft, tmp_path: Path) -> None:
    vocabulary = tmp_path / "target.gguf"
    writer = GGUFWriter(vocabulary, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 32), dtype=np.float32))
    gguf_files._finish(writer)
    target = load_target(str(tiny_llama_folder), packed=False)
    draft.bind(target.embedding_weight, target.head_weight)
    gguf_files.write_draft(draft, vocabulary, tmp_path / "draft.gguf")
    reader = GGUFReader(tmp_path / "draft.gguf")
    found = {key: field.contents() for key, field in reader.fields.items()}
    assert found["general.architecture"] == "dflash" and found["tokenizer.ggml.tokens"] == ["a", "b"]
    assert found["dflash.target_layers"] == [1, 3] and found["tokenizer.ggml.mask_token_id"] == 3
    assert found["dflash.sample_from_anchor"] and not found["dflash.has_confidence_head"]
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    np.testing.assert_array_equal(tensors["output.weight"], target.head_weight.numpy().astype(np.float16))
    query = draft.layers[0].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(tensors["blk.0.attn_q.weight"], query.astype(np.float16))
    assert tensors["enc.output_norm.weight"].dtype == np.float32 and "d2t" not in tensors

    gguf_files.write_target(vocabulary, tmp_path / "half.gguf")
    half = GGUFReader(tmp_path / "half.gguf")
    assert half.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"] and half.tensors[0].data.dtype == np.float16


def test_a_draft_that_llamacpp_cannot_run_is_refused(draft: DSparkDraft, tmp_path: Path) -> None:
    config = draft.config
    windowed = config.model_copy(update={"layer_types": ("sliding_attention",), "sliding_window": 8})
    with pytest.raises(DsparkError, match="layer_types"):
        gguf_files.write_draft(DSparkDraft(windowed), tmp_path / "none", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_questions_are_those_of_the_file(options: list[str]) -> None:
    bench = benchmark.Bench(benchmark.parse(options))
    assert len(bench.questions) == 2 and all(isinstance(one, Question) for one in bench.questions)
    assert len(bench.context) == 40
