"""The wheel with its compiled kernels and, where there is no compiler, without: it installs and answers the same."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROBE = """
import sys, torch
import dspark
from dspark.kernels.library import KINDS, explain, load
from dspark.targets.transformers import load_target
assert dspark.__file__.startswith(sys.argv[1]), dspark.__file__
target = load_target(sys.argv[2])
ids = torch.arange(5, 25)
out = target.forward([(target.new_state(32), ids)])
print([kind for kind in KINDS if load(kind) is not None], out.logits.argmax(-1).tolist(), explain(), sep="\\n")
"""


@pytest.mark.parametrize("compiler", [True, False], ids=["compiler", "no compiler"])
def test_wheel(tmp_path, tiny_llama_folder, compiler):
    nothing = {} if compiler else {"CC": "/bin/false", "CXX": "/bin/false"}
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", wheels, source], check=True, env=os.environ | nothing)
    (wheel,) = wheels.glob("dspark-*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    probe = [sys.executable, "-c", PROBE, str(site), str(tiny_llama_folder)]
    found = subprocess.run(
        probe, check=True, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(site)}
    )
    built, ids, line = found.stdout.splitlines()[-3:]
    assert ("plain" in built) == compiler and ("none were built" in line) != compiler
    here = subprocess.run(
        [sys.executable, "-c", PROBE.replace("assert", "# "), "", str(tiny_llama_folder)],
        check=True, capture_output=True, text=True, env=os.environ | {"DSPARK_KERNELS": "none"},
    )  # fmt: skip
    assert ids == here.stdout.splitlines()[-2]
