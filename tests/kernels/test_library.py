"""Which kernels are used, and that DSPARK_KERNELS says so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.conftest import small_target

from dspark.errors import DsparkError
from dspark.kernels import library
from dspark.kernels.matrix import packable
from dspark.targets.packed import PackedLinear

WIDTHS = {"avx512": 16, "avx2": 8, "plain": 4}


def test_each_kind_is_used_when_asked_for(kind: str) -> None:
    """Its own file is loaded, not another's: they count their vectors' numbers."""
    assert library.kind() == kind and library.library().dspark_vector_width() == WIDTHS[kind]
    target = small_target()
    assert target._compiled is not None
    ids = torch.arange(30)
    wanted = small_target(packed=False)
    ours, plain = (one.forward([(one.new_state(30), ids)]).logits for one in (target, wanted))
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def built() -> list[str]:
    """The widest first."""
    found = {path.name.split(".")[0] for path in Path(library.__file__).parent.glob("_*.*")}
    return [kind for kind in library.KINDS if f"_{kind}" in found]


@pytest.mark.parametrize("capability", ["AVX512", "AVX2", "DEFAULT"])
def test_the_widest_that_the_processor_runs_is_used(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """Another one's instructions would end the process, also when it is asked for."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    runs = {"AVX512": ["avx512", "avx2", "plain"], "AVX2": ["avx2", "plain"], "DEFAULT": ["plain"]}[capability]
    fitting = [kind for kind in built() if kind in runs]
    monkeypatch.delenv(library.SETTING, raising=False)
    assert library.kind() == next(iter(fitting), None)
    for wanted in library.KINDS:
        monkeypatch.setenv(library.SETTING, wanted)
        assert library.kind() == (wanted if wanted in fitting else None)
    monkeypatch.setenv(library.SETTING, "")
    assert library.kind() == next(iter(fitting), None)


def test_none_leaves_everything_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SETTING, "none")
    assert library.kind() is None and library.library() is None and not packable(torch.randn(32, 32))
    target, plain = small_target(), small_target(packed=False)
    layers = [module for module in target.model.modules() if isinstance(module, PackedLinear)]
    assert target._compiled is None and len(layers) == 3 * 7 + 1
    assert {layer.storage for layer in layers} == {"float32"}
    state = target.new_state(40)
    out = target.forward([(state, torch.arange(40))], taps=[0, 2])
    wanted = plain.forward([(plain.new_state(40), torch.arange(40))], taps=[0, 2])
    assert out.best is None
    torch.testing.assert_close(out.logits, wanted.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.taps, wanted.taps, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", ["sse", "AVX2", "avx2,plain", " "])
def test_another_name_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Silently using others would make whoever compares kinds compare one with itself."""
    monkeypatch.setenv(library.SETTING, value)
    for use in (library.kind, library.library, small_target):
        with pytest.raises(
            DsparkError, match=f"DSPARK_KERNELS = '{value}': must be one of avx512, avx2, plain or none"
        ):
            use()


def test_the_command_says_so_in_one_line(run: Callable[..., tuple[int, str, str]], monkeypatch: Any) -> None:
    monkeypatch.setenv(library.SETTING, "neon")
    code, out, error = run("doctor")
    assert (code, out) == (2, "") and "DSPARK_KERNELS = 'neon'" in error and len(error.splitlines()) == 1


def test_pytorch_keeps_to_one_thread_beside_the_kernels() -> None:
    """Its threads would stay awake where the kernels' should run; afterwards everything is as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with pytest.raises(ValueError), library.own_threads():
            with library.own_threads():
                assert (torch.get_num_threads(), library.threads()) == ((1, 3) if library.kind() else (3, 3))
            assert library.threads() == 3
            raise ValueError
        assert (torch.get_num_threads(), library.threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(shutil.which("c++") is None, reason="without a compiler there are none, and that is tested apart")
@pytest.mark.skipif(os.environ.get(library.SETTING) == "none", reason="they are turned off")
def test_where_there_is_a_compiler_they_were_built() -> None:
    """Else every test of them would be left out, and nobody would notice."""
    assert library.kind() is not None, "reinstall the package"
