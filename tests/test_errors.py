"""The remedy that installs something names the Python that runs, however it was called."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dspark.data.prompts import read_prompts
from dspark.errors import DsparkError, pip_install


@pytest.mark.parametrize(
    ("python", "shown"),
    [
        ("work/.venv/bin/python", ".venv/bin/python -m pip install 'dspark[demo]'"),
        ("elsewhere/python", "{root}/elsewhere/python -m pip install 'dspark[demo]'"),
    ],
)
def test_pip_is_that_of_this_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str, shown: str) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "executable", str(tmp_path / python))
    assert pip_install("'dspark[demo]'") == shown.format(root=tmp_path)


def test_a_public_set_without_its_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DsparkError) as caught:
        read_prompts("hub:gsm8k")
    assert caught.value.remedy.endswith(f"{Path(sys.executable).name} -m pip install datasets")
