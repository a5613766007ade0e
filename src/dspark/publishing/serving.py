"""How a card says to serve its draft: the commands of `dspark launch` for vLLM and SGLang."""

from __future__ import annotations

from dspark.checkpoints.served_form import as_it_is, convert_words, form_for
from dspark.drafts.config import DraftConfig
from dspark.errors import DsparkError
from dspark.publishing.words import hub_name
from dspark.serving.launch.command import Wish, compose
from dspark.serving.launch.engines import Engine, engine
from dspark.serving.launch.notes import notes
from dspark.targets.embedded import EMBEDDED
from dspark.training.recipe import load_recipe, recipe_names

PLACES = {"TARGET": "the target's folder", "FOLDER": "this draft's folder"}


def serving_sections(config: DraftConfig, lm_head: bool, repo: str | None) -> list[str]:
    """`Serving with vLLM` and `Serving with SGLang`. lm_head: whether the file holds the head's rows; repo: where the
    draft is published."""
    return [_section(engine(key), config, lm_head, repo) for key in ("vllm", "sglang")]


def serves(key: str, config: DraftConfig) -> bool:
    """Whether some form of this draft is served by the engine."""
    try:
        form_for(key, config)
    except DsparkError:
        return False
    return True


def _section(one: Engine, config: DraftConfig, lm_head: bool, repo: str | None) -> str:
    title = f"## Serving with {one.name}"
    own = config.target_name == EMBEDDED  # a copy in 4 bits, of which the hub has the original
    target, draft = (None if own else hub_name(config.target_name)) or "TARGET", repo or "FOLDER"
    try:
        form, expanded = form_for(one.key, config)
        there = as_it_is(one.key, config, "native", lm_head)
        served = draft if there else f"for-{one.key}"
        command = compose(one, Wish(target, served), config, _published(one.key, config.target_name))
    except DsparkError as error:
        return f"{title}\n\n{one.name} {one.version} cannot serve this draft: {error}."
    lines = [command.text()]
    if not there:
        lines.insert(0, " ".join(convert_words(draft, served, form, expanded, "TARGET")))
    text = "\n".join(lines)
    words = [f"{place}: {said}." for place, said in PLACES.items() if place in text]
    version = " ".join([f"By `dspark launch`; flags as {one.name} {one.version} has them.", *words])
    bullets = "\n".join(f"- {note}" for note in notes(one, command, config))
    return "\n\n".join([title, f"```bash\n{text}\n```", version, bullets])


def _published(key: str, target: str) -> dict[str, object] | None:
    """The flags of the recipe for this target that states a command."""
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.target == target and recipe.serve is not None:
            return getattr(recipe.serve, key)
    return None
