"""A draft's reduced vocabulary as two buffers: d2t int64 [K], offsets (target id = i + d2t[i]), and t2d bool [V]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.errors import DsparkError


def add_vocabulary(module: nn.Module, config: DraftConfig | Eagle3Config) -> None:
    """Register d2t and t2d, not yet set, on the module of a draft with K < V."""
    if config.reduced:
        module.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        module.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))


@torch.no_grad()
def write_vocabulary(module: nn.Module, config: DraftConfig | Eagle3Config, ids: Sequence[int]) -> None:
    """Set which K target ids the draft predicts over (kept sorted).

    Raises DsparkError unless there are exactly K distinct ids in 0..V-1, or when K = V.
    """
    size, vocabulary = config.draft_vocab_size, config.vocab_size
    if not config.reduced:
        raise DsparkError("draft_vocab_size", size, "is the whole vocabulary, so there is no list of ids to set")
    chosen = sorted({int(i) for i in ids})
    if len(chosen) != len(ids) or len(chosen) != size:
        raise DsparkError(
            "vocabulary", f"{len(ids)} ids, {len(chosen)} distinct", f"must be exactly {size} distinct target ids"
        )
    if chosen[0] < 0 or chosen[-1] >= vocabulary:
        raise DsparkError("vocabulary", [chosen[0], chosen[-1]], f"must be target ids, 0..{vocabulary - 1}")
    d2t = module.get_buffer("d2t")
    targets = torch.tensor(chosen, dtype=torch.int64, device=d2t.device)
    d2t.copy_(targets - torch.arange(size, device=targets.device))
    module.get_buffer("t2d").zero_()[targets] = True


def read_vocabulary(module: nn.Module, config: DraftConfig | Eagle3Config, device: torch.device) -> Tensor:
    """Target id of every draft id, int64 [K]. Raises DsparkError when a reduced vocabulary was never set."""
    if not config.reduced:
        return torch.arange(config.vocab_size, device=device)
    if not bool(module.get_buffer("t2d").any()):
        raise DsparkError("vocabulary", None, "is not set: call set_vocabulary with the target ids to predict over")
    return torch.arange(config.draft_vocab_size, device=device) + module.get_buffer("d2t")
