"""The model card of a draft folder: README.md, made from its config, its training.json and what was measured.

    python -m dspark.checkpoints.card runs/mine/best --measured report.json

writes FOLDER/README.md, over one that is there. What is not known is said to be not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark.checkpoints.measured import (
    UNKNOWN,
    Json,
    dig,
    measured_limits,
    measured_section,
    read_json,
    read_measured,
    said,
    table,
)
from dspark.checkpoints.native import CARD_FILE, PROMPTS_FILE, TRAINING_FILE, read_config
from dspark.drafts.config import DraftConfig
from dspark.drafts.inspect import parameter_counts
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED


def model_card(config: DraftConfig, training: Json | None, measured: Json | None) -> str:
    """The whole README.md. training: training.json; measured: report.json with this draft's columns; None: there is
    none."""
    sections = [
        _head(config),
        _architecture(config),
        _data(config, training),
        _training(training),
        measured_section(measured),
        _limits(config, training, measured),
    ]
    return "\n\n".join(sections) + "\n"


def _facts(rows: Sequence[tuple[str, str]]) -> str:
    return table(("", ""), rows)


def _head(config: DraftConfig) -> str:
    target = said(config.target_name)
    kind = "DSpark" if config.markov_rank or config.enable_confidence_head else "DFlash"
    # The embedded target's licence, and so that of drafts which start from its layers; of others we know nothing.
    licence = "license: apache-2.0\n" if config.target_name == EMBEDDED else ""
    return f"""---
{licence}base_model: {json.dumps(target)}
tags:
- dspark
- speculative-decoding
---
# {kind} draft for {target}

A draft for speculative decoding: each round it proposes up to {config.gamma} tokens, `{target}` checks them in one pass
and keeps those it agrees with. The output is the target's own; the draft decides only how fast it comes.

```
dspark generate --draft FOLDER --target {target} --prompt "What is 12 * 3?"
dspark demo --draft FOLDER --target {target}
```
FOLDER is this folder: `config.json`, `model.safetensors`, and, where recorded, `{TRAINING_FILE}` (how it was made) and
`{PROMPTS_FILE}` (hashes of the prompts it was trained on)."""


def _architecture(config: DraftConfig) -> str:
    counts = parameter_counts(config)
    layout = "anchor-first" if config.sample_from_anchor else "bonus-anchor"
    layers = ", ".join(f"{config.layer_types.count(kind)} {kind}" for kind in dict.fromkeys(config.layer_types))
    markov = f"{config.markov_head_type} Markov of rank {config.markov_rank}" if config.markov_rank else "no Markov"
    with_markov = " with Markov part" if config.confidence_head_with_markov else ""
    confidence = f"confidence{with_markov}" if config.enable_confidence_head else "no confidence"
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.items() if name != "total" and count)
    rope = config.rope_parameters
    return "## Architecture\n" + _facts(
        [
            ("predictions a block", f"{config.gamma} ({layout})"),
            ("layers", f"{layers}; sliding window {said(config.sliding_window) if config.sliding_window else 'none'}"),
            ("width", f"{config.hidden_size}, intermediate {config.intermediate_size}"),
            ("heads", f"{config.num_attention_heads} query, {config.num_key_value_heads} KV, of {config.head_dim}"),
            ("taps", f"after layers {said(config.target_layer_ids)} (0-based) of {config.num_target_layers}"),
            ("vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} ids; mask {config.mask_token_id}"),
            ("output heads", f"{markov}, {confidence}"),
            ("rotary", f"{rope['rope_type']}, theta {rope['rope_theta']:g}"),
            ("parameters", f"{counts['total']:,} ({parts}); embedding and head are the target's"),
            ("weights", "BF16"),
            ("longest training row", f"{config.training_length:,} tokens"),
            ("chat template", f"sha256 {said(config.prompt_recipe['template_sha256'])}"),
            ("thinking mode", said(config.prompt_recipe["thinking"])),
        ]
    )


def _data(config: DraftConfig, training: Json | None) -> str:
    if training is None:
        return f"## Data\nThis draft came without `{TRAINING_FILE}`: its data is {UNKNOWN}."
    rows = []
    for one in training.get("rows", []):
        settings = dig(one, "settings", "settings")
        temperatures = dig(settings, "temperatures") or dig(settings, "temperature")
        rows.append(
            [
                said(one.get("name")),
                _writer(config, one),
                said(one.get("rows"), ","),
                said(one.get("answer_tokens"), ","),
                said(temperatures),
                said(dig(settings, "max_tokens")),
                said(sorted(dig(one, "settings", "prompt_files") or {}) or None),
                f"`{one['sha256'][:16]}`" if one.get("sha256") else UNKNOWN,
            ]
        )
    headers = ("rows file", "answers by", "rows", "answer tokens", "temperatures", "limit", "prompt files", "sha256")
    return (
        f"## Data\n{table(headers, rows)}\n\n{said(training.get('training_rows'), ',')} rows trained on, "
        f"{said(training.get('held_out_rows'), ',')} held out (all turns of a prompt on one side), of which "
        f"{said(training.get('held_out_rows_seen_before'), ',')} on prompts that a draft before it was trained on."
    )


def _writer(config: DraftConfig, rows_file: Json) -> str:
    """Who wrote the answers of a rows file: its notes name the target, without them nothing tells."""
    writer = dig(rows_file, "settings", "target")
    if writer is None:
        return "nothing tells who"
    return "the target itself" if Path(writer).name == Path(said(config.target_name)).name else said(writer)


def _training(training: Json | None) -> str:
    if training is None:
        return f"## Training\nHow it was trained is {UNKNOWN}."
    settings, best = dig(training, "recipe", "training") or {}, training.get("best") or {}
    loss = ", ".join(f"{key} {said(value)}" for key, value in (settings.get("loss") or {}).items()) or UNKNOWN
    replay = f"{said(best.get('replay_acceptance'), '.3f')} at step {said(best.get('step'))}, n = {said(best.get('n'))}"
    note = f"; {best['note']}" if best.get("note") else ""
    spent = [training.get(key) for key in ("seconds", "validation_seconds")]
    hours = [said(None if one is None else one / 3600, ".2f") for one in spent]
    facts = [
        ("recipe", said(dig(training, "recipe", "name"))),
        ("steps", f"{said(training.get('steps'), ',')} of {said(settings.get('steps'), ',')}"),
        ("hours of the run", f"{hours[0]}, of which validation {hours[1]}"),
        ("best by replay", f"{replay}, {said(best.get('rows'))} held-out rows; bonus counted, macro{note}"),
        ("loss", loss),
        *(
            (key.replace("_", " "), said(value))
            for key, value in settings.items()
            if key not in ("loss", "steps", "out", "seed", "compute_dtype")
        ),
        ("seed", said(training.get("seed"))),
        ("compute type", said(training.get("compute_dtype"))),
        *(
            (f"machine {number}", "; ".join(f"{label} {value}" for label, value in machine.items()))
            for number, machine in enumerate(training.get("machines") or [], start=1)
        ),
    ]
    return "\n\n".join(["## Training\n" + _facts(facts), _lineage(training), _curve(training)])


def lineage(training: Json) -> Iterator[Json]:
    """This draft's record and those of the drafts it was started from, the newest first."""
    record: Any = training
    while isinstance(record, Mapping):
        yield record
        record = record.get("started_from")


def _lineage(training: Json) -> str:
    """Every draft of the chain with its hours, and their sum."""
    chain = list(lineage(training))
    rows = [
        [
            said(dig(one, "recipe", "name")),
            said(dig(one, "recipe", "training", "init")),
            said(dig(one, "draft", "which")),
            said(dig(one, "draft", "step"), ","),
            said(dig(one, "draft", "hours"), ".2f"),
        ]
        for one in chain
    ]
    hours = [dig(one, "draft", "hours") for one in chain]
    begun = dig(chain[-1], "recipe", "training", "init")
    known = begun in ("random", "target-layers") and None not in hours
    total = f"{sum(hours):.2f} hours in all" if known else f"hours in all: {UNKNOWN}"
    end = "" if begun in ("random", "target-layers") else f"; the draft `{said(begun)}` before them is {UNKNOWN}"
    headers = ("recipe", "first weights", "draft", "step", "hours up to it")
    return f"### Lineage\nThe newest first: {total}{end}.\n\n" + table(headers, rows)


def _curve(training: Json) -> str:
    rows = [
        [
            said(one.get("step"), ","),
            said(one.get("hours"), ".2f"),
            *(said(one.get(key), ".3f") for key in ("replay_acceptance", "loss_l1", "loss_bce")),
        ]
        for one in training.get("curve") or []
    ]
    if not rows:
        return f"### Curve\nValidations: {UNKNOWN}."
    headers = ("step", "hours", "replay acceptance", "L1", "confidence BCE")
    return "### Curve\nOn held-out prompts; acceptance by replay, bonus counted, macro.\n\n" + table(headers, rows)


def _limits(config: DraftConfig, training: Json | None, measured: Json | None) -> str:
    lines = [
        f"It speculates for `{said(config.target_name)}` alone: its inputs are that model's own layers.",
        f"No row it was trained on is longer than {config.training_length:,} tokens.",
    ]
    if config.reduced:
        share = f"{config.draft_vocab_size:,} of {config.vocab_size:,}"
        lines.append(f"It can propose {share} ids; a token outside them always ends a round.")
    if training is not None:
        lines.append("The curve and the choice of its best step rest on held-out prompts of its own training set.")
    lines += measured_limits(measured)
    return "## Limits\n" + "\n".join(f"- {line}" for line in lines)


def read_training(folder: str | Path) -> dict[str, Any] | None:
    """training.json of a draft folder, None when there is none. Raises DsparkError when it cannot be read."""
    path = Path(folder) / TRAINING_FILE
    return read_json(path) if path.is_file() else None


def card_of(folder: str | Path, measured: str | Path | None = None) -> str:
    """The model card of a draft folder. Raises DsparkError."""
    config, training = read_config(folder)[0], read_training(folder)
    if not isinstance(config, DraftConfig):
        raise DsparkError("draft", str(folder), "is an EAGLE-3 baseline; cards are for DSpark and DFlash drafts")
    figures = None if measured is None else read_measured(measured, folder)
    try:
        return model_card(config, training, figures)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = " or ".join(str(one) for one in (Path(folder) / TRAINING_FILE, measured) if one is not None)
        raise DsparkError("card", where, f"does not have the form this version writes ({error!r})") from None


def write_card(folder: str | Path, measured: str | Path | None = None) -> Path:
    """Write FOLDER/README.md under a temporary name, then rename. Raises DsparkError."""
    text, path = card_of(folder, measured), Path(folder) / CARD_FILE
    temporary = path.with_name(CARD_FILE + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.chmod(0o644)
    os.replace(temporary, path)
    return path


def arguments(about: str | None, argv: Sequence[str] | None) -> argparse.Namespace:
    """FOLDER and --measured, for this command and for `builtin`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a trained draft, e.g. runs/mine/best")
    parser.add_argument("--measured", help="report.json of a `dspark bench` with this draft")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(__doc__, argv)
    try:
        print(write_card(args.folder, args.measured))
    except DsparkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
