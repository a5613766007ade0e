"""A draft's first weights: from another draft, or from the target's last layers and head."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.kinds import Draft
from dspark.errors import DsparkError
from dspark.targets.base import Target

BY_ID = ("markov_head.markov_w2.weight", "lm_head.weight")
"""Parameters with one row for every draft id."""


@torch.no_grad()
def copy_draft(given: Draft, draft: Draft) -> int:
    """Take over all weights of a draft of the same kind, whose reduced vocabulary may be another one.

    Rows of W2, or of an EAGLE-3 head, follow their target ids; those of ids that `given` has not keep what they are.
    Returns the shared ids.
    """
    place = torch.full((draft.config.vocab_size,), -1)
    place[given.draft_ids] = torch.arange(given.config.draft_vocab_size)
    source = place[draft.draft_ids]
    kept = source >= 0
    copied = dict(given.named_parameters())
    for name, parameter in draft.named_parameters():
        if name in BY_ID:
            parameter[kept] = copied[name][source[kept]]
        else:
            parameter.copy_(copied[name])
    return int(kept.sum())


@torch.no_grad()
def copy_target_layers(draft: DSparkDraft, target: Target) -> list[str]:
    """Start from the target's last decoder layers: attention, MLP and norms where names and shapes agree.

    The context projection starts as the last tap alone, normalised as the target's own last layer would: the copied
    K/V projections then see what they were made for. Returns the names of the tensors set.
    """
    own = dict(draft.named_parameters())
    count = draft.config.num_hidden_layers
    first = target.num_layers - count
    done = []
    layers, final_norm = _decoder_weights(target)
    for index in range(count):
        for suffix, weight in layers.get(first + index, {}).items():
            name = f"layers.{index}.{suffix}"
            if name in own and own[name].shape == weight.shape:
                own[name].copy_(weight)
                done.append(name)
    if not done:
        raise DsparkError("training.init", "target-layers", "no layer of the target has the draft's shapes; use random")
    _start_from_last_tap(own["fc.weight"], draft.config.target_layer_ids)
    input_norm = layers[target.num_layers - 1].get("input_layernorm.weight")
    for name, source in (("hidden_norm.weight", input_norm), ("norm.weight", final_norm)):
        if source is not None and own[name].shape == source.shape:
            own[name].copy_(source)
            done.append(name)
    return [*done, "fc.weight"]


def _decoder_weights(target: Target) -> tuple[dict[int, dict[str, Tensor]], Tensor | None]:
    """({layer id: {name inside the layer: weight}}, final norm weight) of a target that holds a model."""
    model = getattr(target, "model", None)
    if not isinstance(model, nn.Module):
        raise DsparkError("training.init", "target-layers", "this target's layers are not in this process; use random")
    layers: dict[int, dict[str, Tensor]] = {}
    norm = None
    for name, weight in model.state_dict().items():
        if found := re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name):
            layers.setdefault(int(found[1]), {})[found[2]] = weight
        elif re.search(r"(?:^|\.)norm\.weight$", name):
            norm = weight
    return layers, norm


@torch.no_grad()
def copy_target_head(draft: Eagle3Draft, target: Target) -> None:
    """The draft's own head starts as the target's rows of its ids."""
    draft.lm_head.weight.copy_(target.head_weight[draft.draft_ids])


@torch.no_grad()
def copy_target_layer(draft: Eagle3Draft, target: Target) -> list[str]:
    """Start an EAGLE-3 layer from the target's last one: attention, MLP and norms where names and shapes agree.

    Projections of the 2d wide input take the target's weights in the half that reads the state, normed as the target's
    input_layernorm would, and keep small random ones for the embedding. fc starts as the last tap alone. Returns the
    names of the tensors set.
    """
    own, d = dict(draft.named_parameters()), draft.config.hidden_size
    layers, final_norm = _decoder_weights(target)
    done = []
    for suffix, weight in layers.get(target.num_layers - 1, {}).items():
        name = "midlayer." + ("hidden_norm.weight" if suffix == "input_layernorm.weight" else suffix)
        if name not in own:
            continue
        if own[name].shape == weight.shape:
            own[name].copy_(weight)
        elif weight.dim() == 2 and own[name].shape == (len(weight), 2 * d):
            own[name][:, d:].copy_(weight)
        else:
            continue
        done.append(name)
    if not done:
        raise DsparkError("training.init", "target-layers", "no layer of the target has the draft's shapes; use random")
    _start_from_last_tap(own["fc.weight"], draft.config.target_layer_ids)
    if final_norm is not None and own["norm.weight"].shape == final_norm.shape:
        own["norm.weight"].copy_(final_norm)
        done.append("norm.weight")
    return [*done, "fc.weight"]


def _start_from_last_tap(fc: Tensor, taps: tuple[int, ...]) -> None:
    """fc [d, m * d]: the identity for the last tap, small random parts for the others, so that they are not left out
    for good."""
    d, place = len(fc), max(range(len(taps)), key=lambda i: taps[i])
    fc.mul_(0.1)
    fc[:, place * d : (place + 1) * d].copy_(torch.eye(d))
