"""A recipe: the one run file that fixes target, draft, data and training (DESIGN convention 8).

YAML, either package data under `dspark/recipes` given by name (`smollm2-135m`) or a file given by path. Any value can
be overridden as `section.key=value`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dspark.drafts.config import DraftConfig
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import Config
from dspark.errors import DsparkError
from dspark.training.loss import LossSettings

ARCHITECTURES: dict[str, type[DraftConfig] | type[Eagle3Config]] = {"dspark": DraftConfig, "eagle3": Eagle3Config}


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSection(_Section):
    """rows: row files (JSONL). features: folder of cached features, or several (rows in none of them are computed into
    the first, stored as `features_dtype`), None = the target runs in process at every step.

    Held out, by hash of the prompt's id so that all turns of a prompt stay on one side: `held_out` prompts, or
    `validation_share` of them when `held_out` is None. Rows longer than `max_length` tokens are cut.
    answers: which rows are trained on, by the temperature they were written at; held-out rows stay as they are.
    training_rows: train on that many of them only, chosen by hash of their ids.
    vocabulary_prompts: a prompts file or folder whose words fill up a reduced vocabulary that the answers do not.
    """

    rows: tuple[str, ...] = ()
    features: tuple[str, ...] | None = None
    features_dtype: Literal["bf16", "fp32"] = "bf16"
    held_out: int | None = Field(default=None, ge=0)
    validation_share: float = Field(default=0.05, ge=0.0, lt=1.0)
    max_length: int = Field(default=2048, ge=4)
    answers: Literal["all", "greedy", "sampled"] = "all"
    training_rows: int | None = Field(default=None, ge=1)
    vocabulary_prompts: str | None = None

    @field_validator("rows", "features", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value


class LossSection(_Section):
    """See `training/loss.py:LossSettings`; docs/method.md section 3."""

    ce: float = Field(default=0.1, ge=0.0)
    l1: float = Field(default=0.9, ge=0.0)
    confidence: float = Field(default=1.0, ge=0.0)
    decay: float = Field(default=4.0, gt=0.0)
    detach_confidence: bool = False
    soft: float = Field(default=0.0, ge=0.0)

    def settings(self) -> LossSettings:
        return LossSettings(**self.model_dump())


class TrainingSection(_Section):
    """One step = `accumulation` micro-batches of `rows_per_step` rows packed into one flat row each.

    warmup: share of the steps when < 1, else steps. init: `random`, `target-layers` (the target's last decoder
    layers) or the folder of a draft. 0 for validate_every or save_every means: at the end only.
    init_vocabulary: with the folder of a draft, `keep` its reduced vocabulary, or `recount` one in these rows (of
    another size too): the ids in both keep what was learned, the others start afresh.
    markov_init: of a Markov head that starts afresh, `default`, or `bigram` for the log-odds of the answers' bigrams
    (training/bigrams.py); the folder of a draft brings its own.
    block_widths: each micro-batch trains blocks of one of these widths, drawn anew; `all` = 1..gamma, None = gamma.
    """

    steps: int = Field(default=4000, ge=1)
    rows_per_step: int = Field(default=4, ge=1)
    anchors_per_row: int = Field(default=24, ge=1)
    accumulation: int = Field(default=1, ge=1)
    lr: float = Field(default=6e-4, gt=0.0)
    min_lr_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    warmup: float = Field(default=0.04, ge=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = Field(default=1.0, gt=0.0, allow_inf_nan=True)
    seed: int = Field(default=0, ge=0, lt=2**63)
    compute_dtype: Literal["fp32", "bf16"] = "fp32"
    loss: LossSection = LossSection()
    loss_chunk: int | None = Field(default=None, ge=1)
    log_every: int = Field(default=20, ge=1)
    validate_every: int = Field(default=500, ge=0)
    validation_rows: int = Field(default=32, ge=0)
    replay_rows: int = Field(default=16, ge=0)
    replay_n: int | None = Field(default=None, ge=1)
    save_every: int = Field(default=500, ge=0)
    out: str = "runs/draft"
    init: str = "random"
    init_vocabulary: Literal["keep", "recount"] = "keep"
    markov_init: Literal["default", "bigram"] = "default"
    block_widths: Literal["all"] | tuple[int, ...] | None = None

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0.0 <= beta < 1.0 for beta in value):
            raise ValueError("both must be in [0, 1)")
        return value


class ServeSection(_Section):
    """The published draft's hub name, and its published commands: an engine's long flags in their order, without the
    dashes; true for a flag alone, a mapping for one whose value is JSON."""

    draft: str
    vllm: dict[str, Any] | None = None
    sglang: dict[str, Any] | None = None


class Recipe(_Section):
    """name, target (folder, hub name or `embedded:...`), draft, data, training, and how a published pair is served.

    draft: `architecture` (dspark, the default, or eagle3) and the fields of DraftConfig or Eagle3Config.
    """

    name: str
    target: str
    draft: dict[str, Any]
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    serve: ServeSection | None = None

    def draft_config(self) -> Config:
        """The draft's config; `target_name` is the recipe's target unless the recipe says otherwise.

        Raises DsparkError naming the field that is missing or wrong.
        """
        fields = {"target_name": self.target, **self.draft}
        architecture = fields.pop("architecture", "dspark")
        if architecture not in ARCHITECTURES:
            raise DsparkError("draft.architecture", architecture, f"must be {' or '.join(ARCHITECTURES)}")
        try:
            return ARCHITECTURES[architecture](**fields)
        except DsparkError as error:
            raise DsparkError(f"draft.{error.field}", error.value, error.remedy) from None

    def check(self) -> None:
        """Raises DsparkError naming a setting of the training that this draft cannot have."""
        config, training = self.draft_config(), self.training
        if training.replay_n is not None and not 1 <= training.replay_n <= config.gamma:
            raise DsparkError("training.replay_n", training.replay_n, f"must be 1..{config.gamma}")
        widths = training.block_widths
        if isinstance(widths, tuple) and not (widths and all(1 <= width <= config.gamma for width in widths)):
            remedy = f"must be `all`, or a list of widths in 1..{config.gamma}"
            raise DsparkError("training.block_widths", list(widths), remedy)
        if training.markov_init == "bigram":
            _check_markov(config)
        if isinstance(config, Eagle3Config) and widths is not None:
            raise DsparkError("training.block_widths", widths, "is for blocks: an eagle3 draft's steps are alone")


def _check_markov(config: Config) -> None:
    """Raises DsparkError when the draft has no Markov head that bigrams could start."""
    if isinstance(config, DraftConfig) and config.markov_rank and config.markov_head_type == "vanilla":
        return
    head = (
        "none" if isinstance(config, Eagle3Config) else f"a {config.markov_head_type} head of rank {config.markov_rank}"
    )
    remedy = f"needs a vanilla Markov head, the draft has {head}; use default"
    raise DsparkError("training.markov_init", "bigram", remedy)


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("dspark") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe by name or path, apply `section.key=value` overrides, check all of it.

    Raises DsparkError naming the field and what it may be; an unknown key is refused.
    """
    text = _recipe_text(str(name_or_path))
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        first = " ".join(str(error).split())
        raise DsparkError("recipe", str(name_or_path), f"is not valid YAML: {first}") from error
    if not isinstance(content, dict):
        raise DsparkError("recipe", str(name_or_path), "must be a mapping with name, target and draft")
    for override in overrides:
        _apply(content, override)
    try:
        recipe = Recipe.model_validate(content)
    except ValidationError as error:
        raise _readable(error) from None
    recipe.check()
    return recipe


def _recipe_text(name: str) -> str:
    packaged = resources.files("dspark") / "recipes" / f"{name}.yaml"
    if "/" not in name and packaged.is_file():
        return packaged.read_text()
    path = Path(name)
    if not path.is_file():
        raise DsparkError("recipe", name, f"no such file; give a path or one of {', '.join(recipe_names())}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DsparkError("recipe", name, f"is not UTF-8 text ({error.reason}); give a YAML file") from None


def _apply(content: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator or not key:
        raise DsparkError("override", override, "must be key=value, for example training.steps=100")
    place: Any = content
    *sections, last = key.split(".")
    for section in sections:
        place = place.setdefault(section, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise DsparkError("override", override, f"{section!r} is not a section")
    try:
        place[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise DsparkError(key, value, "is not a valid value") from error


def _readable(error: ValidationError) -> DsparkError:
    """The first complaint of pydantic as one line: field, value, what is allowed."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    remedy, value = first["msg"], first.get("input")
    if first["type"] == "extra_forbidden":
        remedy = f"unknown key; allowed here: {', '.join(_fields(Recipe, location[:-1]))}"
    elif first["type"] == "missing":
        value, remedy = None, "is missing; the recipe must state it"
    return DsparkError(".".join(location) or "recipe", value, remedy)


def _fields(model: type[BaseModel], path: Sequence[str]) -> list[str]:
    for part in path:
        inner = model.model_fields[part].annotation if part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        model = inner
    return sorted(model.model_fields)
