"""GGUF files for llama.cpp: the embedded target in f16, and a DSpark draft for it (architecture `dflash`).

Private to the benchmark: the smallest that llama.cpp (b11434 and later) loads. Only the vanilla Markov head, full
attention and the default rotary embedding; anything else is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError

ARCHITECTURE = "dflash"
LAYER = {  # ours -> llama.cpp's, inside a layer
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def write_target(source: Path, destination: Path) -> None:
    """The weights of a quantised GGUF file in f16 (vectors in f32), everything else as it is."""
    reader = GGUFReader(source)
    writer = GGUFWriter(destination, str(reader.fields["general.architecture"].contents()))
    for key in reader.fields:
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            _copy_field(reader, writer, key)
    writer.add_file_type(1)  # mostly f16
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    _finish(writer)


def write_draft(draft: DSparkDraft, target_file: Path, destination: Path) -> None:
    """A draft that is bound to its target, in f16, with the target's tokenizer.

    Raises DsparkError for a draft that llama.cpp cannot run.
    """
    config = draft.config
    for field, value, wanted in (
        ("markov_head_type", config.markov_head_type, "vanilla"),
        ("attention_bias", config.attention_bias, False),
        ("layer_types", set(config.layer_types), {"full_attention"}),
        ("rope_type", config.rope_parameters["rope_type"], "default"),
        ("hidden_act", config.hidden_act, "silu"),
    ):
        if value != wanted:
            raise DsparkError(field, value, f"must be {wanted!r} for llama.cpp as it is written here")
    writer = GGUFWriter(destination, ARCHITECTURE)
    reader = GGUFReader(target_file)
    for key in reader.fields:
        if key.startswith("tokenizer."):
            _copy_field(reader, writer, key)
    writer.add_uint32("tokenizer.ggml.mask_token_id", config.mask_token_id)
    for name, number in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "block_size": config.block_size,
        "vocab_size": config.vocab_size,
    }.items():
        writer.add_uint32(f"{ARCHITECTURE}.{name}", number)
    writer.add_float32(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base", float(config.rope_parameters["rope_theta"]))
    taps = [tap + 1 for tap in config.target_layer_ids]  # there a tap is a layer's input
    writer.add_array(f"{ARCHITECTURE}.target_layers", taps)
    writer.add_bool(f"{ARCHITECTURE}.sample_from_anchor", config.sample_from_anchor)
    writer.add_bool(f"{ARCHITECTURE}.has_confidence_head", config.enable_confidence_head)
    for name, values in _tensors(draft).items():
        writer.add_tensor(name, values)
    _finish(writer)


def _tensors(draft: DSparkDraft) -> dict[str, np.ndarray]:
    """llama.cpp's name -> values: matrices in f16, vectors in f32."""
    found = {}
    for name, tensor in draft.state_dict().items():
        if name in ("d2t", "t2d"):
            continue
        stem, _, kind = name.rpartition(".")
        if stem.startswith("layers."):
            _, layer, inner = stem.split(".", 2)
            stem = f"blk.{layer}.{LAYER[inner]}"
        else:
            stem = WHOLE[stem]
        values = tensor.float().numpy()
        found[f"{stem}.{kind}"] = values if values.ndim == 1 else values.astype(np.float16)
    found["output.weight"] = draft.head_rows.float().numpy().astype(np.float16)
    if draft.config.reduced:
        found["d2t"] = draft.draft_ids.numpy()  # absolute ids there, offsets in our files
    return found


def _copy_field(reader: GGUFReader, writer: GGUFWriter, key: str) -> None:
    field = reader.fields[key]
    kind, *inner = field.types
    writer.add_key_value(key, field.contents(), kind, sub_type=inner[-1] if kind == GGUFValueType.ARRAY else None)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
