"""The state file is whole or absent, the vocabulary and the first weights are what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dspark.data.rows import Row, write_rows
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget
from dspark.training.batches import split_rows
from dspark.training.first_weights import copy_target_layers
from dspark.training.recipe import Recipe
from dspark.training.setup import (
    build_draft,
    finished_config,
    memory_estimate,
    open_features,
    read_training_rows,
)
from dspark.training.state import STATE_NAME, SavedState, data_fingerprint, save_state
from dspark.training.vocabulary import choose_draft_vocabulary

Make = Callable[..., Recipe]


def silent(_: str) -> None:
    return None


@pytest.fixture
def draft(make_recipe: Make, target: TransformersTarget, rows: list[Row]) -> DSparkDraft:
    recipe = make_recipe()
    return build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, silent)


def test_a_kill_while_saving_leaves_the_older_state(
    make_recipe: Make, draft: DSparkDraft, rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, optimizer = make_recipe(), torch.optim.AdamW(draft.parameters())
    args = (draft, optimizer, recipe, data_fingerprint(rows))
    save_state(tmp_path, *args, 1, {"acceptance": None, "step": None}, draft.draft_ids)
    before = (tmp_path / STATE_NAME).read_bytes()

    def killed(tensors: object, path: Path, metadata: object = None) -> None:
        Path(path).write_bytes(before[: len(before) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark.training.state.save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        save_state(tmp_path, *args, 2, {"acceptance": None, "step": None}, draft.draft_ids)
    assert (tmp_path / STATE_NAME).read_bytes() == before
    assert SavedState(tmp_path).step == 1


def test_a_state_from_before_a_setting_existed_goes_on_with_its_default(
    make_recipe: Make, draft: DSparkDraft, rows: list[Row], tmp_path: Path
) -> None:
    recipe, fingerprint = make_recipe(), data_fingerprint(rows)
    save_state(tmp_path, draft, torch.optim.AdamW(draft.parameters()), recipe, fingerprint, 1, {}, draft.draft_ids)
    saved = SavedState(tmp_path)
    del saved.recipe["training"]["block_widths"]
    saved.check(recipe, fingerprint)
    saved.recipe["training"]["no_longer_there"] = 1
    with pytest.raises(DsparkError, match="no_longer_there"):
        saved.check(recipe, fingerprint)
    other = recipe.model_copy(update={"training": recipe.training.model_copy(update={"block_widths": (1,)})})
    with pytest.raises(DsparkError, match="block_widths"):
        saved.check(other, fingerprint)


def test_damaged_states_are_refused(make_recipe: Make, draft: DSparkDraft, rows: list[Row], tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match="no saved run"):
        SavedState(tmp_path)
    optimizer = torch.optim.AdamW(draft.parameters())
    path = save_state(tmp_path, draft, optimizer, make_recipe(), data_fingerprint(rows), 1, {}, draft.draft_ids)
    saved = SavedState(tmp_path)
    del saved.tensors["parameter.fc.weight"]
    with pytest.raises(DsparkError, match=r"fc\.weight"):
        saved.restore(draft, optimizer)
    saved = SavedState(tmp_path)
    saved.tensors["exp_avg.fc.weight"] = torch.zeros(1)  # AdamW's fused step would read past its end
    with pytest.raises(DsparkError, match=r"moments of fc\.weight"):
        saved.restore(draft, optimizer)
    save_file({"x": torch.zeros(1)}, path, metadata={"format": "1", "run": "[]"})
    with pytest.raises(DsparkError, match="not a readable state"):
        SavedState(tmp_path)
    save_state(tmp_path, draft, optimizer, make_recipe(), data_fingerprint(rows), 1, {}, draft.draft_ids)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DsparkError, match="not a readable state"):
        SavedState(tmp_path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(DsparkError, match="not a readable state"):
        SavedState(tmp_path)


def test_vocabulary_is_the_most_frequent_ids(rows: list[Row]) -> None:
    row = rows[0].model_copy(update={"prompt_ids": [9, 70], "answer_ids": [9, 9, 9, 7, 7, 50, 60, 8]})
    assert choose_draft_vocabulary([row], 4, 100, {2}) == [2, 7, 8, 9]  # ties (8, 50, 60) by id
    assert choose_draft_vocabulary([row], 4, 100, {9, 60}) == [7, 8, 9, 60]
    told: list[str] = []
    assert choose_draft_vocabulary([row], 8, 100, {2}, told.append) == [0, 2, 7, 8, 9, 50, 60, 70]
    assert "100.00% of 8 answer tokens; to the 6 that occur come 1 of prompts and 1 low ids" in told[0]
    texts = [[9, 80, 81], [81]]  # words of prompts by frequency, before low ids
    assert choose_draft_vocabulary([row], 8, 100, {2}, texts=texts) == [2, 7, 8, 9, 50, 60, 70, 81]


def test_a_vocabulary_that_cannot_be_made_is_an_error(rows: list[Row]) -> None:
    with pytest.raises(DsparkError, match="needs answers to count"):
        choose_draft_vocabulary([], 4, 100, {2})
    with pytest.raises(DsparkError, match="draft_vocab_size"):
        choose_draft_vocabulary(rows, 1, 100, {2, 3})
    with pytest.raises(DsparkError, match="outside the target's vocabulary"):
        choose_draft_vocabulary(rows, 2, 10, {2})


def test_an_existing_vocabulary_is_reused(make_recipe: Make, target: TransformersTarget, rows: list[Row]) -> None:
    recipe = make_recipe()
    config = finished_config(recipe, target, rows)
    ids = list(range(30, 70))
    assert build_draft(recipe, config, target, rows, ids, silent).draft_ids.tolist() == ids


def test_seeded_first_weights(make_recipe: Make, target: TransformersTarget, rows: list[Row]) -> None:
    def first(seed: int) -> torch.Tensor:
        recipe = make_recipe(seed=seed)
        torch.manual_seed(123 + seed)  # whatever the process drew before
        draft = build_draft(recipe, finished_config(recipe, target, rows), target, rows, None, silent)
        return draft.state_dict()["fc.weight"]

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


def test_first_weights_from_the_targets_layers(draft: DSparkDraft, target: TransformersTarget) -> None:
    names = copy_target_layers(draft, target)
    weights = dict(draft.named_parameters())
    own = target.model.state_dict()
    assert {"layers.0.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight", "norm.weight"} <= set(names)
    assert torch.equal(weights["layers.0.self_attn.q_proj.weight"], own["model.layers.2.self_attn.q_proj.weight"])
    assert torch.equal(weights["layers.1.mlp.down_proj.weight"], own["model.layers.3.mlp.down_proj.weight"])
    assert torch.equal(weights["layers.1.self_attn.q_norm.weight"], torch.ones(8))
    assert torch.equal(weights["fc.weight"][:, 32:], torch.eye(32))  # tap 3 is the later one


def test_a_draft_for_another_target_is_refused(make_recipe: Make, target: TransformersTarget, rows: list[Row]) -> None:
    for change in ({"num_target_layers": 5}, {"hidden_size": 64}, {"vocab_size": 101}, {"target_name": "another"}):
        recipe = make_recipe(draft=change)
        with pytest.raises(DsparkError, match=next(iter(change))):
            finished_config(recipe, target, rows)
    emitted = rows[0].answer_ids[0]
    with pytest.raises(DsparkError, match="is a token the target emits"):
        finished_config(make_recipe(draft={"mask_token_id": emitted}), target, rows)


def test_the_prompt_recipe_comes_from_the_rows_notes(
    make_recipe: Make, target: TransformersTarget, rows: list[Row], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(row.model_dump_json() + "\n" for row in rows))
    notes = tmp_path / "rows.jsonl.meta.json"
    notes.write_text(f'{{"target": "{target.name}", "template_sha256": "abc", "thinking": null}}')
    recipe = make_recipe(data={"rows": str(path)})
    assert finished_config(recipe, target, rows).prompt_recipe == {"template_sha256": "abc", "thinking": None}
    stated = make_recipe(data={"rows": str(path)}, draft={"prompt_recipe": {"template_sha256": "x", "thinking": None}})
    with pytest.raises(DsparkError, match="template_sha256 = 'x'"):
        finished_config(stated, target, rows)
    notes.write_text('{"target": "another"}')
    with pytest.raises(DsparkError, match="was written by 'another'"):
        finished_config(recipe, target, rows)
    for damaged in ("{", "[]"):
        notes.write_text(damaged)
        with pytest.raises(DsparkError, match=r"rows\.jsonl\.meta\.json"):
            finished_config(recipe, target, rows)
    with pytest.raises(DsparkError, match="row ids appear twice"):
        read_training_rows(make_recipe(data={"rows": [str(path), str(path)]}))


def test_a_prompt_and_answer_in_two_files_is_read_once(make_recipe: Make, rows: list[Row], tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    recipe = make_recipe(data={"rows": [str(first), str(second)]})
    sampled = rows[0].model_copy(update={"id": "sampled", "temperature": 0.5})
    write_rows(first, rows[:3])
    write_rows(second, [sampled, rows[1], rows[3]])  # two processes may have answered equal prompts under one id
    said: list[str] = []
    assert read_training_rows(recipe, said.append) == rows[:4]
    assert len(said) == 1 and said[0].startswith("2 of 6 rows repeat")
    write_rows(second, [rows[1].model_copy(update={"answer_ids": rows[1].answer_ids[:-1], "finish": "length"})])
    with pytest.raises(DsparkError, match="row ids appear twice"):
        read_training_rows(recipe)


def test_held_out_prompts_keep_their_turns_together(make_recipe: Make, rows: list[Row]) -> None:
    for data in ({"held_out": 3}, {"held_out": None, "validation_share": 0.4}):
        train, held = split_rows(rows, make_recipe(data=data).data)
        assert len(train) + len(held) == len(rows) and train and held
        assert not {row.source for row in train} & {row.source for row in held}
        shuffled_train, shuffled_held = split_rows(rows[::-1], make_recipe(data=data).data)
        assert [row.id for row in shuffled_held] == [row.id for row in held]
        assert {row.id for row in shuffled_train} == {row.id for row in train}
    assert len({row.source for row in split_rows(rows, make_recipe(data={"held_out": 3}).data)[1]}) == 3
    with pytest.raises(DsparkError, match="no row to train on"):
        split_rows(rows, make_recipe(data={"held_out": 12}).data)


def test_a_prompt_under_two_ids_is_not_on_both_sides(make_recipe: Make, rows: list[Row]) -> None:
    data = make_recipe(data={"held_out": 1}).data
    held = split_rows(rows, data)[1][0]
    same = {"prompt_hash": "0" * 16}
    marked = [row.model_copy(update=same) if row.id == held.id else row for row in rows]
    other = next(row for row in split_rows(rows, data)[0] if row.turn == 0)
    twin = other.model_copy(update={"id": "twin", "source": "zz/8", **same})
    later = twin.model_copy(update={"id": "later", "turn": 1, "prompt_hash": "1" * 16})  # goes with its first turn
    asks_later = other.model_copy(update={"id": "first", "source": "zz/1", "prompt_hash": "2" * 16})
    same_words = asks_later.model_copy(update={"id": "second", "turn": 1, **same})
    train, _ = split_rows([*marked, twin, later, asks_later, same_words], data)
    usual, out = split_rows(rows, data)
    assert {row.id for row in train} == {row.id for row in usual} and [row.id for row in out] == [held.id]
    unmarked = held.model_copy(update={"id": "copy", "source": "zz/8"})  # no hash: the ids of the prompt tell
    assert {row.id for row in split_rows([*rows, unmarked], data)[0]} == {row.id for row in usual}


def test_a_row_that_was_edited_is_other_data(rows: list[Row]) -> None:
    edited = rows[2].model_copy(update={"answer_ids": [*rows[2].answer_ids[:-1], 5]})
    assert data_fingerprint([*rows[:2], edited, *rows[3:]]) != data_fingerprint(rows)


def test_answers_that_the_target_did_not_write_are_noticed(
    make_recipe: Make, target: TransformersTarget, rows: list[Row]
) -> None:
    told: list[str] = []
    open_features(make_recipe(), target, rows, told.append)
    assert not any("note" in line for line in told)
    foreign = [row.model_copy(update={"answer_ids": [7, 8] * 5}) for row in rows]
    open_features(make_recipe(), target, foreign, told.append)
    assert any("would have written 0% of the answer" in line for line in told)
    told.clear()
    sampled = [row.model_copy(update={"temperature": 0.7}) for row in foreign]
    open_features(make_recipe(), target, sampled, told.append)
    assert not any("note" in line for line in told)


def test_the_memory_estimate_counts_what_is_there(
    make_recipe: Make, draft: DSparkDraft, target: TransformersTarget, rows: list[Row]
) -> None:
    parts = memory_estimate(make_recipe(), draft, target, rows)
    parameters = sum(p.numel() for p in draft.parameters())
    assert parts["AdamW"] == 2 * parts["parameters"] == 8 * parameters
    assert parts["target"] == 4 * sum(p.numel() for p in target.model.parameters())
    more = memory_estimate(make_recipe(anchors_per_row=30), draft, target, rows)
    assert more["activations"] > 5 * parts["activations"] and more["loss"] == 10 * parts["loss"]


def test_rows_and_settings_that_cannot_be_trained_on_are_named_before_the_start(
    make_recipe: Make, target: TransformersTarget, rows: list[Row]
) -> None:
    with pytest.raises(DsparkError, match=r"data\.max_length"):
        finished_config(make_recipe(data={"max_length": 4}), target, rows)
    with pytest.raises(DsparkError, match=r"training\.replay_n"):
        finished_config(make_recipe(replay_n=9), target, rows)
    foreign = rows[0].model_copy(update={"prompt_ids": [5, target.vocab_size]})
    with pytest.raises(DsparkError, match=f"token id = {target.vocab_size}"):
        finished_config(make_recipe(), target, [foreign, *rows[1:]])
