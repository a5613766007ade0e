"""Every kind of draft from every form to every form: the same bytes whatever the way, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoints.conftest import FIRST, PLAIN, WHOLE, same_files
from tests.drafts.conftest import MLA
from tests.drafts.test_eagle3 import eagle3_draft

from dspark.checkpoints.convert import FORMS, convert
from dspark.checkpoints.k3 import RENAMED as K3_RENAMED
from dspark.checkpoints.native import save_draft
from dspark.checkpoints.zlab import RENAMED
from dspark.errors import DsparkError

LATENT = {**WHOLE, **FIRST, **MLA, "q_lora_rank": 8}
REDUCED = {"layer_types": ["full_attention", "full_attention"], "sliding_window": None}
DRAFTS: dict[str, dict[str, Any]] = {
    "whole, anchor-first": {**WHOLE, **FIRST},
    "whole, bonus-anchor": WHOLE,
    "reduced, anchor-first": {**REDUCED, **FIRST},
    "reduced, bonus-anchor, sliding": {},
    "sliding, non-causal": {**FIRST, "draft_vocab_size": 30, "sliding_window": 8, "sliding_window_non_causal": True},
    "sliding, causal": {**FIRST, "draft_vocab_size": 30, "sliding_window": 8},
    "gated": {**WHOLE, **FIRST, "markov_head_type": "gated"},
    "rnn": {**WHOLE, **FIRST, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    "no confidence": {**WHOLE, **FIRST, "enable_confidence_head": False},
    "DFlash": {**WHOLE, **PLAIN},
    "DFlash, anchor-first": {**WHOLE, **PLAIN, **FIRST},
    "MLA": {**LATENT, "aux_hidden_stream": "attn_res"},
    "MLA, queries of full rank": {**LATENT, "q_lora_rank": None},
    "MLA, reduced, bonus-anchor": {**LATENT, "draft_vocab_size": 12, "sample_from_anchor": False, "block_size": 8},
}
EAGLE3 = {"EAGLE-3": "gqa", "EAGLE-3, MLA": "mla-low-rank", "EAGLE-3, MLA, full rank": "mla"}
# "=": the same bytes from every form, and there and back; ">": written only; else the field that is refused
MATRIX = {
    #                         native vllm sglang speculators k3_dspark specforge z-lab transformers gguf
    "whole, anchor-first": "= = = = attention = markov_rank markov_rank =",
    "whole, bonus-anchor": "= = = = attention sample_from_anchor markov_rank markov_rank =",
    "reduced, anchor-first": "= = draft_vocab_size = attention draft_vocab_size markov_rank markov_rank =",
    "reduced, bonus-anchor, sliding": "= = draft_vocab_size = attention sample_from_anchor markov_rank markov_rank "
    "sliding_window_non_causal",
    "sliding, non-causal": "= sliding_window_non_causal sliding_window_non_causal sliding_window_non_causal attention "
    "layer_types markov_rank markov_rank =",
    "sliding, causal": "= = = = attention layer_types markov_rank markov_rank sliding_window_non_causal",
    "gated": "= markov_head_type = markov_head_type attention = markov_rank markov_rank markov_head_type",
    "rnn": "= markov_head_type = markov_head_type attention = markov_rank markov_rank markov_head_type",
    "no confidence": "= = = = attention = markov_rank markov_rank =",
    "DFlash": "= markov_rank markov_rank = attention sample_from_anchor = > =",
    "DFlash, anchor-first": "= markov_rank markov_rank = attention = sample_from_anchor sample_from_anchor "
    "sample_from_anchor",
    "MLA": "= attention attention attention = attention attention attention attention",
    "MLA, queries of full rank": "= attention attention attention q_lora_rank attention attention attention attention",
    "MLA, reduced, bonus-anchor": "= attention attention attention sample_from_anchor attention attention attention "
    "attention",
    "EAGLE-3": "= = = to to to to to to",
    "EAGLE-3, MLA": "= = = to to to to to to",
    "EAGLE-3, MLA, full rank": "= q_lora_rank q_lora_rank to to to to to to",
}


@pytest.fixture
def sources(make_draft, tmp_path) -> dict[str, Path]:
    """A native folder of every kind of draft, weights exact in BF16."""
    drafts = {name: make_draft(**changes) for name, changes in DRAFTS.items()}
    drafts |= {name: eagle3_draft(kind, draft_vocab_size=12) for name, kind in EAGLE3.items()}
    folders = {name: tmp_path / f"{number}" for number, name in enumerate(drafts)}
    for name, draft in drafts.items():
        save_draft(draft, folders[name])
    return folders


def place(source: Path, form: str, via: str = "") -> Path:
    return source.parent / f"{source.name}-{via}{form}{'.gguf' if form == 'gguf' else ''}"


def attempt(source: Path, form: str, out: Path, target: Path) -> str | None:
    """Convert; the field that was refused, if one was, and then nothing is there."""
    try:
        gguf = {"target": str(target), "kind": "f32"} if form == "gguf" else {}
        convert(source, form, out, **gguf)
    except DsparkError as error:
        assert not out.exists() and "\n" not in str(error)
        return error.field
    return None


def same_tensors(source: Path, form: str, out: Path) -> bool:
    names = {"transformers": RENAMED, "k3_dspark": K3_RENAMED}.get(form, {})
    tensors, stored = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    pairs = [(tensors[name], stored.get(names.get(name, name))) for name in tensors]
    return len(stored) == len(tensors) and all(
        theirs is not None and torch.equal(ours, theirs) and ours.dtype == theirs.dtype for ours, theirs in pairs
    )


def row(source: Path, target: Path) -> list[str]:
    """What becomes of one draft in every form, from every form it can be in."""
    cells = {form: attempt(source, form, place(source, form), target) for form in FORMS}
    made = [form for form, refused in cells.items() if refused is None]
    shown = {form: refused or "=" for form, refused in cells.items()}
    for form in made:
        if form != "gguf":
            assert same_tensors(source, form, place(source, form)), form
        if form == "transformers":
            shown[form] = ">"
            continue
        for goal in FORMS:
            out = place(source, goal, f"{form}-")
            refused = attempt(place(source, form), goal, out, target)
            assert refused == cells[goal], (form, goal)
            if refused is None and not same_files(place(source, goal), out):
                shown[form] = f"changed to {goal}"
        if not same_files(source, place(source, "native", f"{form}-")):
            shown[form] = "changed"
    return [shown[form] for form in FORMS]


def test_every_form_to_every_form(sources: dict[str, Path], write_target: Callable[..., Path]) -> None:
    target = write_target()
    found = {name: row(folder, target) for name, folder in sources.items()}
    print(f"\n{'':32}{' '.join(f'{form:14}' for form in FORMS)}")
    for name, cells in found.items():
        print(f"{name:32}{' '.join(f'{cell[:14]:14}' for cell in cells)}")
    assert {name: " ".join(cells) for name, cells in found.items()} == MATRIX


# Layout -> form: block_size and layer ids as written, of 7 predictions and our taps [0, 2]
WRITTEN = {
    "anchor-first": {
        "native": (7, [0, 2]), "speculators": (7, [1, 3]), "specforge": (7, [0, 2]), "gguf": (7, [1, 3]),
    },
    "bonus-anchor": {"native": (8, [0, 2]), "speculators": (8, [1, 3]), "gguf": (8, [1, 3])},
    "DFlash": {"z-lab": (8, [0, 2]), "transformers": (8, [0, 2]), "speculators": (8, [1, 3])},
    "MLA": {"native": (7, [0, 2]), "k3_dspark": (7, [0, 2])},
}  # fmt: skip
SHOWN = {
    "anchor-first": "whole, anchor-first", "bonus-anchor": "whole, bonus-anchor", "DFlash": "DFlash", "MLA": "MLA",
}  # fmt: skip


@pytest.mark.parametrize(("layout", "form"), [(layout, form) for layout, forms in WRITTEN.items() for form in forms])
def test_counts_and_layer_ids_as_every_form_writes_them(make_draft, write_target, tmp_path, layout, form) -> None:
    save_draft(make_draft(**DRAFTS[SHOWN[layout]]), tmp_path / "0")
    out = place(tmp_path / "0", form)
    assert attempt(tmp_path / "0", form, out, write_target()) is None
    if form == "gguf":
        fields = pytest.importorskip("gguf").GGUFReader(out).fields
        written = fields["dflash.block_size"].contents(), fields["dflash.target_layers"].contents()
    else:
        values = json.loads((out / "config.json").read_text())
        values |= values.get("dflash_config", {})
        written = values["block_size"], values.get("aux_hidden_state_layer_ids", values.get("target_layer_ids"))
    assert written == WRITTEN[layout][form]
