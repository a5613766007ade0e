"""Faults of the kinds that the field knows, each planted for real, and the check that names it.

`python -m pytest tests/doctor/test_planted.py -v` prints the list: the fault, the check, the level.
"""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file
from tests.doctor.conftest import draft_fields, edit, levels, random_draft, retensor, texts

from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import load_draft, save_draft
from dspark.decoding import engine as engine_module
from dspark.decoding.engine import Engine
from dspark.doctor import memory, positions
from dspark.doctor.diagnose import Diagnosis
from dspark.errors import DsparkError
from dspark.serving.launch.pair import ready_draft
from dspark.targets.transformers import TransformersTarget

Check = Callable[..., Diagnosis]
Plant = Callable[[Path], Any]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-200])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))


def traversal(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"fc.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def sharded(folder: Path) -> None:
    """The same tensors in a file of another name, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def rope(**changes: Any) -> Plant:
    """Rotary settings, in both spellings."""
    parameters = {**YARN, **changes}
    stated = {name: value for name, value in parameters.items() if value is not None}
    theta = stated["rope_theta"]
    scaling = {name: value for name, value in stated.items() if name != "rope_theta"}
    return lambda folder: edit(folder, rope_parameters=stated, rope_theta=theta, rope_scaling=scaling)


def doubled(folder: Path) -> None:
    """A tensor that is the config's, and one that nobody asked for."""
    retensor(folder, lambda tensors: tensors.update(extra=tensors["fc.weight"].clone()))


STATIC: dict[str, tuple[Plant, dict[str, Any], str, str]] = {
    "file truncated": (truncate, {}, "files", "broken"),
    "file pickled": (pickled, {}, "files", "broken"),
    "index leaves the folder": (traversal, {}, "files", "broken"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), {}, "files", "broken"),
    "tensor missing": (lambda f: retensor(f, lambda t: t.pop("norm.weight")), {}, "files", "broken"),
    "tensor unexpected": (doubled, {}, "files", "broken"),
    "tensor not finite": (lambda f: retensor(f, lambda t: t["fc.weight"].fill_(torch.nan)), {}, "finite", "broken"),
    "matrix lost by a converter": (lambda f: retensor(f, lambda t: t["fc.weight"].zero_()), {}, "weights", "broken"),
    "Markov head never trained": (
        lambda f: retensor(f, lambda t: t["markov_head.markov_w2.weight"].zero_()), {}, "weights", "loses",
    ),
    "target of another depth": (lambda f: edit(f, num_target_layers=6), {}, "target-depth", "broken"),
    "target of another width": (lambda f: None, {"target": "embedded"}, "target-width", "broken"),
    "layer id past the end": (lambda f: edit(f, target_layer_ids=[1, 4]), {}, "layer-ids", "broken"),
    "layer ids not ascending": (lambda f: edit(f, target_layer_ids=[2, 1]), {}, "layer-ids", "note"),
    "layer ids not ascending, for an engine": (
        lambda f: edit(f, target_layer_ids=[2, 1]), {"engine": "sglang"}, "engine-support", "note",
    ),
    "weights in shards": (sharded, {}, "files", "broken"),
    "the target's embedding in the file": (
        lambda f: retensor(f, lambda t: t.update({"embed_tokens.weight": torch.ones(100, 32)})), {}, "files", "broken",
    ),
    "config nested too deep": (lambda f: (f / "config.json").write_text("[" * 100000), {}, "files", "broken"),
    "layout key missing": (lambda f: edit(f, ("sample_from_anchor",)), {}, "layout", "broken"),
    "layout key missing, DeepSpec's form": (
        lambda f: edit(f, ("sample_from_anchor", "lm_head_in_file")), {}, "layout", "broken",
    ),
    "mask id missing": (lambda f: edit(f, ("mask_token_id",)), {}, "mask-token", "broken"),
    "mask id -1": (lambda f: edit(f, mask_token_id=-1), {}, "mask-token", "broken"),
    "mask id outside the embedding": (lambda f: edit(f, mask_token_id=100), {}, "mask-token", "broken"),
    "mask id is the pad token": (lambda f: edit(f, mask_token_id=0), {}, "mask-token", "loses"),
    "mask id is the end token": (lambda f: edit(f, mask_token_id=2), {}, "mask-token", "broken"),
    "mask id is normal text": (lambda f: edit(f, mask_token_id=40), {}, "mask-token", "loses"),
    "YaRN without its original length": (
        rope(original_max_position_embeddings=None), {}, "rotary", "broken",
    ),
    "YaRN with another original length": (rope(original_max_position_embeddings=32), {}, "rotary", "loses"),
    "rotary stated in two ways": (lambda f: edit(f, rope_theta=5000.0), {}, "rotary", "broken"),
    "only part of a head turns": (
        lambda f: edit(
            f,
            ("rope_theta", "rope_scaling"),
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        ),
        {}, "rotary", "note",
    ),
    "YaRN without end": (rope(factor=float("inf")), {}, "rotary", "broken"),
    "norm lost by a converter": (
        lambda f: retensor(f, lambda t: t["hidden_norm.weight"].zero_()), {}, "weights", "broken",
    ),
    "key norm lost by a converter": (
        lambda f: retensor(f, lambda t: t["layers.1.self_attn.k_norm.weight"].zero_()), {}, "weights", "broken",
    ),
    "context past the trained length": (lambda f: None, {"context": 200}, "trained-length", "loses"),
    "context past the target's": (lambda f: None, {"context": 300}, "trained-length", "broken"),
    "n above the block": (lambda f: None, {"n": 7}, "block-size", "broken"),
    "another chat template": (
        lambda f: edit(f, prompt_recipe={"template_sha256": "ab" * 32, "thinking": None}),
        {}, "prompt-recipe", "loses",
    ),
    "float16 weights out of range": (
        lambda f: (edit(f, torch_dtype="float16"), retensor(f, lambda t: t["fc.weight"].mul_(1e6))),
        {}, "dtype", "broken",
    ),
    "key that makes another model": (
        lambda f: edit(f, ("lm_head_in_file",), attention_sink_bias=True), {}, "config", "broken",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", STATIC)
def test_in_the_files(fault: str, copied: Path, check: Check, embedded_path: Path) -> None:
    plant, settings, name, level = STATIC[fault]
    plant(copied)
    found = check(copied, **settings)
    assert level in levels(found, name), texts(found.findings)
    assert found.code == {"broken": 2, "loses": 1, "note": 0}[level]


def test_thinking_mode_of_another_template(copied: Path, target: TransformersTarget, check: Check) -> None:
    recipe = draft_fields(target)["prompt_recipe"]
    edit(copied, prompt_recipe={**recipe, "thinking": "on"})
    found = check(copied)
    assert levels(found, "prompt-recipe") == ["loses"] and "no such switch" in texts(found.findings)


RANDOM: dict[str, tuple[dict[str, Any], Plant, dict[str, Any], str, str]] = {
    "d2t holds ids": (
        {"draft_vocab_size": 40},
        lambda f: retensor(f, lambda t: t["d2t"].add_(torch.arange(40))),
        {}, "d2t", "broken",
    ),
    "t2d marks other ids": (
        {"draft_vocab_size": 40},
        lambda f: retensor(f, lambda t: t["t2d"].copy_(t["t2d"].roll(1))),
        {}, "d2t", "broken",
    ),
    "ids where offsets belong, in range": (
        {"draft_vocab_size": 40},
        lambda f: (edit(f, ("lm_head_in_file",)), retensor(f, ids_in_range)), {}, "d2t", "loses",
    ),
    "a right map without neighbours": (
        {"draft_vocab_size": 40}, lambda f: retensor(f, no_neighbours), {}, "d2t", "ok",
    ),
    "t2d missing": (
        {"draft_vocab_size": 40}, lambda f: retensor(f, lambda t: t.pop("t2d")), {}, "files", "broken",
    ),
    "head's rows stated, not there": (
        {"draft_vocab_size": 40}, lambda f: retensor(f, lambda t: t.pop("lm_head.weight")), {}, "config", "broken",
    ),
    "vocabulary padded otherwise": (
        {"vocab_size": 104, "draft_vocab_size": 104}, lambda f: None, {}, "vocabulary", "broken",
    ),
    "gated head for vLLM": (
        {"markov_head_type": "gated"}, lambda f: None, {"engine": "vllm"}, "engine-support", "broken",
    ),
    "rnn head for llama.cpp": (
        {"markov_head_type": "rnn"}, lambda f: None, {"engine": "llamacpp"}, "engine-support", "broken",
    ),
    "rank 0, anchor-first, for SGLang": (
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        lambda f: None, {"engine": "sglang"}, "engine-support", "broken",
    ),
    "reduced vocabulary for SGLang": (
        {"draft_vocab_size": 40}, lambda f: None, {"engine": "sglang"}, "engine-support", "note",
    ),
    "window that is not causal for vLLM": (
        {"layer_types": ["full_attention", "sliding_attention"]}
        | {"sliding_window": 8, "sliding_window_non_causal": True},
        lambda f: None, {"engine": "vllm"}, "engine-support", "broken",
    ),
    "no confidence head for SGLang": (
        {"enable_confidence_head": False}, lambda f: None, {"engine": "sglang"}, "engine-support", "note",
    ),
    "the target's last layer for llama.cpp": (
        {"target_layer_ids": [1, 3]}, lambda f: None, {"engine": "llamacpp"}, "engine-support", "broken",
    ),
}  # fmt: skip


def ids_in_range(tensors: dict[str, torch.Tensor]) -> None:
    """Every second id from 5: as offsets these still give ids below 100."""
    tensors["d2t"] = torch.arange(40) + 5
    tensors.pop("t2d", None)


def no_neighbours(tensors: dict[str, torch.Tensor]) -> None:
    """A right map to ids of which no two are neighbours, as t2d marks them."""
    ids_in_range(tensors)
    tensors["t2d"] = torch.zeros(100, dtype=torch.bool)
    tensors["t2d"][torch.arange(40) + tensors["d2t"]] = True


@pytest.mark.parametrize("fault", RANDOM)
def test_in_drafts_of_other_kinds(fault: str, copied: Path, target: TransformersTarget, check: Check) -> None:
    fields, plant, settings, name, level = RANDOM[fault]
    random_draft(copied, target, **fields)
    plant(copied)
    found = check(copied, **settings)
    assert level in levels(found, name), texts(found.findings)


def test_a_target_without_taps_in_vllm(copied: Path, target_folder: Path, check: Check, tmp_path: Path) -> None:
    mixtral = tmp_path / "target"
    mixtral.mkdir()
    for file in target_folder.iterdir():
        (mixtral / file.name).write_bytes(file.read_bytes())
    edit(mixtral, architectures=["MixtralForCausalLM"])
    found = check(copied, target=str(mixtral), engine="vllm")
    assert "broken" in levels(found, "engine-support"), texts(found.findings)


def test_what_a_conversion_mends_is_a_note_with_its_command(
    healthy: Path, copied: Path, target: TransformersTarget, target_folder: Path, check: Check, tmp_path: Path
) -> None:
    convert(healthy, "specforge", tmp_path / "nested")
    random_draft(copied, target, draft_vocab_size=40)
    save_draft(load_draft(copied), tmp_path / "short", lm_head=False)
    goals = {
        ("nested", "sglang"): "--to sglang",
        ("short", "vllm"): "--to vllm",
        ("short", "sglang"): "--to sglang",
        ("short", "llamacpp"): "--to gguf --target TARGET.gguf",
    }
    for (name, engine), words in goals.items():
        found = check(tmp_path / name, engine=engine)
        said = [one.text for one in found.findings if one.check == "engine-support" and "not in a form" in one.text]
        assert found.code < 2 and len(said) == 1, texts(found.findings)
        assert words in said[0] and f"dspark convert {tmp_path / name} OUT" in said[0]
        if engine != "llamacpp":  # and launch does the very same
            ready = ready_draft(engine, str(target_folder), str(tmp_path / name), tmp_path / "made")
            assert shlex.join(ready.command).replace(str(tmp_path / "made"), "OUT") in said[0]


def test_target_of_another_name(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    found = check("kimi-k2.6", target="somebody/Kimi-K2.6-Tuned")
    assert levels(found, "target-name") == ["loses"] and levels(found, "target-depth") == ["skipped"]


def test_library_of_other_frequencies(copied: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a hard-coded YaRN factor would change them."""
    right = positions.inverse_frequencies
    monkeypatch.setattr(positions, "inverse_frequencies", lambda config: (right(config)[0] / 16, 1.0))
    assert levels(check(copied), "rotary-library") == ["broken"]


# Faults that only running the pair shows


def to_the_brim(tensors: dict[str, torch.Tensor]) -> None:
    """Weights that float16 holds, with sums that it does not."""
    weight = tensors["layers.0.mlp.down_proj.weight"]
    weight.mul_(6e4 / float(weight.abs().max()))


def recorded(folder: Path) -> None:
    """A training.json with about the acceptance that the healthy draft has."""
    best = {"step": 250, "replay_acceptance": 2.0, "bonus": "counted", "n": 4}
    record = {"draft": {"which": "last", "step": 250}, "best": best, "curve": [best]}
    (folder / "training.json").write_text(json.dumps(record))


def swap(tensors: dict[str, torch.Tensor]) -> None:
    """Keys for values in every layer, as a converter that mixes up names leaves them."""
    for layer in (0, 1):
        k, v = (f"layers.{layer}.self_attn.{one}_proj.weight" for one in "kv")
        tensors[k], tensors[v] = tensors[v].clone(), tensors[k].clone()


DYNAMIC: dict[str, tuple[Plant, dict[str, Any], str, str]] = {
    "layer ids one too high": (lambda f: edit(f, target_layer_ids=[2, 3]), {}, "layer-ids", "loses"),
    "layer ids one too low": (lambda f: edit(f, target_layer_ids=[0, 1]), {}, "layer-ids", "loses"),
    "layout key of the other layout": (
        lambda f: edit(f, sample_from_anchor=False), {}, "layout", "broken",
    ),
    "layout unsure, decided by running": (lambda f: edit(f, ("sample_from_anchor",)), {}, "layout", "note"),
    "float16 overflows": (
        lambda f: (edit(f, torch_dtype="float16"), retensor(f, to_the_brim)),
        {}, "first-draft", "broken",
    ),
    "weights of another draft": (
        lambda f: retensor(f, lambda t: [x.copy_(torch.randn_like(x)) for n, x in t.items() if x.ndim == 2]),
        {}, "acceptance", "broken",
    ),
    "context past the trained length": (lambda f: None, {"context": 200}, "depth", "loses"),
    "keys and values swapped": (lambda f: (recorded(f), retensor(f, swap)), {}, "acceptance", "loses"),
    "as it was trained": (recorded, {}, "acceptance", "ok"),
}  # fmt: skip


@pytest.mark.parametrize("fault", DYNAMIC)
def test_in_the_running_pair(fault: str, copied: Path, check: Check) -> None:
    plant, settings, name, level = DYNAMIC[fault]
    plant(copied)
    found = check(copied, run=True, **settings)
    assert level in levels(found, name), texts(found.findings)


def test_a_target_larger_than_the_memory(
    copied: Path, check: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 10 kB\n")
    monkeypatch.setattr(memory, "MEMORY_INFO", tmp_path / "meminfo")
    found = check(copied, run=True)
    assert levels(found, "run") == ["skipped"] and "GB too few" in texts(found.findings)


def test_speculators_ids_counted_twice(copied: Path, check: Check, tmp_path: Path) -> None:
    convert(copied, "speculators", tmp_path / "spec")
    edit(tmp_path / "spec", aux_hidden_state_layer_ids=[3, 4])
    found = check(tmp_path / "spec", run=True)
    assert "loses" in levels(found, "layer-ids"), texts(found.findings)


def test_head_rows_of_other_ids(copied: Path, target: TransformersTarget, check: Check) -> None:
    random_draft(copied, target, draft_vocab_size=40)
    retensor(copied, lambda t: t["lm_head.weight"].copy_(t["lm_head.weight"].roll(1, 0)))
    found = check(copied, run=True)
    assert levels(found, "head-rows") == ["broken"], texts(found.findings)


def test_mask_that_the_target_emits(copied: Path, tiny_llama_folder: Path, check: Check) -> None:
    found = check(copied, run=True, target=str(tiny_llama_folder))  # its head was not kept from emitting id 3
    assert "loses" in levels(found, "mask-token"), texts(found.findings)


def faulty(target: TransformersTarget, out: Any, taps: Any, batch: Any, kind: str) -> None:
    """Spoil what a pass hands out, as broken captures do."""
    if out.taps is None:
        return
    if kind == "zero":
        out.taps = torch.zeros_like(out.taps)
    elif kind == "one layer early":
        out.taps = out.taps.roll(target.hidden_size, -1)
    elif kind == "batch" and len(batch) > 1:
        out.taps = out.taps.roll(1, 0)


@pytest.mark.parametrize(("kind", "name"), [("zero", "features"), ("one layer early", "states"), ("batch", "states")])
def test_captured_states(kind: str, name: str, copied: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformersTarget.forward

    def spoiled(self: Any, batch: Any, taps: Any = (), logits: Any = "all") -> Any:
        out = forward(self, batch, taps, logits)
        faulty(self, out, taps, batch, kind)
        return out

    monkeypatch.setattr(TransformersTarget, "forward", spoiled)
    found = check(copied, run=True)
    assert "broken" in levels(found, name), texts(found.findings)


def test_final_norm_missing(copied: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransformersTarget, "head", lambda self, hidden, rows=None: self._head_module(hidden))
    found = check(copied, run=True)
    assert "broken" in levels(found, "states"), texts(found.findings)


def test_draft_context_unwritten_when_served(copied: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a request's first context is lost, as with a prefix-cache hit that forgets the draft."""
    observe = Engine._observe

    def forget(self: Any, observed: Any, out: Any) -> None:
        kept = [(a, rows) for a, rows in observed if self._capturing or len(a.result.output_ids) > 1]
        if any(len(a.result.output_ids) <= 1 for a, _ in observed) and out.taps is not None and not self._capturing:
            out.taps = torch.zeros_like(out.taps)
            kept = observed
        observe(self, kept, out)

    monkeypatch.setattr(Engine, "_observe", forget)
    found = check(copied, run=True)
    assert levels(found, "replay") == ["broken"], texts(found.findings)


def test_one_token_too_many_accepted(copied: Path, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:

    def generous(right: Callable[..., Any]) -> Callable[..., Any]:
        def verify(best: Any, tokens: Any, *rest: Any) -> Any:
            accepted, token = right(best, tokens, *rest)
            return min(accepted + 1, len(tokens)), token

        return verify

    for name in ("verify_largest", "verify_greedy"):
        monkeypatch.setattr(engine_module, name, generous(getattr(engine_module, name)))
    found = check(copied, run=True)
    assert levels(found, "served-ids") == ["broken"], texts(found.findings)


def test_thinking_changes_what_the_draft_knows(copied: Path, target_folder: Path, check: Check, tmp_path: Path) -> None:
    """A template with a switch: the draft learned the answers without thinking by heart, and knows no others."""
    folder = tmp_path / "target"
    folder.mkdir()
    for file in target_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = folder / "chat_template.jinja"
    switch = "{% if enable_thinking is defined and enable_thinking %}{{ 'think long, think hard\n' }}{% endif %}"
    template.write_text(switch + template.read_text())
    found = check(copied, run=True, target=str(folder))
    assert levels(found, "thinking") == ["loses"], texts(found.findings)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_any_value_of_any_key_is_a_finding(engine: str | None, copied: Path, check: Check) -> None:
    """No value makes the doctor itself fail."""
    original = json.loads((copied / "config.json").read_text())
    for name in original:
        for value in (None, -1, 0, "x", [], {}, 1e9, [1, "x"], True):
            edit(copied, **{**original, name: value})
            assert check(copied, engine=engine).code in (0, 1, 2)


def test_any_value_of_any_key_of_the_target(copied: Path, target_folder: Path, check: Check, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    for file in target_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    original = json.loads((folder / "config.json").read_text())
    counts = "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"
    for name in (*counts, "architectures", "eos_token_id", "rope_parameters", "rope_theta", "text_config"):
        for value in (None, -1, 10**400, "x", [], {}, [[1], "x"]):
            edit(folder, **{**original, name: value})
            try:
                assert check(copied, target=str(folder), context=60, engine="vllm").code in (0, 1, 2)
            except DsparkError as error:
                assert error.field == "target"
