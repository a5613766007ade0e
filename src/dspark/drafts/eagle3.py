"""EAGLE-3 (arXiv 2503.01840): one decoder layer that drafts token by token, the baseline DSpark is compared with.

A pair at position t is (token t + 1, state g_t). Its input is [input_layernorm(embed(x_{t+1})); hidden_norm(g_t)], its
residual g_t, and it predicts token t + 2. g_t is the projected taps of token t where the target has read it; past that
it is the layer's own output before the last norm, one step earlier. Decoding (`write_context`, `first_step`,
`next_step`) and training (`train_hidden`, the training-time test) go through the same layer and give the same states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafts.anchors import attend_steps, check_anchors, needs_checkpoint, plan_anchors
from dspark.drafts.attention import GroupedAttention, LatentAttention, RMSNorm
from dspark.drafts.backbone import MLP
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.rope import Rotary
from dspark.drafts.vocabulary import add_vocabulary, read_vocabulary, write_vocabulary
from dspark.errors import DsparkError

INIT_STD = 0.02


class Eagle3Context:
    """One request's tokens as the draft knows them, preallocated.

    states [capacity, d]: projected taps of the `length` tokens that the target has read. keys [kvh, capacity +
    scratch, kd], values [kvh, .., vd] (MLA: a view of the keys): of the first `written` pairs. The pair of the last
    token needs the token after it, so it is written when that one is known, at the next draft; until then, and when a
    prefix is taken over by another request, the states stand in for it. The scratch holds the steps of a draft.
    """

    def __init__(self, states: Tensor, keys: Tensor, values: Tensor | None, rank: int, capacity: int) -> None:
        self.states, self.keys, self.rank, self.capacity = states, keys, rank, capacity
        self._values = values
        self.length = self.written = 0

    @property
    def values(self) -> Tensor:
        """[kvh, capacity + scratch, vd]."""
        return self.keys[..., : self.rank] if self._values is None else self._values

    def write(self, start: int, key: Tensor, value: Tensor) -> None:
        """Keys [t, kvh, kd] and values [t, kvh, vd] of the pairs at start.. ."""
        self.keys[:, start : start + len(key)] = key.transpose(0, 1)
        if self._values is not None:
            self._values[:, start : start + len(key)] = value.transpose(0, 1)

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on, and the pair that held one. Raises DsparkError past self.length."""
        if not 0 <= length <= self.length:
            raise DsparkError("length", length, f"must be 0..{self.length}, what the draft's context holds")
        if length < self.length:
            self.length, self.written = length, max(0, min(self.written, length - 1))

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` committed tokens in all; what is held is copied."""
        more = capacity - self.capacity
        if more > 0:
            self.states = _longer(self.states, 0, more, self.length)
            self.keys = _longer(self.keys, 1, more, self.written)
            self._values = None if self._values is None else _longer(self._values, 1, more, self.written)
            self.capacity = capacity

    def copy_prefix(self, other: Eagle3Context, length: int) -> None:
        """Take the first `length` tokens of another request's context, which must hold them. The pair of the last one
        is not taken: the other request may go on with another token."""
        pairs = max(0, min(other.written, length - 1))
        self.states[:length] = other.states[:length]
        self.keys[:, :pairs] = other.keys[:, :pairs]
        if self._values is not None:
            self._values[:, :pairs] = other.values[:, :pairs]
        self.length, self.written = length, pairs


def _longer(held: Tensor, dim: int, more: int, used: int) -> Tensor:
    """`held` with `more` places added along `dim`, the first `used` of them copied."""
    shape = list(held.shape)
    shape[dim] += more
    grown = held.new_empty(shape)
    grown.narrow(dim, 0, used).copy_(held.narrow(dim, 0, used))
    return grown


class Eagle3Layer(nn.Module):
    """The one layer. Inputs are 2d wide for attention only; residuals and MLP are d wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = (
            GroupedAttention(config)
            if config.attention == "gqa"
            else LatentAttention(config, 2 * config.hidden_size, Rotary(config.rotary))
        )
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def inputs(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Embeddings and states [N, d] -> [N, 2d]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), -1)

    def finish(self, states: Tensor, mixed: Tensor) -> Tensor:
        """Residual [N, d] and mixed values [N, H, vd] -> the layer's output [N, d]."""
        x = states + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Draft(nn.Module):
    """The draft model. Shapes: R requests, n predictions, d width, K of V tokens it predicts over.

    Parameters are named as in the public checkpoints. The embedding is the target's (`bind`); the head is its own.
    Fresh weights: normal(0, 0.02), norms 1. For K < V call `set_vocabulary` (or load a checkpoint) before use.
    """

    d2t: Tensor  # int64 [K], offsets
    t2d: Tensor  # bool [V]

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        add_vocabulary(self, config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
        self._embedding: tuple[Tensor, ...] = ()  # the target's, in a tuple: never a parameter of this module
        self.packed: Any = None  # what its weights were when they were packed for decoding

    def set_vocabulary(self, ids: Sequence[int]) -> None:
        """Set which K target ids the draft predicts over (kept sorted). d2t holds offsets: target id = i + d2t[i].

        Raises DsparkError unless there are exactly K distinct ids in 0..V-1, or when K = V.
        """
        write_vocabulary(self, self.config, ids)

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id, int64 [K]. Raises DsparkError when the reduced vocabulary was never set."""
        return read_vocabulary(self, self.config, self.norm.weight.device)

    def bind(self, embedding_weight: Tensor, head_weight: Tensor | None = None) -> None:
        """Give the draft the target's embedding [V, d], by reference. The target's head is not used: its own is.

        Raises DsparkError on another shape.
        """
        expected = (self.config.vocab_size, self.config.hidden_size)
        if tuple(embedding_weight.shape) != expected:
            remedy = f"this draft was made for a target with {expected} ([V, d])"
            raise DsparkError("embedding_weight", tuple(embedding_weight.shape), remedy)
        self._embedding = (embedding_weight.detach(),)

    @property
    def bound(self) -> bool:
        """Whether `bind` was called."""
        return bool(self._embedding)

    def embed(self, ids: Tensor) -> Tensor:
        """Target embedding of ids [...] -> [..., d] in the draft's dtype."""
        if not self._embedding:
            raise DsparkError("draft", self.config.target_name, "is not bound to a target: call bind(embedding) first")
        return F.embedding(ids, self._embedding[0]).to(self.norm.weight.dtype)

    def project(self, taps: Tensor) -> Tensor:
        """Taps [N, 3d] -> g [N, d]. Raises DsparkError on another width."""
        if taps.shape[-1] != self.fc.in_features:
            raise DsparkError("taps", tuple(taps.shape), f"must have {self.fc.in_features} features per token (3 taps)")
        return self.fc(taps.to(self.norm.weight.dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs of the layer [..., d] -> logits over the draft's ids [..., K]."""
        return self.lm_head(self.norm(hidden))

    # Decoding

    def new_context(self, capacity: int) -> Eagle3Context:
        """Room for `capacity` committed tokens of one request."""
        if capacity < 1:
            raise DsparkError("capacity", capacity, "must be at least 1 token")
        config, like = self.config, self.norm.weight
        heads, key_width, value_width = config.cached_shape
        places = capacity + config.gamma
        with torch.inference_mode(False):  # so that it may be written outside inference mode too
            states = like.new_empty(capacity, config.hidden_size).detach()
            keys = like.new_empty(heads, places, key_width).detach()
            values = like.new_empty(heads, places, value_width).detach() if config.attention == "gqa" else None
        return Eagle3Context(states, keys, values, value_width, capacity)

    @torch.no_grad()
    def write_context(self, batch: Sequence[tuple[Eagle3Context, Tensor]]) -> None:
        """Append tokens the target has read: (context, taps [t, 3d]) per request, at positions context.length.. .

        Raises DsparkError when a request would pass its capacity.
        """
        batch = [(context, taps) for context, taps in batch if len(taps)]
        if not batch:
            return
        for context, taps in batch:
            if (end := context.length + len(taps)) > context.capacity:
                raise DsparkError("context", end, f"tokens do not fit the {context.capacity} this request reserved")
        states = self.project(batch[0][1] if len(batch) == 1 else torch.cat([taps for _, taps in batch]))
        parts = states.split([len(taps) for _, taps in batch])
        for (context, _), part in zip(batch, parts, strict=True):
            context.states[context.length : context.length + len(part)] = part
            context.length += len(part)

    @torch.no_grad()
    def first_step(self, batch: Sequence[tuple[Eagle3Context, Sequence[int]]]) -> Tensor:
        """Write the pairs that can be written by now, and give the layer's output [R, d] for the last of each request.

        batch: (context, the tokens that follow those of the unwritten pairs: token written + 1 .. token length).
        Raises DsparkError when their number is another, or a context is empty.
        """
        for context, following in batch:
            if not context.length or len(following) != context.length - context.written:
                remedy = f"the draft has read {context.length} tokens and paired {context.written} of them"
                raise DsparkError("following", len(following), remedy)
        spans = [(context.written, context.length) for context, _ in batch]
        parts = [context.states[start:end] for (context, _), (start, end) in zip(batch, spans, strict=True)]
        states = parts[0] if len(parts) == 1 else torch.cat(parts)
        ids = torch.tensor([token for _, following in batch for token in following])
        x = self.midlayer.inputs(self.embed(ids), states)
        cos, sin = self._rotation(spans, x)
        key, value = self.midlayer.self_attn.key_value(x, cos, sin)
        row, last = 0, []
        for (context, _), (start, end) in zip(batch, spans, strict=True):
            stop = row + end - start
            context.write(start, key[row:stop], value[row:stop])
            context.written, row = end, stop
            last.append(stop - 1)
        if len(last) < len(x):
            x, states, cos, sin = (t[last] for t in (x, states, cos, sin))
        query = self.midlayer.self_attn.query(x, cos, sin)
        return self.midlayer.finish(states, self._attend([context for context, _ in batch], query, 0))

    @torch.no_grad()
    def next_step(self, contexts: Sequence[Eagle3Context], ids: Tensor, hidden: Tensor, step: int) -> Tensor:
        """Draft pass `step` (1, 2, ..): the tokens drafted last [R], the outputs of the pass before [R, d] -> [R, d].

        Its keys go to the scratch, at position context.length - 1 + step, and are never part of what is written.
        """
        spans = [(c.length - 1 + step, c.length + step) for c in contexts]
        x = self.midlayer.inputs(self.embed(ids), hidden)
        cos, sin = self._rotation(spans, x)
        attention = self.midlayer.self_attn
        query = attention.query(x, cos, sin)
        key, value = attention.key_value(x, cos, sin)
        for r, (context, (start, _)) in enumerate(zip(contexts, spans, strict=True)):
            context.write(start, key[r : r + 1], value[r : r + 1])
        return self.midlayer.finish(hidden, self._attend(contexts, query, step))

    def _attend(self, contexts: Sequence[Eagle3Context], query: Tensor, step: int) -> Tensor:
        """query [R, H, kd], each over all pairs of its request and `step` steps -> [R, H, vd]."""
        heads, mixed = self.config.cached_shape[0], []
        for r, context in enumerate(contexts):
            end = context.length + step
            folded = query[r].view(1, heads, -1, query.shape[-1])
            keys, values = context.keys[None, :, :end], context.values[None, :, :end]
            one = F.scaled_dot_product_attention(folded, keys, values, scale=self.midlayer.self_attn.scale)
            mixed.append(one.reshape(1, query.shape[1], -1))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _rotation(self, spans: list[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [N, 1, dims] of the positions of all spans, one after the other."""
        tables = self.midlayer.self_attn.rotary.tables(max(end for _, end in spans), like)
        cos, sin = (torch.cat([t[start:end] for start, end in spans])[:, None] for t in tables)
        return cos, sin

    # Training

    def teacher_logits(self, hidden: Tensor, prev_ids: Tensor) -> Tensor:
        """Logits of what `train_hidden` gave: [A, n, d] -> [A, n, K]. prev_ids were read there."""
        return self.logits(hidden)

    def confidence(self, hidden: Tensor, prev_ids: Tensor) -> None:
        """It has no confidence head."""
        return None

    def train_hidden(
        self,
        taps: Tensor,
        ids: Tensor,
        positions: Tensor,
        anchor_index: Tensor,
        doc_start: Tensor,
        prev_ids: Tensor,
    ) -> Tensor:
        """The training-time test: outputs of n steps from many anchors of one packed row, with gradients.

        taps [S, 3d]; ids and positions [S] (positions restart per document); anchor_index [A] sorted, with a token of
        its document before it; doc_start [A]; prev_ids [A, n] the teacher's tokens a .. a + n - 1 -> [A, n, d].
        Step k has the pair (token a + k - 1, state): the taps of token a - 1 at step 1, then step k - 1's output. It
        sees all pairs of the document up to a - 1, made from taps, and its own anchor's steps before it. Keys and
        values of the row are computed once, queries and MLP for anchors only: what decoding from that anchor would do.
        """
        check_anchors(anchor_index, doc_start, len(taps))
        if bool((anchor_index <= doc_start).any()):
            raise DsparkError("anchor_index", "a document's first token", "must have a token before it")
        anchors, steps = prev_ids.shape
        if not anchors:
            return self.norm.weight.new_zeros(0, steps, self.config.hidden_size)
        layer, attention = self.midlayer, self.midlayer.self_attn
        g = self.project(taps)
        before = anchor_index - 1
        longest = int(torch.maximum(positions.max(), positions[before].max() + steps)) + 1
        cos, sin = (table[:, None] for table in attention.rotary.tables(longest, g))
        row = layer.inputs(self.embed(ids.roll(-1)), g)
        row_key, row_value = attention.key_value(row, cos[positions], sin[positions])
        context = (row_key.transpose(0, 1).contiguous(), row_value.transpose(0, 1).contiguous())
        plan = plan_anchors(self.config, anchor_index, doc_start, 1, sliding=False)
        recompute = needs_checkpoint(self.config, [plan] * steps, 1)
        x, state, outputs = row[before], g[before], []
        key, value = (t[:0].new_empty(anchors, t.shape[0], 0, t.shape[-1]) for t in context)
        for step in range(steps):
            at = positions[before] + step
            if step:
                x = layer.inputs(self.embed(prev_ids[:, step]), state)
                own = attention.key_value(x, cos[at], sin[at])
                key, value = (torch.cat((old, new[:, :, None]), 2) for old, new in zip((key, value), own, strict=True))
            query = attention.query(x, cos[at], sin[at])
            mixed = attend_steps(plan, query, key, value, context, attention.scale, recompute)
            state = layer.finish(state, mixed)
            outputs.append(state)
        return torch.stack(outputs, 1)
