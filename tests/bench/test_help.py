"""The help of the programs that are no `dspark` command: an example, every default, what is written where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks import choices, engine, generate, train_step

from dspark.checkpoints import builtin

PROGRAMS = {
    "benchmarks/engine.py": engine.main,
    "benchmarks/generate.py": generate.main,
    "benchmarks/choices.py": choices.main,
    "benchmarks/train_step.py": train_step.main,
    "dspark.checkpoints.builtin": builtin.main,
}


def shown(main: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", PROGRAMS)
def test_help_has_an_example_and_no_made_up_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(PROGRAMS[name], capsys)
    assert f"python {'-m ' if name.startswith('dspark') else ''}{name} " in text
    assert not any(f"(default: {nothing})" in text for nothing in (None, False, [], 10**9))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("benchmarks/engine.py", ["embedded:smollm2-135m", "3,7", "256", "runs/peers", "not measured"]),
        ("benchmarks/generate.py", ["16,32,64", "generate,capture,train", "fp32,bf16", "0"]),
        ("benchmarks/choices.py", ["150.0", "7,3", "all"]),
        ("benchmarks/train_step.py", ["512", "49152", "all"]),
    ],
)
def test_help_shows_defaults(name: str, lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(PROGRAMS[name], capsys)
    for line in lines:
        assert f"(default: {line})" in text


def test_shipping_a_draft_warns_that_it_replaces_one(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(builtin.main, capsys)
    assert f"REPLACES the draft in {builtin.draft_folder('embedded')}" in text
