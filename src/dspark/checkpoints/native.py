"""The native checkpoint: a folder with config.json (top-level DeepSpec / vLLM / SGLang form) and model.safetensors.

One BF16 file without the target's embedding and head; a reduced vocabulary adds lm_head.weight (its rows of the head),
d2t and t2d (method section 8). The packaged drafts leave lm_head.weight out and say so with "lm_head_in_file": false.
An EAGLE-3 draft is written and read here too, with its own config.json (`checkpoints/eagle3.py`) and its own head.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.checkpoints.eagle3 import ARCHITECTURES as EAGLE3
from dspark.checkpoints.eagle3 import eagle3_from_json, eagle3_to_json
from dspark.checkpoints.rope import older_rope_keys, rope_parameters
from dspark.checkpoints.staging import place_folder, staged
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.kinds import Config, Draft, new_draft
from dspark.errors import DsparkError

ARCHITECTURE, LATENT_ARCHITECTURE = "Qwen3DSparkModel", "LatentDSparkModel"
# No engine reads an MLA draft in this form, and none shall take it for another model: vLLM's form is k3_dspark
_MODEL_TYPES = {ARCHITECTURE: "qwen3", LATENT_ARCHITECTURE: "dspark_latent"}
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
# What may lie beside them: where the draft comes from, hashes of the prompts it was trained on, its card
TRAINING_FILE, PROMPTS_FILE, CARD_FILE = "training.json", "training_prompts.txt", "README.md"
CALIBRATION_FILE = "calibration.json"
LM_HEAD = "lm_head.weight"
# Lists in JSON, tuples in the config
_TUPLES = ("layer_types", "target_layer_ids")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def config_to_json(config: DraftConfig, lm_head_in_file: bool) -> dict[str, Any]:
    """The config.json of a draft: Qwen3's keys and DSpark's, all at top level.

    rope_theta and rope_scaling repeat rope_parameters for engines that read the older pair of keys.
    """
    fields = config.model_dump()
    for name in _TUPLES:
        fields[name] = list(fields[name])
    uses_window = "sliding_attention" in config.layer_types
    architecture = LATENT_ARCHITECTURE if config.attention == "mla" else ARCHITECTURE
    return {
        "architectures": [architecture],
        "model_type": _MODEL_TYPES[architecture],
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "use_sliding_window": uses_window,
        "max_window_layers": 0 if uses_window else config.num_hidden_layers,
        **older_rope_keys(config.rope_parameters),
        **fields,
        "lm_head_in_file": lm_head_in_file,
    }


def config_from_json(values: Mapping[str, Any]) -> tuple[DraftConfig, bool]:
    """The DraftConfig of a config.json, and whether the weights file holds lm_head.weight.

    rope_parameters may be stated as the older rope_theta + rope_scaling; stated both ways they must agree.
    Raises DsparkError naming a missing or wrong key.
    """
    found = values.get("architectures")
    if found not in ([ARCHITECTURE], [LATENT_ARCHITECTURE]):
        known = (ARCHITECTURE, LATENT_ARCHITECTURE, *EAGLE3.values())
        raise DsparkError("architectures", found, f"must be [one of {', '.join(known)}]; convert other formats first")
    if (found == [LATENT_ARCHITECTURE]) != (values.get("attention", "gqa") == "mla"):
        raise DsparkError(
            "attention", values.get("attention"), f"must be mla with {LATENT_ARCHITECTURE} and only there"
        )
    fields = {name: values[name] for name in DraftConfig.model_fields if name in values}
    fields["rope_parameters"] = rope_parameters(values)
    if "hidden_act" not in fields:  # has a default in Python; in a file nothing is left out
        raise DsparkError("hidden_act", None, "is missing from config.json: state it (silu for Qwen3)")
    for name in _TUPLES:
        if isinstance(fields.get(name), list):
            fields[name] = tuple(fields[name])
    config = DraftConfig(**fields)
    lm_head = values.get("lm_head_in_file")
    if not isinstance(lm_head, bool):
        raise DsparkError(
            "lm_head_in_file",
            lm_head,
            "must be true or false in config.json: whether model.safetensors holds lm_head.weight",
        )
    if lm_head and not config.reduced:
        raise DsparkError(
            "lm_head_in_file", True, "must be false with the whole vocabulary: the head is the target's own"
        )
    return config, lm_head


def save_draft(
    draft: Draft, folder: str | Path, lm_head: bool = True, files: Mapping[str, str | None] | None = None
) -> None:
    """Write the draft to `folder`, atomically: a kill at any moment leaves the old or the new one loadable.

    lm_head: whether to write the head's rows (DSpark, K < V); the draft must then be bound or carry its own. The head
    of an EAGLE-3 draft is its own and always written.
    files: texts by file name that come with the weights in the same move; None: none of that name may stay.
    Other files in an existing folder are kept. Raises DsparkError on a non-finite tensor; then nothing is written.
    """
    _ = draft.draft_ids  # raises when a reduced vocabulary was never set
    tensors = dict(draft.state_dict())
    if isinstance(draft, DSparkDraft):
        lm_head = lm_head and draft.config.reduced
        if lm_head:
            tensors[LM_HEAD] = draft.own_head_rows if draft.own_head_rows is not None else draft.head_rows
        document = config_to_json(draft.config, lm_head)
    else:
        document = eagle3_to_json(draft.config)
    write_checkpoint(folder, document, tensors, files)


def write_checkpoint(
    folder: str | Path,
    document: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, str | None] | None = None,
    replace: bool = True,
) -> None:
    """Write config.json and model.safetensors (floats in BF16) to `folder`, as `save_draft` does: all of it or nothing.

    replace: take the place of a folder that is there; else `folder` must be new or empty, also when all is written.
    Raises DsparkError on a non-finite tensor, a full disk, or a folder that must not be replaced.
    """
    folder = Path(folder).resolve()
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    stored = {name: _as_stored(tensor) for name, tensor in tensors.items()}
    for name, tensor in stored.items():
        check_finite(name, tensor)  # BF16 rounds the largest fp32 values to infinity
    texts = {**(files or {}), CONFIG_FILE: json.dumps(document, indent=2, allow_nan=False) + "\n"}
    with staged(folder, alone=replace) as staging:
        staging.mkdir()
        _fill(staging, folder, stored, texts)
        if replace:
            _swap(staging, folder, {name for name, content in texts.items() if content is None})
        else:
            place_folder(staging, folder)


def _fill(staging: Path, folder: Path, stored: dict[str, Tensor], texts: Mapping[str, str | None]) -> None:
    """Write the files of `folder` into `staging`, down to the disk. Raises DsparkError when it is full."""
    try:
        save_file(stored, staging / WEIGHTS_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # not an OSError, even of a full disk
        remedy = f"cannot be written ({_line(error)}), and nothing was; check the free space"
        raise DsparkError("folder", str(folder), remedy) from None
    for name, content in texts.items():
        if content is not None:
            (staging / name).write_text(content, encoding="utf-8")
    shutil.copymode(staging / CONFIG_FILE, staging / WEIGHTS_FILE)  # save_file keeps it from everybody else
    for path in staging.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _as_stored(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU, floats rounded to BF16."""
    kept = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return kept.detach().cpu().clone(memory_format=torch.contiguous_format)


def weights_sha256(draft: Draft) -> str:
    """Which draft this is: sha256 over name, shape and bytes of every tensor, by name, floats rounded to BF16.

    So it is the same for a run's draft in float32, its BF16 copy on disk and the shipped one, in whatever dtype they
    are loaded. A DSpark draft's head is the target's and does not count. Take it before `make_proposer` packs the
    layers.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(draft.state_dict().items()):
        digest.update(f"{name} {list(tensor.shape)}\n".encode())
        digest.update(_as_stored(tensor).flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _previous(folder: Path) -> Path:
    """Where an overwritten draft rests between the two renames of `_swap`."""
    folder = folder.resolve() if folder.is_symlink() else folder
    return folder.parent / f".{folder.name}.previous"


def _swap(staging: Path, folder: Path, dropped: Set[str]) -> None:
    """Put `staging` in the place of `folder`, whose `dropped` files are not kept.

    In between, `load_draft` finds the old one at `_previous`.
    """
    previous = _previous(folder)
    if folder.exists():
        if not folder.is_dir():
            raise DsparkError("folder", str(folder), "is a file; give a folder to write the draft to")
        _merge(previous, folder)  # left by a save that was killed after its second rename
        folder.rename(previous)
    staging.rename(folder)
    _merge(previous, folder, dropped)


def _merge(previous: Path, folder: Path, dropped: Set[str] = frozenset()) -> None:
    """Move what only `previous` has (a card, a log), `dropped` apart, into `folder`, and remove the rest."""
    if not previous.exists():
        return
    for path in previous.iterdir():
        if path.name not in dropped and not (folder / path.name).exists():
            path.rename(folder / path.name)
    shutil.rmtree(previous, ignore_errors=True)


def read_config(folder: str | Path) -> tuple[Config, bool]:
    """config.json of a draft folder: its config, and whether the weights file holds lm_head.weight.

    Raises DsparkError.
    """
    values = config_values(Path(folder))
    if values.get("architectures") in [[name] for name in EAGLE3.values()]:
        return eagle3_from_json(values), True
    return config_from_json(values)


def config_values(folder: Path) -> dict[str, Any]:
    """The object in the config.json of a draft folder. Raises DsparkError when there is none that can be read."""
    path = _existing(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = [one for name in ("best", "last") if (one := folder / name).is_dir()]  # a run of `train`
        remedy = f"give a draft in it, {inside[0]}" if inside else "give the folder of a draft checkpoint"
        raise DsparkError("draft", str(folder), f"holds no {CONFIG_FILE}; {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DsparkError(
            CONFIG_FILE, str(path), f"cannot be read ({_line(error)}); copy the checkpoint again"
        ) from None
    if not isinstance(values, dict):
        raise DsparkError(CONFIG_FILE, str(path), "must hold one JSON object")
    return values


def load_draft(folder: str | Path, dtype: torch.dtype = torch.float32) -> Draft:
    """Read a draft folder; the draft comes unbound, its weights in `dtype`.

    Every tensor name, shape, type and value is checked; raises DsparkError naming what is missing, extra, misshapen,
    non-finite or inconsistent.
    """
    config, lm_head = read_config(folder)
    with torch.device("meta"):
        draft = new_draft(config)
    expected = {name: tuple(t.shape) for name, t in draft.state_dict().items()}
    if lm_head:  # inside an EAGLE-3 draft already
        expected[LM_HEAD] = (config.draft_vocab_size, config.hidden_size)
    tensors = _read_tensors(_existing(Path(folder)) / WEIGHTS_FILE, expected)
    if config.reduced:
        check_vocabulary(tensors["d2t"], tensors["t2d"])
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    if isinstance(draft, DSparkDraft):
        draft.own_head_rows = tensors.pop(LM_HEAD, None)
    draft.load_state_dict(tensors, strict=True, assign=True)
    return draft


def _existing(folder: Path) -> Path:
    if folder.is_dir():
        return folder
    if _previous(folder).is_dir():  # a save was killed between its two renames
        return _previous(folder)
    raise DsparkError("draft", str(folder), "is not a folder; give the folder of a draft checkpoint, or `embedded`")


def _read_tensors(path: Path, expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """All tensors of a safetensors file whose names and shapes are exactly `expected`."""
    if not path.is_file():
        raise DsparkError("draft", str(path), "is missing; a native checkpoint has one model.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            check_names(path, found, expected)
            tensors = {name: file.get_tensor(name) for name in expected}
    except (SafetensorError, OSError) as error:
        raise DsparkError(
            WEIGHTS_FILE, str(path), f"is not a whole safetensors file ({_line(error)}); copy it again"
        ) from None
    check_values(tensors)
    return tensors


def check_values(tensors: Mapping[str, Tensor]) -> None:
    """Raise DsparkError naming a tensor of the wrong type or with a value that is not finite."""
    for name, tensor in tensors.items():
        wanted = {"d2t": (torch.int64,), "t2d": (torch.bool,)}.get(name, FLOATS)
        if tensor.dtype not in wanted:
            raise DsparkError(name, str(tensor.dtype), f"must be {' or '.join(str(w) for w in wanted)}")
        check_finite(name, tensor)


def check_names(path: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DsparkError naming the tensors that are missing, unexpected or misshapen."""
    faults = [f"missing {name}" for name in expected if name not in found]
    faults += [f"unexpected {name}" for name in found if name not in expected]
    faults += [
        f"{name} has shape {list(found[name])}, the config gives {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise DsparkError(WEIGHTS_FILE, str(path), f"does not fit its config.json: {shown}")


def check_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise DsparkError(name, "NaN or infinity", "must be finite; this draft is broken, use an earlier checkpoint")


def check_vocabulary(d2t: Tensor, t2d: Tensor) -> None:
    """d2t holds offsets (target id = i + d2t[i]) whose ids ascend, are in range, and are those that t2d marks."""
    ids = torch.arange(len(d2t)) + d2t
    if int(ids.min()) < 0 or int(ids.max()) >= len(t2d):
        raise DsparkError(
            "d2t",
            [int(ids.min()), int(ids.max())],
            f"gives target ids outside 0..{len(t2d) - 1}; it must hold offsets, not ids",
        )
    if bool((ids[1:] <= ids[:-1]).any()):
        raise DsparkError(
            "d2t", d2t[:8].tolist(), "must give ascending distinct target ids (offsets: target id = i + d2t[i])"
        )
    if int(t2d.sum()) != len(d2t) or not bool(t2d[ids].all()):
        raise DsparkError(
            "t2d", f"{int(t2d.sum())} marked", f"must mark exactly the {len(d2t)} target ids that d2t gives"
        )


def _line(error: BaseException) -> str:
    """An error's text on one line."""
    return " ".join(str(error).split())
