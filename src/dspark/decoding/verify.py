"""Accept rules: how many draft tokens of one request survive, and which token the target adds (method section 4).

All functions take the target's logits of one request's verified slots, [s + 1, V] for s scheduled draft tokens: row k
is the target's prediction after the first k of them. They return (accepted, next_token): the round emits
drafts[:accepted] + [next_token]. With s = 0 each one is plain decoding under its rule. Rows are turned into laws one
by one, and none is looked at after the first rejection. `shaped(row [V], drafts before it)` is what the request
changes in logits (`Active.shaped`); the same function shaped the draft's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dspark.decoding.request import Rule, SamplingSettings
from dspark.decoding.sampling import (
    Use,
    draw,
    draw_weights,
    greedy_token,
    gumbel,
    gumbel_argmax,
    log_distribution,
    uniform,
)

Shaped = Callable[[Tensor, Sequence[int]], Tensor]


def unshaped(logits: Tensor, drafts: Sequence[int]) -> Tensor:
    """A request that changes nothing in logits."""
    return logits


def draft_token(
    logits: Tensor,
    settings: SamplingSettings,
    seed: int,
    round_index: int,
    slot: int,
    position: int,
    rule: Rule,
    ids: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[int, Tensor | None]:
    """One draft token from the draft's logits, and the law it was drawn from.

    logits: [V], or [K] of a reduced vocabulary with ids [K] = their target ids and vocab_size = V. slot counts from 0
    inside the block; position is the token's own absolute position (read by `coupled` only). The token is a target id.
    The law is log q over V, what `verify_rejection` needs; None for `greedy` (a point mass) and for `coupled` (whose
    verification never looks at q).
    """
    if (ids is None) != (vocab_size is None):
        raise ValueError("ids and vocab_size go together")
    if rule == "greedy":
        token = greedy_token(logits)
        return (token if ids is None else int(ids[token])), None
    law = log_distribution(logits, settings)
    if ids is not None and vocab_size is not None:
        law = torch.full((vocab_size,), -math.inf, dtype=law.dtype, device=law.device).index_copy_(0, ids, law)
    if rule == "coupled":
        return gumbel_argmax(law, gumbel(seed, position, law.shape[0])), None
    if rule == "rejection":
        return draw(law, uniform(seed, round_index, slot, Use.DRAFT)), law
    raise ValueError(f"unknown accept rule {rule!r}")


def verify_largest(best: Sequence[int], drafts: Sequence[int]) -> tuple[int, int]:
    """`verify_greedy` of a request that changes nothing in logits, from the id of the largest of each row [s + 1]."""
    accepted = next((slot for slot, draft in enumerate(drafts) if best[slot] != draft), len(drafts))
    return accepted, best[accepted]


def verify_greedy(target_logits: Tensor, drafts: Sequence[int], shaped: Shaped = unshaped) -> tuple[int, int]:
    """Accept the longest prefix of drafts [s] that equals the target's argmax; next is the argmax at the cut."""
    _check_rows(target_logits, drafts)
    for slot, draft in enumerate(drafts):
        token = greedy_token(shaped(target_logits[slot], drafts[:slot]))
        if token != draft:
            return slot, token
    return len(drafts), greedy_token(shaped(target_logits[len(drafts)], drafts))


def verify_rejection(
    target_logits: Tensor,
    drafts: Sequence[int],
    laws: Sequence[Tensor | None],
    settings: SamplingSettings,
    seed: int,
    round_index: int,
    shaped: Shaped = unshaped,
) -> tuple[int, int]:
    """Speculative sampling: the emitted tokens follow the target's law exactly, whatever the laws of the draft are.

    Draft token x of slot k is accepted with probability min(1, p(x) / q(x)); the first rejected slot draws from
    normalise(max(p - q, 0)); when all are accepted the next token is drawn from p of the last row. laws [s] are log q
    over V [V] as `draft_token` returned them; None is a point mass on the draft token, whose residual is p without it.
    Noise: (seed, round_index, slot, use), a fresh number for each.
    """
    _check_rows(target_logits, drafts)
    if len(laws) != len(drafts):
        raise ValueError(f"{len(drafts)} draft tokens and {len(laws)} laws")
    for slot, (draft, law) in enumerate(zip(drafts, laws, strict=True)):
        log_p = log_distribution(shaped(target_logits[slot], drafts[:slot]), settings)
        log_q = 0.0 if law is None else float(law[draft])
        if log_q == -math.inf:
            raise ValueError(f"slot {slot}: draft token {draft} has probability 0 under its own law")
        if uniform(seed, round_index, slot, Use.ACCEPT) < math.exp(min(0.0, float(log_p[draft]) - log_q)):
            continue
        return slot, draw_weights(_residual(log_p, draft, law), uniform(seed, round_index, slot, Use.RESIDUAL))
    log_p = log_distribution(shaped(target_logits[len(drafts)], drafts), settings)
    return len(drafts), draw(log_p, uniform(seed, round_index, len(drafts), Use.BONUS))


def _residual(log_p: Tensor, draft: int, law: Tensor | None) -> Tensor:
    """max(p - q, 0) over V, not normalised."""
    p = log_p.exp()
    if law is None:
        rest = p.clone()
        rest[draft] = 0.0
    else:
        rest = (p - law.to(p).exp()).clamp_min_(0.0)
    # A rejection implies p(x) < q(x), so mass is left somewhere else; only when p = q up to rounding can it round to
    # nothing, and then p is that same law.
    return rest if float(rest.sum()) > 0.0 else p


def verify_coupled(
    target_logits: Tensor,
    drafts: Sequence[int],
    settings: SamplingSettings,
    seed: int,
    positions: int,
    shaped: Shaped = unshaped,
) -> tuple[int, int]:
    """Gumbel coupling: the ids are those of one-at-a-time decoding with this seed, for any drafts and any s.

    The token of slot k is y = argmax(log p + G[seed, positions + k]); a draft token is accepted iff it equals y, and y
    is emitted either way. positions: absolute position of the first emitted token. Drafts drawn with the same noise
    (`draft_token`, rule "coupled") are accepted with probability at least (1 - TV) / (1 + TV), TV = |p - q|_1 / 2.
    """
    _check_rows(target_logits, drafts)
    vocab = target_logits.shape[-1]
    for slot in range(len(drafts) + 1):
        log_p = log_distribution(shaped(target_logits[slot], drafts[:slot]), settings)
        token = gumbel_argmax(log_p, gumbel(seed, positions + slot, vocab))
        if slot == len(drafts) or token != drafts[slot]:
            return slot, token
    raise AssertionError("unreachable: the last row always returns")


def _check_rows(target_logits: Tensor, drafts: Sequence[int]) -> None:
    rows = len(drafts) + 1
    if target_logits.dim() != 2 or target_logits.shape[0] != rows:
        raise ValueError(f"{len(drafts)} draft tokens need logits [{rows}, V], got {tuple(target_logits.shape)}")
