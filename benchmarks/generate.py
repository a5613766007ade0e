"""What training data costs on this machine: generation, capture, training steps. Ratios measured in one run.

    python benchmarks/generate.py --data DIR [--parts generate,capture,train]

DIR is a folder of JSONL files of {"id", "turns"}, or one file; the first turn of each prompt is asked. Sides of a
comparison take turns, repetition after repetition, until --repeats or --budget seconds are used up (one repetition at
least). A ratio is the median over repetitions of side / base within one repetition. A table goes to stderr, one JSON
object to stdout.

generate: greedy answers of the same rows, all in flight at once: the engine without a draft, with and without capture
of the recipe's taps (features in memory, as a feature folder would store them), against Transformers' `generate` on a
left-padded batch with its fastest ordinary attention. Only tokens up to a row's stop count. `decode` leaves out the
passes over the prompts and the token each of them gives. --processes N: N processes of one thread each, a share of
the rows each, against one process of N threads.
capture: taps, last hidden state and log-sum-exp over the answer of given rows: several rows packed in one pass and row
by row, against Transformers' forward with output_hidden_states, row by row and right-padded.
train: optimiser steps of the recipe's draft (random weights) by rows a step, fp32 and bf16, features ready in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from rich.console import Console

from dspark.bench.command import HelpFormatter, run_program
from dspark.bench.compare import Question, read_questions
from dspark.bench.throughput import (
    Answers,
    Sample,
    Transformers,
    capture_packed,
    compare_ids,
    generate,
    largest_error,
    repeat,
    show,
    summarise,
)
from dspark.data.chat import ChatRenderer
from dspark.data.rows import Row
from dspark.decoding.engine import PREFILL_TOKENS
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.base import Target
from dspark.targets.transformers import load_target
from dspark.training.batches import Batches
from dspark.training.features import DTYPES, Features, InProcessFeatures
from dspark.training.recipe import Recipe, load_recipe
from dspark.training.setup import build_draft, finished_config
from dspark.training.validation import micro_loss

HF = "transformers"
PARTS = ("generate", "capture", "train")
PLAIN, CAPTURE = "dspark", "dspark, capture"


class Bench:
    """What the parts share: target, questions, the recipe, and rows once they are written."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.recipe: Recipe = load_recipe(args.recipe, ["training.init=random", "data.rows=[]"])
        self.taps = self.recipe.draft_config().target_layer_ids
        self.dtype = DTYPES[self.recipe.data.features_dtype]
        self.target = load_target(self.recipe.target)
        self.questions = list(self._questions())
        self.prompts = [list(question.ids) for question in self.questions]
        self.answers: Answers = []
        self._hf: Transformers | None = None

    def _questions(self) -> Iterator[Question]:
        args, renderer = self.args, ChatRenderer(self.target.tokenizer)
        length = args.max_prompt_tokens
        return read_questions(args.data, renderer, seed=args.seed, limit=args.limit, max_prompt_tokens=length)

    @property
    def hf(self) -> Transformers:
        self._hf = self._hf or Transformers(self.target)
        return self._hf

    def repeat(self, sides: dict[str, Callable[[], Sample]], bases: Sequence[str]) -> dict[str, Any]:
        return summarise(repeat(sides, self.args.repeats, self.args.budget), bases)

    def rows(self, count: int) -> list[Row]:
        """The first prompts with the target's own answers."""
        self._enough("rows", count)
        if len(self.answers) < count:
            self.answers, _ = generate(self.target, self.prompts[:count], self.args.max_tokens)
        pairs = zip(self.questions[:count], self.answers, strict=False)
        return [
            Row(
                id=question.id,
                source=question.id,
                prompt_ids=list(question.ids),
                answer_ids=answer,
                finish="stop" if answer[-1] in self.target.stop_ids else "length",
            )
            for question, answer in pairs
        ]

    def _enough(self, what: str, count: int) -> None:
        if count > len(self.prompts):
            raise DsparkError(what, count, f"only {len(self.prompts)} prompts are there; give more --data or --limit")

    def generation(self, count: int) -> dict[str, Any]:
        """The first `count` prompts, all in flight, on every side."""
        self._enough("in-flight", count)
        prompts, questions, written = self.prompts[:count], self.questions[:count], dict[str, Answers]()

        def run(side: str, asked: Answers, limit: int) -> Sample:
            if side == HF:
                written[side], sample = self.hf.generate(asked, limit)
            else:
                taps = self.taps if side == CAPTURE else ()
                written[side], sample = generate(self.target, asked, limit, taps, self.dtype)
            return sample

        names = PLAIN, CAPTURE, HF
        for side in names:  # warm-up
            run(side, prompts[:2], 2)
        limit = self.args.max_tokens
        result = self.repeat({side: lambda s=side: run(s, prompts, limit) for side in names}, (HF,))
        ids = {side: compare_ids(self.target, questions, written[PLAIN], written[side]) for side in names[1:]}
        self.answers = max(self.answers, written[PLAIN], key=len)
        read = sum(map(len, prompts))
        show(self.console, f"generation, {count} rows in flight, {read} prompt tokens", result)
        for side, found in ids.items():
            self.console.print(f"ids of {side}: {found['differ']} of {count} rows differ, {found['ties']} by a tie")
        return {"in_flight": count, "prompt_tokens": read, **result, "ids_against_dspark": ids}

    def processes(self) -> dict[str, Any]:
        """The same rows by N processes of one thread and by one process of N threads, both already started."""
        count = self.args.processes
        prompts = self.prompts[: max(self.args.in_flight)]
        with ExitStack() as stack:
            alone = [stack.enter_context(Worker(self.args, count))]
            several = [stack.enter_context(Worker(self.args, 1)) for _ in range(count)]
            for worker in (*alone, *several):
                worker.receive()
            names = f"1 process, {count} threads", f"{count} processes, 1 thread"
            sides = {name: lambda w=w: run_workers(w, prompts) for name, w in zip(names, (alone, several), strict=True)}
            result = self.repeat(sides, names[:1])
        show(self.console, f"processes, {len(prompts)} rows in all", result)
        return {"rows": len(prompts), **result}

    def capture(self) -> dict[str, Any]:
        """The same rows through every way to capture; `error`: norm of the difference to dspark row by row."""
        rows, size = self.rows(self.args.capture_rows), self.args.capture_batch
        alone, kept = InProcessFeatures(self.target, self.taps), dict[str, list[Features]]()
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        ways: dict[str, Callable[[], list[Features]]] = {
            "dspark, packed": lambda: [f for group in groups for f in capture_packed(self.target, group, self.taps)],
            "dspark, row by row": lambda: [alone.get(row) for row in rows],
            f"{HF}, row by row": lambda: [self.hf.capture([row], self.taps)[0] for row in rows],
            f"{HF}, padded": lambda: [f for group in groups for f in self.hf.capture(group, self.taps)],
        }
        tokens = sum(len(row.ids) - 1 for row in rows)

        def timed(way: str) -> Sample:
            start = time.perf_counter()
            kept[way] = ways[way]()
            seconds = time.perf_counter() - start
            return {"tokens_per_s": tokens / seconds, "rows_per_s": len(rows) / seconds, "seconds": seconds}

        capture_packed(self.target, rows[:1], self.taps)  # warm-up
        self.hf.capture(rows[:1], self.taps)
        names = list(ways)
        result = self.repeat({way: lambda w=way: timed(w) for way in ways}, names[1:])
        error = {way: largest_error(kept[way], kept[names[1]]) for way in names if way != names[1]}
        show(self.console, f"capture, {len(rows)} rows, {tokens} tokens, {size} rows a pass", result)
        worst = max(value for parts in error.values() for value in parts.values())
        self.console.print(f"taps and log-sum-exp agree with {names[1]} to {worst:.0e}")
        return {"rows": len(rows), "tokens": tokens, "rows_a_pass": size, **result, "error": error}

    def training(self) -> dict[str, Any]:
        """Steps by rows a step and dtype: against fp32 at the first size, and bf16 against fp32 at each."""
        rows = self.rows(max(self.args.rows_per_step))
        trainer = Trainer(self.recipe, self.target, rows, capture_packed(self.target, rows, self.taps))
        cases = {f"{n} rows, {d}": (n, d) for n in self.args.rows_per_step for d in self.args.compute_dtypes}
        for name in self.args.compute_dtypes:
            trainer.step(min(self.args.rows_per_step), name)  # warm-up
        taken = repeat(
            {name: lambda c=case: trainer.step(*c) for name, case in cases.items()}, self.args.repeats, self.args.budget
        )
        result, same = summarise(taken, [next(iter(cases))]), {}
        for name, (n, dtype) in cases.items():
            base = f"{n} rows, fp32"
            if dtype != "fp32" and base in taken:
                same[name] = summarise({base: taken[base], name: taken[name]}, [base])["ratio"][base][name]
        show(self.console, f"training, {trainer.parameters:,} parameters, steps of {len(rows)} different rows", result)
        return {"rows": len(rows), "parameters": trainer.parameters, **result, "ratio_to_fp32_of_same_rows": same}


class Trainer:
    """Optimiser steps as `training/trainer.py` does them, without its logs; features are in memory in bf16 or fp32."""

    def __init__(self, recipe: Recipe, target: Target, rows: Sequence[Row], features: Sequence[Features]) -> None:
        self.recipe, self.target, self.all_rows = recipe, target, rows
        kind = DTYPES[recipe.data.features_dtype]
        stored = [Features(f.taps.to(kind), f.last_hidden.to(kind), f.lse) for f in features]
        self._features = {row.id: one for row, one in zip(rows, stored, strict=True)}
        self.taps = recipe.draft_config().target_layer_ids
        config = finished_config(recipe, target, rows)
        self.draft = build_draft(recipe, config, target, rows, None, lambda _: None)
        self.parameters = sum(p.numel() for p in self.draft.parameters())
        t = recipe.training
        self.optimizer = torch.optim.AdamW(
            self.draft.parameters(), lr=1e-6, betas=t.betas, weight_decay=t.weight_decay, fused=True
        )
        self._taken: Counter[tuple[int, str]] = Counter()

    def get(self, row: Row) -> Features:
        """The `FeatureSource` of `Batches`."""
        return self._features[row.id]

    def step(self, rows_per_step: int, compute_dtype: str) -> Sample:
        """One timed step; its batch is ready before, as the reader thread has it. Both dtypes get the same batches."""
        changes = {"rows_per_step": rows_per_step, "compute_dtype": compute_dtype}
        training = self.recipe.training.model_copy(update=changes)
        recipe = self.recipe.model_copy(update={"training": training})
        batches = Batches(self.all_rows, self, recipe.data, training, self.draft.config.gamma)
        ready = list(batches.micro_batches(self._taken[rows_per_step, compute_dtype]))
        self._taken[rows_per_step, compute_dtype] += 1
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        blocks = 0
        for b in ready:
            stats = micro_loss(
                self.draft, self.target, b.plan, b.taps, b.last_hidden, b.lse, recipe, b.scale, backward=True
            )
            blocks += stats.blocks
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), training.clip)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        return {
            "blocks_per_s": blocks / seconds,
            "steps_per_s": 1 / seconds,
            "blocks": blocks,
            "seconds": seconds,
        }


class Worker:
    """A child process with a target of its own that answers lists of prompts until it is closed."""

    def __init__(self, args: argparse.Namespace, threads: int) -> None:
        options = [f"--recipe={args.recipe}", f"--max-tokens={args.max_tokens}", f"--threads={threads}", "--worker"]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )

    def send(self, prompts: Answers) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Answers:
        """The answers; the first call, before anything was sent, waits until the worker is warm."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise DsparkError("processes", self.process.wait(), "a worker process ended; its message stands above")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def run_workers(workers: Sequence[Worker], prompts: Answers) -> Sample:
    """Every worker gets each len(workers)-th prompt; the clock stops with the last one's answers."""
    start = time.perf_counter()
    for index, worker in enumerate(workers):
        worker.send(prompts[index :: len(workers)])
    answers = [answer for worker in workers for answer in worker.receive()]
    seconds = time.perf_counter() - start
    tokens = sum(map(len, answers))
    return {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds}


def serve_worker(args: argparse.Namespace) -> None:
    """The child's side: one line of prompts in, one line of answers out."""
    target = load_target(load_recipe(args.recipe).target)
    answers, _ = generate(target, [[min(target.stop_ids, default=0)] * 2], 2)
    print(json.dumps(answers), flush=True)
    for line in sys.stdin:
        answers, _ = generate(target, json.loads(line), args.max_tokens)
        print(json.dumps(answers), flush=True)


def settings(args: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Both sides' settings."""
    chosen = {key: value for key, value in vars(args).items() if key not in ("worker", "data", "parts")}
    return {
        **chosen,
        "parts": list(args.parts),
        "prompts": len(bench.prompts),
        "target": bench.target.name,
        "taps": list(bench.taps),
        "greedy": True,
        "dspark": {
            "dtype": str(bench.target.dtype),
            "prefill_tokens": PREFILL_TOKENS,
            "captured_as": bench.recipe.data.features_dtype,
        },
        HF: Transformers.settings,
        "training": {
            key: getattr(bench.recipe.training, key)
            for key in ("anchors_per_row", "accumulation", "loss_chunk", "clip")
        },
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    def whole(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def words(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--recipe", default="smollm2-135m", help="names target, taps and draft")
    parser.add_argument("--data", help="folder of JSONL prompts, or one file")
    parser.add_argument("--parts", type=words, default=",".join(PARTS), help="what to measure")
    parser.add_argument("--limit", type=int, default=64, help="prompts at most")
    parser.add_argument("--seed", type=int, default=0, help="shuffles the prompts before the limit")
    parser.add_argument("--max-prompt-tokens", type=int, default=512, help="longer prompts are left out")
    parser.add_argument("--max-tokens", type=int, default=64, help="answer tokens at most")
    parser.add_argument("--in-flight", type=whole, default="16,32,64", help="rows to answer at once")
    parser.add_argument("--processes", type=int, default=2, help="processes of one thread each; 0: not measured")
    parser.add_argument("--capture-rows", type=int, default=16, help="rows to capture")
    parser.add_argument("--capture-batch", type=int, default=8, help="rows a pass")
    parser.add_argument("--rows-per-step", type=whole, default="1,2,4,8,16", help="to train on")
    parser.add_argument("--compute-dtypes", type=words, default="fp32,bf16", help="to train in")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of a comparison at most")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds for a comparison (one repetition at least)")
    parser.add_argument("--threads", type=int, default=None, help="of this process (default: PyTorch's choice)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.worker:
        serve_worker(args)
        return 0
    if args.data is None:
        raise DsparkError("data", None, "give --data, a folder of JSONL prompts or one such file")
    if unknown := set(args.parts) - set(PARTS):
        raise DsparkError("parts", sorted(unknown)[0], f"must be of {', '.join(PARTS)}")
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = 160
    machine = {**describe_machine(), "load_average_before": os.getloadavg()[0]}
    bench = Bench(args, console)
    result: dict[str, Any] = {"settings": settings(args, bench), "machine": machine}
    if "generate" in args.parts:
        result["generate"] = [bench.generation(count) for count in args.in_flight]
        if args.processes > 1:
            result["processes"] = bench.processes()
    if "capture" in args.parts:
        result["capture"] = bench.capture()
    if "train" in args.parts:
        result["train"] = bench.training()
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    run_program(main)
