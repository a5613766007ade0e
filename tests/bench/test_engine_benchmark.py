"""benchmarks/engine.py on a tiny pair: its JSON, its table, the cost profile, peers that are not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks import engine as benchmark
from gguf import GGUFReader, GGUFWriter
from transformers import AutoModelForCausalLM, LlamaConfig

from dspark.bench.compare import PLAIN, Mode, Question, Run, build_engines, timed_run
from dspark.calibration.cost import CostProfile
from dspark.checkpoints.gguf import finish
from dspark.checkpoints.native import save_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.kernels.library import library
from dspark.targets.transformers import TransformersTarget, load_target
from peers import children, gguf_files

WEIGHTS = 4 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 64) + 100 * 32
"""Of the tiny target: q and o, k and v, the MLP; the head."""
needs_kernels = pytest.mark.skipif(library() is None, reason="the compiled kernels are not built here")


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

    passes, exact = result["passes"], result["passes"]["storages"]["exact"]
    assert [row["tokens"] for row in exact["verify"]] == [1, 2, 4, 8, 16, 8, 8, 8] and passes["context"] == 40
    assert exact["verify"][0]["ratio"]["value"] == 1.0 and [row["n"] for row in exact["draft"]] == [3, 7]
    for one in result["outside"].values():
        assert one["rounds"] > 0 and 0 < one["outside_seconds"] < one["round_seconds"] and 0 < one["share"] < 1
    assert set(result["outside"]["plain"]["inside_seconds"]) == {"forward"}
    assert set(result["outside"]["n = 3"]["inside_seconds"]) >= {"forward", "block_hidden", "write_context"}
    kept = result["storages"]["exact"]
    assert kept["weight_bytes"] == 4 * WEIGHTS and kept["target"] == {"layers": ["float32"], "head": "float32"}
    floor = kept["weight_bytes"] / max(passes["read_bytes_per_s"])
    assert exact["floor_seconds"] == floor
    assert exact["over_floor"]["value"] == pytest.approx(exact["verify"][0]["seconds"] / floor)
    profile = CostProfile.load(options[-1].partition("=")[2])
    assert profile.model_dump(mode="json") == result["cost"] and profile.settings.n == 7

    table = captured.err
    for line in (
        "llamacpp: not measured, ",
        "8 tokens, 8 requests x 1",
        "draft pass, n = 3",
        "outside the two models, n",
        "T(1) / floor ",
        "kernels: ",
        "exact: 0.2 MB of weights a pass; target: float32, head float32; draft: ",
    ):
        assert line in table
    assert max(map(len, table.splitlines())) <= 120


def test_storages_side_by_side_and_a_peer_with_the_same_weights(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "BUFFER", 2**16)
    target = load_target(options[0].partition("=")[2], storage="float16")
    engines = build_engines(target, None, [PLAIN])

    class Other:
        """What llama.cpp in f16 would say: the rounded weights' answers."""

        name, n, drafted, accepted = "llama.cpp f16", 0, 0, 0

        def ask(self, question: str, ids: Sequence[int], limit: int) -> Run:
            return timed_run(engines["plain"], Mode(self.name, 0), Question(question, "", ids), limit)

    monkeypatch.setattr(benchmark, "open_peers", lambda *_: children.Peers([Other()]))  # type: ignore[list-item]
    more = ["--storages=exact,float16,float16", "--max-tokens=24", "--ns=3", "--peers=llamacpp"]
    work = Path(options[-1].partition("=")[2]).parent / "peers"
    assert benchmark.main([*options, *more, f"--work={work}"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    sides = result["decode"]["sides"]
    assert list(sides) == ["plain", "n = 3", "float16, plain", "float16, n = 3", "transformers", "llama.cpp f16"]
    assert [side["storage"] for side in sides.values()] == ["exact", "exact", "float16", "float16", "exact", "float16"]
    assert all(side["equal_ids"] + side["ties"] == side["answers"] for side in sides.values())
    for name in ("plain", "float16, plain"):
        assert sides[name]["end_to_end"]["ratio"]["own plain"]["value"] == 1.0
    kept = result["storages"]
    assert list(kept) == list(result["passes"]["storages"]) == ["exact", "float16"]
    assert kept["float16"]["weight_bytes"] == 2 * WEIGHTS
    assert kept["float16"]["draft"]["head"] == "float16" != kept["exact"]["draft"]["head"]  # its rows are the target's
    assert [row["tokens"] for row in result["passes"]["storages"]["float16"]["verify"]] == [1, 2, 4, 8, 16]
    assert list(result["outside"]) == ["plain", "n = 3", "float16, plain", "float16, n = 3"]
    against = {(one["ours"], one["theirs"]): one for one in result["decode"]["against"]}
    assert ("float16, plain", "llama.cpp f16") in against
    assert all(one["same_weights"] and one["decode_only"] for one in against.values())
    assert [one["fastest"] for one in against.values()].count(True) == 1
    assert "float16, plain over llama.cpp f16: " in captured.err and "(the same weights, decoding" in captured.err


@pytest.mark.parametrize("storage", ["float16", pytest.param("int8", marks=needs_kernels)])
def test_transformers_has_the_main_storages_weights(
    options: list[str], storage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "BUFFER", 2**16)
    assert benchmark.main([*options, f"--storage={storage}", "--max-tokens=24"]) == 0
    sides = json.loads(capsys.readouterr().out)["decode"]["sides"]
    assert list(sides) == ["plain", "n = 3", "n = 7", "transformers"]
    assert all(side["equal_ids"] + side["ties"] == side["answers"] for side in sides.values())


def test_the_clock_counts_what_is_inside_and_lets_go(target: TransformersTarget) -> None:
    ids = torch.tensor([5, 6, 7])
    with benchmark.clocked([(target, ("forward", "embed"))]) as spent:
        target.embed(ids)
        assert set(spent) == {"embed"}
        target.forward([(target.new_state(3), ids)])
        assert all(seconds > 0 for seconds in spent.values()) and set(spent) == {"embed", "forward"}
    assert "forward" not in vars(target) and "embed" not in vars(target)


@needs_kernels
def test_the_clock_sees_every_compiled_pass(draft: DSparkDraft) -> None:
    """A pair whose sizes the kernels know: all that calls them from a round is clocked, and each part once."""
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        wide = DSparkDraft(draft.config.model_copy(update={"head_dim": 32, "markov_rank": 32}))
    target = TransformersTarget("tiny", model, None, storage="bfloat16")
    engines = build_engines(target, wide, [PLAIN, Mode("n = 3", 3)])
    stored = benchmark.Stored("bfloat16", "", target, wide, engines)
    assert target._compiled is not None and wide.compiled is not None
    assert stored.describe()["target"] == {"layers": ["bfloat16"], "head": "bfloat16"}
    assert stored.describe()["draft"] == {"layers": ["float32"], "head": "bfloat16"}

    with benchmark.clocked(stored.parts()) as spent:
        rounds, wall = benchmark.measure_rounds(engines["n = 3"], Question("q", "", [5, 6, 7]), 12, spent)
    assert rounds > 0 and sum(spent.values()) < wall
    assert set(spent) == {"forward", "block_hidden", "base_logits", "write_context", "greedy_tokens"}
    assert "greedy_tokens" not in vars(wide.compiled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--data=nope"], "data = 'nope': give --data"),
        (["--peers=ollama"], "peers = 'ollama': must be of llamacpp, vllm"),
        (["--storages=exact,f16"], "storages = 'f16': must be of exact, float32, float16"),
        (["--storages=q4_1"], "storage = 'q4_1': "),
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


def test_the_target_in_f16(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "target.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 32), dtype=np.float32))
    finish(writer)
    gguf_files.write_target(tmp_path / "target.gguf", tmp_path / "half.gguf")
    half = GGUFReader(tmp_path / "half.gguf")
    assert half.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"] and half.tensors[0].data.dtype == np.float16


def test_questions_are_those_of_the_file(options: list[str]) -> None:
    bench = benchmark.Bench(benchmark.parse(options))
    assert len(bench.questions) == 2 and all(isinstance(one, Question) for one in bench.questions)
    assert len(bench.context) == 40
