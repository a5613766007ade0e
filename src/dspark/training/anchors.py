"""Anchors: which positions of a row start a training block, and what each block is asked to predict.

An anchor a is a data token the draft is shown; slot k (1..gamma) of its block is asked for token a + k. Packed
documents rule anchors, labels, masks and contexts alike: nothing of a block reaches beyond its own document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.errors import DsparkError


@dataclass(frozen=True)
class AnchorBatch:
    """Blocks of one packed row [S]; g = gamma. Everything int64 but `mask`.

    anchor_index [A]: index a of the anchor token in the row (ascending when it comes from select_anchors)
    anchor_ids [A]: its token id
    doc_start [A]: first index of its document; the block's context is doc_start .. a - 1
    prev_ids [A, g]: token before each label (a .. a + g - 1), which teacher-forces the Markov head
    labels [A, g]: token a + k
    mask [A, g] bool: True while a + k is supervised and inside the document; always a prefix of the slots
    label_positions [A, g]: a + k - 1, the index whose target state predicts the label

    Where the mask is False the other fields hold in-range values without meaning.
    """

    anchor_index: Tensor
    anchor_ids: Tensor
    doc_start: Tensor
    prev_ids: Tensor
    labels: Tensor
    mask: Tensor
    label_positions: Tensor


def select_anchors(
    loss_mask: Tensor, document_ids: Tensor, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Up to `count` anchors, uniform without replacement, ascending: [A] int64 (method section 3).

    A position a can be an anchor when tokens a and a + 1 are both supervised and of the same document.
    loss_mask [S] bool, document_ids [S]. The generator lives on the CPU: a seed gives the same anchors on any device.
    Raises DsparkError for a negative count or shapes that differ.
    """
    _check_row(loss_mask, document_ids)
    if count < 0:
        raise DsparkError("anchors", count, "give 0 or more anchors per row")
    supervised = loss_mask.bool()
    usable = supervised[:-1] & supervised[1:] & (document_ids[:-1] == document_ids[1:])
    candidates = usable.nonzero().squeeze(-1)
    order = torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)
    return candidates[order].sort().values


def build_anchor_batch(
    ids: Tensor, loss_mask: Tensor, document_ids: Tensor, anchor_index: Tensor, gamma: int
) -> AnchorBatch:
    """The blocks of the given anchors: ids, loss_mask, document_ids [S], anchor_index [A] -> AnchorBatch, gamma slots.

    A slot's mask is 1 while a + k is inside the anchor's document and loss_mask[a + k] is 1; the first 0 ends it.
    Raises DsparkError for an anchor outside the row, gamma < 1, or shapes that differ.
    """
    _check_row(loss_mask, document_ids)
    _check_row(ids, document_ids)
    if gamma < 1:
        raise DsparkError("gamma", gamma, "a block predicts at least one token")
    length = len(ids)
    anchors = anchor_index.to(device=ids.device, dtype=torch.int64)
    if len(anchors) and (int(anchors.min()) < 0 or int(anchors.max()) >= length):
        raise DsparkError("anchor_index", anchors.tolist(), f"anchors must lie in 0..{length - 1}")
    starts = _document_starts(document_ids)
    wanted = anchors[:, None] + torch.arange(1, gamma + 1, device=ids.device)  # [A, g], may leave the row
    label_index, previous = wanted.clamp(max=length - 1), (wanted - 1).clamp(max=length - 1)
    same_document = (wanted < length) & (starts[label_index] == starts[anchors][:, None])
    mask = (same_document & loss_mask.bool()[label_index]).to(torch.int64).cumprod(dim=1).bool()
    return AnchorBatch(
        anchor_index=anchors,
        anchor_ids=ids[anchors],
        doc_start=starts[anchors],
        prev_ids=ids[previous],
        labels=ids[label_index],
        mask=mask,
        label_positions=previous,
    )


def _document_starts(document_ids: Tensor) -> Tensor:
    """First index of the run of equal document ids around each position: [S] -> [S] int64."""
    index = torch.arange(len(document_ids), device=document_ids.device)
    new = torch.ones_like(document_ids, dtype=torch.bool)
    new[1:] = document_ids[1:] != document_ids[:-1]
    return torch.where(new, index, 0).cummax(dim=0).values


def _check_row(values: Tensor, document_ids: Tensor) -> None:
    if values.ndim != 1 or values.shape != document_ids.shape:
        raise DsparkError(
            "packed row",
            (tuple(values.shape), tuple(document_ids.shape)),
            "ids, loss_mask and document_ids are all [S]",
        )
    if len(values) == 0:
        raise DsparkError("packed row", 0, "the row has no token; drop empty rows before packing")
