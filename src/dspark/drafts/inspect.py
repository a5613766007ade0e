"""Parameter counts of a draft without allocating it."""

from __future__ import annotations

import torch

from dspark.drafts.config import DraftConfig
from dspark.drafts.kinds import Config, new_draft

PARTS = ("fc", "layers", "norms", "markov_head", "confidence_head")
EAGLE3_PARTS = ("fc", "layers", "norms", "lm_head")
_RENAMED = {"hidden_norm": "norms", "norm": "norms", "midlayer": "layers"}


def parameter_counts(config: Config) -> dict[str, int]:
    """Parameters by part, with "total" last. The target's embedding and head and the d2t/t2d maps are not counted; an
    EAGLE-3 draft's own head is.

    norms: hidden_norm and the last norm; each layer's own norms count with the layers. Built on the meta device, so a
    draft of billions of parameters costs nothing.
    """
    with torch.device("meta"):
        draft = new_draft(config)
    counts = dict.fromkeys(PARTS if isinstance(config, DraftConfig) else EAGLE3_PARTS, 0)
    for name, parameter in draft.named_parameters():
        part = name.partition(".")[0]
        counts[_RENAMED.get(part, part)] += parameter.numel()
    return {**counts, "total": sum(counts.values())}
