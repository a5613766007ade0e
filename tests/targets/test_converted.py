"""A folder built once: damage is found, builders exclude each other, a killed one leaves no trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from dspark.errors import DsparkError
from dspark.targets.converted import MANIFEST, build_once, fault

TEXT = "weights " * 1000


def build(folder: Path) -> dict[str, Any]:
    (folder / "model").write_text(TEXT)
    (folder / "sub").mkdir()
    (folder / "sub" / "config").write_text("{}")
    return {"file": "source"}


def never(folder: Path) -> dict[str, Any]:
    raise AssertionError("a whole folder was built again")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_once(tmp_path / "cache" / "thing-v1", build, pytest.fail)


def test_built_once(folder: Path) -> None:
    assert build_once(folder, never, pytest.fail, verify=True) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == [".thing-v1.lock", "thing-v1"]


def _truncate(folder: Path) -> None:
    os.truncate(folder / "model", 100)


def _alter(folder: Path) -> None:
    (folder / "model").write_text(TEXT.replace("weights", "WEIGHTS", 1))


def _remove(folder: Path) -> None:
    (folder / "sub" / "config").unlink()


def _cut_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 20)


@pytest.mark.parametrize(
    ("damage", "named"),
    [(_truncate, "100 bytes"), (_alter, "SHA-256"), (_remove, "sub/config is missing"), (_cut_manifest, MANIFEST)],
)
def test_damage_is_found_and_mended(folder: Path, damage: Any, named: str) -> None:
    damage(folder)
    assert named in (fault(folder) or "")
    notices: list[str] = []
    build_once(folder, build, notices.append)
    assert len(notices) == 1 and named in notices[0]
    assert fault(folder, verify=True) is None and (folder / "model").read_text() == TEXT


def test_altered_with_its_old_time_is_found_on_demand(folder: Path) -> None:
    stat = (folder / "model").stat()
    _alter(folder)
    os.utime(folder / "model", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert fault(folder) is None
    assert "SHA-256" in (fault(folder, verify=True) or "")


def test_touched_files_are_hashed_once(folder: Path) -> None:
    os.utime(folder / "model", ns=(5, 5))
    before = (folder / MANIFEST).stat().st_ino
    assert fault(folder) is None
    recorded = (folder / MANIFEST).stat().st_ino
    assert recorded != before  # the new time was written down ...
    assert fault(folder) is None
    assert (folder / MANIFEST).stat().st_ino == recorded  # ... and so it is not hashed again


def test_a_failed_build_leaves_the_old_state(tmp_path: Path) -> None:
    def fails(partial: Path) -> dict[str, Any]:
        build(partial)
        raise DsparkError("target", "x", "remedy")

    with pytest.raises(DsparkError, match="remedy"):
        build_once(tmp_path / "thing", fails, pytest.fail)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []


def test_a_short_disk_is_said_before_building(tmp_path: Path) -> None:
    with pytest.raises(DsparkError, match="MB free"):
        build_once(tmp_path / "thing", never, pytest.fail, bytes_needed=1 << 60)


BUILDER = """
    import sys, time
    from pathlib import Path
    from dspark.targets.converted import build_once, fault
    folder, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    def build(partial):
        with log.open("a") as file:
            file.write("built\\n")
        (partial / "model").write_text("half")
        time.sleep(seconds)
        (partial / "model").write_text("whole")
        return {}
    build_once(folder, build, lambda line: None)
    assert fault(folder, verify=True) is None and (folder / "model").read_text() == "whole"
"""


def _start(folder: Path, log: Path, seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(BUILDER), str(folder), str(log), str(seconds)])


def test_concurrent_builders_build_once(tmp_path: Path) -> None:
    processes = [_start(tmp_path / "thing", tmp_path / "log", 0.5) for _ in range(4)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_killed_builder_leaves_nothing_usable(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "thing"
    process = _start(folder, tmp_path / "log", 60)
    deadline = time.monotonic() + 30
    while not list(folder.parent.glob(".thing.*.partial/model")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert list(folder.parent.glob("*.partial")) != [] or list(folder.parent.glob(".*.partial")) != []
    assert not folder.exists()
    build_once(folder, build, pytest.fail)
    assert sorted(path.name for path in folder.parent.iterdir()) == [".thing.lock", "thing"]
