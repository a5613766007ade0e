"""The DFlash backbone: projected context, injected K/V, block attention (method section 2).

Layers are Qwen3-style: RMSNorm, grouped-query attention with per-head q/k norms (or DeepSeek-V3's latent attention),
SwiGLU. Context never passes through a layer: its K/V come from the same projections as the block's, so they are
computed once per committed token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from dspark.drafts.attention import Attention, LatentAttention, RMSNorm
from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.rope import Rotary
from dspark.errors import DsparkError

# How a layer attends: (its index, q [N, H, kd], k [N, kvh, kd], v [N, kvh, vd]) -> [N, H, vd]; q and k come normed and
# rotated.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class MLP(nn.Module):
    """SwiGLU: down(act(gate(x)) * up(x))."""

    def __init__(self, config: DraftConfig | Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        if config.hidden_act not in ACT2FN:
            raise DsparkError("hidden_act", config.hidden_act, "is not an activation that Transformers knows")
        self.act = F.silu if config.hidden_act == "silu" else ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer over block tokens [N, d]."""

    def __init__(self, config: DraftConfig, rotary: Rotary) -> None:
        super().__init__()
        self.self_attn = (
            Attention(config, rotary)
            if config.attention == "gqa"
            else LatentAttention(config, config.hidden_size, rotary)
        )
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Backbone(nn.Module):
    """fc, hidden_norm, layers and norm: everything but the heads."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(Layer(config, self.rotary) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    @property
    def decoder_layers(self) -> list[Layer]:
        """`layers` with their type."""
        return cast(list[Layer], list(self.layers))

    def check_taps(self, taps: Tensor) -> None:
        """Raises DsparkError unless taps are [N, m * d]."""
        expected = len(self.config.target_layer_ids) * self.config.hidden_size
        if taps.shape[-1] != expected:
            raise DsparkError(
                "taps",
                tuple(taps.shape),
                f"must have {expected} features per token ({len(self.config.target_layer_ids)} taps)",
            )

    def context_states(self, taps: Tensor) -> Tensor:
        """c = hidden_norm(fc(concatenated taps)): [N, m * d] -> [N, d]."""
        self.check_taps(taps)
        return self.hidden_norm(self.fc(taps.to(self.hidden_norm.weight.dtype)))

    def run_layers(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Block tokens x [N, d] with cos/sin [N, 1, dims] through all layers and `norm` -> [N, d]."""
        for index, layer in enumerate(self.decoder_layers):
            attention = layer.self_attn
            states = layer.input_layernorm(x)
            key, value = attention.key_value(states, cos, sin)
            x = x + attention.output(attend(index, attention.query(states, cos, sin), key, value))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)


def visible(query_positions: Tensor, key_positions: Tensor, window: int, non_causal: bool) -> Tensor:
    """Sliding-window rule, [queries, keys] bool: key j is seen from i iff 0 <= i - j < window (Transformers' count).

    non_causal also opens the block's later slots, |i - j| < window. Context lies before the block, so for it only
    i - j < window matters.
    """
    distance = query_positions[:, None] - key_positions[None, :]
    return (distance.abs() < window) if non_causal else (distance >= 0) & (distance < window)
