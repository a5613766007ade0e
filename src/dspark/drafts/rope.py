"""Rotary position embedding. The frequencies come from Transformers' own functions, for every type it knows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dspark.errors import DsparkError

ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
# Parameters that divide or scale; whatever else a type has is left to Transformers' own checks
_POSITIVE = (
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "attention_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Raise DsparkError unless rope_parameters name a type that Transformers knows and a base, in numbers above 0."""
    if parameters.get("rope_type") not in ROPE_TYPES:
        remedy = f"must be one of {', '.join(ROPE_TYPES)}"
        raise DsparkError("rope_parameters.rope_type", parameters.get("rope_type"), remedy)
    for name in _POSITIVE:
        value = parameters.get(name)
        if value is None and name != "rope_theta":
            continue  # null as well as absent: Transformers' default
        if not _above_0(value):
            raise DsparkError(f"rope_parameters.{name}", value, "must be a finite number above 0")
    for name, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, float) and not math.isfinite(one):
                raise DsparkError(f"rope_parameters.{name}", one, "must be finite")


def _above_0(value: object) -> bool:
    """Whether it is a number above 0 that fp32 holds, and no bool."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= torch.finfo(torch.float32).max  # NaN compares false


class RotarySettings(Protocol):
    """What the frequencies depend on; head_dim: dimensions of a head that are offered for rotation."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_parameters(self) -> dict[str, Any]: ...


def inverse_frequencies(config: RotarySettings) -> tuple[Tensor, float]:
    """Inverse frequencies [rotated dims / 2] in fp32 and the factor on cos and sin (YaRN's attention factor).

    "default" is Transformers' "linear" with factor 1, which is the Llama/Qwen3 formula and also honours
    partial_rotary_factor. "dynamic" and "longrope" would change their frequencies while a request grows, which
    cached keys cannot follow: like vLLM we fix them once, for rows of max_position_embeddings.
    Raises DsparkError when a parameter that the type needs is missing or wrong.
    """
    parameters = deepcopy(dict(config.rope_parameters))
    rope_type = parameters["rope_type"]
    if rope_type in ("yarn", "llama3", "longrope") and "original_max_position_embeddings" not in parameters:
        # Transformers would take max_position_embeddings instead, and the frequencies would silently be others
        raise DsparkError("rope_parameters.original_max_position_embeddings", None, f"must be stated for {rope_type}")
    if rope_type == "default":
        parameters.update(rope_type="linear", factor=1.0)
    try:
        shape = Qwen3Config(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            num_hidden_layers=1,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=parameters,
        )
        with torch.device("cpu"):  # also when the modules around it are being built on the meta device
            function = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
            frequencies, factor = function(shape, torch.device("cpu"), seq_len=config.max_position_embeddings)
            factor = float(factor)
    except Exception as error:  # Transformers checks these values in many ways, and some not at all
        raise DsparkError(
            "rope_parameters", config.rope_parameters, f"{rope_type} needs other values: {error}"
        ) from None
    sound = bool(torch.isfinite(frequencies).all()) and math.isfinite(factor) and factor > 0
    if 2 * len(frequencies) > config.head_dim or not len(frequencies) or not sound:
        raise DsparkError(
            "rope_parameters", config.rope_parameters, f"gives no valid frequencies for head_dim {config.head_dim}"
        )
    return frequencies.float(), factor


class Rotary:
    """cos and sin by position, from a table that grows with the longest position asked for.

    No module and no buffer: the frequencies stay fp32 when a draft is cast, and nothing of it enters a state dict.
    """

    def __init__(self, config: RotarySettings) -> None:
        self.frequencies, self.factor = inverse_frequencies(config)
        self.dims = 2 * len(self.frequencies)
        self.whole = self.dims == config.head_dim
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos [>= length, dims] and signed sin [>= length, dims] in the dtype and on the device of `like`.

        The first half of sin carries the minus sign of the rotation, so that rotate(x) = x * cos + swap(x) * sin.
        """
        key = (like.dtype, like.device)
        found = self._tables.get(key)
        if found is None or len(found[0]) < length:
            rows = max(1024, 2 ** math.ceil(math.log2(max(length, 1))))
            with torch.inference_mode(False), torch.no_grad():
                angles = (
                    torch.arange(rows, dtype=torch.float32, device=self.frequencies.device)[:, None] * self.frequencies
                )
                cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
                found = (torch.cat((cos, cos), -1).to(like), torch.cat((-sin, sin), -1).to(like))
            self._tables[key] = found
        return found

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first `dims` of x [..., heads, head_dim]; cos, sin [..., 1, dims] (Qwen3's half-split form)."""
        part = x if self.whole else x[..., : self.dims]
        rotated = torch.addcmul(part * cos, torch.roll(part, self.dims // 2, -1), sin)
        return rotated if self.whole else torch.cat((rotated, x[..., self.dims :]), -1)
