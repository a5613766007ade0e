"""Attention of the training forward: many anchors over one packed row, without a block-by-row mask (method section 3).

Every anchor's block scores two groups of keys under one softmax: its context (a slice of the row) and its own block.
Anchors come sorted, so a chunk of neighbours of one document shares one slice of context keys and one matrix product;
no anchor ever scores another's block. Memory is bounded by SCORES_PER_CHUNK, and above CHECKPOINT_SCORES the chunks are
recomputed in the backward pass instead of kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dspark.drafts.backbone import visible
from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError

SCORES_PER_CHUNK = 4_000_000  # all heads of one chunk: 16 MB a copy in fp32
CHECKPOINT_SCORES = 64_000_000  # all layers: about 3 kept copies of this many scores, 768 MB in fp32


@dataclass(frozen=True)
class Chunk:
    """Anchors first..last-1 read context keys low..high-1. seen: bool, broadcastable to [anchors, 1, slots, keys]."""

    first: int
    last: int
    low: int
    high: int
    seen: Tensor


@dataclass(frozen=True)
class AnchorPlan:
    """How one kind of layer attends: its chunks and, for sliding layers, which block slots see each other."""

    chunks: tuple[Chunk, ...]
    block_seen: Tensor | None  # [slots, slots] bool; None: all


def check_anchors(anchor_index: Tensor, doc_start: Tensor, row_length: int) -> None:
    """Raise DsparkError unless the anchors are sorted, inside the row, and not before their document's start."""
    if anchor_index.ndim != 1 or anchor_index.shape != doc_start.shape:
        raise DsparkError(
            "doc_start", tuple(doc_start.shape), f"must have one entry per anchor, {tuple(anchor_index.shape)}"
        )
    if not len(anchor_index):
        return
    if bool((anchor_index[1:] < anchor_index[:-1]).any()):
        raise DsparkError("anchor_index", anchor_index[:8].tolist(), "must be sorted ascending")
    if int(anchor_index[0]) < 0 or int(anchor_index[-1]) >= row_length:
        raise DsparkError(
            "anchor_index",
            [int(anchor_index[0]), int(anchor_index[-1])],
            f"must be inside the row, 0..{row_length - 1}",
        )
    if bool((doc_start > anchor_index).any()) or int(doc_start.min()) < 0:
        raise DsparkError("doc_start", doc_start[:8].tolist(), "must be the index of each anchor's document start")


def plan_anchors(
    config: DraftConfig | Eagle3Config, anchor_index: Tensor, doc_start: Tensor, slots: int, sliding: bool
) -> AnchorPlan:
    """Cut sorted anchors into chunks of one document whose scores fit SCORES_PER_CHUNK (at least one anchor each)."""
    index, starts = anchor_index.tolist(), doc_start.tolist()
    window = config.sliding_window if sliding and isinstance(config, DraftConfig) else None
    lows = starts if window is None else [max(s, i - window + 1) for i, s in zip(index, starts, strict=True)]
    rows = config.num_attention_heads * slots
    chunks: list[Chunk] = []
    first = 0
    while first < len(index):
        last = first + 1
        while (
            last < len(index)
            and starts[last] == starts[first]
            and (last + 1 - first) * rows * (index[last] - lows[first] + slots) <= SCORES_PER_CHUNK
        ):
            last += 1
        low, high = lows[first], index[last - 1]
        seen = _context_seen(anchor_index[first:last], starts[first], low, high, slots, window)
        chunks.append(Chunk(first, last, low, high, seen))
        first = last
    block_seen = None
    if window is not None and isinstance(config, DraftConfig):
        slot = torch.arange(slots, device=anchor_index.device)
        block_seen = visible(slot, slot, window, config.sliding_window_non_causal)
    return AnchorPlan(tuple(chunks), block_seen)


def _context_seen(anchors: Tensor, start: int, low: int, high: int, slots: int, window: int | None) -> Tensor:
    """[anchors, 1, 1 or slots, high - low] bool: context is document start..anchor-1, inside any window."""
    keys = torch.arange(low, high, device=anchors.device)
    seen = ((keys < anchors[:, None]) & (keys >= start))[:, None, None, :]
    if window is not None:
        queries = anchors[:, None] + torch.arange(slots, device=anchors.device)
        seen = seen & (queries[:, :, None] - keys < window)[:, None]
    return seen


def needs_checkpoint(config: DraftConfig | Eagle3Config, plans: list[AnchorPlan], slots: int) -> bool:
    """Whether the kept scores of all plans (one a layer, or a step) would pass CHECKPOINT_SCORES."""
    rows = config.num_attention_heads * slots
    total = sum((c.last - c.first) * rows * (c.high - c.low + slots) for plan in plans for c in plan.chunks)
    return total > CHECKPOINT_SCORES


def attend_anchors(
    plan: AnchorPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: tuple[Tensor, Tensor],
    scale: float,
    recompute: bool,
) -> Tensor:
    """One layer's attention for all anchors.

    query [A, slots, H, kd], key [A, slots, kvh, kd] and value [A, slots, kvh, vd] (rotated); context: K [kvh, S, kd]
    and V [kvh, S, vd] of the row -> [A * slots, H, vd].
    """
    anchors, slots, kv_heads, width = key.shape
    # [A, kvh, group * slots, kd]: query heads of one KV head side by side, so that each product reads its keys once
    folded = (query * scale).view(anchors, slots, kv_heads, -1, width).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(anchors, kv_heads, -1, width)
    mixed = _over_chunks(plan, folded, key.transpose(1, 2), value.transpose(1, 2), context, recompute)
    mixed = mixed.unflatten(2, (-1, slots)).permute(0, 3, 1, 2, 4)
    return mixed.reshape(anchors * slots, -1, mixed.shape[-1])


def attend_steps(
    plan: AnchorPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: tuple[Tensor, Tensor],
    scale: float,
    recompute: bool,
) -> Tensor:
    """One step of every anchor, which sees the anchor's context and the earlier steps' own keys.

    query [A, H, kd]; key [A, kvh, steps, kd] and value [A, kvh, steps, vd], steps >= 0; context: K [kvh, S, kd] and
    V [kvh, S, vd] of the row -> [A, H, vd]. plan: made for one slot.
    """
    folded = (query * scale).unflatten(1, (key.shape[1], -1))
    return _over_chunks(plan, folded, key, value, context, recompute).flatten(1, 2)


def _over_chunks(
    plan: AnchorPlan, query: Tensor, key: Tensor, value: Tensor, context: tuple[Tensor, Tensor], recompute: bool
) -> Tensor:
    """query [A, kvh, rows, kd], own key and value [A, kvh, keys, ..], context [kvh, S, ..] -> [A, kvh, rows, vd]."""
    parts = []
    for chunk in plan.chunks:
        own = slice(chunk.first, chunk.last)
        arguments = (
            query[own],
            key[own],
            value[own],
            context[0][:, chunk.low : chunk.high],
            context[1][:, chunk.low : chunk.high],
            chunk.seen,
            plan.block_seen,
        )
        if recompute and torch.is_grad_enabled():
            parts.append(checkpoint(_attend_chunk, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(_attend_chunk(*arguments))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    seen: Tensor,
    block_seen: Tensor | None,
) -> Tensor:
    """query [c, kvh, rows, hd], own K/V [c, kvh, slots, hd], context K/V [kvh, L, hd] -> [c, kvh, rows, vd]."""
    anchors, kv_heads, rows, width = query.shape
    own = query @ key.transpose(-1, -2)
    if block_seen is not None:
        own.view(anchors, kv_heads, -1, *block_seen.shape).masked_fill_(~block_seen, float("-inf"))
    length = context_key.shape[1]
    if not length:
        return _softmax(own) @ value
    flat = query.transpose(0, 1).reshape(kv_heads, anchors * rows, width)
    scores = torch.bmm(flat, context_key.transpose(1, 2)).view(kv_heads, anchors, -1, seen.shape[2], length)
    scores = scores.masked_fill_(~seen, float("-inf")).view(kv_heads, anchors, rows, length)
    joint = _softmax(torch.cat((scores, own.transpose(0, 1)), -1))
    mixed = torch.bmm(joint[..., :length].reshape(kv_heads, -1, length), context_value)
    mixed = mixed.view(kv_heads, anchors, rows, -1).transpose(0, 1)
    return mixed + joint[..., length:].transpose(0, 1) @ value


def _softmax(scores: Tensor) -> Tensor:
    """Softmax in fp32 at least, back in the dtype of the scores."""
    wide = torch.promote_types(scores.dtype, torch.float32)
    return torch.softmax(scores, -1, dtype=wide).to(scores.dtype)
