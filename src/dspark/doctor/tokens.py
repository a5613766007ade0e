"""Ids: the mask token, the two vocabularies and their padding, and the map between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dspark.checkpoints.read import like_ids
from dspark.checkpoints.tensors import tensor_shapes
from dspark.doctor.draft import DraftFacts
from dspark.doctor.facts import TargetFacts
from dspark.doctor.findings import Finding
from dspark.drafts.config import DraftConfig
from dspark.drafts.kinds import Config

_PADDED = 1.1
"""How many times the tokenizer's ids an embedding has at most where its further rows only pad."""


def check_mask(config: Config, target: TargetFacts) -> Finding:
    """mask-token: inside the embedding (read so already), and nothing that a text can contain."""
    if not isinstance(config, DraftConfig):
        return Finding("mask-token", "ok", "an EAGLE-3 draft has none")
    mask = config.mask_token_id
    if target.vocabulary is not None and mask >= target.vocabulary:
        return Finding("mask-token", "broken", f"{mask} is outside the target's embedding, 0..{target.vocabulary - 1}")
    if mask in target.stop_ids:
        return Finding("mask-token", "broken", f"{mask} ends the target's answers; give the id trained with")
    if target.tokenizer is None:
        return Finding("mask-token", "skipped", f"{mask}; {target.no_tokenizer}")
    return _text_of_mask(mask, target.tokenizer)


def _text_of_mask(mask: int, tokenizer: Any) -> Finding:
    for role in ("pad", "bos", "unk"):
        if mask == getattr(tokenizer, f"{role}_token_id", None):
            text = f"{mask} is the target's {role} token, what a missing key falls back to; give the id trained with"
            return Finding("mask-token", "loses", text)
    if mask >= len(tokenizer):
        return Finding("mask-token", "ok", f"{mask}, padding of the embedding: never emitted")
    shown = tokenizer.convert_ids_to_tokens(mask)
    if mask not in tokenizer.added_tokens_decoder:
        text = f"{mask} is {shown!r}, which normal text contains; a mask must be a token that is never emitted"
        return Finding("mask-token", "loses", text)
    if shown in str(getattr(tokenizer, "chat_template", None) or ""):
        return Finding("mask-token", "loses", f"{mask} is {shown!r}, which the target's chat template writes")
    return Finding("mask-token", "ok", f"{mask}, {shown!r}: no text contains it")


def check_vocabulary(draft: DraftFacts, config: Config, target: TargetFacts) -> Finding:
    """vocabulary: as many rows as the target's embedding, and no draft id among the rows that only pad it."""
    mine, theirs = config.vocab_size, target.vocabulary
    words = len(target.tokenizer) if target.tokenizer is not None else None
    if theirs is None:
        return Finding("vocabulary", "skipped", f"{mine} rows in the draft's config; {target.missing}")
    if mine != theirs:
        why = "another tokenizer"
        if words is not None and min(mine, theirs) >= words and max(mine, theirs) <= _PADDED * words:
            why = f"the tokenizer has {words} and the padding differs: pad the draft's rows as the target's"
        return Finding("vocabulary", "broken", f"{mine} rows in the draft's config, {theirs} in the target: {why}")
    if not config.reduced:
        return Finding("vocabulary", "ok", f"all {mine} of the target")
    if words is not None and draft.tensors is not None:
        padding = int((target_ids(draft) >= words).sum())
        if padding:
            text = f"{padding} of {config.draft_vocab_size} draft ids are padding ({words} and up), never emitted"
            return Finding("vocabulary", "loses", text)
    return Finding("vocabulary", "ok", f"{config.draft_vocab_size} of {mine}")


def target_ids(draft: DraftFacts) -> torch.Tensor:
    """The target id of every draft id, of a draft with a reduced vocabulary."""
    assert draft.tensors is not None
    offsets = draft.tensors["d2t"]
    return torch.arange(len(offsets)) + offsets


def check_map(draft: DraftFacts, config: Config) -> Iterator[Finding]:
    """d2t: offsets. Bounds, order and t2d were checked while reading; ids in the place of offsets can pass those,
    unless the file's own t2d marks what it gives as offsets."""
    if not config.reduced or draft.tensors is None:
        return
    offsets = draft.tensors["d2t"]
    if like_ids(offsets) and not _marked(draft):
        text = (
            f"{offsets[:4].tolist()}... rise at every entry: ids, it seems, where offsets are wanted (id = i + d2t[i])"
        )
        yield Finding("d2t", "loses", text)
    else:
        yield Finding("d2t", "ok", f"offsets to {len(offsets)} ascending ids")


def _marked(draft: DraftFacts) -> bool:
    """Whether t2d lies in the file itself; where it does not it was made from d2t, and tells nothing."""
    return draft.place is not None and draft.place.is_dir() and "t2d" in tensor_shapes(draft.place)[0]
