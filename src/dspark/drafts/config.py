"""Everything a server needs to know about a draft, complete in itself (DESIGN convention 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_serializer,
    model_validator,
)

from dspark.drafts.rope import check_rope, inverse_frequencies
from dspark.errors import DsparkError

if TYPE_CHECKING:
    from dspark.drafts.eagle3_config import Eagle3Config


def one_line(name: str) -> str:
    """The name itself. Raises ValueError unless it is one line of printable text without backticks."""
    if not name.isprintable() or "`" in name or not name.strip():
        raise ValueError("must be one line of printable text without backticks")
    return name


# Counts and lengths: what a 32-bit number holds, as files and engines have them
PositiveInt = Annotated[StrictInt, Field(ge=1, le=2**31 - 1)]
# Widths of tensors: above any model's, and small enough that no product of them overflows
Width = Annotated[StrictInt, Field(ge=1, le=2**18)]
# One line that a card and a command can quote
Name = Annotated[StrictStr, Field(min_length=1), AfterValidator(one_line)]
LayerType = Literal["full_attention", "sliding_attention"]
MarkovType = Literal["vanilla", "gated", "rnn"]

# What mla attention needs and gqa must not have; q_lora_rank may be None, for a plain q_proj
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Fields that are left out where they say nothing, as in files from before there was a choice
OPTIONAL = {"attention": "gqa", **dict.fromkeys(("q_lora_rank", *MLA_SIZES)), "aux_hidden_stream": None}
PROMPT_RECIPE_KEYS = ("template_sha256", "thinking")

# What to say when one of these is missing: its absence has been read in opposite ways by different engines.
_MISSING = {
    "sample_from_anchor": (
        "is missing and has no default: state sample_from_anchor: true when the anchor slot predicts the first draft "
        "token (anchor-first, block_size = predictions), false for DFlash's layout (bonus-anchor, "
        "block_size = predictions + 1)"
    ),
    "mask_token_id": "is missing and has no default: give the id of a token inside the embedding that the target "
    "never emits, the one the draft was trained with",
}


class DraftConfig(BaseModel):
    """A draft's shape, layout, taps and provenance. Nothing is inherited from the target at load time.

    Every field is required (a missing one is a DsparkError that names it), but `hidden_act` and OPTIONAL: what only
    some drafts have.
    attention: gqa (Qwen3's) or mla (DeepSeek-V3's, of MLA_SIZES and q_lora_rank). num_key_value_heads and head_dim are
    then, as Transformers has them for DeepSeek-V3, the query heads and the rotated part, qk_rope_head_dim
    aux_hidden_stream: what a tap is when it is not a layer's output: attn_res, the mixture that the next layer reads
    target_layer_ids: 0-based target layers whose outputs are the taps, in the order they are concatenated
    block_size: gamma when sample_from_anchor (anchor-first), gamma + 1 otherwise (bonus-anchor)
    rope_parameters: Transformers 5 form {rope_type, rope_theta, factor, partial_rotary_factor, ...}
    training_length: longest row, in tokens, it was trained on
    prompt_recipe: {template_sha256, thinking}, each a string or None
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: Width
    num_hidden_layers: PositiveInt
    num_attention_heads: Width
    num_key_value_heads: Width
    head_dim: Width
    intermediate_size: Width
    hidden_act: StrictStr = "silu"
    rms_norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    attention: Literal["gqa", "mla"] = "gqa"
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None
    attention_bias: StrictBool
    max_position_embeddings: PositiveInt
    rope_parameters: dict[str, Any]
    layer_types: tuple[LayerType, ...]
    sliding_window: PositiveInt | None
    sliding_window_non_causal: StrictBool
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    target_layer_ids: tuple[StrictInt, ...]
    aux_hidden_stream: Literal["attn_res"] | None = None
    num_target_layers: PositiveInt
    target_name: Name
    mask_token_id: StrictInt
    sample_from_anchor: StrictBool
    block_size: PositiveInt
    markov_rank: Annotated[StrictInt, Field(ge=0, le=2**18)]
    markov_head_type: MarkovType
    enable_confidence_head: StrictBool
    confidence_head_with_markov: StrictBool
    training_length: PositiveInt
    prompt_recipe: dict[str, StrictStr | None]

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise readable(error) from None

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if name not in OPTIONAL or value != OPTIONAL[name]}

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        self._check_attention()
        self._check_target_side()
        self._check_heads()
        check_prompt_recipe(self.prompt_recipe)
        return self

    def _check_attention(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise DsparkError(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"must divide num_attention_heads {self.num_attention_heads}",
            )
        if self.head_dim % 2:
            raise DsparkError("head_dim", self.head_dim, "must be even (rotary pairs)")
        self._check_latent()
        if len(self.layer_types) != self.num_hidden_layers:
            raise DsparkError(
                "layer_types", list(self.layer_types), f"must have one entry per layer ({self.num_hidden_layers})"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise DsparkError("sliding_window", None, "must be given because layer_types has sliding_attention layers")
        check_rope(self.rope_parameters)
        frequencies, _ = inverse_frequencies(self)  # raises when the type lacks one of its parameters
        if self.attention == "mla" and 2 * len(frequencies) != self.head_dim:
            raise DsparkError("rope_parameters", self.rope_parameters, "must rotate all of qk_rope_head_dim")

    def _check_latent(self) -> None:
        """MLA's fields are those of an MLA draft, all of them and of no other."""
        for name in ("q_lora_rank", *MLA_SIZES):
            value = getattr(self, name)
            if self.attention == "gqa" and value is not None:
                raise DsparkError(name, value, "belongs to mla attention, this draft has gqa")
            if self.attention == "mla" and value is None and name != "q_lora_rank":
                raise DsparkError(name, None, "is missing and has no default: mla attention needs it")
        if self.attention == "mla":
            for name, value, wanted in (
                ("num_key_value_heads", self.num_key_value_heads, self.num_attention_heads),
                ("head_dim", self.head_dim, self.qk_rope_head_dim),
                ("attention_bias", self.attention_bias, False),
            ):
                if value != wanted:
                    raise DsparkError(name, value, f"must be {wanted} with mla attention")

    def _check_target_side(self) -> None:
        check_target_side(self)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise DsparkError(
                "mask_token_id", self.mask_token_id, f"must be inside the target's embedding, 0..{self.vocab_size - 1}"
            )

    def _check_heads(self) -> None:
        if self.gamma < 1:
            raise DsparkError("block_size", self.block_size, "must be at least 2 in the bonus-anchor layout")
        if self.markov_rank == 0 and self.markov_head_type != "vanilla":
            raise DsparkError(
                "markov_head_type", self.markov_head_type, "must be vanilla when markov_rank is 0 (no head)"
            )
        if self.markov_rank == 0 and self.enable_confidence_head and self.confidence_head_with_markov:
            raise DsparkError("confidence_head_with_markov", True, "must be false when markov_rank is 0")

    @property
    def gamma(self) -> int:
        """Predictions (draft tokens) of a full block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def cached_shape(self) -> tuple[int, int, int]:
        """(heads, key width, value width) of what a layer keeps of a token: MLA its latent and the shared rotated part,
        whose first kv_lora_rank values are the value too."""
        if self.kv_lora_rank is None:
            return self.num_key_value_heads, self.head_dim, self.head_dim
        return 1, self.kv_lora_rank + self.head_dim, self.kv_lora_rank

    @property
    def reduced(self) -> bool:
        """Whether the draft predicts over K < V of the target's tokens."""
        return self.draft_vocab_size < self.vocab_size

    def slots(self, n: int) -> int:
        """Slots run for n predictions: n anchor-first, n + 1 bonus-anchor.

        Raises DsparkError unless 1 <= n <= gamma.
        """
        if not 1 <= n <= self.gamma:
            raise DsparkError("n", n, f"must be 1..{self.gamma}, what this draft was trained for")
        return n if self.sample_from_anchor else n + 1

    def check_target(self, name: str | None, num_layers: int, hidden_size: int, vocab_size: int) -> None:
        """Raise DsparkError when the draft was made for another target (name None: not compared)."""
        check_target(self, name, num_layers, hidden_size, vocab_size)


def check_prompt_recipe(prompt_recipe: dict[str, str | None]) -> None:
    """Raise DsparkError unless it has exactly PROMPT_RECIPE_KEYS."""
    if set(prompt_recipe) != set(PROMPT_RECIPE_KEYS):
        raise DsparkError("prompt_recipe", prompt_recipe, f"must have the keys {', '.join(PROMPT_RECIPE_KEYS)}")


def check_target_side(config: DraftConfig | Eagle3Config) -> None:
    """Raise DsparkError unless the taps are layers of the target and K <= V."""
    taps = config.target_layer_ids
    if not taps or len(set(taps)) != len(taps):
        raise DsparkError("target_layer_ids", list(taps), "must be a non-empty list without repeats")
    for tap in taps:
        if not 0 <= tap < config.num_target_layers:
            raise DsparkError(
                "target_layer_ids",
                tap,
                f"must be a 0-based layer of the target, 0..{config.num_target_layers - 1} "
                "(the embedding output, -1, is not supported)",
            )
    if config.draft_vocab_size > config.vocab_size:
        raise DsparkError(
            "draft_vocab_size", config.draft_vocab_size, f"must be at most vocab_size {config.vocab_size}"
        )


def check_target(
    config: DraftConfig | Eagle3Config, name: str | None, num_layers: int, hidden_size: int, vocab_size: int
) -> None:
    """Raise DsparkError when the draft was made for another target (name None: not compared)."""
    for field, mine, theirs in (
        ("num_target_layers", config.num_target_layers, num_layers),
        ("hidden_size", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
        ("target_name", config.target_name, config.target_name if name is None else name),
    ):
        if mine != theirs:
            raise DsparkError(
                field,
                mine,
                f"the draft was trained for {config.target_name}, but this target has {theirs!r}; "
                "use a draft made for it",
            )


def readable(error: ValidationError) -> DsparkError:
    """The first fault of a pydantic error as one line that names the field."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "draft"
    if first["type"] == "missing":
        return DsparkError(field, None, _MISSING.get(field, "is missing and has no default: state it"))
    if first["type"] == "extra_forbidden":
        return DsparkError(field, first["input"], "is not a field of a draft; check its spelling or remove it")
    return DsparkError(field, first["input"], first["msg"].removeprefix("Value error, "))
