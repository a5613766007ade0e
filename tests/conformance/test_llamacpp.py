"""The real llama.cpp with our GGUF of the shipped draft: ids of its own plain decoding, and our accepted counts.

llama.cpp tells how many tokens of a round were accepted, not which ones were drafted. Where fewer than n + 1 tokens are
left to make it drafts one fewer than those, and we n: such rounds at the end of an answer are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.conftest import MAX_TOKENS
from tests.conformance.walks import Seen, Walk, compare, length, our_walks

from dspark.checkpoints.builtin import load_named_draft
from dspark.checkpoints.gguf import export_gguf
from dspark.checkpoints.read import import_draft
from dspark.targets.embedded import EMBEDDED, find_gguf
from dspark.targets.transformers import load_target
from peers.children import Child
from peers.gguf_files import write_target

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("llamacpp_child.py")
FEWEST_ROUNDS = 16
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def files(embedded_path, tmp_path_factory) -> dict[str, Path]:
    """The draft in f16, the embedded target's own Q4_1 file, and the same weights in f16."""
    folder = tmp_path_factory.mktemp("gguf")
    export_gguf(load_named_draft("embedded"), folder / "draft.gguf", find_gguf(), "f16")
    write_target(find_gguf(), folder / "target.gguf")
    return {"draft": folder / "draft.gguf", "f16": folder / "target.gguf", "Q4_1": find_gguf()}


@pytest.fixture
def open_llamacpp(llamacpp_python: Path, tmp_path: Path) -> Open:
    """Start llama.cpp in a child: open_llamacpp(target file, draft file or None, n)."""

    @contextmanager
    def start(target: Path, draft: Path | None = None, n: int = 0) -> Iterator[Child]:
        settings = {"target": str(target), "draft": draft and str(draft), "n": n, "threads": 1, "context": 512}
        with closing(Child([str(llamacpp_python), str(CHILD), json.dumps(settings)], tmp_path / "llama.log")) as child:
            yield child

    return start


def ask(child: Child, prompts: list[list[int]]) -> list[Walk]:
    return [_walk(**child.ask({"ids": ids, "max_tokens": MAX_TOKENS})) for ids in prompts]


def _walk(ids: list[int], counters: list[list[int] | None], end: list[int] | None) -> Walk:
    """Tokens with the same counters came from one pass; those without any from the prompt's."""
    at, before, rounds = 0, 0, []
    for counter, group in groupby(counters):
        if counter is not None:
            rounds.append(Seen(at, [], min(counter[1] - before, len(ids) - at)))
            before = counter[1]
        at += len(list(group))
    return Walk(ids, rounds)


@pytest.mark.parametrize("kind", ["f16", "Q4_1"])
def test_greedy_output_is_that_of_plain_decoding(open_llamacpp, files, prompts, tell, kind) -> None:
    with open_llamacpp(files[kind]) as child:
        plain = ask(child, prompts)
    assert not any(one.rounds for one in plain)
    for n in (3, 7):
        with open_llamacpp(files[kind], files["draft"], n) as child:
            theirs = ask(child, prompts)
        assert all(one.rounds for one in theirs)  # when a draft fails to load it serves plain, with a line in its log
        same = sum(a.ids == b.ids for a, b in zip(plain, theirs, strict=True))
        rounds = sum(len(one.rounds) for one in theirs)
        text = f"xllamacpp {child.version}, {kind}, n = {n}: {same} of {len(plain)} answers equal to its own plain"
        tell(f"{text}, {rounds} rounds, acceptance length {length(theirs):.3f}")
        assert same == len(plain) and rounds >= FEWEST_ROUNDS
        if kind == "f16":
            compare_with_ours(files["draft"], n, prompts, theirs, tell)


def compare_with_ours(draft: Path, n: int, prompts: list[list[int]], theirs: list[Walk], tell) -> None:
    """Our engine with the same f16 weights, which it multiplies in float32."""
    half = load_target(EMBEDDED, storage="float16")
    ours = our_walks(half, import_draft(draft), n, prompts, MAX_TOKENS)
    found = compare([_whole_rounds(one, n) for one in ours], [_whole_rounds(one, n) for one in theirs])
    tell(f"    beside our engine: {found}")
    for line in found.ties:
        tell(f"    tie: {line}")
    for line in found.faults:
        tell(f"    fault: {line}")
    assert not found.faults and found.rounds >= FEWEST_ROUNDS


def _whole_rounds(walk: Walk, n: int) -> Walk:
    return Walk(walk.ids, [one for one in walk.rounds if one.at + n < MAX_TOKENS], walk.margins)
