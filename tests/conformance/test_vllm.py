"""The real vLLM with our checkpoints: same ids as plain decoding, same draft tokens and accepted counts as our engine.

float32 on both sides, and both read the same file (whose head rows are BF16, unlike the embedded target's own).
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.conformance.conftest import MAX_TOKENS, PROMPTS
from tests.conformance.walks import Walk, compare, length, our_walks, their_walk

from dspark.checkpoints.builtin import EMBEDDED_DRAFT, draft_folder
from dspark.checkpoints.convert import convert
from dspark.checkpoints.native import load_draft, save_draft
from dspark.checkpoints.read import import_draft
from dspark.drafts.dspark import DSparkDraft
from dspark.drafts.eagle3 import Eagle3Draft
from dspark.drafts.eagle3_config import Eagle3Config
from dspark.targets.embedded import EMBEDDED
from dspark.targets.transformers import TransformersTarget
from peers.children import Child

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("vllm_child.py")
FEWEST_ROUNDS = 16
Open = Callable[..., Any]


@pytest.fixture
def open_vllm(vllm_python: Path, embedded_path: Path, tmp_path: Path) -> Open:
    """Start vLLM in a child: open_vllm(draft folder or None, method, n, runner)."""

    @contextmanager
    def start(draft: Path | None, method: str = "dspark", n: int = 0, runner: int = 2) -> Iterator[Child]:
        settings = {"model": str(embedded_path), "draft": draft and str(draft), "method": method, "n": n}
        settings |= {"runner": runner, "threads": 1, "context": 512, "batch": PROMPTS}
        with closing(Child([str(vllm_python), str(CHILD), json.dumps(settings)], tmp_path / "vllm.log")) as child:
            yield child

    return start


@pytest.fixture(scope="module")
def plain(target: TransformersTarget, prompts: list[list[int]]) -> list[Walk]:
    return our_walks(target, None, 0, prompts, MAX_TOKENS)


def ask(child: Child, prompts: list[list[int]], norm_per_layer: bool = True) -> tuple[list[Walk], float]:
    answer = child.ask({"prompts": prompts, "max_tokens": MAX_TOKENS, "norm_per_layer": norm_per_layer})
    return [their_walk(one["ids"], one["rounds"]) for one in answer["answers"]], answer["seconds"]


def test_plain_decoding_gives_our_ids(open_vllm, prompts, plain, tell) -> None:
    with open_vllm(None, runner=1) as child:
        theirs, _ = ask(child, prompts)
    found = compare(plain, theirs)
    tell(f"vLLM {child.version}, plain, float32: {found.same_answers} of {found.answers} answers equal to ours")
    for line in found.ties:
        tell(f"    tie: {line}")
    assert not found.faults


@pytest.mark.parametrize("n", [3, 7])
@pytest.mark.parametrize("form", ["speculators", "vllm"])
def test_dspark(open_vllm, target, prompts, plain, tell, tmp_path, form, n) -> None:
    convert("embedded", form, tmp_path / "draft")
    ours = our_walks(target, import_draft(tmp_path / "draft"), n, prompts, MAX_TOKENS)
    with open_vllm(tmp_path / "draft", "dspark", n) as child:
        theirs, seconds = ask(child, prompts)
        stock = ask(child, prompts, norm_per_layer=False)[0] if form == "speculators" else None
    found = compare(ours, theirs)
    report(tell, f"vLLM {child.version}, dspark, {form} form, n = {n}, {seconds:.0f} s", found)
    assert [one.ids for one in ours] == [one.ids for one in plain]
    assert not compare(plain, [Walk(one.ids, []) for one in theirs]).faults
    assert not found.faults and found.rounds >= FEWEST_ROUNDS
    if stock is not None:
        faulty = compare(ours, stock)
        tell(f"    its own k_norm (all rounds {length(stock):.3f}, ours {length(ours):.3f}): {faulty}")
        assert not compare(plain, [Walk(one.ids, []) for one in stock]).faults
        assert faulty.faults  # when this fails, that build has mended it, and our worker's patch can go


def report(tell, what: str, found) -> None:
    tell(f"{what}: {found}")
    for line in found.ties:
        tell(f"    tie: {line}")
    for line in found.faults:
        tell(f"    fault: {line}")


def test_dflash(open_vllm, target, prompts, plain, tell, tmp_path) -> None:
    """DFlash, bonus-anchor, in model runner V1; DFLASH_DRAFT names a trained one, else the shipped draft's layers."""
    named = os.environ.get("DFLASH_DRAFT")
    folder = Path(named) if named else _as_dflash(target, tmp_path / "native")
    convert(folder, "speculators", tmp_path / "draft")
    ours = our_walks(target, import_draft(tmp_path / "draft"), 7, prompts, MAX_TOKENS)
    with open_vllm(tmp_path / "draft", "dflash", 7, runner=1) as child:
        theirs, _ = ask(child, prompts)
        stock, _ = ask(child, prompts, norm_per_layer=False)
    found, faulty = compare(ours, theirs), compare(ours, stock)
    kind = "trained" if named else "untrained"
    report(tell, f"vLLM {child.version}, dflash ({kind} draft), speculators form, n = 7, runner V1", found)
    tell(f"    its own k_norm (all rounds {length(stock):.3f}, ours {length(ours):.3f}): {faulty}")
    assert [one.ids for one in ours] == [one.ids for one in plain]
    assert not found.faults and found.rounds >= FEWEST_ROUNDS
    assert compare(plain, [Walk(one.ids, []) for one in stock]).faults == []


def _as_dflash(target: TransformersTarget, folder: Path) -> Path:
    """The shipped draft's backbone in DFlash's layout: it was not trained for that, and drafts all the same."""
    shipped = load_draft(draft_folder(EMBEDDED_DRAFT))
    assert isinstance(shipped, DSparkDraft)
    changes = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    config = shipped.config.model_copy(update={**changes, "sample_from_anchor": False, "block_size": 8})
    draft = DSparkDraft(config)
    draft.load_state_dict({name: shipped.state_dict()[name] for name in draft.state_dict()})
    draft.bind(target.embedding_weight, target.head_weight)
    save_draft(draft, folder)
    return folder


def test_eagle3(open_vllm, target, prompts, plain, tell, tmp_path) -> None:
    """EAGLE-3 with GQA attention, in model runner V1; EAGLE3_DRAFT names a trained one, else its weights are random."""
    named = os.environ.get("EAGLE3_DRAFT")
    folder = Path(named) if named else _fresh_eagle3(tmp_path / "draft")
    ours = our_walks(target, load_draft(folder), 3, prompts, MAX_TOKENS)
    with open_vllm(folder, "eagle3", 3, runner=1) as child:
        theirs, _ = ask(child, prompts)
    found = compare(ours, theirs)
    report(tell, f"vLLM {child.version}, eagle3 ({'trained' if named else 'random'} draft), n = 3, runner V1", found)
    assert [one.ids for one in ours] == [one.ids for one in plain]
    assert not found.faults and found.rounds >= FEWEST_ROUNDS


def _fresh_eagle3(folder: Path) -> Path:
    recipe = yaml.safe_load((files("dspark") / "recipes" / "smollm2-135m-eagle3.yaml").read_text(encoding="utf-8"))
    fields = {name: value for name, value in recipe["draft"].items() if name != "architecture"}
    fields |= {"target_name": EMBEDDED, "training_length": recipe["data"]["max_length"]}
    draft = Eagle3Draft(Eagle3Config(**fields))
    draft.set_vocabulary(range(draft.config.draft_vocab_size))
    save_draft(draft, folder)
    return folder


def test_served(vllm_python, embedded_path, target, prompts, plain, tell, tmp_path) -> None:
    """vLLM's OpenAI server: the counters it gives for one answer are those of our rounds."""
    convert("embedded", "speculators", tmp_path / "draft")
    ours = our_walks(target, import_draft(tmp_path / "draft"), 7, prompts, MAX_TOKENS)
    with serve(vllm_python, embedded_path, tmp_path / "draft", 7, tmp_path / "vllm.log") as client:
        body = {"prompt": prompts, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        counters = _counters(client.get("/metrics").raise_for_status().text)
    ids = [one["token_ids"] for one in sorted(answer["choices"], key=lambda one: one["index"])]
    drafts, accepted = counters["num_drafts"], counters["num_accepted_tokens"]
    rounds, kept = sum(len(one.rounds) for one in ours), sum(seen.accepted for one in ours for seen in one.rounds)
    tell(
        f"vLLM served, dspark, speculators form, n = 7: {drafts:.0f} drafts, {counters['num_draft_tokens']:.0f} draft "
        f"tokens, {accepted:.0f} accepted, acceptance length {1 + accepted / drafts:.3f}; ours {rounds} and {kept} kept"
    )
    assert compare(plain, [Walk(one, []) for one in ids]).faults == []
    # it also counts what the end of an answer cuts off, and asynchronous scheduling may run one round more
    assert rounds <= drafts <= rounds + len(prompts)
    assert kept <= accepted <= kept + 7 * len(prompts)


@contextmanager
def serve(python: Path, model: Path, draft: Path, n: int, log: Path) -> Iterator[httpx.Client]:
    """A server on a free port, stopped at the end; its log in the failure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    speculative = json.dumps({"method": "dspark", "model": str(draft), "num_speculative_tokens": n})
    arguments = f"--model {model} --port {port} --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 6"
    command = [str(python), str(CHILD.with_name("vllm_server.py")), *arguments.split()]
    command += ["--worker-cls", "vllm_parts.Worker", "--speculative-config", speculative]
    with log.open("wb") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=sink, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
            _wait(client, server, log)
            yield client
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 240
    while time.monotonic() < end and server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1)
    raise AssertionError(f"vLLM's server did not start; its log ends with {log.read_text(errors='replace')[-2000:]}")


def _counters(text: str) -> dict[str, float]:
    """The sums of vllm:spec_decode_NAME_total."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^vllm:spec_decode_(\w+)_total\{[^}]*\} (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0.0) + float(value)
    return found
