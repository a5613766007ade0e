"""The demo end to end on a tiny pair, and how it fits its answers to a slow machine."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from dspark.data.prompts import Prompt
from dspark.demo import FEWEST_TOKENS, fit_tokens, run_demo
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget


def test_demo_prints_the_table_and_writes_the_page(
    target: TransformersTarget, draft: DSparkDraft, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=80)
    prompts = [Prompt(f"maths/{i}", (f"what is {i} + {i}?",)) for i in range(3)]
    out = tmp_path / "demo.html"
    comparison = run_demo(target, draft, out, prompts=prompts, max_tokens=16, weights="rounded, 3 MB", console=console)
    assert comparison.lossless and len(comparison.runs["n = 7"]) == 3
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in (
        "plain",
        "n = 3",
        "n = 7",
        "bonus counted",
        "same tokens in every mode",
        "rounded, 3 MB",
        "demo.html",
    ):
        assert expected in text
    row = next(line for line in text.splitlines() if line.startswith("n = 7"))
    assert "x [" in row and "…" not in text  # the row is whole within 80 columns
    page = out.read_text(encoding="utf-8")
    assert "what is 2 + 2?" in page and "up to 16 tokens an answer" in page
    assert "overlap with the training prompts: unknown" in text and "does not list them" in page


def test_a_slow_machine_gets_shorter_answers() -> None:
    fast = [(0.2, 0.1)] * 3
    assert fit_tokens(fast, 15, 64, budget=300) == 64  # 15 x 3 x (0.2 + 6.4) = 297 s
    slow = [(0.4, 0.2)] * 3
    tokens = fit_tokens(slow, 15, 64, budget=300)
    assert FEWEST_TOKENS < tokens < 64 and 15 * 3 * (0.4 + 0.2 * tokens) == pytest.approx(300, rel=0.05)
    assert fit_tokens([(9.0, 5.0)] * 3, 15, 64, budget=300) == FEWEST_TOKENS
    assert fit_tokens([(9.0, 5.0)] * 3, 15, 8, budget=300) == 8
