"""A draft in any form that is read: first what headers say, then the tensors.

A form's layer ids, its spelling of the layout and its count are translated, never the layout itself, nor a weight.
Everything is checked: names, shapes, types and values of all tensors, and the vocabulary maps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints.eagle3_public import PUBLIC as EAGLE3
from dspark.checkpoints.eagle3_public import eagle3_name, read_eagle3
from dspark.checkpoints.gguf import gguf_header, gguf_tensors
from dspark.checkpoints.k3 import MODEL_TYPE as K3_TYPE
from dspark.checkpoints.k3 import RENAMED as K3_RENAMED
from dspark.checkpoints.k3 import k3_fields, without_tap_count
from dspark.checkpoints.native import (
    ARCHITECTURE,
    LATENT_ARCHITECTURE,
    LM_HEAD,
    WEIGHTS_FILE,
    check_names,
    check_values,
    check_vocabulary,
    config_from_json,
    config_values,
)
from dspark.checkpoints.qwen3 import assemble, backbone_fields, own_object, state, unknown_keys
from dspark.checkpoints.specforge import is_specforge, specforge_fields
from dspark.checkpoints.speculators import speculators_fields
from dspark.checkpoints.tensors import Shapes, load_tensors, tensor_shapes
from dspark.checkpoints.zlab import TRANSFORMERS_TYPE, ZLAB_ARCHITECTURE, zlab_fields
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.kinds import Config, Draft, new_draft
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, ensure_embedded

GGUF_SUFFIX = ".gguf"
_LONG_MAP = 16  # entries: of a shorter d2t nothing can be said
_EMBEDDING = "embed_tokens.weight"
# What `inspected` puts in the place of a record that is missing
_RECORDS: dict[str, Any] = {
    "target_name": "unknown",
    "num_target_layers": 10**6,
    "training_length": 1,
    "training_steps": 1,
}
Reader = Callable[[Mapping[str, Any], list[str]], dict[str, Any]]


@dataclass(frozen=True)
class Header:
    """A draft by its config and the headers of its files. shapes: of the tensors taken, by our names.

    lm_head: whether its native file holds (held, before a conversion) the head's rows. homes: our name -> the file it
    is in and its name there; none for a GGUF file.
    """

    source: Path
    form: str
    config: Config
    shapes: Shapes
    lm_head: bool
    notes: list[str]
    homes: dict[str, tuple[Path, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A draft as read. tensors: by our names; lm_head, notes: see `Header`."""

    form: str
    config: Config
    tensors: dict[str, Tensor]
    lm_head: bool
    notes: list[str]


def read_header(source: Path, target: str | None = None, **stated: Any) -> Header:
    """What a draft's folder or GGUF file says of itself, without reading a tensor.

    target: a model folder that supplies name and depth where the file lacks them. stated: fields that it lacks.
    Raises DsparkError naming a missing or wrong key, a tensor that is missing, unexpected or misshapen, a pickle, or an
    index that leaves the folder.
    """
    if source.suffix == GGUF_SUFFIX:
        config, shapes, lm_head = gguf_header(source)
        state(config.model_dump(), stated, DraftConfig.model_fields)
        notes = list[str]()
        _check_facts(config, {} if target is None else _target_facts(target, config.model_dump()), notes)
        return Header(source, "gguf", config, shapes, lm_head, notes)
    values, notes = config_values(source), list[str]()
    form = detect(values)
    if form == "eagle3":
        facts = {} if target is None else _target_facts(target, values)
        eagle3 = read_eagle3(values, facts, stated, notes)
        _check_facts(eagle3, facts, notes)
        return _located(source, form, eagle3, True, notes)
    fields = READERS[form](values, notes)
    if form == "k3_dspark":
        values = without_tap_count(values)
    facts = {} if target is None else _target_facts(target, fields)
    known = {**fields, **own_object(values), **values}
    missing = {name: value for name, value in facts.items() if name not in known}
    config = assemble(fields, values, {**missing, **stated}, notes)
    _check_facts(config, facts, notes)
    return _located(source, form, config, (own_object(values) or values).get("lm_head_in_file"), notes)


def inspected(source: Path, **stated: Any) -> tuple[Header, list[str]]:
    """`read_header`, and the records that the file lacks: those without which a draft still has its size and taps."""
    missing: list[str] = []
    while True:
        try:
            return read_header(source, **{name: _RECORDS[name] for name in missing}, **stated), missing
        except DsparkError as error:
            if error.field not in _RECORDS or error.value is not None or error.field in missing:
                raise
            missing.append(error.field)


def read_checkpoint(source: Path, target: str | None = None, **stated: Any) -> Checkpoint:
    """Read and check a draft of any form, as `read_header` does.

    Raises DsparkError also for a tensor of the wrong type or not finite, and a vocabulary map that is none.
    """
    header = read_header(source, target, **stated)
    config = header.config
    if isinstance(config, DraftConfig) and header.form == "gguf":
        tensors = gguf_tensors(source, config)
    else:
        paths = {inside: path for path, inside in header.homes.values()}
        found = load_tensors(paths, [header.homes[name][1] for name in header.shapes])
        tensors = {name: found[header.homes[name][1]] for name in header.shapes}
    if config.reduced and "t2d" not in tensors:
        tensors["t2d"] = _marked(tensors["d2t"], config.vocab_size)
        if like_ids(tensors["d2t"]):
            header.notes.append("d2t rises at every entry, as ids do, and no t2d tells: see that it holds offsets")
    check_values(tensors)
    if config.reduced:
        check_vocabulary(tensors["d2t"], tensors["t2d"])
    if others := sorted({str(t.dtype) for t in tensors.values() if _loses(t)}):
        header.notes.append(f"{', '.join(others)} weights are rounded to BF16")
    return Checkpoint(header.form, config, tensors, header.lm_head, header.notes)


def import_draft(source: str | Path, target: str | None = None, **stated: Any) -> Draft:
    """Load a draft of any form we read, unbound, in float32. Raises DsparkError as `read_checkpoint`."""
    return draft_of(read_checkpoint(Path(source), target, **stated))


def draft_of(read: Checkpoint) -> Draft:
    """The draft of a checkpoint, unbound, in float32."""
    with torch.device("meta"):
        draft = new_draft(read.config)
    tensors = {name: t.float() if t.is_floating_point() else t for name, t in read.tensors.items()}
    if isinstance(draft, DSparkDraft):
        draft.own_head_rows = tensors.pop(LM_HEAD, None)
    draft.load_state_dict(tensors, strict=True, assign=True)
    return draft


def detect(values: Mapping[str, Any]) -> str:
    """Which form a config.json has. Raises DsparkError for one that is not read here."""
    architectures, kind = values.get("architectures"), values.get("model_type")
    if "speculators_model_type" in values:
        return "speculators"
    if kind == K3_TYPE:
        return "k3_dspark"
    if kind == TRANSFORMERS_TYPE:
        raise DsparkError("model_type", kind, "is not read here; give the checkpoint it was made from")
    if architectures in [[name] for name in EAGLE3]:
        return "eagle3"
    if is_specforge(values):
        return "specforge"
    if architectures in ([ARCHITECTURE], [LATENT_ARCHITECTURE]):
        return "native"
    if architectures == [ZLAB_ARCHITECTURE]:
        return "z-lab"
    raise DsparkError(
        "architectures",
        architectures,
        "is no form of a draft known here: native, speculators, SpecForge, z-lab, k3_dspark or EAGLE-3",
    )


def native_fields(values: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The DraftConfig fields of a top-level config.json: ours, which states all, or DeepSpec's.

    A missing layout key is anchor-first only where DeepSpec's training key num_anchors shows the origin and there is a
    Markov head; DeepSpec's rank 0 files are plain DFlash, whose layout has to be stated.
    """
    if "lm_head_in_file" in values:
        unknown_keys(values, {*DraftConfig.model_fields, "lm_head_in_file"}, "", notes)
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


READERS: dict[str, Reader] = {
    "native": native_fields,
    "speculators": speculators_fields,
    "specforge": specforge_fields,
    "z-lab": zlab_fields,
    "k3_dspark": k3_fields,
}


def _located(source: Path, form: str, config: Config, lm_head: Any, notes: list[str]) -> Header:
    """The header of a folder. The target's own embedding and whole head are left out where a file carries them."""
    shapes, homes = _renamed(form, *tensor_shapes(source))
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in new_draft(config).state_dict().items()}
    whole, dspark = (config.vocab_size, config.hidden_size), isinstance(config, DraftConfig)
    for name in (_EMBEDDING, *((LM_HEAD,) if dspark and not config.reduced else ())):
        if shapes.get(name) == whole:
            del shapes[name]
            notes.append(f"{name} is left out: it is the target's")
    if form == "native" and config.reduced and isinstance(lm_head, bool) and lm_head != (LM_HEAD in shapes):
        remedy = f"is not what the weights have: {LM_HEAD} is {'missing' if lm_head else 'there'}; mend config.json"
        raise DsparkError("lm_head_in_file", lm_head, remedy)
    if dspark and config.reduced and LM_HEAD in shapes:
        expected[LM_HEAD] = (config.draft_vocab_size, config.hidden_size)
    if config.reduced and "t2d" not in shapes:
        del expected["t2d"]
    if form == "k3_dspark" and not config.enable_confidence_head:
        left = [name for name in shapes if name.startswith("confidence_head.")]
        for name in left:
            del shapes[name]
        if left:
            notes.append("confidence_head is left out: enable_confidence_head is not true, and vLLM drops it too")
    check_names(source / WEIGHTS_FILE, shapes, expected)
    held = LM_HEAD in shapes if lm_head is None else bool(lm_head)
    return Header(source, form, config, expected, held and config.reduced, notes, homes)


def _renamed(form: str, shapes: Shapes, paths: Mapping[str, Path]) -> tuple[Shapes, dict[str, tuple[Path, str]]]:
    """Shapes and homes by our names. Raises DsparkError when two tensors of a file have the same one."""
    back = {theirs: ours for ours, theirs in K3_RENAMED.items()} if form == "k3_dspark" else {}
    ours = {name: eagle3_name(name) if form == "eagle3" else back.get(name, name) for name in shapes}
    if len(set(ours.values())) < len(ours):
        raise DsparkError(WEIGHTS_FILE, sorted(ours), "has one tensor under two names; copy the checkpoint again")
    return {ours[n]: shape for n, shape in shapes.items()}, {ours[n]: (paths[n], n) for n in shapes}


def _loses(tensor: Tensor) -> bool:
    """Whether BF16, in which drafts are written, does not hold it."""
    return tensor.is_floating_point() and not torch.equal(tensor.bfloat16().to(tensor.dtype), tensor)


def _marked(d2t: Tensor, vocabulary: int) -> Tensor:
    """t2d by d2t; ids out of range are left to the check of the vocabulary."""
    ids = torch.arange(len(d2t)) + d2t
    t2d = torch.zeros(vocabulary, dtype=torch.bool)
    t2d[ids[(ids >= 0) & (ids < vocabulary)]] = True
    return t2d


def like_ids(d2t: Tensor) -> bool:
    """Whether a map looks like ids in the place of offsets, which stay the same between ids that follow each other."""
    return len(d2t) >= _LONG_MAP and bool((d2t[1:] > d2t[:-1]).all())


def _target_facts(target: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Name and depth of a target by its config.json; its width and vocabulary must be the draft's."""
    values = config_values(ensure_embedded() if target == EMBEDDED else Path(target))
    text = values if values.get("text_config") is None else values["text_config"]
    if not isinstance(text, Mapping):
        raise DsparkError("text_config", text, f"must be an object in the config.json of the target {target}")
    for name in ("hidden_size", "vocab_size"):
        if text.get(name) != fields.get(name):
            raise DsparkError(name, fields.get(name), f"is {text.get(name)!r} in the target {target}: not its draft")
    return {"target_name": target, "num_target_layers": text.get("num_hidden_layers")}


def _check_facts(config: Config, facts: Mapping[str, Any], notes: list[str]) -> None:
    """Raise DsparkError when the given target has another depth than the draft's; note that it has another name."""
    depth, name = facts.get("num_target_layers"), facts.get("target_name", config.target_name)
    if depth is not None:
        config.check_target(None, depth, config.hidden_size, config.vocab_size)
    if Path(name).name.lower() != Path(config.target_name).name.lower():
        notes.append(f"the draft says it was made for {config.target_name}; the target given is {name}")
