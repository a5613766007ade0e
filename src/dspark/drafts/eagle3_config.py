"""Everything a server needs to know about an EAGLE-3 draft, complete in itself (as `DraftConfig` for DSpark)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from dspark.drafts.config import (
    Name,
    PositiveInt,
    Width,
    check_prompt_recipe,
    check_target,
    check_target_side,
    readable,
)
from dspark.drafts.rope import check_rope, inverse_frequencies
from dspark.errors import DsparkError

TAPS = 3
# Which fields belong to which kind of attention; the others must be left out. q_lora_rank is free for mla.
KINDS = {
    "gqa": ("num_key_value_heads", "head_dim"),
    "mla": ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}


@dataclass(frozen=True)
class RotaryShape:
    """`rope.RotarySettings` of the part of a head that is rotated."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_parameters: dict[str, Any]


class Eagle3Config(BaseModel):
    """An EAGLE-3 draft's shape, taps and provenance. Nothing is inherited from the target at load time.

    attention: gqa (Llama's: num_key_value_heads, head_dim) or mla (DeepSeek-V3's: kv_lora_rank, qk_nope_head_dim,
    qk_rope_head_dim, v_head_dim, and q_lora_rank, None for a plain q_proj); a field of the other kind is refused.
    target_layer_ids: three 0-based target layers (low, middle, high) whose outputs are the taps
    training_steps: steps unrolled in training, so the most draft tokens a round
    rope_parameters: Transformers 5 form; training_length: longest row, in tokens, it was trained on
    prompt_recipe: {template_sha256, thinking}, each a string or None
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    enable_confidence_head: ClassVar[bool] = False

    hidden_size: Width
    intermediate_size: Width
    hidden_act: StrictStr = "silu"
    rms_norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    max_position_embeddings: PositiveInt
    rope_parameters: dict[str, Any]
    attention: Literal["gqa", "mla"]
    num_attention_heads: Width
    num_key_value_heads: Width | None = None
    head_dim: Width | None = None
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    target_layer_ids: tuple[StrictInt, ...]
    num_target_layers: PositiveInt
    target_name: Name
    training_steps: PositiveInt
    training_length: PositiveInt
    prompt_recipe: dict[str, StrictStr | None]

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise readable(error) from None

    @model_validator(mode="after")
    def _consistent(self) -> Eagle3Config:
        self._check_attention()
        check_rope(self.rope_parameters)
        frequencies, _ = inverse_frequencies(self.rotary)
        if self.attention == "mla" and 2 * len(frequencies) != self.qk_rope_head_dim:
            raise DsparkError("rope_parameters", self.rope_parameters, "must rotate all of qk_rope_head_dim")
        check_target_side(self)
        if len(self.target_layer_ids) != TAPS:
            raise DsparkError("target_layer_ids", list(self.target_layer_ids), "must be three: low, middle and high")
        check_prompt_recipe(self.prompt_recipe)
        return self

    def _check_attention(self) -> None:
        for kind, names in KINDS.items():
            for name in names:
                value = getattr(self, name)
                if kind == self.attention and value is None:
                    raise DsparkError(name, None, f"is missing and has no default: {kind} attention needs it")
                if kind != self.attention and value is not None:
                    raise DsparkError(name, value, f"belongs to {kind} attention, this draft has {self.attention}")
        if self.attention == "gqa" and self.q_lora_rank is not None:
            raise DsparkError("q_lora_rank", self.q_lora_rank, "belongs to mla attention, this draft has gqa")
        if self.attention == "gqa" and self.num_attention_heads % (self.num_key_value_heads or 1):
            remedy = f"must divide num_attention_heads {self.num_attention_heads}"
            raise DsparkError("num_key_value_heads", self.num_key_value_heads, remedy)
        name = "head_dim" if self.attention == "gqa" else "qk_rope_head_dim"
        if getattr(self, name) % 2:
            raise DsparkError(name, getattr(self, name), "must be even (rotary pairs)")

    @property
    def rotary(self) -> RotaryShape:
        """What the rotary frequencies are computed from."""
        return RotaryShape(
            self.hidden_size,
            self.num_attention_heads,
            self.num_key_value_heads or self.num_attention_heads,
            (self.head_dim if self.attention == "gqa" else self.qk_rope_head_dim) or 0,
            self.max_position_embeddings,
            self.rope_parameters,
        )

    @property
    def cached_shape(self) -> tuple[int, int, int]:
        """(heads, key width, value width) of what attention keeps of a token: MLA its latent and the shared rotated
        part, whose first kv_lora_rank values are the value too."""
        if self.attention == "gqa":
            return self.num_key_value_heads or 0, self.head_dim or 0, self.head_dim or 0
        rank = self.kv_lora_rank or 0
        return 1, rank + (self.qk_rope_head_dim or 0), rank

    @property
    def gamma(self) -> int:
        """Most draft tokens of a round: the steps it was trained with."""
        return self.training_steps

    @property
    def reduced(self) -> bool:
        """Whether the draft predicts over K < V of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def slots(self, n: int) -> int:
        """Draft passes for n predictions: n. Raises DsparkError unless 1 <= n <= gamma."""
        if not 1 <= n <= self.gamma:
            raise DsparkError("n", n, f"must be 1..{self.gamma}, what this draft was trained for")
        return n

    def check_target(self, name: str | None, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        """Raise DsparkError when the draft was made for another target (name None: not compared)."""
        check_target(self, name, num_layers, hidden_size, vocab_size)
