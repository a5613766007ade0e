"""What is known of a target without its weights: its config.json and tokenizer, or what a recipe states of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

from dspark.drafts.kinds import Config
from dspark.errors import DsparkError
from dspark.targets.embedded import EMBEDDED, ensure_embedded
from dspark.targets.transformers import load_tokenizer
from dspark.training.recipe import load_recipe, recipe_names

HUB_SECONDS = 5.0


@dataclass(frozen=True)
class TargetFacts:
    """name: as a draft's target_name would give it; folder: where its files lie, None when they cannot be had.

    depth, width, vocabulary (rows of its embedding) and context are None when unknown, and `missing` says why; values:
    its config.json with `text_config` unwrapped; stop_ids: of its generation config, config and tokenizer.
    """

    name: str
    folder: Path | None = None
    depth: int | None = None
    width: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    architecture: str | None = None
    stop_ids: frozenset[int] = frozenset()
    tokenizer: Any = None
    no_tokenizer: str = ""
    missing: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def runnable(self) -> bool:
        """Whether its weights are on this machine: the embedded target, or a folder."""
        return self.folder is not None and (self.name == EMBEDDED or Path(self.name).is_dir())


def target_name(name: str) -> str:
    """`embedded` spelled out; anything else as it is."""
    return EMBEDDED if name == "embedded" else name


def target_facts(name: str) -> TargetFacts:
    """What is known of the target `name`: `embedded`, a folder, a hub name, or a recipe's name for its target.

    Raises DsparkError for a folder that is no model, or a name that means nothing.
    """
    name = target_name(name)
    if name in recipe_names():
        name = load_recipe(name).target
    if name == EMBEDDED:
        return _read_folder(name, ensure_embedded())
    path = Path(name)
    if path.is_dir():
        return _read_folder(name, path)
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise DsparkError("target", name, "is no model folder, hub name (ORGANISATION/MODEL) or `embedded`")
    try:
        return _read_folder(name, _hub_files(name))
    except Exception:  # the hub's client raises many kinds
        return _stated_by_recipe(name, f"{name} is not in the local cache, and the hub gave nothing")


def recipe_drafts(target: str) -> dict[str, Config]:
    """The drafts that recipes state for this target, by the recipe's name."""
    found = {name: load_recipe(name) for name in recipe_names()}
    return {name: recipe.draft_config() for name, recipe in found.items() if recipe.target == target}


def _stated_by_recipe(name: str, reason: str) -> TargetFacts:
    """Depth, width and vocabulary as a recipe states them of this target; nothing when there is none."""
    known = recipe_drafts(name)
    if not known:
        return TargetFacts(name, missing=reason, no_tokenizer=reason)
    recipe, config = next(iter(known.items()))
    return TargetFacts(
        name,
        depth=config.num_target_layers,
        width=config.hidden_size,
        vocabulary=config.vocab_size,
        missing=f"{reason}; depth, width and vocabulary are those of the recipe {recipe}",
        no_tokenizer=reason,
    )


def _hub_files(name: str) -> Path:
    """The folder in the hub's cache with a model's config.json and tokenizer; raises whatever the hub's client does."""
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    present = {file.rfilename for file in HfApi().model_info(name, timeout=HUB_SECONDS).siblings or ()}
    wanted = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    for file in wanted:
        if file in present:
            hf_hub_download(name, file, etag_timeout=HUB_SECONDS)
    return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_SECONDS)).parent


def _read_folder(name: str, folder: Path) -> TargetFacts:
    """Facts of a model folder. Raises DsparkError when it has no config.json of a causal LM."""
    outer = _json(folder / "config.json")
    if outer is None:
        raise DsparkError("target", name, "holds no config.json that can be read; give a model folder")
    values = outer["text_config"] if isinstance(outer.get("text_config"), dict) else outer
    architectures = outer.get("architectures") or values.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    tokenizer, reason = None, ""
    try:
        tokenizer = load_tokenizer(str(folder))
    except DsparkError as error:
        reason = f"the target's tokenizer cannot be read: {error}"
    return TargetFacts(
        name,
        folder,
        depth=_count(name, values, "num_hidden_layers"),
        width=_count(name, values, "hidden_size"),
        vocabulary=_count(name, values, "vocab_size"),
        context=_count(name, values, "max_position_embeddings"),
        architecture=first if isinstance(first, str) else None,
        stop_ids=_stop_ids(folder, outer, values, tokenizer),
        tokenizer=tokenizer,
        no_tokenizer=reason,
        values=values,
    )


def _count(name: str, values: Mapping[str, Any], key: str) -> int | None:
    """A positive number of a config.json, None when it is not there. Raises DsparkError for anything else."""
    found = values.get(key)
    if found is not None and (not isinstance(found, int) or found < 1):
        raise DsparkError("target", name, f"its config.json has {key} {found!r}: must be a number of at least 1")
    return found


def _stop_ids(folder: Path, outer: Mapping[str, Any], inner: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    generation = _json(folder / "generation_config.json") or {}
    found = [source.get("eos_token_id") for source in (generation, outer, inner)]
    found.append(getattr(tokenizer, "eos_token_id", None))
    flat = [one for entry in found for one in (entry if isinstance(entry, list) else [entry])]
    return frozenset(one for one in flat if isinstance(one, int))


def _json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when the file is missing or holds something else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
