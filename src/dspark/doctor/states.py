"""What the target hands to the draft: its captured states rebuild its logits, alone and in a batch, and are alive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dspark.doctor.draft import DraftFacts
from dspark.doctor.findings import Finding
from dspark.doctor.tokens import target_ids
from dspark.doctor.trial import Answers
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.base import Target, TargetOutput

TOLERANCE = 2e-3
"""Of the largest value: what another order of summation may change in float32."""
_ROWS, _TOKENS = 3, 96


@torch.inference_mode()
def check_states(target: Target, answers: Answers) -> Iterator[Finding]:
    """states: the last layer's tap is the last hidden state, and head(final norm(it)) the target's own logits, for a
    batch of unequal rows as for each alone; features: finite, and different from token to token and layer to layer."""
    rows = [torch.tensor(answers.row(i).ids[: _TOKENS + 7 * i]) for i in range(min(_ROWS, len(answers.rows)))]
    layers = tuple(dict.fromkeys((*answers.layers, target.num_layers - 1)))
    together = _read(target, rows, layers)
    alone = [_read(target, [row], layers) for row in rows]
    faults = []
    parts = _by_layer(together, layers)
    if _differ(parts[target.num_layers - 1], together.last_hidden):
        faults.append("the last layer's tap is not the last hidden state")
    if _differ(target.head(together.last_hidden), together.logits):
        faults.append("head(final norm(last state)) is not the target's logits")
    for name in ("taps", "last_hidden", "logits"):
        if _differ(getattr(together, name), torch.cat([getattr(one, name) for one in alone])):
            faults.append(f"{name} of a batch of {len(rows)} differ from those of each alone")
    if faults:
        yield Finding("states", "broken", f"{'; '.join(faults)}: what is captured is not what the target computes")
    else:
        count = sum(len(row) for row in rows)
        yield Finding("states", "ok", f"captured states rebuild the logits of {count} tokens, batched and alone")
    yield _features(parts)


def _read(target: Target, rows: Sequence[Tensor], layers: Sequence[int]) -> TargetOutput:
    return target.forward([(target.new_state(len(row)), row) for row in rows], layers)


def _by_layer(out: TargetOutput, layers: Sequence[int]) -> dict[int, Tensor]:
    assert out.taps is not None
    return dict(zip(layers, out.taps.float().chunk(len(layers), dim=-1), strict=True))


def _differ(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two results differ by more than rounding; NaN differs from everything."""
    scale = float(theirs.abs().max())
    return not bool((mine.float() - theirs.float()).abs().max() <= TOLERANCE * scale)


def _features(parts: dict[int, Tensor]) -> Finding:
    for layer, part in parts.items():
        if not bool(torch.isfinite(part).all()):
            return Finding("features", "broken", f"layer {layer} gives values that are not finite")
        if float(part.std(dim=0).max()) == 0.0:
            return Finding("features", "broken", f"layer {layer} gives the same values for every token")
    layers = sorted(parts)
    for one, other in pairwise(layers):
        if torch.equal(parts[one], parts[other]):
            return Finding("features", "broken", f"layers {one} and {other} give the same values")
    return Finding("features", "ok", f"finite and alive at layers {layers}")


@torch.inference_mode()
def check_head(target: Target, draft: DraftFacts) -> Iterator[Finding]:
    """head-rows: the rows of the target's head that a file brings along are those of the ids in its map."""
    if draft.config is None or draft.tensors is None or not draft.config.reduced or draft.form == "eagle3":
        return
    mine = draft.tensors.get("lm_head.weight")
    if mine is None:
        yield Finding("head-rows", "ok", "taken from the target")
        return
    theirs = torch.as_tensor(target.head_weight)[target_ids(draft)].float()
    cosine = torch.nn.functional.cosine_similarity(mine.float(), theirs, dim=-1)
    strange = int((cosine < 0.99).sum())
    if strange:
        text = (
            f"{strange} of {len(mine)} rows in the file are not the target's rows of those ids: d2t and head disagree"
        )
        yield Finding("head-rows", "broken", text)
    else:
        yield Finding("head-rows", "ok", f"{len(mine)} rows, the target's")


@torch.inference_mode()
def first_draft(target: Target, draft: DSparkDraft, answers: Answers, dtype: torch.dtype = torch.float32) -> str:
    """What is wrong with the logits of the first block at two anchors, "" when nothing is.

    The draft must be fresh, not packed; it is bound to the target here, in `dtype`.
    """
    draft.eval().requires_grad_(False)
    draft.bind(target.embedding_weight.to(dtype), torch.as_tensor(target.head_weight).to(dtype))
    found = []
    for index in range(min(2, len(answers.rows))):
        row = answers.rows[index]
        count = len(row.prompt_ids)
        context = draft.new_context(count + draft.config.block_size)
        draft.write_context([(context, row.columns(draft.config.target_layer_ids)[:count].to(dtype))])
        hidden = draft.block_hidden([(context, row.answer_ids[0])], draft.config.gamma)
        found.append(draft.base_logits(hidden)[0])
    name = str(dtype).removeprefix("torch.")
    if not all(bool(torch.isfinite(one).all()) for one in found):
        return f"the first draft is not finite in {name}"
    if any(float(one.float().std(dim=-1).max()) == 0.0 for one in found):
        return f"the first draft gives every token the same logit in {name}"
    if len(found) == 2 and torch.equal(found[0], found[1]):
        return "two different contexts give the same draft: it does not see its context"
    return ""
