"""Parameter counts of a draft without allocating it."""

from __future__ import annotations

import torch

from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft

PARTS = ("fc", "layers", "norms", "markov_head", "confidence_head")


def parameter_counts(config: DraftConfig) -> dict[str, int]:
    """Parameters by part, with "total" last. The target's embedding and head and the d2t/t2d maps are not counted.

    norms: hidden_norm and the last norm; each layer's own norms count with the layers. Built on the meta device, so a
    draft of billions of parameters costs nothing.
    """
    with torch.device("meta"):
        draft = DSparkDraft(config)
    counts = dict.fromkeys(PARTS, 0)
    for name, parameter in draft.named_parameters():
        part = name.partition(".")[0]
        counts["norms" if part in ("hidden_norm", "norm") else part] += parameter.numel()
    return {**counts, "total": sum(counts.values())}
