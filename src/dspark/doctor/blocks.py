"""Slots and weights: the layout of a block, how many predictions it has, and whether the weights are alive."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dspark.doctor.draft import DraftFacts
from dspark.doctor.findings import Finding
from dspark.drafts.config import DraftConfig
from dspark.drafts.kinds import Config

FP16_MAX = 65504.0
_USUAL = (7, 15)
"""Predictions that published drafts have: 7 (DSpark), 15 (DFlash)."""


def check_layout(draft: DraftFacts, config: Config) -> Finding:
    """layout: which slot predicts the first draft token. A key that is missing was found while reading."""
    if not isinstance(config, DraftConfig):
        return Finding("layout", "ok", "one token a pass (EAGLE-3), no slots")
    name = "anchor-first" if config.sample_from_anchor else "bonus-anchor"
    count = f"block_size {config.block_size} = {config.gamma} predictions"
    if draft.unsure_layout:
        return Finding("layout", "note", f"read as {name} for the other checks; the drafts decide when it is run")
    other = config.block_size - 1 if config.sample_from_anchor else config.block_size
    if config.gamma not in _USUAL and other in _USUAL:
        text = f"{name}, {count}; in the other layout it would be the usual {other}: see that the key is right"
        return Finding("layout", "note", text)
    return Finding("layout", "ok", f"{name}, {count}")


def check_block(config: Config, n: int | None) -> Finding:
    """block-size: n draft tokens a round are at most what the draft was trained for."""
    if n is None:
        return Finding("block-size", "ok", f"up to {config.gamma} draft tokens a round")
    if not 1 <= n <= config.gamma:
        text = f"n = {n} is asked of a draft trained for {config.gamma} predictions; use 1..{config.gamma}"
        return Finding("block-size", "broken", text)
    return Finding("block-size", "ok", f"n = {n} of {config.gamma}")


def check_weights(draft: DraftFacts) -> Iterator[Finding]:
    """weights: no matrix or norm without content, as a converter leaves that lost one; dtype: fits its type."""
    if draft.tensors is None:
        yield Finding("weights", "skipped", "there are none to look at")
        return
    flat = [name for name, t in draft.tensors.items() if t.is_floating_point() and t.ndim == 2 and _constant(t)]
    heads = [name for name in flat if name.startswith(("markov_head", "confidence_head"))]
    dead = [name for name, t in draft.tensors.items() if name.endswith("norm.weight") and not bool(t.any())]
    body = [name for name in flat if name not in heads]
    if dead:
        yield Finding("weights", "broken", f"{', '.join(dead[:4])} holds zeros only: nothing passes this norm")
    elif body:
        yield Finding("weights", "broken", f"{', '.join(body[:4])} holds one value only: lost or never trained")
    elif heads:
        yield Finding("weights", "loses", f"{', '.join(heads[:4])} holds one value only: this head does nothing")
    else:
        yield Finding("weights", "ok", "no matrix is constant, no norm zero")
    yield _dtype(draft)


def _constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


def _dtype(draft: DraftFacts) -> Finding:
    """What the weights are stored in, and whether they fit the type that the config states."""
    assert draft.tensors is not None
    floats = {name: t for name, t in draft.tensors.items() if t.is_floating_point()}
    kinds = sorted({str(t.dtype).removeprefix("torch.") for t in floats.values()})
    if not states_fp16(draft):
        return Finding("dtype", "ok", f"{', '.join(kinds)} weights")
    name, largest = max(((name, float(t.abs().max())) for name, t in floats.items()), key=lambda one: one[1])
    if largest > FP16_MAX:
        text = f"{name} reaches {largest:.3g}, more than float16 holds ({FP16_MAX:.0f}); serve it in bfloat16"
        return Finding("dtype", "broken", text)
    return Finding("dtype", "note", "float16: its range is easily left in a pass; bfloat16 is what drafts are made for")


def states_fp16(draft: DraftFacts) -> bool:
    """Whether an engine that goes by the file would run it in float16."""
    stated = draft.values.get("dtype") or draft.values.get("torch_dtype")
    if stated is not None:
        return stated == "float16"
    return any(t.dtype == torch.float16 for t in (draft.tensors or {}).values())
