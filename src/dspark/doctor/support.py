"""Whether an engine can serve this draft for this target: what it cannot express, and what it is known to do wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dspark.checkpoints.gguf import metadata
from dspark.checkpoints.native import LM_HEAD, WEIGHTS_FILE, check_names, read_config
from dspark.checkpoints.served_form import as_it_is, convert_words, form_for
from dspark.checkpoints.tensors import tensor_shapes
from dspark.doctor.draft import DraftFacts
from dspark.doctor.engine_faults import ENGINES, FAULTS, VLLM_WITHOUT_TAPS
from dspark.doctor.facts import TargetFacts
from dspark.doctor.findings import Finding
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import new_draft
from dspark.errors import DsparkError

SUPPORT, FAULT = "engine-support", "engine-fault"
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}


def engine_version(engine: str) -> tuple[str, Version]:
    """`vllm` or `vllm==0.32.0` -> the engine and its release. Raises DsparkError for another engine or no version."""
    name, _, stated = engine.partition("==")
    if name not in ENGINES:
        raise DsparkError("engine", engine, f"must be {', '.join(ENGINES)}, with ==VERSION for another release")
    try:
        return name, Version(stated.removeprefix("b") or ENGINES[name])
    except InvalidVersion:
        raise DsparkError("engine", engine, f"must be like {name}=={ENGINES[name]}") from None


def check_loader(draft: DraftFacts) -> Iterator[Finding]:
    """files: what the readers of foreign forms forgive in our own, the built-in engine's loader refuses."""
    if draft.form != "native" or draft.place is None or "lm_head_in_file" not in draft.values:
        return
    try:
        config, lm_head = read_config(draft.place)
        with torch.device("meta"):
            expected = {name: tuple(t.shape) for name, t in new_draft(config).state_dict().items()}
        if lm_head:
            expected[LM_HEAD] = (config.draft_vocab_size, config.hidden_size)
        shapes, homes = tensor_shapes(draft.place)
        if {path.name for path in homes.values()} != {WEIGHTS_FILE}:
            raise DsparkError("draft", str(draft.place), f"must have one {WEIGHTS_FILE}")
        check_names(draft.place / WEIGHTS_FILE, shapes, expected)
    except DsparkError as error:
        text = f"the built-in engine does not load it: {error}; dspark convert --to native writes what it loads"
        yield Finding("files", "broken", text)


def check_engine(draft: DraftFacts, target: TargetFacts, engine: str) -> Iterator[Finding]:
    """engine-support and engine-fault."""
    name, version = engine_version(engine)
    notes: list[str] = []
    try:
        _refuse(draft, target, name, notes)
    except DsparkError as error:
        yield Finding(SUPPORT, "broken", f"{name}: {error}")
    else:
        yield Finding(SUPPORT, "ok", f"{name} {version} serves such a draft")
    for note in notes:
        yield Finding(SUPPORT, "note", f"{name}: {note}")
    for fault in FAULTS:
        if fault.engine == name and version in SpecifierSet(fault.releases) and fault.when(draft):
            yield Finding(FAULT, fault.level, f"{name} {version}: {fault.text}")
    if version != Version(ENGINES[name]):
        text = f"what {name} does was read at {ENGINES[name]}; {version} may differ"
        yield Finding(FAULT, "note", text)


def _refuse(draft: DraftFacts, target: TargetFacts, engine: str, notes: list[str]) -> None:
    """Raise DsparkError naming what the engine cannot serve; add what it ignores to `notes`."""
    if engine == "vllm" and target.architecture in VLLM_WITHOUT_TAPS:
        raise DsparkError("target", target.architecture, "its class has no hidden states for a draft in vLLM 0.32")
    if engine == "llamacpp":
        if isinstance(draft.config, Eagle3Config):
            raise DsparkError("draft", "eagle3", "only DSpark and DFlash drafts are written for llama.cpp here")
        assert draft.config is not None
        metadata(draft.config)
        if draft.form not in ("gguf", "recipe"):
            words = shlex.join(("dspark", "convert", draft.name, "OUT.gguf", "--to", "gguf"))
            notes.append(
                f"not in a form that {NAMES[engine]} reads: {words} --target TARGET.gguf, as dspark launch does"
            )
        return
    _note_form(draft, target, engine, notes)


def _note_form(draft: DraftFacts, target: TargetFacts, engine: str, notes: list[str]) -> None:
    """Note what an engine ignores of a draft, and the conversion that its files need first, as `dspark launch` makes
    it. Raises DsparkError for what no form of it expresses."""
    assert draft.config is not None
    form, expanded = form_for(engine, draft.config, notes)
    held = LM_HEAD in (draft.tensors or {})
    recipe = draft.form == "recipe"  # has no files; what is published with it is for one engine
    if not expanded if recipe else as_it_is(engine, draft.config, draft.form, held):
        return
    place = target.name if Path(target.name).is_dir() else None
    words = shlex.join(convert_words("DRAFT" if recipe else draft.name, "OUT", form, expanded, place))
    notes.append(f"not in a form that {NAMES[engine]} reads: {words}, as dspark launch does")
