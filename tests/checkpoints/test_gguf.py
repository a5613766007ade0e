"""GGUF files of drafts for llama.cpp: names, shapes, keys and values, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints.conftest import same_files

gguf = pytest.importorskip("gguf", reason="the package gguf (extra demo) is not installed")

from dspark.checkpoints import gguf as module  # noqa: E402
from dspark.checkpoints.gguf import CONFIG_KEY, export_gguf, metadata  # noqa: E402
from dspark.checkpoints.native import config_to_json, save_draft  # noqa: E402
from dspark.checkpoints.read import import_draft as read_gguf  # noqa: E402
from dspark.drafts.dspark import DSparkDraft  # noqa: E402
from dspark.errors import DsparkError  # noqa: E402

PLAIN: dict[str, Any] = {
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
}
DFLASH = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
BONUS = {"sample_from_anchor": False, "block_size": 8}
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 7,
    "sliding_window_non_causal": True,
}
LAYER_SHAPES = {
    "attn_norm": (16,),
    "attn_q": (16, 16),
    "attn_k": (8, 16),
    "attn_v": (8, 16),
    "attn_output": (16, 16),
    "attn_q_norm": (4,),
    "attn_k_norm": (4,),
    "ffn_norm": (16,),
    "ffn_gate": (24, 16),
    "ffn_up": (24, 16),
    "ffn_down": (16, 24),
}


@pytest.fixture
def make(make_draft) -> Callable[..., DSparkDraft]:
    return lambda **changes: make_draft(**{**PLAIN, "sample_from_anchor": True, "block_size": 7, **changes})


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    reader = gguf.GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items()}
    return keys, {one.name: one for one in reader.tensors}


def same(mine: DSparkDraft, other: DSparkDraft) -> bool:
    a, b = mine.state_dict(), other.state_dict()
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_keys_names_and_shapes(make, write_target, tmp_path) -> None:
    draft = make()
    export_gguf(draft, tmp_path / "draft.gguf", write_target())
    keys, tensors = contents(tmp_path / "draft.gguf")
    assert keys["general.architecture"] == "dflash" and keys["general.file_type"] == 1
    theirs = {key.removeprefix("dflash."): value for key, value in keys.items() if key.startswith("dflash.")}
    config = draft.config
    assert theirs.pop("attention.layer_norm_rms_epsilon") == pytest.approx(config.rms_norm_eps)
    assert theirs == {
        "block_count": 2,
        "context_length": config.max_position_embeddings,
        "embedding_length": 16,
        "feed_forward_length": 24,
        "vocab_size": 30,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 4,
        "attention.value_length": 4,
        "rope.freq_base": 100.0,
        "block_size": 7,
        "target_layers": [1, 3],  # ours are 0 and 2
        "sample_from_anchor": True,
        "has_confidence_head": True,
    }
    assert keys["tokenizer.ggml.mask_token_id"] == 29 and keys["tokenizer.ggml.tokens"][7] == "t7"
    assert keys["tokenizer.ggml.add_bos_token"] is False and keys["tokenizer.ggml.token_type"] == [1] * 30
    assert json.loads(keys[CONFIG_KEY])["target_layer_ids"] == [0, 2]
    shapes = {name: tuple(one.data.shape) for name, one in tensors.items()}
    layers = {f"blk.{i}.{name}.weight": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    assert shapes == {
        **layers,
        "fc.weight": (16, 32),
        "enc.output_norm.weight": (16,),
        "output_norm.weight": (16,),
        "markov_w1.weight": (30, 3),
        "markov_w2.weight": (12, 3),
        "conf_proj.weight": (1, 19),
        "conf_proj.bias": (1,),
        "output.weight": (12, 16),
        "d2t": (12,),
    }
    assert os.listdir(tmp_path).count("draft.gguf") == 1 and len(os.listdir(tmp_path)) == 2


def test_values_types_and_absolute_ids(make, write_target, tmp_path) -> None:
    draft = make()
    export_gguf(draft, tmp_path / "draft.gguf", write_target())
    _, tensors = contents(tmp_path / "draft.gguf")
    assert tensors["d2t"].data.tolist() == list(range(3, 27, 2)) and tensors["d2t"].data.dtype == np.int64
    query = draft.layers[1].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(tensors["blk.1.attn_q.weight"].data, query.astype(np.float16))
    np.testing.assert_array_equal(tensors["output.weight"].data, draft.head_rows.numpy().astype(np.float16))
    norm = draft.hidden_norm.weight.detach().numpy()
    np.testing.assert_array_equal(tensors["enc.output_norm.weight"].data, norm)
    assert all(one.data.dtype == np.float32 for one in tensors.values() if one.data.ndim == 1 and one.name != "d2t")


@pytest.mark.parametrize(
    "changes",
    [{}, BONUS, {**DFLASH, **BONUS, "draft_vocab_size": 30}, {"enable_confidence_head": False}],
    ids=["dspark", "bonus anchor", "dflash", "no confidence"],
)
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_there_and_back(make, write_target, tmp_path, changes, kind) -> None:
    draft = make(**changes)  # exact in BF16, and of a size that f16 holds
    export_gguf(draft, tmp_path / "draft.gguf", write_target(), kind)
    back = read_gguf(tmp_path / "draft.gguf")
    assert back.config == draft.config and same(draft, back) and not back.bound
    if draft.config.reduced:
        assert back.own_head_rows is not None and torch.equal(back.own_head_rows, draft.head_rows)
    export_gguf(back, tmp_path / "again.gguf", tmp_path / "target.gguf", kind)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "draft.gguf").read_bytes()


def test_the_whole_vocabulary_leaves_the_head_to_the_target(make, write_target, tmp_path) -> None:
    export_gguf(make(draft_vocab_size=30), tmp_path / "draft.gguf", write_target())
    _, tensors = contents(tmp_path / "draft.gguf")
    assert not {"d2t", "output.weight", "token_embd.weight"} & set(tensors)


def test_the_block_size_is_of_the_layout(make) -> None:
    for changes, predictions in (({}, 7), (BONUS, 7)):
        config = make(**changes).config
        keys = metadata(config)
        assert config.gamma == predictions
        assert keys["dflash.block_size"] == config.slots(config.gamma) == config.block_size
        assert keys["dflash.sample_from_anchor"] is config.sample_from_anchor


def test_q8_0_keeps_half_a_step(make, write_target, tmp_path) -> None:
    draft = make()
    export_gguf(draft, tmp_path / "draft.gguf", write_target(), "q8_0")
    keys, tensors = contents(tmp_path / "draft.gguf")
    assert keys["general.file_type"] == 7
    kinds = {name: one.tensor_type.name for name, one in tensors.items()}
    assert kinds["fc.weight"] == "Q8_0" and kinds["output_norm.weight"] == "F32"
    assert kinds["markov_w1.weight"] == "F16"  # rows of 3
    back, values = read_gguf(tmp_path / "draft.gguf").fc.weight.detach(), draft.fc.weight.detach()
    step = values.abs().amax(1, keepdim=True) / 127  # of a row's one block of 32
    assert bool(((back - values).abs() <= step * (0.5 + 127 / 2048)).all())  # and the rounding of its scale to f16
    assert not torch.equal(back, values)


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
def test_an_unbound_draft_takes_its_rows_from_the_targets_file(make, write_target, tmp_path, name) -> None:
    head = np.random.default_rng(0).normal(size=(30, 16)).astype(np.float32)
    unbound = DSparkDraft(make().config)
    unbound.set_vocabulary(range(3, 27, 2))
    values = {"token_embd.weight": np.zeros_like(head), name: head}
    export_gguf(unbound, tmp_path / "draft.gguf", write_target(values), "f32")
    np.testing.assert_array_equal(contents(tmp_path / "draft.gguf")[1]["output.weight"].data, head[3:27:2])


def test_yarn(make, write_target, tmp_path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4.0, "original_max_position_embeddings": 64}
    draft = make(rope_parameters=rope)
    export_gguf(draft, tmp_path / "draft.gguf", write_target())
    keys, _ = contents(tmp_path / "draft.gguf")
    assert {key: value for key, value in keys.items() if "rope.scaling" in key} == {
        "dflash.rope.scaling.type": "yarn",
        "dflash.rope.scaling.factor": 4.0,
        "dflash.rope.scaling.original_context_length": 64,
    }
    assert read_gguf(tmp_path / "draft.gguf").config == draft.config


def test_sliding_layers(make, write_target, tmp_path) -> None:
    draft = make(**SLIDING)
    export_gguf(draft, tmp_path / "draft.gguf", write_target())
    keys, _ = contents(tmp_path / "draft.gguf")
    assert keys["dflash.attention.sliding_window"] == 7
    assert keys["dflash.attention.sliding_window_pattern"] == [False, True]
    assert read_gguf(tmp_path / "draft.gguf").config == draft.config


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gated": ({"markov_head_type": "gated"}, "markov_head_type"),
    "rnn": ({"markov_head_type": "rnn"}, "markov_head_type"),
    "biases": ({"attention_bias": True}, "attention_bias"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "causal window": ({**SLIDING, "sliding_window_non_causal": False}, "sliding_window_non_causal"),
    "short window": ({**SLIDING, "sliding_window": 6}, "sliding_window"),
    "last layer": ({"target_layer_ids": [0, 3]}, "target_layer_ids"),
    "anchor-first DFlash": (DFLASH, "sample_from_anchor"),
    "confidence alone": ({"confidence_head_with_markov": False}, "confidence_head_with_markov"),
    "partial rotary": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor",
    ),
    "attention factor": (
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 9.0, "factor": 2.0, "attention_factor": 1.5}},
        "rope_parameters.attention_factor",
    ),
    "dynamic": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 9.0, "factor": 2.0}},
        "rope_parameters.rope_type",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llamacpp_cannot_say_is_refused(make, write_target, tmp_path, case) -> None:
    changes, field = REFUSED[case]
    target = write_target()
    with pytest.raises(DsparkError) as caught:
        export_gguf(make(**changes), tmp_path / "draft.gguf", target)
    assert caught.value.field == field and os.listdir(tmp_path) == ["target.gguf"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": 29}, "vocab_size"),
        ({"tokens": 0}, "target"),
        ({"embedding_length": 32}, "hidden_size"),
        ({"block_count": 5}, "num_target_layers"),
    ],
)
def test_another_targets_file_is_refused(make, write_target, tmp_path, changes, field) -> None:
    target = write_target(**changes)
    with pytest.raises(DsparkError) as caught:
        export_gguf(make(), tmp_path / "draft.gguf", target)
    assert caught.value.field == field and os.listdir(tmp_path) == ["target.gguf"]


def test_layers_that_predict_ahead_are_no_layers_of_the_target(make, write_target, tmp_path) -> None:
    export_gguf(make(), tmp_path / "draft.gguf", write_target(block_count=5, nextn_predict_layers=1))


def test_paths_and_types(make, write_target, tmp_path, monkeypatch) -> None:
    target, draft = write_target(), make()
    before = target.read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no such file")
    for path, source, kind, field in (
        (target, target, "f16", "path"),
        (tmp_path / "folder", target, "f16", "path"),
        (tmp_path / "text" / "draft.gguf", target, "f16", "path"),
        (tmp_path / "draft.gguf", tmp_path / "none", "f16", "target"),
        (tmp_path / "draft.gguf", tmp_path / "text", "f16", "target"),
        (tmp_path / "draft.gguf", target, "q4_0", "kind"),
    ):
        with pytest.raises(DsparkError) as caught:
            export_gguf(draft, path, source, kind)
        assert caught.value.field == field
    assert target.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["folder", "target.gguf", "text"]
    monkeypatch.setattr(module, "gguf", None)
    with pytest.raises(DsparkError, match=r"dspark\[demo\]"):
        export_gguf(draft, tmp_path / "draft.gguf", target)


def test_broken_and_packed_drafts(make, write_target, tmp_path) -> None:
    target, draft = write_target(), make()
    with torch.no_grad():
        draft.fc.weight[0, 0] = 1e5  # finite in f32, infinite in f16
    for kind in ("f16", "q8_0"):
        with pytest.raises(DsparkError, match=r"fc\.weight"):
            export_gguf(draft, tmp_path / "draft.gguf", target, kind)
    assert os.listdir(tmp_path) == ["target.gguf"]
    export_gguf(draft, tmp_path / "draft.gguf", target, "f32")
    draft.fc = torch.nn.Identity()  # what packing does to a layer's place in the state
    with pytest.raises(DsparkError, match="packed"):
        export_gguf(draft, tmp_path / "draft.gguf", target)


@pytest.mark.parametrize("broken", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(make, write_target, tmp_path, monkeypatch, broken) -> None:
    target, path = write_target(), tmp_path / "draft.gguf"
    export_gguf(make(), path, target)
    before = path.read_bytes()

    def fails(*_args: Any, **_kwargs: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(*((module.os, "fsync") if broken == "fsync" else (Path, "replace")), fails)
        with pytest.raises(DsparkError, match="disk full"):
            export_gguf(make(), path, target, "f32")
    assert path.read_bytes() == before and sorted(os.listdir(tmp_path)) == ["draft.gguf", "target.gguf"]
    export_gguf(make(), path, target, "f32")
    assert path.read_bytes() != before


def test_files_that_cannot_be_read_back(make, write_target, tmp_path) -> None:
    target, path = write_target(), tmp_path / "draft.gguf"
    with pytest.raises(DsparkError, match=r"dspark\.config"):
        read_gguf(target)
    export_gguf(make(), path, target)
    data = path.read_bytes()
    key = b"dflash.block_size" + (4).to_bytes(4, "little")
    path.write_bytes(data.replace(key + b"\x07", key + b"\x05"))
    with pytest.raises(DsparkError) as caught:
        read_gguf(path)
    assert (caught.value.field, caught.value.value) == ("dflash.block_size", 5)
    config = json.dumps(config_to_json(make().config, True)).encode()
    assert config in data
    for other in (b"7".ljust(len(config)), b"{".ljust(len(config))):
        path.write_bytes(data.replace(config, other))
        with pytest.raises(DsparkError, match="is no JSON object"):
            read_gguf(path)
    path.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(DsparkError, match="its tensors"):
        read_gguf(path)
    path.write_bytes(data[:-200])
    with pytest.raises(DsparkError, match="cannot be read as GGUF"):
        read_gguf(path)


def test_convert_writes_a_file_and_reads_it(make, write_target, tmp_path, run) -> None:
    draft, target, out = make(), write_target(), tmp_path / "draft.gguf"
    save_draft(draft, tmp_path / "mine")
    words = ["convert", tmp_path / "mine", out, "--to", "gguf", "--target", target, "--type", "f32"]
    code, printed, _ = run(*words)
    assert code == 0 and "(native) ->" in printed and same(read_gguf(out), draft)
    assert run("convert", out, tmp_path / "back", "--to", "native")[0] == 0
    assert same_files(tmp_path / "mine", tmp_path / "back")
    code, _, complaint = run(*words)
    assert code == 2 and "exists already" in complaint
    for changed, field in (
        ([*words[:2], tmp_path / "folder", *words[3:]], "out"),
        ([*words[:2], tmp_path / "b.gguf", "--to", "native"], "out"),
        ([*words[:2], tmp_path / "b.gguf", "--to", "gguf"], "target"),
        ([*words[:2], tmp_path / "b.gguf", "--to", "gguf", "--target", tmp_path / "none"], "target"),
        ([*words[:2], tmp_path / "b", "--to", "native", "--type", "f32"], "type"),
    ):
        code, _, complaint = run(*changed)
        assert code == 2 and complaint.startswith(f"error: {field} = "), complaint
    assert sorted(os.listdir(tmp_path)) == ["back", "draft.gguf", "mine", "target.gguf"]


def test_a_length_in_a_file_is_a_whole_number(make, write_target, tmp_path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 9.0, "factor": 4.0, "original_max_position_embeddings": 64.0}
    export_gguf(make(rope_parameters=rope), tmp_path / "draft.gguf", write_target())
    (field,) = [f for key, f in gguf.GGUFReader(tmp_path / "draft.gguf").fields.items() if "original" in key]
    assert field.types == [gguf.GGUFValueType.UINT32] and field.contents() == 64
    assert read_gguf(tmp_path / "draft.gguf").config.rope_parameters == rope
    with pytest.raises(DsparkError, match="whole number"):
        metadata(make(rope_parameters={**rope, "original_max_position_embeddings": 64.5}).config)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rms_norm_eps": 1e39}, "layer_norm_rms_epsilon"),
        ({"rms_norm_eps": 1e-60}, "layer_norm_rms_epsilon"),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 9.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 2**33,
                }
            },
            "original_context_length",
        ),
    ],
)
def test_numbers_that_32_bits_do_not_hold_are_refused(make, write_target, tmp_path, changes, key) -> None:
    target = write_target()
    with pytest.raises(DsparkError, match=f"{key}.*32 bits"):
        export_gguf(make(**changes), tmp_path / "draft.gguf", target)
    assert os.listdir(tmp_path) == ["target.gguf"]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_a_matrix_that_f16_would_make_0_is_refused(make, write_target, tmp_path, kind) -> None:
    target, draft = write_target(), make()
    with torch.no_grad():
        draft.fc.weight.mul_(1e-9)
    with pytest.raises(DsparkError, match=r"fc\.weight.*100%.*use f32"):
        export_gguf(draft, tmp_path / "draft.gguf", target, kind)
    export_gguf(draft, tmp_path / "draft.gguf", target, "f32")
    with torch.no_grad():
        draft.fc.weight.zero_()  # nothing is lost of a matrix that is 0
    export_gguf(draft, tmp_path / "draft.gguf", target, kind)
    with torch.no_grad():
        draft.fc.weight.normal_()[:2].mul_(1e-9)  # 2 rows of 16
    with pytest.raises(DsparkError, match=r"fc\.weight.*1[23]%"):
        export_gguf(draft, tmp_path / "draft.gguf", target, kind)


def test_text_that_is_no_utf8_is_one_line(make, write_target, tmp_path) -> None:
    target, path = write_target(), tmp_path / "draft.gguf"
    export_gguf(make(), path, target)
    for file, old in ((path, b"draft for tiny"), (target, b"t29")):
        file.write_bytes(file.read_bytes().replace(old, b"\xff" * len(old)))
    with pytest.raises(DsparkError, match=r"general\.name"):
        read_gguf(path)
    with pytest.raises(DsparkError, match=r"tokenizer\.ggml\.tokens"):
        export_gguf(make(), tmp_path / "other.gguf", target)
    assert sorted(os.listdir(tmp_path)) == ["draft.gguf", "target.gguf"]
