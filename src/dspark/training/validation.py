"""Validation on held-out rows: the loss on fixed anchors, and the acceptance that serving would show.

The checkpoint is chosen by the second one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import Tensor

from dspark.data.rows import Row
from dspark.decoding.proposers import draft_proposer
from dspark.decoding.replay import replay
from dspark.decoding.request import Round
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.kinds import Draft
from dspark.targets.base import Target
from dspark.training.batches import MicroPlan, cut, gather, generator, make_plan, trainable
from dspark.training.features import FeatureSource
from dspark.training.loss import LossStats, loss_and_backward
from dspark.training.recipe import Recipe

REPLAY_BATCH = 16


def target_log_p(target: Target, draft: Draft, last_hidden: Tensor, lse: Tensor) -> Callable[[Tensor], Tensor]:
    """Indices into the packed row [P] -> exact log p over the draft's ids [P, K], never renormalised.

    last_hidden [S, d] pre-norm, lse [S]: the log-sum-exp over all V makes K head rows enough (docs/method.md,
    section 3).
    """
    rows = draft.draft_ids if draft.config.reduced else None

    def log_p(index: Tensor) -> Tensor:
        return target.head(last_hidden[index], rows=rows).float() - lse[index, None]

    return log_p


def micro_loss(
    draft: Draft,
    target: Target,
    plan: MicroPlan,
    taps: Tensor,
    last_hidden: Tensor,
    lse: Tensor,
    recipe: Recipe,
    scale: float,
    backward: bool,
) -> LossStats:
    """Forward (and backward) of one packed row; taps [S, m * d], last_hidden [S, d], lse [S].

    The blocks are as wide as the plan's; the sums have gamma slots whatever their width.
    """
    training = recipe.training
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=training.compute_dtype == "bf16"):
        hidden = _train_hidden(draft, plan, taps)
        log_p = target_log_p(target, draft, last_hidden, lse)
        settings, chunk = training.loss.settings(), training.loss_chunk
        stats = loss_and_backward(draft, hidden, plan.anchors, log_p, settings, scale, chunk=chunk, backward=backward)
    return stats.widened(draft.config.gamma)


def _train_hidden(draft: Draft, plan: MicroPlan, taps: Tensor) -> Tensor:
    """The draft's states for every anchor and slot of the plan: [A, width, d]."""
    anchors, packed = plan.anchors, plan.packed
    if isinstance(draft, Eagle3Draft):
        return draft.train_hidden(
            taps, packed.ids, packed.positions, anchors.anchor_index, anchors.doc_start, anchors.prev_ids
        )
    width = anchors.labels.shape[1]
    return draft.train_hidden(
        taps, packed.positions, anchors.anchor_index, anchors.anchor_ids, anchors.doc_start, width
    )


def replay_acceptance(rows: Sequence[Row], records: Sequence[Sequence[Round]]) -> tuple[float, list[float]]:
    """Macro acceptance length, bonus counted, and conditional acceptance per slot (docs/method.md section 6).

    Per row 1 + accepted / rounds, mean over a prompt's turns, mean over prompts; rows without a round are in neither.
    """
    by_prompt: dict[str, list[float]] = defaultdict(list)
    reached: dict[int, int] = defaultdict(int)
    passed: dict[int, int] = defaultdict(int)
    for row, rounds in zip(rows, records, strict=True):
        if rounds:
            by_prompt[row.source].append(1.0 + sum(r.accepted for r in rounds) / len(rounds))
        for r in rounds:
            for slot in range(1, min(r.accepted + 1, r.scheduled) + 1):
                reached[slot] += 1
                passed[slot] += slot <= r.accepted
    macro = fmean(fmean(values) for values in by_prompt.values()) if by_prompt else 1.0
    return macro, [passed[slot] / reached[slot] for slot in sorted(reached)]


class Validator:
    """Fixed rows and fixed anchors, chosen once.

    Replay needs rows the target wrote greedily; when the held-out rows have none, sampled ones are used and `note`
    says so.
    """

    def __init__(self, held: Sequence[Row], source: FeatureSource, recipe: Recipe, gamma: int) -> None:
        training, self.recipe, self.source = recipe.training, recipe, source
        usable = [row for row in held if trainable(row, recipe.data.max_length)]
        self.rows = usable[: training.validation_rows]
        greedy = [row for row in usable if row.temperature == 0.0]
        self.replay_rows = (greedy or usable)[: training.replay_rows]
        self.note = None if greedy or not usable else "no held-out row is greedy: replay acceptance is on sampled rows"
        self.plans = [
            make_plan(
                [cut(row, recipe.data.max_length)],
                training.anchors_per_row,
                gamma,
                generator(training.seed, "validation", row.id),
            )
            for row in self.rows
        ]

    @torch.no_grad()
    def run(self, draft: Draft, target: Target) -> dict[str, float]:
        """All validation figures; `replay_acceptance` chooses the checkpoint."""
        values: dict[str, float] = {}
        stats = LossStats(draft.config.gamma)
        for row, plan in zip(self.rows, self.plans, strict=True):
            features = gather(plan, [self.source.get(row)])
            stats = stats + micro_loss(draft, target, plan, *features, self.recipe, 1.0, backward=False)
        values.update(stats.metrics())
        if self.replay_rows:
            proposer = draft_proposer(draft, self.recipe.training.replay_n)
            items = ((row, self.source.get(row).taps.float()) for row in self.replay_rows)
            records = replay(proposer, items, batch=REPLAY_BATCH)
            macro, slots = replay_acceptance(self.replay_rows, records)
            values["replay_acceptance"] = macro
            values.update({f"replay_slot/{k}": rate for k, rate in enumerate(slots, start=1)})
        return values
