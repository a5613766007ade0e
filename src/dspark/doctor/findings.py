"""A finding: one line about one thing that was checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dspark.errors import DsparkError

Level = Literal["ok", "note", "loses", "broken", "skipped"]
GOOD, LOSES, BROKEN = 0, 1, 2
"""Exit codes."""


@dataclass(frozen=True)
class Finding:
    """check: a stable name; text: what was found, the value, and what would be right.

    ok: as it should be. note: worth knowing, costs nothing by itself. loses: it runs, and acceptance or speed suffers.
    broken: it does not load, or drafts nonsense. skipped: could not be checked, and why.
    """

    check: str
    level: Level
    text: str


def exit_code(findings: Iterable[Finding]) -> int:
    """2 when something is broken, 1 when something loses, else 0."""
    levels = {finding.level for finding in findings}
    return BROKEN if "broken" in levels else LOSES if "loses" in levels else GOOD


_CHECK_OF_FIELD = {
    "mask_token_id": "mask-token",
    "target_layer_ids": "layer-ids",
    "aux_hidden_state_layer_ids": "layer-ids",
    "eagle_aux_hidden_state_layer_ids": "layer-ids",
    "eagle_config.eagle_aux_hidden_state_layer_ids": "layer-ids",
    "num_target_layers": "target-depth",
    "hidden_size": "target-width",
    "target_name": "target-name",
    "sample_from_anchor": "layout",
    "block_size": "block-size",
    "speculative_tokens": "block-size",
    "n": "block-size",
    "d2t": "d2t",
    "t2d": "d2t",
    "vocab_size": "vocabulary",
    "draft_vocab_size": "vocabulary",
    "training_length": "trained-length",
    "prompt_recipe": "prompt-recipe",
    "draft": "files",
    "config.json": "files",
    "model.safetensors": "files",
    "model.safetensors.index.json": "files",
}
_FILE_SUFFIXES = (".safetensors", ".bin", ".json", ".gguf")


def check_of(error: DsparkError) -> str:
    """The check that an error of the checkpoint readers belongs to, by the field that it names."""
    if "must be finite" in str(error):
        return "finite"
    if error.field.startswith("rope_"):
        return "rotary"
    if error.field.endswith(_FILE_SUFFIXES):
        return "files"
    return _CHECK_OF_FIELD.get(error.field, "config")
