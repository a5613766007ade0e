"""Whether an engine can serve this draft for this target: what it cannot express, and what it is known to do wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dspark.checkpoints.convert import EAGLE3_FORMS
from dspark.checkpoints.engines import check_eagle3, check_sglang, check_vllm
from dspark.checkpoints.gguf import metadata
from dspark.checkpoints.native import LM_HEAD, WEIGHTS_FILE, check_names, read_config
from dspark.checkpoints.speculators import speculators_to_json
from dspark.checkpoints.tensors import tensor_shapes
from dspark.doctor.draft import DraftFacts
from dspark.doctor.engine_faults import ENGINES, FAULTS, VLLM_WITHOUT_TAPS
from dspark.doctor.facts import TargetFacts
from dspark.doctor.findings import Finding
from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import new_draft
from dspark.errors import DsparkError

SUPPORT, FAULT = "engine-support", "engine-fault"


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
    if isinstance(draft.config, Eagle3Config):
        if engine == "llamacpp":
            raise DsparkError("draft", "eagle3", "only DSpark and DFlash drafts are written for llama.cpp here")
        check_eagle3(draft.config, engine, EAGLE3_FORMS, notes)
        return
    assert isinstance(draft.config, DraftConfig)
    if engine == "llamacpp":
        metadata(draft.config)
        if draft.form != "gguf":
            notes.append("wants a .gguf file: dspark convert DRAFT draft.gguf --to gguf --target TARGET.gguf")
        return
    if draft.form == "k3_dspark" and engine == "vllm":
        return
    if draft.config.attention == "mla":
        raise DsparkError(
            "attention", "mla", "only vLLM serves such a draft, in the form of dspark convert --to k3_dspark"
        )
    if draft.form in ("gguf", "specforge"):
        raise DsparkError("draft", draft.form, f"{engine} does not load this form; dspark convert --to {engine} does")
    if draft.form == "z-lab":
        return  # plain DFlash, which both load as such
    if engine == "vllm":
        _refuse_vllm(draft, draft.config, notes)
    elif draft.form == "speculators":
        raise DsparkError("draft", "speculators", "sglang does not load this form; dspark convert --to sglang does")
    else:
        check_sglang(draft.config, notes)


def _refuse_vllm(draft: DraftFacts, config: DraftConfig, notes: list[str]) -> None:
    if draft.form == "speculators":
        speculators_to_json(config, False)
    else:
        check_vllm(config, notes)
    if config.reduced and draft.tensors is not None and "lm_head.weight" not in draft.tensors:
        remedy = "is not in the file, and vLLM needs it with a reduced vocabulary; dspark convert --to vllm adds it"
        raise DsparkError("lm_head.weight", None, remedy)
