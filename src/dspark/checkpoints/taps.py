"""The order of the taps. Ours is any, for fc's columns follow it; engines sort the ids, and then read other columns."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark.drafts.kinds import Config
from dspark.errors import DsparkError

FC = "fc.weight"


def ascending(config: Config, tensors: Mapping[str, Tensor], notes: list[str]) -> tuple[Config, dict[str, Tensor]]:
    """The same draft with its layer ids in ascending order, and fc's columns, a block of them per tap, in that order.

    Its proposals stay the same: only the order of a sum changes.
    """
    ids = config.target_layer_ids
    order = sorted(range(len(ids)), key=lambda place: ids[place])
    if order == list(range(len(ids))):
        return config, dict(tensors)
    taps = tuple(ids[place] for place in order)
    notes.append(f"target_layer_ids {list(ids)} are put in order, as engines do, and the columns of {FC} with them")
    blocks = tensors[FC].chunk(len(ids), dim=1)
    moved = torch.cat([blocks[place] for place in order], dim=1)
    return config.model_copy(update={"target_layer_ids": taps}), {**tensors, FC: moved}


def check_ascending(config: Config) -> None:
    """Raise DsparkError for ids out of order: engines sort them and leave fc's columns as they are."""
    ids = list(config.target_layer_ids)
    if ids != sorted(ids):
        remedy = f"must ascend: engines sort them, not the columns of {FC}; `dspark convert` to the engine's form does"
        raise DsparkError("target_layer_ids", ids, remedy)
