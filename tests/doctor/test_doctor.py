"""The healthy pair, the command, the report and its parts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tests.doctor.conftest import TOKENS, edit, levels, texts

from dspark.bench.contenders import Captured
from dspark.calibration.cost import CostProfile, CostSettings, DraftPoint, VerifyPoint
from dspark.decoding.request import Round
from dspark.doctor.costs import EngineCosts, read_costs
from dspark.doctor.diagnose import Diagnosis, Settings, diagnose
from dspark.doctor.findings import Finding, check_of, exit_code
from dspark.doctor.forecast import forecast
from dspark.doctor.identity import usual_taps
from dspark.doctor.positions import GOLDEN, check_golden
from dspark.doctor.static import static_checks
from dspark.doctor.trial import Answers, mean_interval
from dspark.errors import DsparkError

Check = Callable[..., Diagnosis]


def test_a_healthy_pair(healthy: Path, check: Check) -> None:
    steps: list[str] = []
    found = diagnose(check(healthy).settings, steps.append)
    assert not steps and not [one for one in found.findings if one.level in ("loses", "broken")]
    found = check(healthy, run=True)
    assert found.code in (0, 1) and "broken" not in {one.level for one in found.findings}, texts(found.findings)
    ran = {one.check for one in found.findings if one.level == "ok"}
    assert {"states", "features", "first-draft", "acceptance", "served-ids", "replay", "layer-ids"} <= ran
    assert found.forecast is not None and [row.n for row in found.forecast.rows] == [1, 2, 3, 4]
    assert found.forecast.rows[-1].length.value > 1.5


def test_static_checks_give_findings_in_order(healthy: Path, target_folder: Path) -> None:
    found = static_checks(str(target_folder), str(healthy), "vllm==0.31.0", context=60)
    assert [one.check for one in found][:4] == ["files", "target-depth", "target-width", "target-name"]
    assert any("was read at 0.32.0; 0.31.0 may differ" in one.text for one in found)
    assert {one.level for one in found} <= {"ok", "note"}, texts(found)


def test_a_recipe_and_a_target_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = static_checks("moonshotai/Kimi-K2.6", "kimi-k2.6", "vllm", context=20000)
    by_check = {one.check: one.level for one in found}
    assert by_check["files"] == by_check["mask-token"] == by_check["prompt-recipe"] == "skipped"
    assert by_check["target-depth"] == by_check["vocabulary"] == by_check["trained-length"] == "ok"


def test_what_a_foreign_file_lacks_is_taken_from_the_target(healthy: Path, check: Check, tmp_path: Path) -> None:
    folder = shutil.copytree(healthy, tmp_path / "foreign")
    edit(folder, ("lm_head_in_file", "target_name", "num_target_layers", "training_length"))
    found = check(folder, run=True)
    assert found.code in (0, 1) and levels(found, "target-depth") == ["note", "ok"], texts(found.findings)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"engine": "triton"}, "engine"),
        ({"engine": "vllm==new"}, "engine"),
        ({"target": "no/such/folder"}, "target"),
        ({"profile": "nowhere.json"}, "profile"),
        ({"tokens": 2}, "tokens"),
    ],
)
def test_settings_that_mean_nothing(healthy: Path, check: Check, settings: dict[str, Any], field: str) -> None:
    with pytest.raises(DsparkError) as error:
        check(healthy, **settings)
    assert error.value.field == field


def test_a_profile_nested_too_deep(healthy: Path, check: Check, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100000)
    with pytest.raises(DsparkError, match="cannot be read"):
        check(healthy, profile=str(tmp_path / "deep.json"))


def test_a_draft_of_the_hub_that_cannot_be_had(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of every command that takes one."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = check("nobody/nothing")
    (one,) = [one for one in found.findings if one.check == "files"]
    assert one.level == "broken" and "no draft of that name came from the hub" in one.text


def test_no_draft_there(check: Check, tmp_path: Path) -> None:
    found = check(tmp_path / "nothing", run=True)
    assert found.code == 2 and found.verdict == "broken: files" and levels(found, "run") == ["skipped"]


def test_engines_have_costs_of_their_own(healthy: Path, check: Check, tmp_path: Path) -> None:
    found = check(healthy, run=True, engine="vllm")
    assert found.forecast is None and levels(found, "forecast") == ["skipped"]
    costs = EngineCosts(engine="vllm", source="a test", plain=0.01, rounds={2: 0.012, 4: 0.05, 9: 0.1})
    costs.save(tmp_path / "vllm.json")
    found = check(healthy, run=True, engine="vllm", profile=str(tmp_path / "vllm.json"))
    assert found.forecast is not None and [row.n for row in found.forecast.rows] == [2, 4]
    assert found.forecast.best.n == 2 and found.forecast.rows[1].speedup.value < 1 < found.forecast.best.speedup.value
    with pytest.raises(DsparkError, match="is of the engine vllm, and dspark is asked about"):
        check(healthy, profile=str(tmp_path / "vllm.json"))


def test_llamacpp_with_a_python_that_has_none(healthy: Path, check: Check, tmp_path: Path) -> None:
    given = {"engine": "llamacpp", "engine_python": "/bin/false", "engine_target": str(tmp_path / "no.gguf")}
    found = check(healthy, run=True, **given)
    assert found.forecast is None and "must be the target's .gguf file" in texts(found.findings)


# The forecast


def answers(*counts: int) -> Answers:
    rows = [Captured([5, 6], list(range(10, 11 + count)), torch.zeros(1, 1), (0,)) for count in counts]
    return Answers((0,), list(range(len(rows))), rows, [False] * len(rows))


def rounds(*accepted: int) -> list[Round]:
    return [Round(3, 3, one) for one in accepted]


def test_expected_speedup_by_hand() -> None:
    costs = EngineCosts(engine="dspark", source="a test", plain=0.010, rounds={3: 0.015})
    found = forecast(answers(8, 6), {3: [rounds(3, 3), rounds(1, 1, 1)]}, costs)
    row = found.rows[0]
    assert row.tokens == pytest.approx(14 / 5) and row.cost == pytest.approx(1.5)
    assert row.speedup.value == pytest.approx(14 / 5 / 1.5)
    assert row.length.value == pytest.approx((4 + 2) / 2)
    assert row.speedup.low is not None and row.speedup.low <= row.speedup.value <= (row.speedup.high or 0)
    assert found.worth_it and "n = 3" in found.advice
    assert json.loads(json.dumps(found.to_json()))["best_n"] == 3


def test_not_worth_it_says_why() -> None:
    costs = EngineCosts(engine="llamacpp", source="a test", plain=0.010, rounds={3: 0.030})
    found = forecast(answers(8, 6), {3: [rounds(3, 3), rounds(1, 1, 1)]}, costs)
    assert not found.worth_it and found.to_json()["best_n"] is None
    assert found.advice.startswith("do not bother: the best, n = 3, is expected to run at 0.93x")
    assert "a round costs 3.00 plain passes and makes 2.80 tokens" in found.advice
    settings = Settings("t", "d")
    assert Diagnosis(settings, [], found).code == 1 and Diagnosis(settings, []).code == 0


def test_costs_from_a_cost_profile(tmp_path: Path) -> None:
    settings = CostSettings(target="t", draft="d", dtype="float32", threads=2, context=256, n=3, repeats=3)
    verify = tuple(VerifyPoint(counts=(count,), seconds=0.01 + 0.001 * count) for count in (1, 4, 8))
    profile = CostProfile(machine={}, settings=settings, verify=verify, draft=(DraftPoint(requests=1, seconds=0.002),))
    profile.save(tmp_path / "cost.json")
    found = read_costs(tmp_path / "cost.json", "dspark", 7)
    assert found.plain == pytest.approx(0.011) and found.rounds == {3: pytest.approx(0.016)}
    (tmp_path / "cost.json").write_text('{"engine": "dspark", "plain": -1}')
    with pytest.raises(DsparkError, match="mend it, or measure it again"):
        read_costs(tmp_path / "cost.json", "dspark", 7)


def test_intervals_are_seeded() -> None:
    assert mean_interval([1.0, 2.0, 3.0]) == mean_interval([1.0, 2.0, 3.0])
    found = mean_interval([2.0])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


# Parts


def test_exit_codes_and_names() -> None:
    made = {level: Finding("x", level, "") for level in ("ok", "note", "loses", "broken", "skipped")}
    assert exit_code([made["ok"], made["note"], made["skipped"]]) == 0
    assert exit_code([made["ok"], made["loses"]]) == 1 and exit_code(made.values()) == 2
    assert check_of(DsparkError("rope_parameters.factor", 1, "x")) == "rotary"
    assert check_of(DsparkError("fc.weight", "NaN", "must be finite; x")) == "finite"
    assert check_of(DsparkError("model-1.safetensors", "x", "y")) == "files"
    assert check_of(DsparkError("hidden_act", None, "x")) == "config"


def test_golden_frequencies_are_those_of_the_formulas() -> None:
    """YaRN as its paper has it: between two rotations counts, a ramp from extrapolation to interpolation."""
    assert check_golden().level == "ok"
    for golden in GOLDEN:
        rope = golden.rope_parameters
        dims, base = int(golden.head_dim * rope.get("partial_rotary_factor", 1.0)), rope["rope_theta"]
        plain = [base ** (-2 * i / dims) for i in range(dims // 2)]
        if rope["rope_type"] == "yarn":
            factor, original = rope["factor"], rope["original_max_position_embeddings"]

            def turns(count: float, dims: int = dims, base: float = base, original: int = original) -> float:
                return dims * math.log(original / (count * 2 * math.pi)) / (2 * math.log(base))

            low, high = max(math.floor(turns(32)), 0), min(math.ceil(turns(1)), dims - 1)
            ramp = [min(max((i - low) / (high - low), 0.0), 1.0) for i in range(dims // 2)]
            plain = [f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]
            assert golden.factor == pytest.approx(0.1 * math.log(factor) + 1)
        picked = plain[0], plain[1], plain[len(plain) // 2], plain[-1]
        assert golden.frequencies == pytest.approx(picked, rel=1e-6)


def test_usual_taps() -> None:
    assert usual_taps(36, 5) == [1, 9, 17, 25, 33]


# The command


def test_the_command_shows_a_table_and_a_verdict(
    run: Callable[..., tuple[int, str, str]], healthy: Path, target_folder: Path, prompts: Path, tmp_path: Path
) -> None:
    given = ["doctor", "--target", target_folder, "--draft", healthy, "--prompts", prompts, "--tokens", TOKENS]
    code, out, _ = run(*given, "--save-costs", tmp_path / "costs.json")
    assert code in (0, 1) and "forecast for dspark, measured here" in out and "break-even" in out
    code, out, _ = run(*given, "--profile", tmp_path / "costs.json", "--json")
    found = json.loads(out)
    assert set(found) == {"version", "verdict", "exit_code", "findings", "forecast", "versions", "settings"}
    assert found["exit_code"] == code and {row["n"] for row in found["forecast"]["rows"]} == {1, 2, 3, 4}
    assert set(found["findings"][0]) == {"check", "level", "text"}


def test_the_command_on_a_broken_draft(
    run: Callable[..., tuple[int, str, str]], copied: Path, target_folder: Path
) -> None:
    edit(copied, mask_token_id=-1)
    code, out, _ = run("doctor", "--target", target_folder, "--draft", copied, "--quick")
    assert code == 2 and "broken: mask-token" in out


def test_the_command_alone_tells_the_machine(run: Callable[..., tuple[int, str, str]], target_folder: Path) -> None:
    code, out, _ = run("doctor")
    assert code == 0 and "processor" in out and "kernels" in out
    assert json.loads(run("doctor", "--json")[1])["torch"]
    code, _, err = run("doctor", "--target", target_folder)
    assert code == 2 and "draft = None" in err
    code, _, err = run("doctor", "--engine", "vllm")
    assert code == 2 and "draft = None" in err and "beside --engine" in err


@pytest.mark.slow
def test_the_shipped_pair(embedded_path: Path) -> None:
    found = diagnose(Settings("embedded", "embedded"))
    assert found.code in (0, 1) and "broken" not in {one.level for one in found.findings}, texts(found.findings)
    for name in ("states", "first-draft", "served-ids", "replay"):
        assert levels(found, name) == ["ok"], texts(found.findings)
    assert found.forecast is not None and found.forecast.rows[-1].length.value > 1.8
