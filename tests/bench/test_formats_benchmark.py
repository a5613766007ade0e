"""benchmarks/formats.py on a tiny target: our kernels beside PyTorch's, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import formats as benchmark

import engine
from dspark.errors import DsparkError
from dspark.kernels.library import library

OURS = {"ours, int8 weights": (1, 0.02), "ours, fp16 weights": (2, 1e-3), "ours, bf16 weights": (2, 0.005)}


@pytest.mark.skipif(library() is None, reason="the compiled kernels are not built here")
def test_our_formats_beside_plain_layers(
    tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine, "BUFFER", 2**16)
    options = ["--formats=ours,F.linear", "--rows=1,3", "--repeats=1", f"--target={tiny_llama_folder}"]
    assert benchmark.main(options) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    rows, floor = result["formats"], result["values"] / result["read_bytes_per_s"] * 1000
    for name, (size, error) in OURS.items():
        assert list(rows[name]["ms"]) == ["1", "3"] and 0 < rows[name]["error"] < error
        assert rows[name]["floor_ms"] >= size * floor
    assert rows["ours, exact"]["stored"] == ["float32"] and rows["ours, exact"]["error"] < 1e-6
    assert rows["ours, exact"]["bytes"] >= 4 * result["values"]  # outputs fill up to a multiple of 32
    assert "ours, exact" in captured.err and "torchao" not in captured.err


def test_what_is_not_there_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise ImportError("No module named 'torchao'")

    monkeypatch.setitem(benchmark.FORMATS, "absent", absent)  # type: ignore[arg-type]
    assert benchmark.measure([], ["absent"], [1], 1) == {
        "absent": {"missing": "ImportError: No module named 'torchao'"}
    }
    with pytest.raises(DsparkError, match="formats = 'nope': fits none of ours, exact"):
        benchmark.main(["--formats=nope"])
