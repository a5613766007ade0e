"""The form that vLLM or SGLang serves a draft from, whether files are in it, and what converts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dspark.checkpoints.convert import EAGLE3_FORMS, document_for
from dspark.checkpoints.engines import check_eagle3
from dspark.checkpoints.read import Header
from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import Config


def form_for(engine: str, config: Config, notes: list[str] | None = None) -> tuple[str, bool]:
    """The form that an engine serves this draft from, and whether its vocabulary has to be expanded for it.

    notes: what the engine ignores of it is added. Raises DsparkError for what that form, and so the engine, cannot
    express.
    """
    notes = [] if notes is None else notes
    if isinstance(config, Eagle3Config):
        check_eagle3(config, engine, EAGLE3_FORMS, notes)
        return engine, False
    form, expanded = _form(engine, config)
    changes: dict[str, Any] = {"target_layer_ids": tuple(sorted(config.target_layer_ids))}  # as `convert` writes them
    written = config.model_copy(update={**changes, "draft_vocab_size": config.vocab_size} if expanded else changes)
    document_for(written, form, written.reduced, Header(Path(), form, written, {}, written.reduced, notes))
    return form, expanded


def _form(engine: str, config: DraftConfig) -> tuple[str, bool]:
    if config.markov_rank == 0:  # plain DFlash; z-lab's form has the whole vocabulary only
        return ("speculators", False) if engine == "vllm" and config.reduced else ("z-lab", False)
    if engine == "vllm":
        return ("k3_dspark" if config.attention == "mla" else "vllm"), False
    return "sglang", config.reduced


def as_it_is(engine: str, config: Config, form: str, lm_head: bool) -> bool:
    """Whether the engine, which serves this draft from some form, loads the one it has.

    form: of the files; lm_head: whether they hold the head's rows.
    """
    if not in_order(config):
        return False
    if form == "eagle3":
        return True
    if engine == "vllm" and config.reduced and not lm_head:
        return False  # it needs the head's rows in the file
    if engine == "vllm" and form == "speculators":
        return True
    wanted, expanded = form_for(engine, config)
    return not expanded and form == ("native" if wanted == engine else wanted)


def in_order(config: Config) -> bool:
    """Whether the taps ascend, as engines hand them over, whatever the order of fc's columns."""
    return list(config.target_layer_ids) == sorted(config.target_layer_ids)


def convert_words(draft: str, out: str, form: str, expanded: bool, target: str | None) -> tuple[str, ...]:
    """The `dspark convert` that writes the form, as words of a command line. target: None when it is not here."""
    source = ("--target", target) if target is not None else ()
    return "dspark", "convert", draft, out, "--to", form, *source, *(("--expand",) if expanded else ())
