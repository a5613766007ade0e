"""What is written is there whole or not at all, whoever else writes there and whatever stops it."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints.conftest import PLAIN, WHOLE, same_files

from dspark.checkpoints.convert import convert
from dspark.checkpoints.gguf_values import Written
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.staging import LEFT_BEHIND, staged
from dspark.checkpoints.zlab import export_zlab
from dspark.errors import DsparkError


@contextmanager
def small_files(limit: int):
    """A disk that is full after `limit` bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("form", ["native", "gguf"])
def test_of_two_conversions_to_one_place_the_second_is_refused(
    make_draft, write_target, tmp_path, monkeypatch, form
) -> None:
    """The second begins and ends while the first is writing, which then finds the place taken."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    save_draft(make_draft(**WHOLE, **rope, confidence_head_with_markov=True), tmp_path / "draft")
    save_draft(make_draft(**WHOLE, **rope, confidence_head_with_markov=True, markov_rank=5), tmp_path / "other")
    out = tmp_path / ("out.gguf" if form == "gguf" else "out")
    target = str(write_target()) if form == "gguf" else None
    fsync, once = os.fsync, []

    def interrupted(descriptor: int) -> None:
        if not once:
            once.append(True)
            convert(tmp_path / "other", form, out, target)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(DsparkError, match="exists"):
        convert(tmp_path / "draft", form, out, target)
    monkeypatch.undo()
    convert(tmp_path / "other", form, tmp_path / f"again{out.suffix}", target)
    assert same_files(out, tmp_path / f"again{out.suffix}")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_what_kills_left_is_removed_when_it_is_old_or_nobody_else_writes_there(tmp_path) -> None:
    for name in (".out.writing-a", ".out.writing-b", ".other.writing-a"):
        (tmp_path / name).mkdir()
    os.utime(tmp_path / ".out.writing-a", (0, time.time() - LEFT_BEHIND - 60))
    with staged(tmp_path / "out") as path:
        path.write_text("x")
        assert len(os.listdir(tmp_path)) == 3
    assert sorted(os.listdir(tmp_path)) == [".other.writing-a", ".out.writing-b"]
    with staged(tmp_path / "out", alone=True):
        pass
    assert os.listdir(tmp_path) == [".other.writing-a"]


def test_a_full_disk_is_one_line(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    dflash = make_draft(**WHOLE, **PLAIN)
    for attempt in (
        lambda: convert(tmp_path / "draft", "native", tmp_path / "out"),
        lambda: export_zlab(dflash, tmp_path / "out"),
        lambda: save_draft(dflash, tmp_path / "draft"),
    ):
        with small_files(4096), pytest.raises(DsparkError, match="check the free space"):
            attempt()
        assert os.listdir(tmp_path) == ["draft"] and load_draft(tmp_path / "draft").config.markov_rank == 3


def test_an_interrupt_is_one_while_an_array_is_written(tmp_path) -> None:
    """Again and again at another moment, for NumPy's own way turns only some of them into a TypeError."""
    array, before = np.zeros(2000, np.float32).view(Written), signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for attempt in range(400):
            with pytest.raises(KeyboardInterrupt), (tmp_path / "file").open("wb") as file:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + attempt * 5e-7)
                for _ in range(100_000):
                    array.tofile(file)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_links_lead_where_they_lead(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    (tmp_path / "empty").mkdir()
    for link, place in (("to-empty", "empty"), ("to-nothing", "nothing")):
        (tmp_path / link).symlink_to(tmp_path / place)
        convert(tmp_path / "draft", "native", tmp_path / link)
        assert (tmp_path / link).is_symlink() and same_files(tmp_path / "draft", tmp_path / place)
    save_draft(make_draft(**WHOLE, markov_rank=5), tmp_path / "to-empty")
    assert load_draft(tmp_path / "empty").config.markov_rank == 5
    assert sorted(os.listdir(tmp_path)) == ["draft", "empty", "nothing", "to-empty", "to-nothing"]


def test_places_that_are_none(make_draft, tmp_path, monkeypatch) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    (tmp_path / "here").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.chdir(tmp_path / "here")
    for place in (".", "", "../here", "a\0b", tmp_path / "loop"):
        with pytest.raises(DsparkError) as caught:
            convert(tmp_path / "draft", "native", place)
        assert caught.value.field == "out"
    with pytest.raises(DsparkError, match="is not a folder"):
        convert("a\0b", "native", "out")
    assert not os.listdir() and sorted(os.listdir(tmp_path)) == ["draft", "here", "loop"]


def test_a_folder_may_be_used_by_whom_the_umask_lets(make_draft, tmp_path) -> None:
    save_draft(make_draft(**WHOLE), tmp_path / "draft")
    convert(tmp_path / "draft", "native", tmp_path / "out")
    Path(tmp_path / "usual").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode
