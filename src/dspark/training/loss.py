"""The training objective of DSpark (method section 3) and EAGLE-3, forward and backward in chunks of anchors.

    loss = sum w (ce CE + l1 L1 + soft S + confidence BCE) / sum w,   w_k = m_k exp(-(k - 1) / decay)

p is the target's distribution over all V tokens, q the draft's over its K. q is zero outside K, and p is never
renormalised, so L1 = sum_K |q - p| + (1 - sum_K p); as q sums to one, y = sum_K min(p, q) = 1 - L1 / 2, also for K < V.
S = -sum_K p log q, EAGLE-3's loss: the cross-entropy against the target's own distribution on K, renormalised, times
the mass that lies in K. A slot whose likely tokens are outside K therefore counts for little; EAGLE-3 leaves out those
whose first choice is, which would take all V logits to know.

Memory: [A * gamma, K] logits never exist at once. A chunk's logits are turned in place into their gradient, known in
closed form, and p is computed once per distinct label position of the chunk, not once per slot that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.errors import DsparkError
from dspark.training.anchors import AnchorBatch

TargetLogP = Callable[[Tensor], Tensor]
"""Indices into the packed row [P] -> exact log p over the K draft ids [P, K] (log-sum-exp taken over all V)."""

# Logits of one chunk; about four tensors of this size live at once. The step's peak is then the backbone's own backward
# pass; 64 MiB is 5 % faster for 49,152 tokens, since the head's weights are read less often, but adds 150 MiB.
CHUNK_BYTES = 24 << 20


class Draft(Protocol):
    """What the loss needs of a draft (drafts.DSparkDraft has it)."""

    config: Any

    @property
    def draft_ids(self) -> Tensor: ...
    def teacher_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor: ...
    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None: ...


@dataclass(frozen=True)
class LossSettings:
    """Factors of the terms, the decay of the slot weights in slots, and whether BCE stops at the hidden states.

    detach_confidence: BCE trains the confidence head (and, with its Markov part, W1) but not the backbone.
    Raises DsparkError for a negative factor or a decay that is not positive.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    detach_confidence: bool = False
    soft: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence", "soft"):
            if not getattr(self, name) >= 0:
                raise DsparkError(f"loss.{name}", getattr(self, name), "a loss factor is 0 or more")
        if not self.decay > 0:
            raise DsparkError("loss.decay", self.decay, "the decay is positive, in slots (the released recipes use 4)")


def _zeros(gamma: int) -> Tensor:
    return torch.zeros(gamma, dtype=torch.float64)


@dataclass
class LossStats:
    """Sums over slots and blocks, never ratios, so that any grouping of batches adds up.

    weight = sum w; total, ce, l1, soft, bce = sum w * term (total with the settings' factors; ce without labels
        outside K)
    accepted, slots: sum of y_k and number of slots, both over unmasked slots
    survival: sum over blocks of prod_{j<=k} y_j, where a masked slot stops the product
    tau_teacher_forced: sum over blocks of 1 + sum_k prod_{j<=k} y_j; blocks: blocks with at least one label
    kept_mass: sum of sum_K p over unmasked slots; outside: labels that are not draft ids
    accepted, slots and survival are [gamma], float64, on the CPU.
    """

    gamma: int
    weight: float = 0.0
    total: float = 0.0
    ce: float = 0.0
    l1: float = 0.0
    soft: float = 0.0
    bce: float = 0.0
    tau_teacher_forced: float = 0.0
    blocks: int = 0
    kept_mass: float = 0.0
    outside: int = 0
    accepted: Tensor = field(default=None)  # type: ignore[assignment]
    slots: Tensor = field(default=None)  # type: ignore[assignment]
    survival: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ("accepted", "slots", "survival"):
            if getattr(self, name) is None:
                setattr(self, name, _zeros(self.gamma))

    def __add__(self, other: LossStats) -> LossStats:
        if self.gamma != other.gamma:
            raise DsparkError("gamma", (self.gamma, other.gamma), "statistics of different block widths do not add up")
        names = [f.name for f in fields(self) if f.name != "gamma"]
        return LossStats(self.gamma, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def widened(self, gamma: int) -> LossStats:
        """The same sums with `gamma` slots, those past the blocks' own width empty: they add up with wider blocks'."""
        by_slot = (self.accepted, self.slots, self.survival)
        accepted, slots, survival = (F.pad(sums, (0, gamma - self.gamma)) for sums in by_slot)
        return replace(self, gamma=gamma, accepted=accepted, slots=slots, survival=survival)

    def metrics(self) -> dict[str, float]:
        """The ratios a log shows: means over weights, slots or blocks. Empty when nothing was supervised."""
        if not self.blocks:
            return {}
        count = float(self.slots.sum())
        means = {
            "loss": self.total / self.weight,
            "loss_ce": self.ce / self.weight,
            "loss_l1": self.l1 / self.weight,
            **({"loss_soft": self.soft / self.weight} if self.soft else {}),
            "loss_bce": self.bce / self.weight,
            "tau_teacher_forced": self.tau_teacher_forced / self.blocks,
            "kept_mass": self.kept_mass / count,
            "label_outside": self.outside / count,
        }
        for k, (good, n) in enumerate(zip(self.accepted.tolist(), self.slots.tolist(), strict=True), start=1):
            if n:
                means[f"acceptance/{k}"] = good / n
        return means


def slot_weights(mask: Tensor, decay: float) -> Tensor:
    """w_k = m_k exp(-(k - 1) / decay): mask [A, g] bool -> [A, g] float64.

    It depends on masks alone, so the sum over a whole global batch is known before its first forward.
    """
    slots = torch.arange(mask.shape[1], device=mask.device, dtype=torch.float64)
    return mask.to(torch.float64) * torch.exp(-slots / decay)


def default_chunk(gamma: int, vocabulary: int, itemsize: int = 4) -> int:
    """Anchors per chunk that keep its logits [chunk * gamma, K] within CHUNK_BYTES."""
    return max(1, CHUNK_BYTES // (gamma * vocabulary * itemsize))


def loss_and_backward(
    draft: Draft,
    hidden: Tensor,
    batch: AnchorBatch,
    target_log_p: TargetLogP,
    settings: LossSettings,
    scale: float,
    chunk: int | None = None,
    backward: bool = True,
) -> LossStats:
    """Add the gradient of `scale * sum w (...)` to every parameter behind `hidden` and the heads; return the sums.

    hidden [A, g, d] with its graph attached (it is consumed). scale = 1 / sum of slot_weights over the global batch:
    every rank and accumulation step. chunk: anchors per chunk, by default as many as fit CHUNK_BYTES. backward=False
    measures only. A block without labels costs nothing and gets a gradient of exactly zero.
    Raises DsparkError for a batch that contradicts itself.
    """
    _check(hidden, batch)
    if chunk is not None and chunk < 1:
        raise DsparkError("chunk", chunk, "give at least one anchor per chunk")
    gamma = batch.mask.shape[1]
    chunk = chunk or default_chunk(gamma, draft.config.draft_vocab_size, hidden.element_size())
    label_rows = _label_rows(draft, batch.labels)
    stats = LossStats(gamma)
    grad_hidden = torch.zeros_like(hidden)
    live = batch.mask[:, 0].nonzero().squeeze(-1)
    # Neighbouring anchors share label positions, so a chunk of neighbours needs the fewest rows of p.
    live = live[batch.anchor_index[live].argsort(stable=True)]
    for part in live.split(chunk) if len(live) else ():
        leaf = hidden.detach()[part].requires_grad_(backward)
        target = _TargetRows(batch.label_positions[part], batch.mask[part], target_log_p, _work_dtype(hidden.dtype))
        one = _Chunk(batch.prev_ids[part], label_rows[part], batch.mask[part], settings, scale, target)
        stats = stats + one.run(draft, leaf, backward)
        if leaf.grad is not None:
            grad_hidden[part] = leaf.grad
    if backward and hidden.requires_grad:
        hidden.backward(grad_hidden)
    return stats


def dense_loss(
    draft: Draft,
    hidden: Tensor,
    batch: AnchorBatch,
    target_log_p: TargetLogP,
    settings: LossSettings,
    scale: float,
) -> Tensor:
    """The same loss, eager and differentiable, every [A, g, K] tensor at once: the reference. Returns a scalar."""
    _check(hidden, batch)
    mask, rows = batch.mask, _label_rows(draft, batch.labels)
    log_q = draft.teacher_logits(hidden, batch.prev_ids).to(_work_dtype(hidden.dtype)).log_softmax(-1)
    q = log_q.exp()
    positions, inverse = batch.label_positions.unique(return_inverse=True)
    p = target_log_p(positions).detach().to(q.dtype).exp()[inverse]
    l1 = (q - p).abs().sum(-1) + (1 - p.sum(-1))
    y = (1 - l1 / 2).detach().clamp(0, 1)
    ce = -log_q.gather(-1, rows.clamp(min=0)[..., None]).squeeze(-1)
    loss = settings.ce * torch.where(rows >= 0, ce, 0) + settings.l1 * l1 - settings.soft * (p * log_q).sum(-1)
    if draft.config.enable_confidence_head:
        logits = _confidence(draft, hidden, batch.prev_ids, settings).to(q.dtype)
        loss = loss + settings.confidence * F.binary_cross_entropy_with_logits(logits, y, reduction="none")
    return scale * (slot_weights(mask, settings.decay).to(q.dtype) * torch.where(mask, loss, 0)).sum()


class _TargetRows:
    """p at the distinct label positions of a chunk: `p` [P, K], `kept` [P] = sum_K p, and where each block's rows are.

    A block reads consecutive positions, all of them among the sorted distinct ones: its rows are one slice of p.
    """

    def __init__(self, positions: Tensor, mask: Tensor, target_log_p: TargetLogP, dtype: torch.dtype) -> None:
        distinct = positions[mask].unique()
        # No autocast: log p and its stored log-sum-exp must come from the same arithmetic, or p does not sum to one.
        with torch.no_grad(), torch.autocast(positions.device.type, enabled=False):
            self.p = target_log_p(distinct).to(dtype).exp()
        self.kept = self.p.sum(-1)
        self.index = torch.searchsorted(distinct, positions).clamp(max=len(distinct) - 1)  # [c, g]
        self.first: list[int] = self.index[:, 0].tolist()
        self.lengths: list[int] = mask.sum(1).tolist()


@dataclass
class _Chunk:
    """One chunk of c blocks: prev_ids, label_rows (-1 outside K), mask [c, g], and its rows of p."""

    prev_ids: Tensor
    label_rows: Tensor
    mask: Tensor
    settings: LossSettings
    scale: float
    target: _TargetRows

    def run(self, draft: Draft, hidden: Tensor, backward: bool) -> LossStats:
        """hidden [c, g, d], a leaf. Adds gradients to it and to the heads' parameters; returns the sums."""
        settings, mask = self.settings, self.mask
        confidence = None
        with torch.set_grad_enabled(backward):
            logits = draft.teacher_logits(hidden, self.prev_ids)
            if draft.config.enable_confidence_head:
                confidence = _confidence(draft, hidden, self.prev_ids, settings)
        weights = slot_weights(mask, settings.decay)
        # In place on purpose. Had the draft's graph saved the logits for its backward, autograd would raise here.
        work = logits.detach().to(self.target.p.dtype).contiguous()
        ce, l1, soft = self._logit_terms(work, weights * self.scale, backward)
        y = (1 - l1 / 2).clamp(0, 1)
        bce = torch.zeros_like(y)
        heads = [(logits, work.to(logits.dtype))]
        if confidence is not None:
            c = confidence.detach().to(y.dtype)
            bce = F.binary_cross_entropy_with_logits(c, y, reduction="none")
            slope = (weights * self.scale * settings.confidence).to(y.dtype) * (torch.sigmoid(c) - y)
            heads.append((confidence, slope.to(confidence.dtype)))
        heads = [(value, grad) for value, grad in heads if backward and value.requires_grad]
        if heads:
            torch.autograd.backward([value for value, _ in heads], [grad for _, grad in heads])
        return self._stats(weights, ce, l1, soft, bce, y)

    def _logit_terms(self, logits: Tensor, weights: Tensor, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
        """CE, L1, S of every slot [c, g]; `logits` [c, g, K] become their gradient; weights [c, g] hold the scale."""
        shape = logits.shape[:2]
        rows = logits.view(-1, logits.shape[-1])
        labels = self.label_rows.flatten()
        inside = labels >= 0
        a = (weights.flatten() * self.settings.ce * inside).to(rows.dtype)
        b = (weights.flatten() * self.settings.l1).to(rows.dtype)
        c = (weights.flatten() * self.settings.soft).to(rows.dtype) if self.settings.soft else None
        ce, l1, soft = (rows.new_zeros(len(rows)) for _ in range(3))
        columns = labels.clamp(min=0)
        by_anchor = _walks_over_anchors(rows.device)
        scratch = rows.new_empty(shape[1] if by_anchor else len(rows), rows.shape[1])
        for at, p in self._blocks(by_anchor):
            q = scratch[: at.stop - at.start]
            if c is not None:
                soft[at] = _soft_term(rows[at], p)
            factors = a[at], b[at], None if c is None else c[at]
            ce[at], l1[at] = _slot_terms(rows[at], p, columns[at], *factors, q, backward)
        if backward:
            rows[~self.mask.flatten()] = 0
        return ce.view(shape) * (inside.view(shape) & self.mask), l1.view(shape), soft.view(shape)

    def _blocks(self, by_anchor: bool) -> Iterator[tuple[slice, Tensor]]:
        """(rows of the chunk, their p): one anchor at a time, whose p is a slice of ours, or all rows at once."""
        target, gamma = self.target, self.mask.shape[1]
        if not by_anchor:
            index = target.index.flatten()
            yield slice(0, len(index)), target.p[index]
            return
        for i, (first, length) in enumerate(zip(target.first, target.lengths, strict=True)):
            yield slice(i * gamma, i * gamma + length), target.p[first : first + length]

    def _stats(self, weights: Tensor, ce: Tensor, l1: Tensor, soft: Tensor, bce: Tensor, y: Tensor) -> LossStats:
        mask, settings = self.mask, self.settings
        ce, l1, soft, bce = ((weights * torch.where(mask, term, 0)).sum() for term in (ce, l1, soft, bce))
        y = torch.where(mask, y, 0).double()
        survival = y.cumprod(dim=1).sum(0)
        kept = torch.where(mask, self.target.kept[self.target.index], 0).double().sum()
        outside = (mask & (self.label_rows < 0)).sum()
        sums = torch.stack([weights.sum(), ce, l1, soft, bce, kept, outside.double(), survival.sum()]).tolist()
        weight, ce_sum, l1_sum, soft_sum, bce_sum, kept_sum, outside_sum, survived = sums
        total = settings.ce * ce_sum + settings.l1 * l1_sum + settings.soft * soft_sum
        return LossStats(
            mask.shape[1],
            weight=weight,
            total=total + settings.confidence * bce_sum,
            ce=ce_sum,
            l1=l1_sum,
            soft=soft_sum,
            bce=bce_sum,
            tau_teacher_forced=len(mask) + survived,
            blocks=len(mask),
            kept_mass=kept_sum,
            outside=int(outside_sum),
            accepted=y.sum(0).cpu(),
            slots=mask.sum(0).double().cpu(),
            survival=survival.cpu(),
        )


def _walks_over_anchors(device: torch.device) -> bool:
    """On a CPU one anchor's [gamma, K] rows stay in cache between passes; elsewhere small passes only cost launches."""
    return device.type == "cpu"


def _soft_term(z: Tensor, p: Tensor) -> Tensor:
    """S [n] = -sum_K p log q of rows z [n, K] against p [n, K]."""
    return p.sum(-1) * z.logsumexp(-1) - torch.linalg.vecdot(p, z)


def _slot_terms(
    z: Tensor, p: Tensor, labels: Tensor, a: Tensor, b: Tensor, c: Tensor | None, q: Tensor, backward: bool
) -> tuple[Tensor, Tensor]:
    """CE [n] and L1 [n] of rows z [n, K] against p [n, K]; z becomes the gradient of sum(a CE + b L1 + c S).

    L1 = 2 - 2 sum min(p, q). With m = 1[q < p] and M = sum q m its gradient is -2 q (m - M); CE's is q - onehot(label),
    S's q sum(p) - p. So z becomes q (a + 2 b M - 2 b m + c sum(p)) - a onehot(label) - c p. q is scratch [n, K]; z
    itself is the second scratch once its log-normaliser and the label's logit have been read.
    """
    torch.softmax(z, -1, out=q)
    # The log-sum-exp is max z - log(max q): max q >= 1 / K has a logarithm where q[label] might have underflowed.
    ce = z.amax(-1) - q.amax(-1).log() - z.gather(-1, labels[:, None]).squeeze(-1)
    l1 = 2 - 2 * torch.minimum(q, p, out=z).sum(-1)
    if backward:
        below = torch.lt(q, p, out=z)
        offset = a + 2 * b * torch.linalg.vecdot(q, below)
        if c is not None:
            offset += c * p.sum(-1)
        below.mul_(-2 * b[:, None]).add_(offset[:, None]).mul_(q)
        below.scatter_add_(-1, labels[:, None], -a[:, None])
        if c is not None:
            below.addcmul_(p, c[:, None], value=-1)
    return ce, l1


def _confidence(draft: Draft, hidden: Tensor, prev_ids: Tensor, settings: LossSettings) -> Tensor:
    """Confidence logits [.., g] of a draft that has the head."""
    logits = draft.confidence(hidden.detach() if settings.detach_confidence else hidden, prev_ids)
    if logits is None:
        raise DsparkError("enable_confidence_head", True, "the draft has no confidence head; set it to false")
    return logits


def _label_rows(draft: Draft, labels: Tensor) -> Tensor:
    """Row of each label among the K draft ids, -1 where it is none of them: target ids [A, g] -> [A, g]."""
    if not draft.config.reduced:
        return labels
    ids = draft.draft_ids.to(labels.device)
    rows = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return torch.where(ids[rows] == labels, rows, -1)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Distributions are never computed in half precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check(hidden: Tensor, batch: AnchorBatch) -> None:
    """The shapes agree, and mask and positions are what build_anchor_batch makes (the slices of p rely on it)."""
    mask, positions = batch.mask, batch.label_positions
    if hidden.ndim != 3 or hidden.shape[:2] != mask.shape:
        raise DsparkError("hidden", tuple(hidden.shape), f"must be [A, gamma, d], [A, gamma] = {tuple(mask.shape)}")
    if not torch.equal(mask, mask.long().cumprod(1).bool()):
        raise DsparkError("mask", "not a prefix", "a block's mask is a contiguous prefix; use build_anchor_batch")
    slots = torch.arange(mask.shape[1], device=mask.device)
    if bool((mask & (positions != positions[:, :1] + slots)).any()):
        raise DsparkError("label_positions", "not consecutive", "slot k looks at a + k - 1; use build_anchor_batch")
