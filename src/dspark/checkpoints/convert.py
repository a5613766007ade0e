"""Conversion of DSpark and DFlash checkpoints: any form we read to any form we write.

A form's layer ids, its spelling of the layout and its count are translated, never the layout itself, nor a weight.
What the goal cannot express is refused by name; what its engine ignores is noted. Everything is checked before the
first byte is written: names, shapes, types and values of all tensors, and the vocabulary maps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints.builtin import draft_folder
from dspark.checkpoints.eagle3 import ARCHITECTURES as EAGLE3
from dspark.checkpoints.engines import check_sglang, check_vllm
from dspark.checkpoints.expand import expand
from dspark.checkpoints.native import (
    ARCHITECTURE,
    CARD_FILE,
    CONFIG_FILE,
    LM_HEAD,
    PROMPTS_FILE,
    TRAINING_FILE,
    check_names,
    check_values,
    check_vocabulary,
    config_from_json,
    config_to_json,
    write_checkpoint,
)
from dspark.checkpoints.qwen3 import assemble, backbone_fields, own_json, own_object, unknown_keys
from dspark.checkpoints.specforge import is_specforge, specforge_fields, specforge_to_json
from dspark.checkpoints.speculators import speculators_fields, speculators_to_json
from dspark.checkpoints.tensors import WEIGHTS_FILE, load_tensors, tensor_shapes
from dspark.checkpoints.zlab import RENAMED, TRANSFORMERS_TYPE, ZLAB_ARCHITECTURE, Form, config_for, zlab_fields
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, ensure_embedded
from dspark.targets.transformers import load_target

FORMS = ("native", "vllm", "sglang", "speculators", "specforge", "z-lab", "transformers")
"""Goals. vllm and sglang are the native form, checked for that engine; transformers is written only."""
_NEEDS_HEAD = ("vllm", "speculators")
_EMBEDDING = "embed_tokens.weight"


@dataclass(frozen=True)
class Checkpoint:
    """A draft folder as read. lm_head: whether its native file holds (held, before a conversion) the head's rows."""

    form: str
    config: DraftConfig
    tensors: dict[str, Tensor]
    lm_head: bool
    notes: list[str]


def convert(
    src: str | Path, form: str, out: str | Path, target: str | None = None, expanded: bool = False, **stated: Any
) -> Checkpoint:
    """Write the draft in `src` (a folder, or `embedded`) to the new folder `out` in another form.

    target: supplies its name and depth, and the head's rows where the goal needs them and the file lacks them.
    expanded: rewrite a reduced vocabulary for SGLang. stated: DraftConfig fields that the source lacks.
    Returns what was read, with the notes of both sides. Raises DsparkError; then nothing is written.
    """
    if form not in FORMS:
        raise DsparkError("to", form, f"must be one of {', '.join(FORMS)}")
    folder, out = draft_folder(str(src)), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DsparkError("out", str(out), "exists already; give a new or an empty folder")
    read = read_checkpoint(folder, target, **stated)
    config, tensors = read.config, dict(read.tensors)
    if expanded and form != "sglang":
        raise DsparkError("expand", True, "is for SGLang, which has no reduced vocabulary; leave it out")
    if expanded and config.reduced:
        if LM_HEAD in tensors:
            _drop_head(config, tensors, target, read.notes)
        config, tensors = expand(config, tensors)
    elif config.reduced and form in _NEEDS_HEAD and LM_HEAD not in tensors:
        tensors[LM_HEAD] = _head_rows(config, tensors["d2t"], target)
    elif form in ("native", "sglang") and not read.lm_head:
        tensors.pop(LM_HEAD, None)
    document = document_for(config, form, LM_HEAD in tensors, read)
    renamed = RENAMED if form == "transformers" else {}
    files = {name: _text(folder / name) for name in (CARD_FILE, TRAINING_FILE, PROMPTS_FILE)}
    write_checkpoint(out, document, {renamed.get(name, name): tensor for name, tensor in tensors.items()}, files)
    return read


def document_for(config: DraftConfig, form: str, lm_head: bool, read: Checkpoint) -> dict[str, Any]:
    """The config.json of the goal. Raises DsparkError for what it cannot express, and adds to read.notes."""
    if form == "vllm":
        check_vllm(config, read.notes)
    elif form == "sglang":
        check_sglang(config, read.notes)
    elif form == "speculators":
        if config.target_name == EMBEDDED:
            read.notes.append(f"verifier.name_or_path is {EMBEDDED!r}: give vLLM the target's own folder")
        return speculators_to_json(config, read.lm_head)
    elif form == "specforge":
        return specforge_to_json(config, read.lm_head)
    elif form in ("z-lab", "transformers"):
        kind: Form = "z-lab" if form == "z-lab" else "transformers"
        return {**config_for(config, kind), **own_json(config, read.lm_head)}
    return config_to_json(config, lm_head)


def import_draft(folder: str | Path, target: str | None = None, **stated: Any) -> DSparkDraft:
    """Load a draft of any form we read, unbound, in float32. Raises DsparkError as `convert`."""
    read = read_checkpoint(Path(folder), target, **stated)
    with torch.device("meta"):
        draft = DSparkDraft(read.config)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in read.tensors.items()}
    draft.own_head_rows = tensors.pop(LM_HEAD, None)
    draft.load_state_dict(tensors, strict=True, assign=True)
    return draft


def read_checkpoint(folder: Path, target: str | None = None, **stated: Any) -> Checkpoint:
    """Read and check a draft folder of any form.

    Raises DsparkError naming a missing or wrong key, a tensor that is missing, unexpected, misshapen, of the wrong type
    or not finite, a vocabulary map that is none, a pickle, or an index that leaves the folder.
    """
    values = _config_values(folder)
    form, notes = detect(values), list[str]()
    readers: dict[str, Callable[[Mapping[str, Any], list[str]], dict[str, Any]]] = {
        "native": native_fields,
        "speculators": speculators_fields,
        "specforge": specforge_fields,
        "z-lab": zlab_fields,
    }
    fields = readers[form](values, notes)
    known = {**fields, **own_object(values), **values}
    facts = {} if target is None else {n: v for n, v in _target_facts(target, fields).items() if n not in known}
    config = assemble(fields, values, {**facts, **stated}, notes)
    tensors = _read_tensors(folder, config, notes)
    ours = own_object(values) or values
    lm_head = bool(ours.get("lm_head_in_file", LM_HEAD in tensors)) and config.reduced
    return Checkpoint(form, config, tensors, lm_head, notes)


def detect(values: Mapping[str, Any]) -> str:
    """Which form a config.json has. Raises DsparkError for one that is not converted here."""
    architectures, kind = values.get("architectures"), values.get("model_type")
    if "speculators_model_type" in values:
        return "speculators"
    if kind in ("k3_dspark", TRANSFORMERS_TYPE):
        raise DsparkError("model_type", kind, "is not read here; give the checkpoint it was made from")
    if architectures in [[name] for name in EAGLE3.values()]:
        raise DsparkError("architectures", architectures, "is EAGLE-3, whose form vLLM and SGLang load as it is")
    if is_specforge(values):
        return "specforge"
    if architectures == [ARCHITECTURE]:
        return "native"
    if architectures == [ZLAB_ARCHITECTURE]:
        return "z-lab"
    raise DsparkError(
        "architectures", architectures, "is no form of a draft known here: native, speculators, SpecForge or z-lab"
    )


def native_fields(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The DraftConfig fields of a top-level config.json: ours, which states all, or DeepSpec's.

    A missing layout key is anchor-first only where DeepSpec's training key num_anchors shows the origin and there is a
    Markov head; DeepSpec's rank 0 files are plain DFlash, whose layout has to be stated.
    """
    if "lm_head_in_file" in values:
        return config_from_json(values)[0].model_dump()
    fields = {name: values[name] for name in DraftConfig.model_fields if values.get(name) is not None}
    fields |= backbone_fields(values)
    unknown_keys(values, {*fields, *DraftConfig.model_fields}, "", notes)
    fields.setdefault("draft_vocab_size", fields.get("vocab_size"))
    if fields.get("markov_rank") == 0:
        plain = {"markov_head_type": "vanilla", "enable_confidence_head": False, "confidence_head_with_markov": False}
        fields = {**plain, **fields}
    elif "sample_from_anchor" not in fields and "num_anchors" in values:
        fields["sample_from_anchor"] = True
        notes.append("no layout key: anchor-first, as DeepSpec trains DSpark")
    return fields


def _config_values(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())
        raise DsparkError("draft", str(folder), f"has no {CONFIG_FILE} that can be read ({line})") from None
    if not isinstance(values, dict):
        raise DsparkError(CONFIG_FILE, str(path), "must hold one JSON object")
    return values


def _read_tensors(folder: Path, config: DraftConfig, notes: list[str]) -> dict[str, Tensor]:
    """The draft's tensors. The target's own embedding and whole head are left out where a file carries them."""
    shapes, homes = tensor_shapes(folder)
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in DSparkDraft(config).state_dict().items()}
    whole = (config.vocab_size, config.hidden_size)
    for name in (_EMBEDDING, *(() if config.reduced else (LM_HEAD,))):
        if shapes.get(name) == whole:
            del shapes[name]
            notes.append(f"{name} is left out: it is the target's")
    if config.reduced and LM_HEAD in shapes:
        expected[LM_HEAD] = (config.draft_vocab_size, config.hidden_size)
    if config.reduced and "t2d" not in shapes:
        del expected["t2d"]
    check_names(folder / WEIGHTS_FILE, shapes, expected)
    tensors = load_tensors(homes, list(expected))
    if config.reduced and "t2d" not in tensors:
        tensors["t2d"] = _marked(tensors["d2t"], config.vocab_size)
    check_values(tensors)
    if config.reduced:
        check_vocabulary(tensors["d2t"], tensors["t2d"])
    others = sorted({str(t.dtype) for t in tensors.values() if t.is_floating_point() and t.dtype != torch.bfloat16})
    if others:
        notes.append(f"{', '.join(others)} weights are rounded to BF16")
    return tensors


def _marked(d2t: Tensor, vocabulary: int) -> Tensor:
    """t2d by d2t; ids out of range are left to the check of the vocabulary."""
    ids = torch.arange(len(d2t)) + d2t
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[ids[(ids >= 0) & (ids < vocabulary)]] = True
    return t2d


def _head_rows(config: DraftConfig, d2t: Tensor, target: str | None) -> Tensor:
    """The rows of the target's head that the draft predicts over."""
    target = EMBEDDED if target is None and config.target_name == EMBEDDED else target
    if target is None:
        raise DsparkError(
            LM_HEAD, None, "is not in the file, and engines need it with a reduced vocabulary; give the --target"
        )
    loaded = load_target(target, packed=False)
    config.check_target(None, loaded.num_layers, loaded.hidden_size, loaded.vocab_size)
    return loaded.head_weight[torch.arange(len(d2t)) + d2t].detach()


def _drop_head(config: DraftConfig, tensors: Mapping[str, Tensor], target: str | None, notes: list[str]) -> None:
    """Raise DsparkError when the file's head rows, which SGLang cannot use, are not those of the target (if given)."""
    if target is None:
        notes.append(f"{LM_HEAD} is dropped: SGLang drafts with the target's head; give --target to compare them")
    elif not torch.equal(_head_rows(config, tensors["d2t"], target).bfloat16(), tensors[LM_HEAD].bfloat16()):
        raise DsparkError(LM_HEAD, "not the target's rows", "SGLang drafts with the target's head: other proposals")


def _target_facts(target: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Name and depth of a target by its config.json; its width and vocabulary must be the draft's."""
    values = _config_values(ensure_embedded() if target == EMBEDDED else Path(target))
    text = values.get("text_config", values)
    for name in ("hidden_size", "vocab_size"):
        if text.get(name) != fields.get(name):
            raise DsparkError(name, fields.get(name), f"is {text.get(name)!r} in the target {target}: not its draft")
    return {"target_name": target, "num_target_layers": text.get("num_hidden_layers")}


def _text(path: Path) -> str | None:
    """A text that goes along unchanged, if it is there. Raises DsparkError when it is no text."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except ValueError:
        raise DsparkError(path.name, str(path), "must be UTF-8 text; mend it or take it away") from None
