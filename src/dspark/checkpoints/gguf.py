"""A draft as one GGUF file for llama.cpp (architecture `dflash`, b11434 and later), and back.

The draft's file repeats the tokenizer of the target's, the one that llama.cpp serves. Layer ids are ours + 1 there (a
tap is a layer's input), d2t holds absolute ids, embedding and whole head come from the target at load. `dspark.config`
repeats our config.json, for reading the file back; llama.cpp does not look at it. What it cannot express is refused by
name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dspark.checkpoints.gguf_values import Written, as_stored, values_of
from dspark.checkpoints.native import LM_HEAD, config_from_json, config_to_json
from dspark.checkpoints.staging import staged
from dspark.checkpoints.taps import check_ascending
from dspark.checkpoints.zlab import check_whole
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError, pip_install

try:
    import gguf
except ImportError:  # in the extra `demo`
    gguf = None  # type: ignore[assignment]

Kind = Literal["f32", "f16", "q8_0"]
"""How matrices are stored; vectors are in f32 always, and so is f16 what q8_0 cannot hold (rows not of 32s)."""

ARCHITECTURE = "dflash"
CONFIG_KEY = "dspark.config"
MASK_KEY = "tokenizer.ggml.mask_token_id"
HEAD, EMBEDDING, IDS = "output.weight", "token_embd.weight", "d2t"
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7}
_LAYER = {  # ours -> llama.cpp's, inside a layer
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
_WHOLE = {
    "fc": "fc",
    "hidden_norm": "enc.output_norm",
    "norm": "output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}


def export_gguf(
    draft: DSparkDraft,
    path: str | Path,
    target: str | Path,
    kind: Kind = "f16",
    lm_head: bool = True,
    replace: bool = True,
) -> None:
    """Write the draft to the file `path`, whole or not at all; replace: an older file there, else it must be new.

    target: the GGUF file of its target, for the tokenizer. lm_head: whether the draft came with its rows of the head,
    for the way back. One with a reduced vocabulary brings them in any case: its own, those of the target it is bound
    to, or, unbound, those in the target's file.
    Raises DsparkError for what llama.cpp cannot express, another target's file, a non-finite tensor (also by rounding
    to f16), a draft packed for decoding, or files that cannot be read or written; then nothing is written.
    """
    path, target = Path(path).resolve(), Path(target)
    if kind not in get_args(Kind):
        raise DsparkError("kind", kind, f"must be one of {', '.join(get_args(Kind))}")
    check_ascending(draft.config)
    values = metadata(draft.config, lm_head)
    reader = _open("target", target)
    _check_target(reader, draft.config, target)
    if path.is_dir() or (path.exists() and path.samefile(target)):
        raise DsparkError("path", str(path), "must be a new file, or an older draft's")
    tensors = {name: as_stored(name, tensor, kind) for name, tensor in _tensors(draft, reader, target).items()}

    def fill(writer: Any) -> None:
        writer.add_name(f"draft for {draft.config.target_name}")
        writer.add_file_type(_FILE_TYPES[kind])
        _copy_tokenizer(reader, writer)
        for key, value in values.items():
            _add(writer, key, value)
        for name, (array, stored) in tensors.items():
            writer.add_tensor(name, array.view(Written), raw_dtype=stored)

    try:
        _write(path, fill, replace)
    except OSError as error:
        raise DsparkError("path", str(path), f"cannot be written ({error}); nothing was") from None


def _write(path: Path, fill: Callable[[Any], None], replace: bool) -> None:
    """A file made by `fill` under a temporary name, then renamed. Raises OSError, also for one not to be replaced."""
    with staged(path) as staging:
        writer = gguf.GGUFWriter(staging, ARCHITECTURE)
        fill(writer)
        finish(writer)
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        if not replace:
            path.touch(exist_ok=False)  # of two writers one makes it
        try:
            staging.replace(path)
        except BaseException:
            if not replace:
                path.unlink()
            raise


def gguf_header(path: Path) -> tuple[DraftConfig, dict[str, tuple[int, ...]], bool]:
    """A file of `export_gguf` without its data: config, shapes by our names, and whether the draft came with its rows
    of the head. Raises DsparkError for another program's file, or one that does not fit its own metadata."""
    reader = _open("draft", path)
    config, lm_head = _read_config(reader, path)
    wanted = _names(config)
    shapes = {one.name: tuple(int(size) for size in reversed(one.shape)) for one in reader.tensors}
    if shapes != {name: shape for name, (_, shape) in wanted.items()}:
        raise DsparkError("draft", str(path), "its tensors are not those of its config; export the draft again")
    return config, {wanted[name][0]: shape for name, shape in shapes.items()}, lm_head


def gguf_tensors(path: Path, config: DraftConfig) -> dict[str, Tensor]:
    """The tensors of such a file by our names, floats in float32, d2t as offsets.

    Equal to what was written where its type holds the weights: always f32, f16 when they fit, never q8_0.
    """
    names = {name: ours for name, (ours, _) in _names(config).items()}
    tensors = {names[one.name]: values_of(one) for one in _open("draft", path).tensors}
    if config.reduced:
        tensors[IDS] = tensors[IDS] - torch.arange(config.draft_vocab_size)
    return tensors


def _read_config(reader: Any, path: Path) -> tuple[DraftConfig, bool]:
    """The config that a file states, with which llama.cpp's own keys must agree, and its lm_head_in_file."""
    found = {key: _contents(key, field) for key, field in reader.fields.items()}
    if CONFIG_KEY not in found:
        raise DsparkError(CONFIG_KEY, None, f"is not in {path}: only files that dspark wrote can be read back")
    try:
        config, lm_head = config_from_json(dict(json.loads(found[CONFIG_KEY])))
    except (TypeError, ValueError, RecursionError) as error:
        raise DsparkError(CONFIG_KEY, str(path), f"is no JSON object ({error}); export the draft again") from None
    for key, value in metadata(config).items():
        wanted = float(np.float32(value)) if isinstance(value, float) else value  # as it is stored
        if key != CONFIG_KEY and found.get(key) != wanted:
            raise DsparkError(key, found.get(key), f"must be {wanted!r} as {CONFIG_KEY} says; export the draft again")
    return config, lm_head


def metadata(config: DraftConfig, lm_head: bool = True) -> dict[str, Any]:
    """The file's keys but for the tokenizer's. Raises DsparkError naming the field that llama.cpp cannot express."""
    _check_expressible(config)
    rope = config.rope_parameters
    values: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "block_size": config.block_size,  # of the layout, as ours: gamma, or gamma + 1 with a bonus anchor
        "target_layers": [tap + 1 for tap in config.target_layer_ids],
        "sample_from_anchor": config.sample_from_anchor,
        "has_confidence_head": config.enable_confidence_head,
    }
    if rope["rope_type"] != "default":
        values["rope.scaling.type"] = rope["rope_type"]
        values["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        values["rope.scaling.original_context_length"] = _whole(rope["original_max_position_embeddings"])
    if "sliding_attention" in config.layer_types:
        values["attention.sliding_window"] = config.sliding_window
        values["attention.sliding_window_pattern"] = [kind == "sliding_attention" for kind in config.layer_types]
    document = json.dumps(config_to_json(config, lm_head and config.reduced), allow_nan=False)
    theirs = {f"{ARCHITECTURE}.{key}": value for key, value in values.items()}
    for key, value in theirs.items():
        _check_range(key, value)
    return {**theirs, MASK_KEY: config.mask_token_id, CONFIG_KEY: document}


def _whole(length: float) -> int:
    """A length as an integer, which it has to be in a file. Raises DsparkError."""
    if length != int(length):
        raise DsparkError("rope_parameters.original_max_position_embeddings", length, "must be a whole number")
    return int(length)


def _check_range(key: str, value: Any) -> None:
    """Raise DsparkError for a number that a file's 32 bits do not hold; its fractions are all above 0."""
    large = isinstance(value, int) and not 0 <= value < 2**32
    if large or (isinstance(value, float) and not _SMALLEST <= value <= _LARGEST):
        raise DsparkError(key, value, "must fit into 32 bits of a GGUF file")


def finish(writer: Any) -> None:
    """Write out what a GGUFWriter was given, and close it."""
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def copy_field(reader: Any, writer: Any, key: str) -> None:
    """One key of a file that is read, with its type, to one that is written."""
    field = reader.fields[key]
    kind, *inner = field.types
    sub_type = inner[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(key, _contents(key, field), kind, sub_type=sub_type)


def _contents(key: str, field: Any) -> Any:
    """The value of a key. Raises DsparkError when it is none, as text that is no UTF-8."""
    try:
        return field.contents()
    except (ValueError, TypeError, IndexError) as error:
        raise DsparkError(key, None, f"cannot be read from the GGUF file ({error}); copy it again") from None


def _check_expressible(config: DraftConfig) -> None:
    for field, value, wanted in (
        ("attention", config.attention, "gqa"),
        ("markov_head_type", config.markov_head_type, "vanilla"),
        ("attention_bias", config.attention_bias, False),
        ("hidden_act", config.hidden_act, "silu"),
    ):
        if value != wanted:
            raise DsparkError(field, value, f"must be {wanted!r}: llama.cpp has no other")
    if "sliding_attention" in config.layer_types:
        _check_window(config)
    if config.sample_from_anchor and not config.markov_rank:
        raise DsparkError(
            "sample_from_anchor", True, "must be false without a Markov head: llama.cpp then skips slot 0"
        )
    if config.enable_confidence_head and not config.confidence_head_with_markov:
        raise DsparkError("confidence_head_with_markov", False, "must be true: llama.cpp's confidence head reads it")
    if config.num_target_layers - 1 in config.target_layer_ids:
        last = config.num_target_layers - 1
        raise DsparkError("target_layer_ids", last, "the target's last layer cannot be a tap: llama.cpp aborts")
    _check_rope(config.rope_parameters)


def _check_window(config: DraftConfig) -> None:
    """In a sliding layer llama.cpp sees every later slot of the block; ours those inside the window."""
    if not config.sliding_window_non_causal:
        remedy = "must be true: llama.cpp sees later slots of the block in sliding layers too"
        raise DsparkError("sliding_window_non_causal", False, remedy)
    window, slots = config.sliding_window or 0, config.slots(config.gamma)
    if window < slots:
        raise DsparkError("sliding_window", window, f"must be at least the block's {slots} slots for llama.cpp")


def _check_rope(rope: Mapping[str, Any]) -> None:
    known = {
        "default": set[str](),
        "linear": {"factor"},
        "yarn": {"factor", "original_max_position_embeddings"},
    }
    kind = rope["rope_type"]
    if kind not in known:
        raise DsparkError("rope_parameters.rope_type", kind, f"must be {', '.join(known)} to be written for llama.cpp")
    for name in sorted(set(rope) - known[kind] - {"rope_type", "rope_theta"}):
        raise DsparkError(f"rope_parameters.{name}", rope[name], f"{kind} is written for llama.cpp without it")


def _open(field: str, path: Path) -> Any:
    """A reader. Raises DsparkError."""
    if gguf is None:
        raise DsparkError(
            field, str(path), f"needs the package gguf: {pip_install(chr(39) + 'dspark[demo]' + chr(39))}"
        )
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise DsparkError(field, str(path), f"cannot be read as GGUF ({error}); give a whole GGUF file") from None


def _check_target(reader: Any, config: DraftConfig, path: Path) -> None:
    """Raises DsparkError when the file is not of the draft's target, or has no tokenizer."""
    fields = reader.fields
    if "tokenizer.ggml.model" not in fields or "tokenizer.ggml.tokens" not in fields:
        raise DsparkError("target", str(path), "has no tokenizer, without which llama.cpp loads no draft")
    architecture = "general.architecture"
    if architecture not in fields:
        raise DsparkError("target", str(path), f"has no {architecture}; give a whole GGUF file")

    def number(key: str) -> int | None:
        name = f"{_contents(architecture, fields[architecture])}.{key}"
        return int(_contents(name, fields[name])) if name in fields else None

    blocks = number("block_count")
    for name, mine, theirs in (
        ("vocab_size", config.vocab_size, len(fields["tokenizer.ggml.tokens"].data)),
        ("hidden_size", config.hidden_size, number("embedding_length")),
        ("num_target_layers", config.num_target_layers, blocks and blocks - (number("nextn_predict_layers") or 0)),
    ):
        if theirs is not None and mine != theirs:
            raise DsparkError(name, mine, f"the draft is for {config.target_name}, but {path} has {theirs}")


def _copy_tokenizer(reader: Any, writer: Any) -> None:
    for key in reader.fields:
        if key.startswith("tokenizer.") and key != MASK_KEY:
            copy_field(reader, writer, key)


def _add(writer: Any, key: str, value: Any) -> None:
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    adders.get(type(value), writer.add_array)(key, value)


def _name(ours: str) -> str:
    """llama.cpp's name of a tensor of our state dict."""
    stem, _, kind = ours.rpartition(".")
    if stem.startswith("layers."):
        _, layer, inner = stem.split(".", 2)
        return f"blk.{layer}.{_LAYER[inner]}.{kind}"
    return f"{_WHOLE[stem]}.{kind}"


def _names(config: DraftConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the file: its name -> our name, its shape."""
    with torch.device("meta"):
        state = DSparkDraft(config).state_dict()
    found = {_name(name): (name, tuple(one.shape)) for name, one in state.items() if name not in ("d2t", "t2d")}
    if config.reduced:
        found[HEAD] = (LM_HEAD, (config.draft_vocab_size, config.hidden_size))
        found[IDS] = (IDS, (config.draft_vocab_size,))
    return found


def _tensors(draft: DSparkDraft, reader: Any, target: Path) -> dict[str, Tensor]:
    """llama.cpp's name -> values, floats in float32."""
    state = draft.state_dict()
    with torch.device("meta"):
        check_whole(state, DSparkDraft(draft.config))
    found = {_name(name): one.detach().cpu().float() for name, one in state.items() if name not in ("d2t", "t2d")}
    if draft.config.reduced:
        ids = draft.draft_ids.cpu()
        found[HEAD] = _head_rows(draft, ids, reader, target).detach().cpu().float()
        found[IDS] = ids  # absolute there, offsets in our files
    return found


def _head_rows(draft: DSparkDraft, ids: Tensor, reader: Any, target: Path) -> Tensor:
    """The head's rows [K, d]: the draft's, its bound target's, or those of the target's file."""
    if draft.own_head_rows is not None:
        return draft.own_head_rows
    if draft.bound:
        return draft.head_rows
    tensors = {one.name: one for one in reader.tensors}
    head = tensors.get(HEAD, tensors.get(EMBEDDING))  # tied: the embedding is the head
    if head is None:
        raise DsparkError("target", str(target), "has no head for the draft's rows; bind the draft to its target")
    return torch.from_numpy(gguf.quants.dequantize(head.data[ids.numpy()], head.tensor_type))
