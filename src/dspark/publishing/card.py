"""The model card of a draft folder: README.md, made from its config, its training.json and what was measured.

What is not known is said to be not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dspark.bench.report import Report
from dspark.checkpoints.native import CARD_FILE, PROMPTS_FILE, TRAINING_FILE, read_config
from dspark.checkpoints.record import read_training
from dspark.drafts.config import DraftConfig
from dspark.drafts.inspect import parameter_counts
from dspark.errors import DsparkError
from dspark.publishing.evaluation import evaluation, measured_limits, report_of
from dspark.publishing.serving import serves, serving_sections
from dspark.publishing.training_details import training_details
from dspark.publishing.words import Json, hub_name, said, table
from dspark.targets.embedded import EMBEDDED


def card_of(
    folder: str | Path, report: str | Path | None = None, licence: str | None = None, repo: str | None = None
) -> str:
    """The model card of a draft folder.

    report: report.json with figures of these weights. licence: for the front matter; without it the one of a card that
    is there. repo: OWNER/NAME of the published draft, for the commands. Raises DsparkError.
    """
    config, lm_head = _config(folder)
    training = read_training(folder)
    figures = None if report is None else report_of(report, folder)
    licence = licence or stated_licence(folder) or _licence(config)
    try:
        return model_card(config, training, figures, licence, serving_sections(config, lm_head, repo), repo)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = str(Path(folder) / TRAINING_FILE)
        raise DsparkError("card", where, f"does not have the form this version writes ({error!r})") from None


def model_card(
    config: DraftConfig,
    training: Json | None,
    report: Report | None,
    licence: str | None = None,
    serving: Sequence[str] = (),
    repo: str | None = None,
) -> str:
    """The whole README.md. training: training.json; report: this draft's columns; None: there is none. serving: the
    sections about engines."""
    sections = [
        _front_matter(config, licence),
        _overview(config, repo),
        specifications(config),
        evaluation(report),
        *serving,
        training_details(config, training),
        _limits(config, training, report),
    ]
    return "\n\n".join(sections) + "\n"


def stale_facts(config: DraftConfig, card: str) -> list[str]:
    """Facts of the config that a card, as `visible`, does not state, or states otherwise in any row."""
    facts = {"parameters": f"| parameters | {parameter_counts(config)['total']:,} (", "gamma": _gamma(config)}
    lines = [" ".join(line.replace("|", " | ").split()) for line in card.splitlines()]
    return [name for name, fact in facts.items() if not _stated(fact, lines)]


def _stated(fact: str, lines: Sequence[str]) -> bool:
    """Whether there are rows with a fact's label, and all of them are it."""
    label = f"| {fact.split('|')[1].strip()} |"
    rows = [line for line in lines if line.startswith(label)]
    return bool(rows) and all(row.startswith(fact) for row in rows)


def visible(card: str) -> str:
    """A card without its HTML comments."""
    return re.sub(r"<!--.*?(?:-->|\Z)", "", card, flags=re.DOTALL)


def front_matter(folder: str | Path) -> dict[str, Any]:
    """The YAML that a folder's card begins with, at its first byte; empty when there is no card or none in it."""
    path = Path(folder) / CARD_FILE
    try:
        head, block, _ = path.read_text(encoding="utf-8").split("---\n", 2)
        values = yaml.safe_load(block) if head == "" else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def stated_licence(folder: str | Path) -> str | None:
    """The licence in a card's front matter; None when it names none."""
    found = front_matter(folder).get("license")
    return found if isinstance(found, str) and found.strip() else None


def _config(folder: str | Path) -> tuple[DraftConfig, bool]:
    config, lm_head = read_config(folder)
    if not isinstance(config, DraftConfig):
        raise DsparkError("draft", str(folder), "is an EAGLE-3 baseline; cards are for DSpark and DFlash drafts")
    return config, lm_head


def _licence(config: DraftConfig) -> str | None:
    """The embedded target's, and so that of drafts which start from its layers; of others we know nothing."""
    return "apache-2.0" if config.target_name == EMBEDDED else None


def _kind(config: DraftConfig) -> str:
    return "DSpark" if config.markov_rank or config.enable_confidence_head else "DFlash"


def _front_matter(config: DraftConfig, licence: str | None) -> str:
    base = hub_name(config.target_name)
    fields: Mapping[str, Any] = {
        **({"license": licence} if licence else {}),
        "library_name": "dspark",
        "pipeline_tag": "text-generation",
        **({"base_model": base} if base else {}),
        "tags": [
            "speculative-decoding",
            _kind(config).lower(),
            *(key for key in ("vllm", "sglang") if serves(key, config)),
        ],
        "inference": False,
    }
    title = f"# {_kind(config)} draft for {said(config.target_name)}"
    return f"---\n{yaml.safe_dump(dict(fields), sort_keys=False)}---\n{title}"


def _overview(config: DraftConfig, repo: str | None) -> str:
    target = said(config.target_name)
    return f"""## Overview

A draft for speculative decoding: each round it proposes up to {config.gamma} tokens, `{target}` checks them in one pass
and keeps those it agrees with. The output is the target's own; the draft decides only how fast it comes.

```bash
dspark generate --draft FOLDER --target {target} --prompt "What is 12 * 3?"
dspark doctor --draft FOLDER --target {target}
```
FOLDER holds `config.json`, `model.safetensors`, and, where recorded, `{TRAINING_FILE}` (how it was made) and
`{PROMPTS_FILE}` (hashes of the prompts it was trained on)."""


def _gamma(config: DraftConfig) -> str:
    layout = "anchor-first" if config.sample_from_anchor else "bonus-anchor"
    return f"| predictions a block | {config.gamma} ({layout}) |"


def specifications(config: DraftConfig) -> str:
    """The section `Model Specifications`, with the exact parameter count."""
    counts = parameter_counts(config)
    layers = ", ".join(f"{config.layer_types.count(kind)} {kind}" for kind in dict.fromkeys(config.layer_types))
    markov = f"{config.markov_head_type} Markov of rank {config.markov_rank}" if config.markov_rank else "no Markov"
    with_markov = " with Markov part" if config.confidence_head_with_markov else ""
    confidence = f"confidence{with_markov}" if config.enable_confidence_head else "no confidence"
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total" and count)
    facts = table(
        ("", ""),
        [
            ("base model", said(config.target_name)),
            ("format", f"safetensors, one file, BF16, {counts['total']:,} parameters"),
            ("layers", f"{layers}; sliding window {said(config.sliding_window) if config.sliding_window else 'none'}"),
            ("width", f"{config.hidden_size}, intermediate {config.intermediate_size}"),
            ("heads", f"{config.num_attention_heads} query, {config.num_key_value_heads} KV, of {config.head_dim}"),
            ("taps", f"after layers {said(config.target_layer_ids)} (0-based) of {config.num_target_layers}"),
            ("vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} ids; mask {config.mask_token_id}"),
            ("output heads", f"{markov}, {confidence}"),
            ("rotary", _rotary(config.rope_parameters)),
            ("parameters", f"{counts['total']:,} ({parts}); embedding and head are the target's"),
            ("context", f"{config.max_position_embeddings:,} positions"),
            ("longest training row", f"{config.training_length:,} tokens"),
            ("chat template", f"sha256 {said(config.prompt_recipe['template_sha256'])}"),
            ("thinking mode", said(config.prompt_recipe["thinking"])),
        ],
    )
    return f"## Model Specifications\n\n{facts}\n{_gamma(config)}"


def _rotary(rope: Mapping[str, Any]) -> str:
    stretched = ""
    if "factor" in rope:
        stretched = f", factor {said(rope['factor'])} over {said(rope.get('original_max_position_embeddings'), ',')}"
    return f"{rope['rope_type']}, theta {rope['rope_theta']:g}{stretched}"


def _limits(config: DraftConfig, training: Json | None, report: Report | None) -> str:
    lines = [
        f"It speculates for `{said(config.target_name)}` alone: its inputs are that model's own layers.",
        f"No row it was trained on is longer than {config.training_length:,} tokens.",
    ]
    if config.reduced:
        share = f"{config.draft_vocab_size:,} of {config.vocab_size:,}"
        lines.append(f"It can propose {share} ids; a token outside them always ends a round.")
    if training is not None:
        lines.append("The curve and the choice of its best step rest on held-out prompts of its own training set.")
    lines += measured_limits(report)
    return "## Limits\n\n" + "\n".join(f"- {line}" for line in lines)
