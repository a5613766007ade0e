"""From a recipe to the things a run needs: rows, target, features, a draft with its first weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from dspark.checkpoints.native import load_draft
from dspark.data.prompts import read_prompts
from dspark.data.rows import Row, check_ids, read_rows, row_notes, unique_rows
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.drafts.kinds import Config, Draft, new_draft
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.training.batches import cut, trainable
from dspark.training.bigrams import start_from_bigrams
from dspark.training.features import HEAD_CHUNK, Features, FeatureSource, InProcessFeatures, verify_features
from dspark.training.first_weights import copy_draft, copy_target_head, copy_target_layer, copy_target_layers
from dspark.training.folders import open_folders
from dspark.training.loss import CHUNK_BYTES
from dspark.training.recipe import Recipe
from dspark.training.vocabulary import choose_draft_vocabulary

Say = Callable[[str], None]

# What may differ between a draft that training starts from and the recipe: where it was trained, not what it is.
PROVENANCE = {"training_length", "prompt_recipe"}
OWN_ANSWER = (
    0.9  # of a greedy answer that the target wrote, at least this share is its first choice, ties and bf16 aside
)


def read_training_rows(recipe: Recipe, say: Say | None = None) -> list[Row]:
    """The recipe's row files, in order, each (prompt, answer) once.

    Raises DsparkError when none is named, or an id appears twice: a file named twice, or one id with two answers.
    Two files may have answered equal prompts equally.
    """
    if not recipe.data.rows:
        raise DsparkError("data.rows", None, "names no row file; give data.rows=FILE (made by `dspark regenerate`)")
    rows = [row for path in recipe.data.rows for row in read_rows(path)]
    kept = unique_rows(rows)
    named_twice = len({Path(path).resolve() for path in recipe.data.rows}) < len(recipe.data.rows)
    counted = Counter(row.id for row in (rows if named_twice else kept))
    twice = [row_id for row_id, count in counted.items() if count > 1]
    if twice:
        raise DsparkError("data.rows", twice[0], f"{len(twice)} row ids appear twice; name each file once")
    if say is not None and len(kept) < len(rows):
        say(f"{len(rows) - len(kept)} of {len(rows)} rows repeat the prompt and answer of an earlier one; left out")
    return kept


def open_features(recipe: Recipe, target: Target, rows: Sequence[Row], say: Say) -> FeatureSource:
    """The recipe's feature folders (checked, and completed by the rows they lack), else the target in process.

    Either way the captured states of two rows must rebuild the target's logits before anything is trained.
    """
    taps = tuple(recipe.draft_config().target_layer_ids)
    source: FeatureSource = InProcessFeatures(target, taps)
    if recipe.data.features:
        source = open_folders(recipe.data.features, target, taps, recipe.data.features_dtype, rows, say)
    checked = {row.id: row for row in (rows[0], max(rows, key=lambda row: len(row.ids)))}
    for row in checked.values():
        features = source.get(row)
        errors = verify_features(target, row, features, taps)
        worst = max(errors, key=lambda name: errors[name])
        say(f"features of row {row.id} agree with the target's own pass (worst: {worst}, {errors[worst]:.1e} by norm)")
        if row.temperature == 0.0 and (own := greedy_share(target, row, features)) < OWN_ANSWER:
            say(
                f"note: the target itself would have written {own:.0%} of the answer of row {row.id}, which says it is "
                "greedy; a draft that learns another model's answers is not accepted by this one"
            )
    return source


@torch.no_grad()
def greedy_share(target: Target, row: Row, features: Features) -> float:
    """Share of the answer's tokens that are the target's own first choice, by the states captured on the row."""
    states = features.last_hidden[len(row.prompt_ids) - 1 :].to(target.dtype)
    chosen = torch.cat([target.head(part).argmax(-1) for part in states.split(HEAD_CHUNK)])
    return float((chosen == torch.tensor(row.answer_ids)).float().mean())


def prompt_recipe(recipe: Recipe, target: Target) -> dict[str, str | None]:
    """How the rows' prompts were rendered: what `regenerate` noted beside each row file, else the recipe's own words.

    Raises DsparkError when the notes contradict each other, the recipe or the target's name.
    """
    stated = dict(recipe.draft_config().prompt_recipe)
    for name in recipe.data.rows:
        found = row_notes(name)
        if not found:
            continue
        if found.get("target") != target.name:
            raise DsparkError("data.rows", name, f"was written by {found.get('target')!r}, not by {target.name!r}")
        for key in stated:
            if stated[key] not in (None, found.get(key)):
                raise DsparkError(f"draft.prompt_recipe.{key}", stated[key], f"{name} was made with {found.get(key)!r}")
            stated[key] = found.get(key)
    return stated


def finished_config(
    recipe: Recipe, target: Target, rows: Sequence[Row], train_rows: Sequence[Row] | None = None
) -> Config:
    """The recipe's draft config, checked against target and rows, with what only the data knows filled in.

    training_length is the longest of `train_rows` (all rows when it is None), prompt_recipe how prompts were rendered.
    Raises DsparkError when the target differs, or the mask token occurs in an answer.
    """
    config = recipe.draft_config()
    config.check_target(target.name, target.num_layers, target.hidden_size, target.vocab_size)
    emitted = {token for row in rows for token in row.answer_ids}
    if isinstance(config, DraftConfig) and config.mask_token_id in emitted | set(target.stop_ids):
        raise DsparkError("draft.mask_token_id", config.mask_token_id, "is a token the target emits; choose another")
    recipe.check()
    check_ids(rows, target.vocab_size)
    limit = recipe.data.max_length
    trained_on = rows if train_rows is None else train_rows
    longest = max((len(cut(row, limit).ids) for row in trained_on if trainable(row, limit)), default=0)
    if not longest:
        raise DsparkError("data.max_length", limit, f"none of {len(trained_on)} rows has two answer tokens within it")
    return config.model_copy(update={"training_length": longest, "prompt_recipe": prompt_recipe(recipe, target)})


def build_draft(
    recipe: Recipe, config: Config, target: Target, rows: Sequence[Row], draft_ids: list[int] | None, say: Say
) -> Draft:
    """A draft with its first weights (`training.init`), its vocabulary, and the target's embedding and head. An EAGLE-3
    draft's own head starts as the target's.

    draft_ids: the map of a saved run; it and, unless `training.init_vocabulary` is recount, the map of an init draft
    are reused as they are.
    """
    init, recount = recipe.training.init, recipe.training.init_vocabulary == "recount"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        draft = new_draft(config)
    given = load_draft(init) if init not in ("random", "target-layers") else None
    if given is not None:
        _check_same_kind(given.config, config, PROVENANCE | ({"draft_vocab_size"} if recount else set()))
    if config.reduced:
        if draft_ids is None and given is not None and not recount:
            draft_ids = given.draft_ids.tolist()
        if draft_ids is None:
            draft_ids = choose_draft_vocabulary(
                rows, config.draft_vocab_size, config.vocab_size, target.stop_ids, say, prompt_texts(recipe, target)
            )
        draft.set_vocabulary(draft_ids)
    if isinstance(draft, Eagle3Draft):
        copy_target_head(draft, target)
    if given is not None:
        shared = copy_draft(given, draft)
        say(f"first weights from the draft in {init}")
        if recount:
            new = config.draft_vocab_size - shared
            gone = given.config.draft_vocab_size - shared
            say(f"draft vocabulary: {shared} ids as in {init}, {new} new ones, {gone} of its own left out")
    elif init == "target-layers":
        say(_from_target_layers(draft, target))
    if recipe.training.markov_init == "bigram" and given is None and isinstance(draft, DSparkDraft):
        say(start_from_bigrams(draft, rows))
    draft.bind(target.embedding_weight.detach(), target.head_weight.detach())
    return draft


def _from_target_layers(draft: Draft, target: Target) -> str:
    """Copy what fits of the target's last layers; a line that says so."""
    if isinstance(draft, Eagle3Draft):
        return f"first weights from the target's last layer and head ({len(copy_target_layer(draft, target))} tensors)"
    count = len(copy_target_layers(draft, target))
    return f"first weights from the target's last {draft.config.num_hidden_layers} layers ({count} tensors)"


def prompt_texts(recipe: Recipe, target: Target) -> list[list[int]]:
    """Token ids of the prompts in data.vocabulary_prompts (none when it is not given)."""
    path = recipe.data.vocabulary_prompts
    turns = [turn for prompt in read_prompts(path) for turn in prompt.turns] if path is not None else []
    return [target.tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]


def _check_same_kind(given: Config, wanted: Config, free: set[str]) -> None:
    if type(given) is not type(wanted):
        remedy = f"is not of the recipe's kind, {type(wanted).__name__}"
        raise DsparkError("training.init", type(given).__name__, remedy)
    mine, theirs = wanted.model_dump(), given.model_dump()
    for field, value in mine.items():
        if field not in free and theirs[field] != value:
            remedy = f"the draft named by training.init has {theirs[field]!r}; the recipe must say the same"
            raise DsparkError(f"draft.{field}", value, remedy)


def memory_estimate(recipe: Recipe, draft: Draft, target: Target, rows: Sequence[Row]) -> dict[str, int]:
    """Bytes by purpose of one step, from shapes alone; activations are an upper estimate.

    The loss part is one chunk's [chunk * gamma, K] logits, their softmax and the target's distribution.
    """
    c, training = draft.config, recipe.training
    parameters = sum(p.numel() for p in draft.parameters())
    frozen = {id(w): w.numel() * w.element_size() for w in (target.embedding_weight, target.head_weight)}
    model = getattr(target, "model", None)
    if isinstance(model, nn.Module):
        frozen = {id(w): w.numel() * w.element_size() for w in model.parameters()}
    lengths = sorted((min(len(row.ids), recipe.data.max_length) for row in rows), reverse=True)
    tokens = sum(lengths[: training.rows_per_step])
    slots = training.rows_per_step * training.anchors_per_row * c.slots(c.gamma)
    features = 3 * tokens * ((len(c.target_layer_ids) + 1) * c.hidden_size + 1) * 4  # this step's and two read ahead
    activations = 4 * _activations(c, slots, tokens, lengths[0])
    chunk = min(training.loss_chunk or 10**9, training.rows_per_step * training.anchors_per_row)
    logits = min(
        4 * chunk * c.gamma * c.draft_vocab_size * 4, 4 * CHUNK_BYTES if training.loss_chunk is None else 2**62
    )
    return {
        "target": sum(frozen.values()),
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "AdamW": 8 * parameters,
        "features": features,
        "activations": activations,
        "loss": logits,
    }


def _activations(c: Config, slots: int, tokens: int, longest: int) -> int:
    """Numbers kept for the backward pass: of `slots` slots (or steps) in a row of `tokens`, the longest document given.

    An EAGLE-3 layer also keeps the 2d wide inputs and the keys of the whole row.
    """
    heads, key_width, value_width = c.cached_shape
    kv, width = heads * (key_width + value_width), c.num_attention_heads * key_width
    per_slot = 8 * c.hidden_size + 4 * width + 2 * kv + 4 * c.intermediate_size
    scores = c.num_attention_heads * slots * (longest + c.slots(c.gamma)) * 2
    if isinstance(c, Eagle3Config):
        return slots * (per_slot + 4 * c.hidden_size) + tokens * (2 * kv + 4 * c.hidden_size) + scores
    return c.num_hidden_layers * (slots * per_slot + tokens * 2 * kv + scores)
