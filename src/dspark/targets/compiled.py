"""A Transformers model's layers and head as one compiled pass, for the families whose layers the kernels know.

Everything else about the target stays Transformers' (configuration, embedding, rotary frequencies); a model that does
not fit runs through its own modules (`targets/cache.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dspark.kernels.decoder import Decoder, LayerWeights, Pointers, Shape, Span, head, interleaved
from dspark.targets.cache import RaggedCache, RequestCache
from dspark.targets.packed import PackedLinear, Storage, pack, packable

LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""RMSNorm, attention (biases, q and k norms, a window), RMSNorm, SwiGLU; each part added to its input."""
ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not change while a request grows."""


class CompiledDecoder:
    """A target's layers, final norm and head, packed; `head` is the head as a layer."""

    def __init__(self, decoder: Any, output: nn.Linear, storage: Storage | None) -> None:
        config = decoder.config
        first = decoder.layers[0].self_attn
        self.heads, self.head_dim = config.num_key_value_heads, first.head_dim
        shape = Shape(
            width=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=self.heads,
            head_dim=first.head_dim,
            rotary_dims=first.head_dim,
            intermediate=config.intermediate_size,
            eps=config.rms_norm_eps,
            scale=first.scaling,
        )
        layers = [layer_weights(layer, storage, _window(layer)) for layer in decoder.layers]
        self.weight_bytes = sum(m.bytes for w in layers for m in (w.qkv, w.out, w.gate_up, w.down))
        self.decoder = Decoder(shape, layers, _Tables(decoder.rotary_emb, first.head_dim).of)
        self._norm, self._eps = decoder.norm.weight.detach().float().contiguous(), config.rms_norm_eps
        matrix = pack(output.weight, output.bias, storage)
        self.head = PackedLinear(output, matrix.multiply, matrix.format)
        self._matrix = matrix
        self.weight_bytes += matrix.bytes

    def allocate(self, state: RequestCache) -> None:
        """Give a request its K/V at once: the kernels write where they are."""
        shape = (len(state.keys), 1, self.heads, state.capacity, self.head_dim)
        with torch.inference_mode(False):
            state.keys = [*torch.empty(shape, dtype=torch.float32)]
            state.values = [*torch.empty(shape, dtype=torch.float32)]

    def forward(self, x: Tensor, ragged: RaggedCache, taps: Sequence[int]) -> Tensor | None:
        """New tokens x [rows, d] through the layers, in place; taps in any order -> [rows, m * d]."""
        ascending = sorted(set(taps))
        spans = [Span(s.start, s.count, s.cache.capacity, _pointers(s.cache)) for s in ragged.segments]
        tapped = self.decoder.run(x, spans, ascending)
        if tapped is None or list(taps) == ascending:
            return tapped
        places = [ascending.index(tap) for tap in taps]
        return tapped.unflatten(-1, (len(ascending), -1))[:, places].flatten(1)

    def logits(self, x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """head(final norm(x)) of chosen rows: logits [rows, V] and the place of the largest of each [rows]."""
        return head(x, chosen, self._norm, self._eps, self._matrix)[1:]


def compiled(decoder: Any, output: nn.Module, storage: Storage | None = None) -> CompiledDecoder | None:
    """A decoder (layers, norm, rotary_emb) and its head `output` compiled; None where the kernels are not built or do
    not know such a model, or its sizes or types."""
    config = decoder.config
    known = all(_known(layer) for layer in decoder.layers) and config.hidden_act == "silu"
    if not known or (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default") not in ROTARY:
        return None
    attention = decoder.layers[0].self_attn
    fits = type(output) is nn.Linear and packable(output.weight)
    fits = fits and attention.head_dim % 32 == 0 and config.intermediate_size % 32 == 0
    weights = [p for layer in decoder.layers for p in layer.parameters() if p.dim() == 2]
    if not fits or not all(packable(weight) for weight in weights):
        return None
    assert isinstance(output, nn.Linear)
    return CompiledDecoder(decoder, output, storage)


def _known(layer: Any) -> bool:
    """A layer of a family above with plain linear layers in it: an adapter's would be passed by."""
    if type(layer).__name__ not in LAYERS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inner = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return all(type(one) is nn.Linear for one in (*inner, mlp.gate_proj, mlp.up_proj, mlp.down_proj))


def _window(layer: Any) -> int:
    if type(layer).__name__ == "MistralDecoderLayer":
        return getattr(layer.self_attn.config, "sliding_window", None) or 0
    return getattr(layer.self_attn, "sliding_window", None) or 0


def layer_weights(layer: Any, storage: Storage | None = None, window: int = 0, causal: bool = True) -> LayerWeights:
    """Pack a decoder layer whose parts have Transformers' names, as our drafts' have too; `kernels.decoder` says what
    window and causal mean."""
    attention, mlp = layer.self_attn, layer.mlp
    gate_up = interleaved(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach())
    bias = None
    if mlp.gate_proj.bias is not None:
        bias = interleaved(mlp.gate_proj.bias.detach(), mlp.up_proj.bias.detach())
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv_bias = None if attention.q_proj.bias is None else torch.cat([p.bias.detach() for p in projections])
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight,
        qkv=pack(torch.cat([p.weight.detach() for p in projections]), qkv_bias, storage),
        out=pack(attention.o_proj.weight, attention.o_proj.bias, storage),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=pack(gate_up, bias, storage),
        down=pack(mlp.down_proj.weight, mlp.down_proj.bias, storage),
        q_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        k_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        window=window,
        causal=causal,
    )


class _Tables:
    """cos and sin by position from the model's own rotary module, grown as needed."""

    def __init__(self, rotary: Any, dims: int) -> None:
        self._rotary, self._half = rotary, dims // 2
        self._held = (torch.empty(0, dims), torch.empty(0, dims))

    def of(self, positions: int) -> tuple[Tensor, Tensor]:
        if len(self._held[0]) < positions:
            with torch.inference_mode(False), torch.no_grad():
                wanted = torch.arange(max(1024, 2 * positions))[None]
                cos, sin = (
                    table[0].contiguous() for table in self._rotary(torch.empty(1, dtype=torch.float32), wanted)
                )
                sin[:, : self._half] *= -1
            self._held = cos, sin
        return self._held


def _pointers(state: RequestCache) -> Pointers:
    if state.compiled is None:
        state.compiled = Pointers(*([held for held in side if held is not None] for side in (state.keys, state.values)))
    return state.compiled
