"""Recipes: by name or path, overridden, and refused with the field and what it may be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.training.recipe import Recipe, load_recipe, recipe_names


def test_the_recipe_of_the_embedded_target() -> None:
    recipe = load_recipe("smollm2-135m")
    config = recipe.draft_config()
    assert (config.gamma, config.target_layer_ids, config.draft_vocab_size) == (7, (2, 9, 16, 23, 28), 12288)
    assert config.target_name == recipe.target == "embedded:smollm2-135m"
    assert recipe.training.loss.settings().decay == 4.0
    assert isinstance(recipe.training.lr, float)
    assert sum(p.numel() for p in DSparkDraft(config).parameters()) * 2 < 40 * 2**20


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_of_the_package_loads(name: str) -> None:
    assert load_recipe(name).draft_config().gamma >= 1


def test_overrides_reach_any_depth(tmp_path: Path) -> None:
    recipe = load_recipe(
        "smollm2-135m",
        [
            "training.steps=10",
            "training.lr=1e-3",
            "training.loss.decay=7",
            "data.rows=[a.jsonl, b.jsonl]",
            "data.features=null",
            "draft.block_size=5",
        ],
    )
    assert recipe.training.steps == 10 and recipe.training.lr == 1e-3 and recipe.training.loss.decay == 7.0
    assert recipe.data.rows == ("a.jsonl", "b.jsonl") and recipe.data.features is None
    assert recipe.draft_config().gamma == 5
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    assert load_recipe(path) == recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.compute_dtype=fp16", r"training\.compute_dtype = 'fp16'.*'fp32' or 'bf16'"),
        ("training.stepps=3", r"training\.stepps = 3: unknown key; allowed here: .*steps"),
        ("training.loss.gamma=3", r"training\.loss\.gamma = 3: unknown key; allowed here: .*decay"),
        ("training.lr=-1", r"training\.lr = -1.*greater than 0"),
        ("training.betas=[0.9, 1.0]", r"training\.betas.*\[0, 1\)"),
        ("data.validation_share=1.5", r"data\.validation_share = 1.5.*less than 1"),
        ("draft.block_sise=3", r"draft\.block_sise = 3"),
        ("draft.mask_token_id=50000", r"draft\.mask_token_id = 50000"),
        ("draft.target_layer_ids=[2, 30]", r"draft\.target_layer_ids = 30"),
        ("nothing.at=1", r"nothing = .*unknown key; allowed here: data, draft, name, serve, target, training"),
        ("training.steps", r"must be key=value"),
        ("name.inner=1", r"'name' is not a section"),
    ],
)
def test_bad_values_name_the_field(override: str, message: str) -> None:
    with pytest.raises(DsparkError, match=message):
        load_recipe("smollm2-135m", [override])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    content = yaml.safe_load(yaml.safe_dump(load_recipe("smollm2-135m").model_dump(mode="json")))
    path = tmp_path / "r.yaml"
    for field, remove in (("target", lambda c: c.pop("target")), (r"draft\.sample_from_anchor", _without_layout)):
        changed = yaml.safe_load(yaml.safe_dump(content))
        remove(changed)
        path.write_text(yaml.safe_dump(changed))
        with pytest.raises(DsparkError, match=f"{field} = None"):
            load_recipe(path)


def _without_layout(content: dict) -> None:
    del content["draft"]["sample_from_anchor"]


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match=r"one of .*smollm2-135m"):
        load_recipe("no-such-recipe")
    path = tmp_path / "r.yaml"
    path.write_text("a: [1")
    with pytest.raises(DsparkError, match="not valid YAML"):
        load_recipe(path)
    path.write_text("- 1")
    with pytest.raises(DsparkError, match="must be a mapping"):
        load_recipe(path)


def test_a_recipe_survives_its_own_dump(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe()
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize("override", ["training.warmup=.inf", "training.lr=.inf", "training.seed=9223372036854775808"])
def test_numbers_that_cannot_be_used_are_refused(override: str) -> None:
    with pytest.raises(DsparkError, match=override.partition("=")[0]):
        load_recipe("smollm2-135m", [override])


def test_a_recipe_that_is_not_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(DsparkError, match="UTF-8"):
        load_recipe(path)
