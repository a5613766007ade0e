"""From a recipe to the things a run needs: rows, target, features, a draft with its first weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dspark.checkpoints.native import load_draft
from dspark.data.prompts import read_prompts
from dspark.data.rows import Row, check_ids, read_rows, row_notes, unique_rows
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.training.batches import cut, trainable
from dspark.training.bigrams import start_from_bigrams
from dspark.training.features import HEAD_CHUNK, Features, FeatureSource, InProcessFeatures, verify_features
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
) -> DraftConfig:
    """The recipe's draft config, checked against target and rows, with what only the data knows filled in.

    training_length is the longest of `train_rows` (all rows when it is None), prompt_recipe how prompts were rendered.
    Raises DsparkError when the target differs, or the mask token occurs in an answer.
    """
    config = recipe.draft_config()
    config.check_target(target.name, target.num_layers, target.hidden_size, target.vocab_size)
    emitted = {token for row in rows for token in row.answer_ids}
    if config.mask_token_id in emitted | set(target.stop_ids):
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
    recipe: Recipe, config: DraftConfig, target: Target, rows: Sequence[Row], draft_ids: list[int] | None, say: Say
) -> DSparkDraft:
    """A draft with its first weights (`training.init`), its vocabulary, and the target's embedding and head.

    draft_ids: the map of a saved run; it and, unless `training.init_vocabulary` is recount, the map of an init draft
    are reused as they are.
    """
    init, recount = recipe.training.init, recipe.training.init_vocabulary == "recount"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        draft = DSparkDraft(config)
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
    if given is not None:
        shared = copy_draft(given, draft)
        say(f"first weights from the draft in {init}")
        if recount:
            new = config.draft_vocab_size - shared
            gone = given.config.draft_vocab_size - shared
            say(f"draft vocabulary: {shared} ids as in {init}, {new} new ones, {gone} of its own left out")
    elif init == "target-layers":
        copied_names = copy_target_layers(draft, target)
        say(f"first weights from the target's last {config.num_hidden_layers} layers ({len(copied_names)} tensors)")
    if recipe.training.markov_init == "bigram" and given is None:
        say(start_from_bigrams(draft, rows))
    draft.bind(target.embedding_weight.detach(), target.head_weight.detach())
    return draft


@torch.no_grad()
def copy_draft(given: DSparkDraft, draft: DSparkDraft) -> int:
    """Take over all weights of a draft of the same kind, whose reduced vocabulary may be another one.

    Rows of W2 follow their target ids; those of ids that `given` has not keep what they are. Returns the shared ids.
    """
    place = torch.full((draft.config.vocab_size,), -1)
    place[given.draft_ids] = torch.arange(given.config.draft_vocab_size)
    source = place[draft.draft_ids]
    kept = source >= 0
    copied = dict(given.named_parameters())
    for name, parameter in draft.named_parameters():
        if name == "markov_head.markov_w2.weight":
            parameter[kept] = copied[name][source[kept]]
        else:
            parameter.copy_(copied[name])
    return int(kept.sum())


def prompt_texts(recipe: Recipe, target: Target) -> list[list[int]]:
    """Token ids of the prompts in data.vocabulary_prompts (none when it is not given)."""
    path = recipe.data.vocabulary_prompts
    turns = [turn for prompt in read_prompts(path) for turn in prompt.turns] if path is not None else []
    return [target.tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]


def _check_same_kind(given: DraftConfig, wanted: DraftConfig, free: set[str]) -> None:
    mine, theirs = wanted.model_dump(), given.model_dump()
    for field, value in mine.items():
        if field not in free and theirs[field] != value:
            remedy = f"the draft named by training.init has {theirs[field]!r}; the recipe must say the same"
            raise DsparkError(f"draft.{field}", value, remedy)


@torch.no_grad()
def copy_target_layers(draft: DSparkDraft, target: Target) -> list[str]:
    """Start from the target's last decoder layers: attention, MLP and norms where names and shapes agree.

    The context projection starts as the last tap alone, normalised as the target's own last layer would: the copied
    K/V projections then see what they were made for. Returns the names of the tensors set.
    """
    own = dict(draft.named_parameters())
    count = draft.config.num_hidden_layers
    first = target.num_layers - count
    done = []
    layers, final_norm = _decoder_weights(target)
    for index in range(count):
        for suffix, weight in layers.get(first + index, {}).items():
            name = f"layers.{index}.{suffix}"
            if name in own and own[name].shape == weight.shape:
                own[name].copy_(weight)
                done.append(name)
    if not done:
        raise DsparkError("training.init", "target-layers", "no layer of the target has the draft's shapes; use random")
    d, taps = draft.config.hidden_size, draft.config.target_layer_ids
    place = max(range(len(taps)), key=lambda i: taps[i])
    own["fc.weight"].mul_(0.1)  # small random parts for the other taps, so that they are not left out for good
    own["fc.weight"][:, place * d : (place + 1) * d].copy_(torch.eye(d))
    input_norm = layers[target.num_layers - 1].get("input_layernorm.weight")
    for name, source in (("hidden_norm.weight", input_norm), ("norm.weight", final_norm)):
        if source is not None and own[name].shape == source.shape:
            own[name].copy_(source)
            done.append(name)
    return [*done, "fc.weight"]


def _decoder_weights(target: Target) -> tuple[dict[int, dict[str, Tensor]], Tensor | None]:
    """({layer id: {name inside the layer: weight}}, final norm weight) of a target that holds a model."""
    model = getattr(target, "model", None)
    if not isinstance(model, nn.Module):
        raise DsparkError("training.init", "target-layers", "this target's layers are not in this process; use random")
    layers: dict[int, dict[str, Tensor]] = {}
    norm = None
    for name, weight in model.state_dict().items():
        if found := re.search(r"(?:^|\.)layers\.(\d+)\.(.+)$", name):
            layers.setdefault(int(found[1]), {})[found[2]] = weight
        elif re.search(r"(?:^|\.)norm\.weight$", name):
            norm = weight
    return layers, norm


def memory_estimate(recipe: Recipe, draft: DSparkDraft, target: Target, rows: Sequence[Row]) -> dict[str, int]:
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
    width = c.num_attention_heads * c.head_dim
    kv = 2 * c.num_key_value_heads * c.head_dim
    per_slot = 8 * c.hidden_size + 4 * width + 2 * kv + 4 * c.intermediate_size
    longest = lengths[0]
    scores = c.num_attention_heads * slots * (longest + c.slots(c.gamma)) * 2
    activations = 4 * c.num_hidden_layers * (slots * per_slot + tokens * 2 * kv + scores)
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
