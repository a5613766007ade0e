"""Conversion of drafts: any form we read to any form we write.

A form's layer ids, its spelling of the layout and its count are translated, never the layout itself, nor a weight;
layer ids that do not ascend are sorted, with fc's columns, for every goal but native. What the goal cannot express is
refused by name; what its engine ignores is noted. Everything is checked before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.checkpoints.eagle3 import eagle3_to_json
from dspark.checkpoints.engines import check_eagle3, check_sglang, check_vllm
from dspark.checkpoints.expand import expand
from dspark.checkpoints.gguf import Kind, export_gguf
from dspark.checkpoints.hub import draft_source
from dspark.checkpoints.k3 import RENAMED as K3_RENAMED
from dspark.checkpoints.k3 import k3_to_json
from dspark.checkpoints.native import (
    CALIBRATION_FILE,
    CARD_FILE,
    LM_HEAD,
    PROMPTS_FILE,
    TRAINING_FILE,
    config_to_json,
    write_checkpoint,
)
from dspark.checkpoints.qwen3 import own_json
from dspark.checkpoints.read import GGUF_SUFFIX, Checkpoint, Header, draft_of, read_checkpoint
from dspark.checkpoints.specforge import specforge_to_json
from dspark.checkpoints.speculators import speculators_to_json
from dspark.checkpoints.taps import ascending, check_ascending
from dspark.checkpoints.zlab import RENAMED, Form, config_for
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, find_gguf
from dspark.targets.transformers import load_target

FORMS = ("native", "vllm", "sglang", "speculators", "k3_dspark", "specforge", "z-lab", "transformers", "gguf")
"""Goals. vllm and sglang are the native form, checked for that engine; transformers is written only."""
EAGLE3_FORMS = ("native", "vllm", "sglang")
_NEEDS_HEAD = ("vllm", "speculators")
_RENAMED = {"transformers": RENAMED, "k3_dspark": K3_RENAMED}


def convert(
    src: str | Path,
    form: str,
    out: str | Path,
    target: str | None = None,
    expanded: bool = False,
    kind: Kind | None = None,
    **stated: Any,
) -> Checkpoint:
    """Write the draft in `src` (a folder, a GGUF file, a hub name, or `embedded`) to the new `out` in another form.

    out: a folder; for gguf a file. target: supplies its name and depth, and the head's rows where the goal needs them
    and the file lacks them; for gguf it is the target's GGUF file. expanded: rewrite a reduced vocabulary for SGLang.
    kind: how gguf stores matrices, f16 unless given. stated: fields that the source lacks.
    Returns what was read, with the notes of both sides. Raises DsparkError; then nothing is written.
    """
    source, out = _check_ends(src, form, out, expanded, kind)
    read = read_checkpoint(source, None if form == "gguf" else target, **stated)
    moved = False
    if form != "native":
        config, tensors = ascending(read.config, read.tensors, read.notes)
        moved = config != read.config
        read = replace(read, config=config, tensors=tensors)
    files = {name: _text(source / name) for name in (CARD_FILE, TRAINING_FILE, PROMPTS_FILE, CALIBRATION_FILE)}
    if expanded and read.config.reduced and files[CARD_FILE] is not None:
        files[CARD_FILE] = None
        read.notes.append(f"{CARD_FILE} is left out: its figures are those of the reduced vocabulary")
    if files[CALIBRATION_FILE] is not None and (moved or (expanded and read.config.reduced)):
        files[CALIBRATION_FILE] = None
        read.notes.append(f"{CALIBRATION_FILE} is left out: it is tied to the weights as they were; calibrate again")
    if form == "gguf":
        _write_gguf(read, out, target, kind or "f16")
    elif isinstance(read.config, Eagle3Config):
        check_eagle3(read.config, form, EAGLE3_FORMS, read.notes)
        write_checkpoint(out, eagle3_to_json(read.config), read.tensors, files, replace=False)
    else:
        document, tensors = _in_form(read, read.config, form, target, expanded)
        names = _RENAMED.get(form, {})
        renamed = {names.get(name, name): tensor for name, tensor in tensors.items()}
        write_checkpoint(out, document, renamed, files, replace=False)
    return read


def _check_ends(src: str | Path, form: str, out: str | Path, expanded: bool, kind: str | None) -> tuple[Path, Path]:
    """Where the draft is and where it goes. Raises DsparkError for a goal that does not fit the options."""
    try:
        out = Path(out).resolve()  # where a link leads is where it is written
    except (ValueError, RuntimeError) as error:
        raise DsparkError("out", str(out), f"is no path ({error}); give another name") from None
    if form not in FORMS:
        raise DsparkError("to", form, f"must be one of {', '.join(FORMS)}")
    if (form == "gguf") != (out.suffix == GGUF_SUFFIX):
        raise DsparkError("out", str(out), "must end in .gguf for gguf, which is one file, and in nothing like it else")
    if out == Path.cwd():
        raise DsparkError("out", str(out), "is where you are; give a name inside it")
    if out.exists() and (not out.is_dir() or any(out.iterdir()) or form == "gguf"):
        raise DsparkError("out", str(out), "exists already; give a new name or an empty folder")
    if kind is not None and form != "gguf":
        raise DsparkError("type", kind, "is for gguf; other forms are in BF16")
    if expanded and form != "sglang":
        raise DsparkError("expand", True, "is for SGLang, which has no reduced vocabulary; leave it out")
    return draft_source(str(src)), out


def _in_form(
    read: Checkpoint, config: DraftConfig, form: str, target: str | None, expanded: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors (by our names) of the goal."""
    tensors = dict(read.tensors)
    if expanded and config.reduced:
        if LM_HEAD in tensors:
            _drop_head(config, tensors, target, read.notes)
        config, tensors = expand(config, tensors)
    elif config.reduced and form in _NEEDS_HEAD and LM_HEAD not in tensors:
        tensors[LM_HEAD] = _head_rows(config, tensors["d2t"], target)
        read.notes.append(f"{LM_HEAD} is added: rows of the head of {target or EMBEDDED}")
    elif form in ("native", "sglang") and not read.lm_head:
        tensors.pop(LM_HEAD, None)
    return document_for(config, form, LM_HEAD in tensors, read), tensors


def document_for(config: DraftConfig, form: str, lm_head: bool, read: Checkpoint | Header) -> dict[str, Any]:
    """The config.json of the goal. Raises DsparkError for what it cannot express, and adds to read.notes."""
    if form != "native":
        check_ascending(config)
    if form == "k3_dspark":
        return k3_to_json(config, read.lm_head)
    if form != "native":
        check_grouped(config, form)
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
        one: Form = "z-lab" if form == "z-lab" else "transformers"
        return {**config_for(config, one), **own_json(config, read.lm_head)}
    return config_to_json(config, lm_head)


def check_grouped(config: DraftConfig, form: str) -> None:
    """Raise DsparkError for an MLA draft: one form has it."""
    if config.attention == "mla":
        raise DsparkError("attention", "mla", f"{form} has grouped-query attention only; vLLM's form is k3_dspark")


def _write_gguf(read: Checkpoint, out: Path, target: str | None, kind: Kind) -> None:
    draft = draft_of(read)
    if not isinstance(draft, DSparkDraft):
        raise DsparkError("to", "gguf", "is for DSpark and DFlash drafts; llama.cpp's EAGLE-3 files are not written")
    if target is None and draft.config.target_name == EMBEDDED:
        target = str(find_gguf())
    if target is None:
        raise DsparkError("target", None, "give the --target: the GGUF file that llama.cpp serves, for its tokenizer")
    export_gguf(draft, out, target, kind, read.lm_head, replace=False)


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


def _text(path: Path) -> str | None:
    """A text that goes along unchanged, if it is there. Raises DsparkError when it is no text."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except ValueError:
        raise DsparkError(path.name, str(path), "must be UTF-8 text; mend it or take it away") from None
