"""A DSpark draft's passes as compiled ones: its context, its block, and its Markov head slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from dspark.drafts.attention import Attention
from dspark.drafts.context import DraftContext
from dspark.drafts.dspark import DSparkDraft
from dspark.kernels.decoder import Decoder, Pointers, Shape, Span, head, markov_tokens
from dspark.targets.compiled import layer_weights
from dspark.targets.packed import pack, packable


class CompiledDraft:
    """The packed weights of a draft; see `DSparkDraft.write_context` and `block_hidden` for what the passes do."""

    def __init__(self, draft: DSparkDraft) -> None:
        config = draft.config
        self._draft = draft
        shape = Shape(
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rotary_dims=draft.rotary.dims,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
        )
        like = draft.norm.weight
        layers = [
            layer_weights(
                layer,
                window=config.sliding_window or 0 if kind == "sliding_attention" else 0,
                causal=_causal(draft, kind),
            )
            for layer, kind in zip(draft.decoder_layers, config.layer_types, strict=True)
        ]
        self.decoder = Decoder(shape, layers, lambda positions: draft.rotary.tables(positions, like))
        self._fc = pack(draft.fc.weight)
        attentions = [cast(Attention, layer.self_attn) for layer in draft.decoder_layers]
        pairs = [p for attention in attentions for p in (attention.k_proj, attention.v_proj)]
        bias = None if pairs[0].bias is None else torch.cat([p.bias.detach() for p in pairs])
        self._kv = pack(torch.cat([p.weight.detach() for p in pairs]), bias)
        self._norm, self._context_norm = draft.norm.weight.detach(), draft.hidden_norm.weight.detach()
        markov = draft.markov_head
        self._w1 = self._w2 = None
        if markov is not None and markov.kind == "vanilla" and packable(markov.markov_w2.weight):
            self._w1, self._w2 = markov.markov_w1.weight.detach(), pack(markov.markov_w2.weight)
        self._ids = draft.draft_ids if config.reduced else None
        self._confidence: tuple[Tensor, Tensor] | None = None

    def write_context(self, batch: Sequence[tuple[DraftContext, Tensor]]) -> None:
        """See `DSparkDraft.write_context`, which has checked the batch."""
        spans = [_span(context, len(taps)) for context, taps in batch]
        taps = batch[0][1].contiguous() if len(batch) == 1 else torch.cat([t for _, t in batch])
        self._draft.check_taps(taps)
        self.decoder.write_context(taps.float(), self._fc, self._context_norm, self._kv, spans)
        for context, new in batch:
            context.length += len(new)

    def block_hidden(self, contexts: Sequence[DraftContext], x: Tensor, slots: int, n: int) -> Tensor:
        """Embedded blocks x [R * slots, d] -> [R, n, d]; see `DSparkDraft.block_hidden`."""
        self.decoder.run(x, [_span(context, slots) for context in contexts])
        last = torch.arange(len(x)).view(-1, slots)[:, slots - n :].reshape(-1).contiguous()
        normed, _, _ = head(x, last, self._norm, self._draft.config.rms_norm_eps, None)
        return normed.view(len(contexts), n, -1)

    def greedy_tokens(self, base: Tensor, first: Tensor) -> Tensor | None:
        """base [R, n, K], first [R]: the anchors -> greedy target ids [R, n]; None for another kind of Markov head, and
        where logits are not finite."""
        if self._w1 is None or self._w2 is None:
            return None
        tokens = markov_tokens(base.contiguous(), self._w1, self._w2, first, self._ids)
        return None if bool((tokens < 0).any()) else tokens

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """See `DSparkDraft.confidence`: w . [h ; W1[x]] + b, with W1's part and b kept as one number a token."""
        if self._confidence is None:
            self._confidence = self._confidence_weights()
        weight, of_token = self._confidence
        return hidden @ weight + (of_token if of_token.dim() == 0 else of_token[before])

    def _confidence_weights(self) -> tuple[Tensor, Tensor]:
        head, markov = self._draft.confidence_head, self._draft.markov_head
        assert head is not None  # whoever asks has seen that there is one
        weight, bias = head.proj.weight.detach()[0].float(), head.proj.bias.detach()[0].float()
        width = self._draft.config.hidden_size
        if not head.with_markov or markov is None:
            return weight, bias
        return weight[:width].contiguous(), markov.markov_w1.weight.detach().float() @ weight[width:] + bias


def compile_draft(draft: DSparkDraft) -> CompiledDraft | None:
    """The draft compiled; None where the kernels are not built, or its sizes, types or attention do not fit them."""
    config = draft.config
    if config.attention == "mla":
        return None
    weights = [p for layer in draft.decoder_layers for p in layer.parameters() if p.dim() == 2]
    fits = config.hidden_act == "silu" and config.head_dim % 32 == 0 and config.intermediate_size % 32 == 0
    return CompiledDraft(draft) if fits and all(packable(w) for w in (draft.fc.weight, *weights)) else None


def _causal(draft: DSparkDraft, kind: str) -> bool:
    """A block's slots see each other, but in sliding layers only those before them unless the config says otherwise."""
    return kind == "sliding_attention" and not draft.config.sliding_window_non_causal


def _span(context: DraftContext, count: int) -> Span:
    if context.compiled is None:
        context.compiled = Pointers(context.keys.unbind(), context.values.unbind())
    return Span(context.length, count, context.keys.shape[2], context.compiled)
