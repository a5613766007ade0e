"""What a target is: a frozen causal LM that reads new tokens for a ragged batch of requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


class TargetState(Protocol):
    """What one request keeps inside the target (its K/V). Rollback is lowering `length`."""

    length: int
    capacity: int

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on. Raises DsparkError when length > self.length."""

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens in all; what is held stays."""

    def copy_prefix(self, other: Any, length: int) -> None:
        """Take the first `length` tokens that another request of this target holds."""


@dataclass
class TargetOutput:
    """One ragged pass. Rows are the new tokens of all requests, concatenated in the order given.

    logits: [rows, V] float, or only the rows asked for, in the same order
    taps: [rows, m * d], the asked-for layers' outputs side by side (None when no tap was asked for)
    last_hidden: [rows, d], pre_norm: the state before the target's final norm
    best: the id of the largest logit of each row that has any, the lowest of equals; -1 where it is not finite or a
        logit is not a number (None: not computed)
    """

    logits: Tensor
    taps: Tensor | None
    last_hidden: Tensor
    best: list[int] | None = None


class Target(Protocol):
    """A frozen causal LM. Layer ids are 0-based; a tap is the value after the layer."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    dtype: torch.dtype
    stop_ids: frozenset[int]
    tokenizer: Any

    @property
    def embedding_weight(self) -> Tensor:
        """Token embedding, [V, d]."""

    @property
    def head_weight(self) -> Tensor:
        """Output head, [V, d] (the embedding itself when tied)."""

    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., d]."""

    def head(self, hidden: Tensor, rows: Tensor | None = None) -> Tensor:
        """head(final_norm(hidden)): pre-norm states [..., d] -> logits [..., V], or only `rows` of them [..., K]."""

    @property
    def bytes_per_token(self) -> int:
        """What one token of one request takes in memory (K/V of all layers)."""

    def new_state(self, capacity: int) -> TargetState:
        """Room for `capacity` tokens of one request."""

    def forward(
        self,
        batch: Sequence[tuple[TargetState, Tensor]],
        taps: Sequence[int] = (),
        logits: Literal["all", "last", "none"] | Sequence[int] = "all",
    ) -> TargetOutput:
        """Read each request's new ids [t_r] at positions state.length.. and advance its length.

        logits: every row's, each request's last row's, none, or how many last rows' of each request.
        """
