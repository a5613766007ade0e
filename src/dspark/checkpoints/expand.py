"""A reduced-vocabulary draft over the target's whole vocabulary, for engines that have none (SGLang).

The base logits become the target's own over all V ids. W2's rows move to their target ids, and one more Markov column,
1 in W1 for every previous token and 0 in W2 for kept ids, holds LOW for the others: their logits fall below any other,
so the draft proposes the ids it always did. The confidence head does not read the new columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.drafts.config import DraftConfig
from dspark.errors import DsparkError

LOW = -32768.0  # exact in BF16 and inside fp16's range
MULTIPLE = 16  # ranks that matrix units like; the other new columns are zero


def expand(config: DraftConfig, tensors: dict[str, Tensor]) -> tuple[DraftConfig, dict[str, Tensor]]:
    """The same draft with K = V. The file's own head rows are dropped: the target's head must have the same.

    Raises DsparkError unless it has a vanilla Markov head.
    """
    if config.markov_rank == 0 or config.markov_head_type != "vanilla":
        kind = config.markov_head_type if config.markov_rank else "none"
        raise DsparkError("markov_head_type", kind, "must be vanilla to carry a reduced vocabulary into its columns")
    ids = torch.arange(config.draft_vocab_size) + tensors["d2t"]
    old, vocabulary = config.markov_rank, config.vocab_size
    rank = -(-(old + 1) // MULTIPLE) * MULTIPLE
    w1, w2 = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]
    wide1, wide2 = w1.new_zeros(vocabulary, rank), w2.new_zeros(vocabulary, rank)
    wide1[:, :old], wide1[:, old] = w1, 1
    wide2[:, old] = LOW
    wide2[ids, :old], wide2[ids, old] = w2, 0
    whole = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d", "lm_head.weight")}
    whole |= {"markov_head.markov_w1.weight": wide1, "markov_head.markov_w2.weight": wide2}
    if config.enable_confidence_head and config.confidence_head_with_markov:
        proj = tensors["confidence_head.proj.weight"]
        whole["confidence_head.proj.weight"] = torch.cat([proj, proj.new_zeros(1, rank - old)], dim=1)
    return config.model_copy(update={"draft_vocab_size": vocabulary, "markov_rank": rank}), whole
