"""Attention of a draft's layers, behind one interface: grouped-query (Qwen3's; Llama's for EAGLE-3) or multi-head
latent (DeepSeek-V3's).

Each turns inputs [N, w] into queries, and into the keys and values that are kept of a token; w is d, or 2d in EAGLE-3.
Attending is then the same grouped attention, passed in from outside (decoding and training differ there only). MLA is
computed in its absorbed form: what is kept is the latent and the shared rotated part, one key head for all query heads,
and kv_b_proj is applied to queries and outputs instead of to every token. The scores equal those of the expanded form:
q_nope (W c) = (W^T q_nope) c.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.rope import Rotary


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in the weight's type; statistics in fp32 for half types."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Qwen3's: queries and keys normed by head. Kept of a token: keys and values [kvh, head_dim]."""

    def __init__(self, config: DraftConfig, rotary: Rotary) -> None:
        super().__init__()
        width, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, width, bias=bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.rotary = rotary
        self.scale = head_dim**-0.5

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, d], cos and sin [N, 1, dims] -> normed and rotated queries [N, H, head_dim]."""
        return self.rotary.rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, d] -> normed and rotated keys, and values, both [N, kvh, head_dim]."""
        key = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return self.rotary.rotate(key, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def output(self, mixed: Tensor) -> Tensor:
        """Mixed values [N, H, head_dim] -> [N, d]."""
        return self.o_proj(mixed.flatten(1))


class GroupedAttention(nn.Module):
    """Llama's, in an EAGLE-3 layer: no norms, no biases. Kept of a token: keys and values [kvh, head_dim]."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, self.head_dim = 2 * config.hidden_size, config.head_dim or 0
        kv_width = (config.num_key_value_heads or 0) * self.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.rotary = Rotary(config.rotary)
        self.scale = self.head_dim**-0.5

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, 2d], cos and sin [N, 1, dims] -> rotated queries [N, H, head_dim]."""
        return self.rotary.rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, 2d] -> rotated keys and values [N, kvh, head_dim]."""
        key = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        return self.rotary.rotate(key, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def output(self, mixed: Tensor) -> Tensor:
        """Mixed values [N, H, head_dim] -> [N, d]."""
        return self.o_proj(mixed.flatten(1))


class LatentAttention(nn.Module):
    """DeepSeek-V3's. Kept of a token: one key [kv_lora_rank + rope], whose first kv_lora_rank values are the value."""

    def __init__(self, config: DraftConfig | Eagle3Config, width: int, rotary: Rotary) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.rank, self.nope = config.kv_lora_rank or 0, config.qk_nope_head_dim or 0
        self.rope, self.value = config.qk_rope_head_dim or 0, config.v_head_dim or 0
        query = heads * (self.nope + self.rope)
        self.low_rank_query = config.q_lora_rank is not None
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, query, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(heads * self.value, config.hidden_size, bias=False)
        self.rotary = rotary
        self.scale = (self.nope + self.rope) ** -0.5 * yarn_scale(config)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [N, w], cos and sin [N, 1, dims] -> absorbed and rotated queries [N, H, kv_lora_rank + rope]."""
        flat = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low_rank_query else self.q_proj(x)
        plain, turned = flat.unflatten(-1, (-1, self.nope + self.rope)).split((self.nope, self.rope), -1)
        absorbed = torch.einsum("nhp,hpr->nhr", plain, self._expand()[:, : self.nope].to(plain))
        return torch.cat((absorbed, self.rotary.rotate(_halves(turned), cos, sin)), -1)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, w] -> keys [N, 1, kv_lora_rank + rope] and values [N, 1, kv_lora_rank], the beginning of the keys."""
        latent, turned = self.kv_a_proj_with_mqa(x).split((self.rank, self.rope), -1)
        turned = self.rotary.rotate(_halves(turned)[:, None], cos, sin)
        key = torch.cat((self.kv_a_layernorm(latent)[:, None].to(turned), turned), -1)
        return key, key[..., : self.rank]

    def output(self, mixed: Tensor) -> Tensor:
        """Mixed latents [N, H, kv_lora_rank] -> [N, d]."""
        values = torch.einsum("nhr,hvr->nhv", mixed, self._expand()[:, self.nope :].to(mixed))
        return self.o_proj(values.flatten(1))

    def _expand(self) -> Tensor:
        """kv_b_proj by head: [H, nope + value, rank]."""
        return self.kv_b_proj.weight.view(-1, self.nope + self.value, self.rank)


def _halves(x: Tensor) -> Tensor:
    """DeepSeek's rotary pairs lie side by side, (0, 1), (2, 3) ..; ours are (i, i + dims / 2). Queries and keys are
    both reordered, so scores do not change."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def yarn_scale(config: DraftConfig | Eagle3Config) -> float:
    """DeepSeek's factor on the softmax scale: (0.1 mscale_all_dim ln(factor) + 1)^2 with that parameter, else 1."""
    parameters = config.rope_parameters
    weight, factor = parameters.get("mscale_all_dim"), parameters.get("factor", 1.0)
    if parameters["rope_type"] == "default" or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)
