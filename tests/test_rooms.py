"""The order of the rooms, as the import contract in pyproject.toml states it, and that the contract bites."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = Path(sys.executable).with_name("lint-imports")


def lint(source: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINT), "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_rooms_import_only_the_rooms_before_them() -> None:
    done = lint(ROOT / "src")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("targets", "drafts"),
        ("drafts", "targets"),
        ("drafts", "decoding"),
        ("decoding", "checkpoints"),
        ("checkpoints", "data"),
        ("data", "training"),
        ("training", "calibration"),
        ("calibration", "bench"),
        ("bench", "doctor"),
        ("doctor", "serving"),
    ],
)
def test_an_import_against_the_order_is_found(tmp_path: Path, importer: str, imported: str) -> None:
    shutil.copytree(ROOT / "src" / "dspark", tmp_path / "dspark", ignore=shutil.ignore_patterns("assets", "*.pyc"))
    (tmp_path / "dspark" / importer / "planted.py").write_text(f"import dspark.{imported}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"dspark.{importer}.planted" in done.stdout and f"dspark.{imported}" in done.stdout


def test_a_module_without_a_place_is_found(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src" / "dspark", tmp_path / "dspark", ignore=shutil.ignore_patterns("assets", "*.pyc"))
    (tmp_path / "dspark" / "misplaced.py").write_text("")
    done = lint(tmp_path)
    assert done.returncode == 1 and "misplaced" in done.stdout, done.stdout + done.stderr
