"""Acceptance, speedup, pass times, equality of ids and of replay on prompt suites: greedy, batch 1.

    python benchmarks/decode.py --data DIR --limit 40 --max-tokens 192 > decode.json

DIR holds <suite>.jsonl files of {"id", "turns"}; the first turn is asked. Every question is recorded in --out as
soon as it is done, and a second call with the same draft, prompts and settings goes on from there. A table goes to
stderr, one JSON object to stdout (which `python -m dspark.checkpoints.card FOLDER --measured decode.json` reads). Exit
code 1 when a mode's ids differ from plain decoding, or replay from the served rounds, by more than a tie.

    python benchmarks/decode.py --linear

times all linear layers of the target, plain against packed by our kernels (or by PyTorch's libraries, where they are
not built), by rows: what targets/packed.py rests on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark.bench.command import HelpFormatter, run_program
from dspark.bench.compare import (
    PLAIN,
    Mode,
    Question,
    Run,
    build_engines,
    find_difference,
    modes_for,
    render_questions,
    run_question,
    warm_up,
)
from dspark.bench.metrics import Interval
from dspark.bench.overlap import find_overlap
from dspark.bench.passes import measure_passes
from dspark.bench.served import check_replay
from dspark.bench.suites import (
    Journal,
    Record,
    best_speedups,
    mean_acceptance,
    mean_speedups,
    prompts_sha256,
    replay_summary,
    summarise_suite,
)
from dspark.checkpoints.builtin import draft_folder, load_named_draft
from dspark.checkpoints.native import weights_sha256
from dspark.cli_output import SPEED_NOTES, slot_percents
from dspark.data.chat import ChatRenderer
from dspark.data.prompts import Prompt, read_prompts
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import DSparkProposer
from dspark.decoding.request import Request
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.base import Target
from dspark.targets.packed import PackedLinear, pack_linears
from dspark.targets.transformers import load_target

PASS_CONTEXT = 256
SUITES = "gsm8k,humaneval,mbpp,math500,mt-bench,livecodebench"
ROW = "{:<7}{:>6}{:>19}{:>7}{:>6}{:>7}{:>6} {}"
LINEAR_ROWS = (1, 2, 4, 8, 16, 32, 64)


def run_suites(
    target: Target,
    draft: DSparkDraft,
    suites: dict[str, list[Question]],
    modes: Sequence[Mode],
    journal: Journal,
    args: argparse.Namespace,
) -> None:
    """Everything not in the journal yet: timed alone, or (past --speed-limit) in batches for acceptance only."""
    singles = build_engines(target, draft, modes)
    batches = build_engines(target, draft, modes, max_batch=args.batch)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    warm = False
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for suite, questions in suites.items():
            task = progress.add_task(suite, total=len(questions))
            waiting: list[Question] = []
            for turn, question in enumerate(questions):
                if (suite, question.id) in journal.records:
                    progress.advance(task)
                elif turn >= args.speed_limit:
                    waiting.append(question)
                else:
                    if not warm:
                        warm_up(singles, question, 16)
                        warm = True
                    runs, found = run_question(target, singles, modes, question, args.max_tokens, turn)
                    journal.add(replayed(target, singles, question, Record(suite, question.id, True, runs, found)))
                    progress.advance(task)
            for start in range(0, len(waiting), args.batch):
                for record in batched(target, batches, modes, suite, waiting[start : start + args.batch], args):
                    journal.add(record)
                    progress.advance(task)


def batched(
    target: Target,
    engines: dict[str, Engine],
    modes: Sequence[Mode],
    suite: str,
    questions: Sequence[Question],
    args: argparse.Namespace,
) -> Iterator[Record]:
    """Untimed records of several questions at once."""
    requests = [Request(prompt_ids=list(question.ids), max_tokens=args.max_tokens) for question in questions]
    runs: list[dict[str, Run]] = [{} for _ in questions]
    for mode in modes:
        for index, result in engines[mode.name].run(requests):
            runs[index][mode.name] = Run.of(mode, questions[index], result)
    for question, by_mode in zip(questions, runs, strict=True):
        found = [find_difference(target, question, by_mode[PLAIN.name], by_mode[mode.name]) for mode in modes]
        record = Record(suite, question.id, False, by_mode, [one for one in found if one is not None])
        yield replayed(target, engines, question, record)


def replayed(target: Target, engines: dict[str, Engine], question: Question, record: Record) -> Record:
    """The record, with what the replay of plain decoding's answer says of its rounds."""
    found = {name: engine.proposer for name, engine in engines.items()}
    proposers = {name: one for name, one in found.items() if isinstance(one, DSparkProposer)}
    record.partings = check_replay(target, proposers, question, record.runs, record.differences)
    return record


def show(summary: dict[str, Any], console: Console) -> None:
    """The table for people, in 80 columns: each suite by its name, then its modes."""
    head = ("", "tokens", "speedup", "decode", "", "length", "", "accepted at")
    names = ("mode", "/ s", "end to end, 95 %", "only", "macro", "macro*", "micro", "slot 1, 2, ..., %")
    for line in (ROW.format(*head), ROW.format(*names), "─" * 79):
        console.print(line, highlight=False, soft_wrap=True)
    for suite, result in summary["suites"].items():
        line = f"{suite}: {result['questions']} questions, {result['looping_answers']} looping answers"
        if result["timed_questions"] < result["questions"]:
            line += f"; {result['timed_questions']} timed, the others for acceptance only"
        console.print(line, style="bold", markup=False, highlight=False)
        for name, mode in result["modes"].items():
            console.print(mode_line(name, mode), highlight=False, soft_wrap=True)
        for line in (*result["ties"], *result["not_lossless"], *result["replay"]["ties"], *result["replay"]["faults"]):
            console.print("  " + line, markup=False)
    notes = SPEED_NOTES + " macro*: without the answers that end in a loop."
    console.print(notes, style="dim", highlight=False)
    show_means(summary, console)
    show_passes(summary["passes"], console)


def mode_line(name: str, mode: dict[str, Any]) -> str:
    """One mode of a suite under the table's head; the interval of decoding alone is in the JSON."""
    acceptance, speed = mode["acceptance"], mode["speed"] or {}
    end_to_end, only = (speed.get(f"speedup_{label}") for label in ("end_to_end", "decode_only"))
    return ROW.format(
        f" {name}",
        shown(speed.get("tokens_per_s_end_to_end"), 1),
        str(Interval(**end_to_end)) if end_to_end else "-",
        f"{only['value']:.2f}x" if only else "-",
        *(shown(acceptance[key]) for key in ("macro_length", "macro_length_without_loops", "micro_length")),
        slot_percents(slot["rate"] for slot in acceptance["conditional"]),
    ).rstrip()


def show_passes(passes: dict[str, Any], console: Console) -> None:
    """What a pass of target and draft costs."""
    rows = passes["verify"]
    for row in rows:
        console.print(f"T_verify({row['tokens']}) {1000 * row['seconds']:.1f} ms at context {passes['context']}")
    console.print(f"T_verify({rows[-1]['tokens']}) / T_verify({rows[0]['tokens']}) = {rows[-1]['ratio']:.2f}")
    console.print(
        f"draft pass, n = {passes['n']}: {1000 * passes['draft_seconds']:.1f} ms "
        f"= {passes['draft_share']:.2f} of T_verify({rows[0]['tokens']})"
    )


def show_means(summary: dict[str, Any], console: Console) -> None:
    """Unweighted means over the suites, replay against served, and whether the draft knew the prompts."""
    for name, lengths in summary["mean_acceptance_over_suites"].items():
        speed = shown(summary["mean_speedup_over_suites"][name])
        console.print(
            f"mean over suites, {name}: acceptance {shown(lengths['macro_length'])}, "
            f"without loops {shown(lengths['macro_length_without_loops'])}, speedup {speed}x"
        )
    best = summary["speedup_at_best_n"]
    chosen = ", ".join(f"{suite} n = {one['n']}" for suite, one in best["suites"].items())
    console.print(f"speedup at the best n, mean over suites: {shown(best['mean'])}x ({chosen})")
    console.print(summary["replay"]["line"])
    overlap = summary["overlap"]
    console.print(overlap["line"], style="bold red" if overlap["in_training_set"] else None, markup=False)


def shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def linear_times(target: Any, repeats: int = 15) -> dict[str, Any]:
    """All linear layers of an unpacked target once each, by rows: milliseconds plain and packed; the storages."""
    plain = [module for module in target.model.modules() if type(module) is torch.nn.Linear]
    holder = torch.nn.ModuleList(plain)
    if not pack_linears(holder):
        raise DsparkError(
            "linear", torch.__version__, "without our kernels this PyTorch cannot pack linear layers here"
        )
    packed = [module for module in holder if isinstance(module, PackedLinear)]
    table = []
    for rows in LINEAR_ROWS:
        samples: dict[str, list[float]] = {"plain": [], "packed": []}
        for _ in range(repeats):
            for name, layers in (("plain", plain), ("packed", packed)):
                inputs = [torch.randn(rows, layer.in_features) for layer in layers]
                start = time.perf_counter()
                for layer, x in zip(layers, inputs, strict=True):
                    layer(x)
                samples[name].append(1000 * (time.perf_counter() - start))
        table.append({"rows": rows, **{f"{name}_ms": median(values) for name, values in samples.items()}})
    return {"linear": table, "storages": sorted({layer.storage for layer in packed})}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--target", default="embedded:smollm2-135m", help="folder, hub name or the embedded target")
    parser.add_argument("--draft", default="embedded", help="draft folder, or `embedded` (the shipped one)")
    parser.add_argument("--data", type=Path, help="folder of <suite>.jsonl files, one line a prompt")
    parser.add_argument("--suites", default=SUITES, help="names of files in --data, without .jsonl")
    parser.add_argument("--limit", type=int, default=40, help="the first N questions of each suite")
    parser.add_argument("--max-tokens", type=int, default=192, help="answer tokens at most")
    parser.add_argument("--ns", default="3,7", help="draft tokens a round, one mode each")
    parser.add_argument("--speed-limit", type=int, default=10**9, help="time only the first N of them (default: all)")
    parser.add_argument("--batch", type=int, default=8, help="requests in flight for questions that are not timed")
    parser.add_argument("--out", type=Path, default=Path("runs/decode.jsonl"), help="records, made or gone on with")
    parser.add_argument("--linear", action="store_true", help="time linear layers only, plain against packed")
    return parser.parse_args(argv)


def widths(text: str) -> list[int]:
    """--ns as numbers. Raises DsparkError."""
    try:
        found = [int(n) for n in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise DsparkError("ns", text, "must be numbers of at least 1 with commas between them, e.g. 3,7")
    return found


def read_suites(args: argparse.Namespace) -> dict[str, list[Prompt]]:
    """The prompts of every suite. Raises DsparkError naming --data or --suites when one is not there."""
    there = [] if args.data is None else sorted(path.stem for path in args.data.glob("*.jsonl"))
    if not there:
        example = Path(args.data or "DIR") / "gsm8k.jsonl"
        value = None if args.data is None else str(args.data)
        remedy = f"must be a folder of <suite>.jsonl files, e.g. {example}; --suites asks for {args.suites}"
        raise DsparkError("data", value, remedy)
    names = args.suites.split(",")
    for name in names:
        if name not in there:
            raise DsparkError("suites", name, f"not in {args.data}, which has {', '.join(there)}")
    return {name: read_prompts(args.data / f"{name}.jsonl", args.limit) for name in names}


def header(
    args: argparse.Namespace, target: Target, draft: DSparkDraft, suites: dict[str, list[Question]]
) -> dict[str, Any]:
    """What results belong to: those of another draft or of other prompts are never taken for this one's."""
    return {
        **{key: getattr(args, key) for key in ("target", "draft", "suites", "limit", "max_tokens", "ns")},
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "weights_sha256": weights_sha256(draft),
        "prompts_sha256": prompts_sha256(suites),
    }


def summarise(
    folder: Path, suites: dict[str, list[Question]], modes: Sequence[Mode], journal: Journal
) -> dict[str, Any]:
    """The figures of every suite and over all of them; folder: the draft's."""
    results, records = {}, []
    for suite, questions in suites.items():
        found = [journal.records[suite, question.id] for question in questions]
        known = find_overlap(folder, questions).to_json()
        results[suite] = {**summarise_suite(questions, modes, found), "overlap": known}
        records += found
    overlap = find_overlap(folder, [question for questions in suites.values() for question in questions])
    return {
        "suites": results,
        "mean_acceptance_over_suites": mean_acceptance(results, modes),
        "mean_speedup_over_suites": mean_speedups(results, modes),
        "speedup_at_best_n": best_speedups(results, modes),
        "replay": replay_summary(records),
        "overlap": {**overlap.to_json(), "line": str(overlap)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    console = Console(stderr=True)
    if args.linear:
        with torch.no_grad():
            times = linear_times(load_target(args.target, packed=False))
        print(json.dumps({**times, "machine": describe_machine()}, indent=1))
        return 0
    modes, prompts = modes_for(widths(args.ns)), read_suites(args)
    target = load_target(args.target)
    draft = load_named_draft(args.draft)
    renderer = ChatRenderer(target.tokenizer)
    suites = {name: render_questions(asked, renderer) for name, asked in prompts.items()}
    settings = header(args, target, draft, suites)
    journal = Journal(args.out, settings, modes)
    console.print(f"records: {args.out}", markup=False, highlight=False, soft_wrap=True)
    gamma = draft.config.gamma
    text = cycle(one for questions in suites.values() for question in questions for one in question.ids)
    context = list(islice(text, min(PASS_CONTEXT, target.max_context - gamma - 1)))
    passes = measure_passes(target, draft, context, widths=(1, gamma + 1))
    run_suites(target, draft, suites, modes, journal, args)
    how = {"greedy": True, "batch": 1, "draft_dtype": str(next(draft.parameters()).dtype)}
    summary = {
        "settings": {**settings, **how, "speed_limit": args.speed_limit},
        "machine": describe_machine(),
        "passes": asdict(passes),
        **summarise(draft_folder(args.draft), suites, modes, journal),
    }
    show(summary, console)
    print(json.dumps(summary, indent=1))
    failed = any(one["not_lossless"] or one["replay"]["faults"] for one in summary["suites"].values())
    return 1 if failed else 0


if __name__ == "__main__":
    run_program(main)
