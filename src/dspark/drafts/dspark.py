"""DSpark: the DFlash backbone with a Markov and a confidence head (markov_rank 0 and no confidence head = DFlash).

Two ways through the same layers: decoding (`write_context` once per committed token, `block_hidden` once per round) and
training (`train_hidden`, many anchors of a packed row at once). For one anchor both give the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafts.anchors import attend_anchors, check_anchors, needs_checkpoint, plan_anchors
from dspark.drafts.backbone import Backbone, visible
from dspark.drafts.config import DraftConfig
from dspark.drafts.context import DraftContext
from dspark.drafts.heads import ConfidenceHead, MarkovHead
from dspark.drafts.vocabulary import add_vocabulary, read_vocabulary, write_vocabulary
from dspark.errors import DsparkError

INIT_STD = 0.02


class CompiledPasses(Protocol):
    """The decoding passes of a frozen draft, by whoever compiled them."""

    def write_context(self, batch: Sequence[tuple[DraftContext, Tensor]]) -> None:
        """See `DSparkDraft.write_context`, which has checked the batch."""

    def block_hidden(self, contexts: Sequence[DraftContext], x: Tensor, slots: int, n: int) -> Tensor:
        """Embedded blocks x [R * slots, d] -> [R, n, d]; see `DSparkDraft.block_hidden`."""

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """See `DSparkDraft.confidence`, which has seen that there is a head."""


@dataclass
class _Bound:
    """The target's weights, referenced and never owned: outside the module tree, so in no state dict or optimiser."""

    embedding: Tensor  # [V, d]
    head_weight: Tensor  # [V, d]
    head: nn.Module  # [..., d] -> [..., K]; an nn.Linear over the draft's rows unless somebody replaced it
    dtype: torch.dtype

    def __deepcopy__(self, memo: dict[int, Any]) -> _Bound:
        return self


class DSparkDraft(Backbone):
    """The draft model. Shapes: R requests, n predictions, d width, K of V tokens it predicts over, r Markov rank.

    Fresh weights: linear and embedding weights normal(0, 0.02), biases 0, norms 1, except that Markov W2 and the
    confidence head start at 0: no bias on the base logits, and a probability of 1/2 for every slot.
    For K < V call `set_vocabulary` (or load a checkpoint) before `bind`.
    """

    d2t: Tensor  # int64 [K], offsets
    t2d: Tensor  # bool [V]

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        add_vocabulary(self, config)
        self.own_head_rows: Tensor | None = (
            None  # [K, d]: a checkpoint's own lm_head rows, used instead of the target's
        )
        self._bound: _Bound | None = None
        self.compiled: CompiledPasses | None = None
        self.packed: Any = None  # what its weights were when they were packed for decoding
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=INIT_STD)
                bias = getattr(module, "bias", None)
                if bias is not None:
                    nn.init.zeros_(bias)
        if self.markov_head is not None:
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.weight)

    # The target's weights and the draft vocabulary

    def set_vocabulary(self, ids: Sequence[int]) -> None:
        """Set which K target ids the draft predicts over (kept sorted). d2t holds offsets: target id = i + d2t[i].

        Raises DsparkError unless there are exactly K distinct ids in 0..V-1, or when K = V.
        """
        write_vocabulary(self, self.config, ids)
        self.compiled = None  # it knows the ids
        if self._bound is not None:
            self.bind(self._bound.embedding, self._bound.head_weight)

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id, int64 [K]. Raises DsparkError when the reduced vocabulary was never set."""
        return read_vocabulary(self, self.config, self.norm.weight.device)

    def bind(self, embedding_weight: Tensor, head_weight: Tensor) -> None:
        """Give the draft the target's embedding and head, both [V, d], by reference.

        Raises DsparkError on other shapes.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        for field, weight in (("embedding_weight", embedding_weight), ("head_weight", head_weight)):
            if tuple(weight.shape) != expected:
                raise DsparkError(
                    field, tuple(weight.shape), f"this draft was made for a target with {expected} ([V, d])"
                )
        embedding, weight = embedding_weight.detach(), head_weight.detach()
        rows = weight
        if self.own_head_rows is not None:
            rows = self.own_head_rows
        elif self.config.reduced:
            rows = weight[self.draft_ids.to(weight.device)]
        like = self.norm.weight
        head = nn.Linear(self.config.hidden_size, self.config.draft_vocab_size, bias=False, device="meta")
        head.weight = nn.Parameter(rows.to(device=like.device, dtype=like.dtype), requires_grad=False)
        self._bound = _Bound(embedding, weight, head, like.dtype)

    @property
    def bound(self) -> bool:
        """Whether `bind` was called."""
        return self._bound is not None

    def _target(self) -> _Bound:
        if self._bound is None:
            raise DsparkError(
                "draft", self.config.target_name, "is not bound to a target: call bind(embedding, head) first"
            )
        return self._bound

    @property
    def head_rows(self) -> Tensor:
        """The base head's rows, [K, d]. Raises DsparkError when unbound or replaced by a head without rows."""
        weight = getattr(self._target().head, "weight", None)
        if weight is None:
            raise DsparkError("head_rows", None, "the head was replaced by a packed one; bind the draft again")
        return weight.detach()

    @property
    def head(self) -> nn.Module:
        """The base head [..., d] -> [..., K], outside the module tree. Assign to replace it (by a packed one, say)."""
        return self._target().head

    @head.setter
    def head(self, module: nn.Module) -> None:
        self._target().head = module

    def __setattr__(self, name: str, value: Any) -> None:
        # nn.Module would register a module assigned to the property above as a child
        if name == "head":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def embed(self, ids: Tensor) -> Tensor:
        """Target embedding of ids [...] -> [..., d] in the draft's dtype."""
        return F.embedding(ids, self._target().embedding).to(self.norm.weight.dtype)

    # Decoding

    def new_context(self, capacity: int) -> DraftContext:
        """Room for `capacity` committed tokens of one request."""
        if capacity < 1:
            raise DsparkError("capacity", capacity, "must be at least 1 token")
        config = self.config
        scratch = config.slots(config.gamma)
        heads, key_width, value_width = config.cached_shape
        like, shape = self.norm.weight, (config.num_hidden_layers, heads, capacity + scratch)
        with torch.inference_mode(False):  # so that it may be written outside inference mode too
            keys = like.new_empty(*shape, key_width)
            values = None if config.attention == "mla" else like.new_empty(*shape, value_width)
            return DraftContext(keys, values, value_width, capacity)

    @torch.no_grad()
    def write_context(self, batch: Sequence[tuple[DraftContext, Tensor]]) -> None:
        """Append committed tokens: (context, taps [t, m * d]) per request, at positions context.length.. .

        One flat pass over all requests. Raises DsparkError when a request would pass its capacity.
        """
        batch = [(context, taps) for context, taps in batch if len(taps)]
        if not batch:
            return
        spans = [(context, context.length, context.length + len(taps)) for context, taps in batch]
        for context, _, end in spans:
            if end > context.capacity:
                raise DsparkError("context", end, f"tokens do not fit the {context.capacity} this request reserved")
        if self.compiled is not None:
            return self.compiled.write_context(batch)
        taps = batch[0][1] if len(batch) == 1 else torch.cat([t for _, t in batch])
        states = self.context_states(taps)
        cos, sin = self._rotation([(start, end) for _, start, end in spans], states)
        pairs = [layer.self_attn.key_value(states, cos, sin) for layer in self.decoder_layers]
        keys = torch.stack([k for k, _ in pairs]).transpose(1, 2)
        values = torch.stack([v for _, v in pairs]).transpose(1, 2)
        row = 0
        for context, start, end in spans:
            stop = row + end - start
            context.write(slice(None), start, keys[:, :, row:stop], values[:, :, row:stop])
            context.length, row = end, stop

    @torch.no_grad()
    def block_hidden(self, batch: Sequence[tuple[DraftContext, int]], n: int) -> Tensor:
        """One draft pass: (context, anchor id) per request, the anchor at position context.length -> [R, n, d].

        Runs slots(n) slots per request in one flat pass and returns the post-`norm` states of the n predicting ones.
        Raises DsparkError unless 1 <= n <= gamma.
        """
        config, slots = self.config, self.config.slots(n)
        contexts = [context for context, _ in batch]
        ids = torch.full((len(batch), slots), config.mask_token_id, dtype=torch.int64, device=self.norm.weight.device)
        ids[:, 0] = torch.tensor([anchor for _, anchor in batch], dtype=torch.int64)
        x = self.embed(ids.view(-1))
        if self.compiled is not None:
            return self.compiled.block_hidden(contexts, x, slots, n)
        cos, sin = self._rotation([(c.length, c.length + slots) for c in contexts], x)
        windows = [self._window(c, slots) for c in contexts] if "sliding_attention" in config.layer_types else []
        requests, (kv_heads, key_width, value_width) = len(batch), config.cached_shape

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # the query heads of one KV head become more rows of it: K and V are read once and never repeated
            query = query.view(requests, slots, kv_heads, -1, key_width).permute(0, 2, 3, 1, 4)
            query = query.reshape(requests, kv_heads, -1, key_width)
            key = key.view(requests, slots, kv_heads, key_width).transpose(1, 2)
            value = value.unflatten(0, (requests, slots)).transpose(1, 2)
            sliding, scale = (
                config.layer_types[layer] == "sliding_attention",
                self.decoder_layers[layer].self_attn.scale,
            )
            mixed = []
            for r, context in enumerate(contexts):
                low, mask = windows[r] if sliding else (0, None)
                end = context.length + slots
                context.write(layer, context.length, key[r], value[r])
                keys, values = context.keys[layer, None, :, low:end], context.values[layer, None, :, low:end]
                mixed.append(F.scaled_dot_product_attention(query[r, None], keys, values, attn_mask=mask, scale=scale))
            joined = mixed[0] if requests == 1 else torch.cat(mixed)
            joined = joined.view(requests, kv_heads, -1, slots, value_width).permute(0, 3, 1, 2, 4)
            return joined.reshape(requests * slots, -1, value_width)

        hidden = self.run_layers(x, cos, sin, attend).view(requests, slots, -1)
        return hidden[:, slots - n :]

    def _rotation(self, spans: list[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, dims] of the positions of all spans, one after the other."""
        cos, sin = self.rotary.tables(max(end for _, end in spans), like)
        if len(spans) == 1:
            start, end = spans[0]
            return cos[start:end, None], sin[start:end, None]
        joined = (torch.cat([table[start:end] for start, end in spans])[:, None] for table in (cos, sin))
        return next(joined), next(joined)

    def _window(self, context: DraftContext, slots: int) -> tuple[int, Tensor]:
        """First key a sliding layer can see and its mask [group * slots, keys] over the slice from there."""
        config = self.config
        window = config.sliding_window or 0
        low, end = max(0, context.length - window + 1), context.length + slots
        positions = torch.arange(low, end, device=self.norm.weight.device)
        mask = visible(positions[-slots:], positions, window, config.sliding_window_non_causal)
        return low, mask.repeat(config.num_attention_heads // config.cached_shape[0], 1)

    # Heads

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U_k = head(h_k): [..., d] -> [..., K]."""
        bound = self._target()
        return bound.head(hidden.to(bound.dtype))

    def markov_start(self, requests: int) -> Tensor | None:
        """The Markov state before slot 1 (rnn: zeros [R, r]; otherwise None)."""
        head = self.markov_head
        return None if head is None or head.kind != "rnn" else head.start(requests)

    def slot_logits(
        self, base: Tensor, hidden: Tensor, prev_ids: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One slot of sequential sampling: logits_k = U_k + bias(x_{k-1}).

        base [R, K], hidden [R, d], prev_ids [R] (target ids) -> logits [R, K] and the state for the next slot.
        """
        if self.markov_head is None:
            return base, state
        bias, state = self.markov_head.bias(hidden, prev_ids, state)
        return base + bias, state

    def teacher_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Logits of whole blocks with given previous tokens: hidden [A, n, d], prev_ids [A, n] -> [A, n, K]."""
        base = self.base_logits(hidden)
        if self.markov_head is None:
            return base
        return base + self.markov_head.block_bias(hidden, prev_ids)

    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> Tensor | None:
        """Logits that slot k survives given that those before did: [..., d], [...] -> [...]; None without the head."""
        if self.confidence_head is None:
            return None
        if self.compiled is not None:
            return self.compiled.confidence(hidden, prev_ids)
        previous = None
        if self.confidence_head.with_markov and self.markov_head is not None:
            previous = self.markov_head.markov_w1(prev_ids)
        return self.confidence_head(hidden, previous)

    # Training

    def train_hidden(
        self,
        taps: Tensor,
        positions: Tensor,
        anchor_index: Tensor,
        anchor_ids: Tensor,
        doc_start: Tensor,
        n: int | None = None,
    ) -> Tensor:
        """States of many blocks of one packed row: what `block_hidden` gives for each anchor, with gradients.

        taps [S, m * d]; positions [S] (restart per document); anchor_index [A] sorted indices into S; anchor_ids [A]
        their tokens; doc_start [A] first index of each anchor's document -> [A, n, d], n = gamma by default.
        The context of anchor a is doc_start..a-1; anchors never see each other's blocks.
        """
        config = self.config
        n = config.gamma if n is None else n
        slots, anchors = config.slots(n), len(anchor_index)
        check_anchors(anchor_index, doc_start, len(taps))
        if not anchors:
            return self.norm.weight.new_zeros(0, n, config.hidden_size)
        states = self.context_states(taps)
        block_positions = (positions[anchor_index][:, None] + torch.arange(slots, device=taps.device)).view(-1)
        cos, sin = self.rotary.tables(int(torch.maximum(block_positions.max(), positions.max())) + 1, states)
        row_cos, row_sin = cos[positions][:, None], sin[positions][:, None]
        plans = {
            kind: plan_anchors(config, anchor_index, doc_start, slots, kind == "sliding_attention")
            for kind in set(config.layer_types)
        }
        recompute = needs_checkpoint(config, [plans[kind] for kind in config.layer_types], slots)

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            attention = self.decoder_layers[layer].self_attn
            row_key, row_value = attention.key_value(states, row_cos, row_sin)
            context = (row_key.transpose(0, 1).contiguous(), row_value.transpose(0, 1).contiguous())
            query, key, value = (t.unflatten(0, (anchors, slots)) for t in (query, key, value))
            plan = plans[config.layer_types[layer]]
            return attend_anchors(plan, query, key, value, context, attention.scale, recompute)

        ids = torch.full((anchors, slots), config.mask_token_id, dtype=torch.int64, device=taps.device)
        ids[:, 0] = anchor_ids
        hidden = self.run_layers(
            self.embed(ids.view(-1)), cos[block_positions][:, None], sin[block_positions][:, None], attend
        )
        return hidden.view(anchors, slots, -1)[:, slots - n :]
