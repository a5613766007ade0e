"""How a draft was trained, for its card: what its training.json records; the rest is said to be not recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dspark.checkpoints.native import TRAINING_FILE
from dspark.drafts.config import DraftConfig
from dspark.publishing.words import UNKNOWN, Json, dig, said, table


def training_details(config: DraftConfig, training: Json | None) -> str:
    """The section `Training Details`. training: training.json, None when there is none."""
    return "\n\n".join(["## Training Details", _data(config, training), _training(training)])


def _data(config: DraftConfig, training: Json | None) -> str:
    if training is None:
        return f"### Data\nThis draft came without `{TRAINING_FILE}`: its data is {UNKNOWN}."
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
        f"### Data\n{table(headers, rows)}\n\n{said(training.get('training_rows'), ',')} rows trained on, "
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
        return f"### Training\nHow it was trained is {UNKNOWN}."
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
    return "\n\n".join(["### Training\n" + table(("", ""), facts), _lineage(training), _curve(training)])


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
