from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from dspark.drafts.config import DraftConfig
from dspark.drafts.rope import ROPE_TYPES, Rotary, check_rope, inverse_frequencies
from dspark.errors import DsparkError

# Stored golden values for head_dim 8 and theta 100: inverse frequencies and the factor on cos and sin. By hand:
# default 100^(-i/4); linear the same / 4; a partial factor of 0.5 leaves 4 rotated dims, 100^(-i/2); the longrope row
# divides by its long factors. The others were computed once with Transformers 5.24.
ORIGINAL = {"original_max_position_embeddings": 64}
GOLDEN = {
    "default": ({"rope_type": "default"}, [1.0, 0.31622776, 0.1, 0.031622777], 1.0),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.5}, [1.0, 0.1], 1.0),
    "linear": ({"rope_type": "linear", "factor": 4.0}, [0.25, 0.07905694, 0.025, 0.0079056947], 1.0),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, [1.0, 0.31622776, 0.1, 0.031622777], 1.0),
    "yarn": (
        {"rope_type": "yarn", "factor": 16.0, **ORIGINAL},
        [1.0, 0.21740657, 0.037499998, 0.0019764237],
        1.27725887,
    ),
    "yarn-partial": (
        {
            "rope_type": "yarn",
            "factor": 16.0,
            "partial_rotary_factor": 0.5,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 4.0,
            **ORIGINAL,
        },
        [1.0, 0.053125],
        1.0,
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
        [1.0, 0.24438459, 0.013042256, 0.0039528473],
        1.0,
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            **ORIGINAL,
        },
        [1.0, 0.15811388, 0.033333335, 0.0079056947],
        1.15470054,
    ),
    "proportional": ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, [1.0, 0.31622776, 0.0, 0.0], 1.0),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_frequencies(fields, name) -> None:
    parameters, frequencies, factor = GOLDEN[name]
    found, scale = inverse_frequencies(DraftConfig(**fields(rope_parameters={**parameters, "rope_theta": 100.0})))
    torch.testing.assert_close(found, torch.tensor(frequencies), rtol=2e-7, atol=0)
    assert scale == pytest.approx(factor, rel=1e-8)


def test_every_type_has_a_golden_vector() -> None:
    assert {parameters["rope_type"] for parameters, _, _ in GOLDEN.values()} == set(ROPE_TYPES)


def test_golden_frequencies_of_the_kimi_k3_draft() -> None:
    """YaRN 16 over 65,536: fast dims untouched, slow dims divided by 16, cos and sin scaled by 0.1 ln 16 + 1."""
    values = yaml.safe_load((files("dspark") / "recipes" / "kimi-k3.yaml").read_text(encoding="utf-8"))
    found, factor = inverse_frequencies(DraftConfig(**values["draft"]))
    assert len(found) == 32
    picked = torch.tensor([1.0, 0.74989420, 0.56234133, 0.01, 4.9586637e-05, 2.7567992e-05])
    torch.testing.assert_close(found[[0, 1, 2, 16, 30, 31]], picked, rtol=2e-7, atol=0)
    assert factor == pytest.approx(1.27725887, rel=1e-8)


@pytest.mark.parametrize("name", ["yarn", "llama3", "longrope"])
def test_original_length_is_required(fields, name) -> None:
    parameters = {k: v for k, v in GOLDEN[name][0].items() if k not in ORIGINAL}
    with pytest.raises(DsparkError, match="original_max_position_embeddings"):
        DraftConfig(**fields(rope_parameters={**parameters, "rope_theta": 100.0}))


@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_rotation_equals_transformers_qwen3(fields, name) -> None:
    parameters = {**GOLDEN[name][0], "rope_theta": 100.0}
    rotary = Rotary(DraftConfig(**fields(rope_parameters=parameters)))
    reference = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=24,
            num_attention_heads=4,
            head_dim=8,
            max_position_embeddings=256,
            rope_parameters=dict(parameters),
        )
    )
    x = torch.randn(1, 3, 7, 8)
    positions = torch.tensor([[0, 1, 5, 63, 64, 200, 1500]])
    cos, sin = reference(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    mine_cos, mine_sin = rotary.tables(1501, x)
    mine = rotary.rotate(x[0].transpose(0, 1), mine_cos[positions[0]][:, None], mine_sin[positions[0]][:, None])
    torch.testing.assert_close(mine.transpose(0, 1), expected[0], rtol=1e-6, atol=1e-6)


def test_partial_rotation_leaves_the_rest_alone(fields) -> None:
    rotary = Rotary(
        DraftConfig(
            **fields(rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5})
        )
    )
    x = torch.randn(5, 2, 8)
    cos, sin = rotary.tables(5, x)
    out = rotary.rotate(x, cos[:5, None], sin[:5, None])
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert not torch.allclose(out[1:, :, :4], x[1:, :, :4])


@pytest.mark.parametrize(
    "wrong", [{"attention_factor": []}, {"beta_fast": "x"}, {"rope_theta": 1}, {"original_max_position_embeddings": 0}]
)
def test_values_that_transformers_trips_over_are_one_readable_error(fields, wrong) -> None:
    parameters = {**GOLDEN["yarn"][0], "rope_theta": 100.0, **wrong}
    with pytest.raises(DsparkError, match="rope_parameters") as caught:
        DraftConfig(**fields(rope_parameters=parameters))
    assert "\n" not in str(caught.value)


YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
NO_NUMBERS = (float("nan"), float("inf"), -1.0, 0, True, "4", 10**400)


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("name", [*(name for name in YARN if name != "rope_type"), "attention_factor", "beta_fast"])
def test_what_is_no_number_above_0_is_named(name, value) -> None:
    with pytest.raises(DsparkError, match="finite number above 0") as caught:
        check_rope({**YARN, name: value})
    assert caught.value.field == f"rope_parameters.{name}"


def test_lists_and_other_keys_hold_no_nan() -> None:
    for change in ({"long_factor": [1.0, float("nan")]}, {"mscale": float("inf")}, {"partial_rotary_factor": 0}):
        with pytest.raises(DsparkError):
            check_rope({**YARN, **change})
    check_rope({**YARN, "attention_factor": None, "mscale": 0})
