"""The parent's side: start the children, ask them one prompt at a time, say why one is not there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dspark.bench.compare import Run
from dspark.checkpoints.gguf import export_gguf
from dspark.data.rows import detect_loop
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.base import Target
from dspark.targets.embedded import EMBEDDED, ensure_embedded, find_gguf
from peers.gguf_files import write_target

HERE = Path(__file__).parent
NAMES = ("llamacpp", "vllm")
LOG_LINES = 3


@dataclass
class Peer:
    """A side of the comparison. drafted, accepted: draft tokens so far by the engine's own counters."""

    name: str
    child: Child
    n: int
    drafted: int = 0
    accepted: int = 0

    def ask(self, question: str, ids: Sequence[int], max_tokens: int) -> Run:
        """One greedy answer, timed from handing over the ids. Raises DsparkError when the child ends."""
        answer = self.child.ask({"ids": list(ids), "max_tokens": max_tokens})
        timings = answer.get("timings", {})
        if self.n:
            if "draft_n" not in timings:  # llama.cpp serves plain, with a line in its log, when a draft does not load
                raise DsparkError("peers", self.name, f"did not draft; its log ends with: {self.child.log_end()}")
            self.drafted += timings["draft_n"]
            self.accepted += timings["draft_n_accepted"]
        prompt = timings["prompt_ms"] / 1000 if timings else None
        looping = detect_loop(answer["ids"])
        return Run(self.name, question, answer["ids"], "", [], looping, answer["seconds"], prompt)


class Child:
    """A process that answers JSON lines until it is closed. Its log is kept in `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True, env=os.environ
            )
        self.version = self._read()["version"]

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            raise DsparkError("peers", self.process.args[1], f"ended with code {code}: {self.log_end()}")  # type: ignore[index]
        return json.loads(line)

    def log_end(self) -> str:
        return " / ".join(self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]) or "nothing"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Peers:
    """sides: who answers; missing: name -> why it does not; versions: of the engines."""

    sides: list[Peer] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


def open_peers(
    pythons: dict[str, Path | None],
    target: Target,
    draft: DSparkDraft,
    ns: Sequence[int],
    folder: Path,
    threads: int,
    context: int,
    stack: ExitStack,
) -> Peers:
    """Start the engines of `pythons` (name -> interpreter). What cannot run is in `missing`, and nothing is raised.

    folder: where converted models and logs go. draft: bound to the target.
    """
    found = Peers()
    openers: dict[str, Callable[..., None]] = {"llamacpp": _open_llamacpp, "vllm": _open_vllm}
    for name, python in pythons.items():
        if target.name != EMBEDDED:
            found.missing[name] = f"is compared on {EMBEDDED} only"
        elif python is None or not python.exists():
            found.missing[name] = f"no interpreter: give --{name}-python ({python} is not there)"
        else:
            start = partial(_start, found, stack, folder, python)
            openers[name](start, found, draft, ns, folder, (str(threads), str(context)))
    return found


def _start(
    found: Peers, stack: ExitStack, folder: Path, python: Path, name: str, script: str, arguments: Sequence[str], n: int
) -> None:
    log = folder / f"{name.replace(' ', '-').replace(',', '').replace('=', '')}.log"
    try:
        child = Child([str(python), str(HERE / script), *arguments], log)
    except DsparkError as error:
        found.missing[name] = error.remedy
        return
    stack.callback(child.close)
    found.versions[name] = child.version
    found.sides.append(Peer(name, child, n))


def _open_llamacpp(
    start: Callable[..., None], found: Peers, draft: DSparkDraft, ns: Sequence[int], folder: Path, size: tuple[str, str]
) -> None:
    """f16, and the package's own Q4_1 file, whose values our target has; plain and with the draft in f16."""
    packed, half, drafting = find_gguf(), folder / "target-f16.gguf", folder / "draft-f16.gguf"
    try:
        export_gguf(draft, drafting, packed)
    except DsparkError as error:
        found.missing["llama.cpp"] = str(error)
        return
    write_target(packed, half)
    for kind, path in (("f16", half), ("Q4_1", packed)):
        start(f"llama.cpp {kind}", "llamacpp_child.py", [str(path), *size], 0)
        for n in ns:
            start(f"llama.cpp {kind}, n = {n}", "llamacpp_child.py", [str(path), *size, str(drafting), str(n)], n)


def _open_vllm(
    start: Callable[..., None], found: Peers, draft: DSparkDraft, ns: Sequence[int], folder: Path, size: tuple[str, str]
) -> None:
    start("vLLM", "vllm_child.py", [str(ensure_embedded()), *size], 0)
    for n in ns:
        found.missing[f"vLLM, n = {n}"] = "its DSpark needs model runner V2, which needs a Triton that CPUs do not have"
