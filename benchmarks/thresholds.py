"""What a static confidence threshold keeps: drafts verified, how many of them are accepted, tokens a round.

    python benchmarks/thresholds.py --data DIR --out runs/thresholds > thresholds.json

Every threshold serves the same prompts with `Threshold`, greedily, and must give plain decoding's ids. Nothing is
timed: a threshold is a diagnosis of the confidence head, whose rising share of accepted drafts says that it ranks them.
Writes thresholds.png into --out, after the paper's figure 5; a table goes to stderr. Confidences are calibrated where
the draft has a calibration.json, else raw.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.ticker
import torch
from matplotlib.figure import Figure

from dspark.bench.command import HelpFormatter, run_program
from dspark.bench.compare import read_questions
from dspark.calibration.schedule import choose_schedule
from dspark.checkpoints.builtin import draft_folder, load_named_draft
from dspark.data.chat import ChatRenderer
from dspark.decoding.engine import Engine
from dspark.decoding.planner import Schedule
from dspark.decoding.proposers import Proposer, make_proposer
from dspark.decoding.request import Request
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.base import Target
from dspark.targets.transformers import load_target

PREFILL = 256


def serve(
    target: Target,
    proposer: Proposer,
    schedule: Schedule | None,
    prompts: Sequence[list[int]],
    args: argparse.Namespace,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Counts over all rounds, and the answers."""
    engine = Engine(target, proposer, args.batch, prefill_tokens=PREFILL, schedule=schedule)
    results = [result for _, result in sorted(engine.run(asked(prompts, args)))]
    rounds = [one for result in results for one in result.rounds]
    count, verified, accepted = len(rounds), sum(r.scheduled for r in rounds), sum(r.accepted for r in rounds)
    figures = {
        "rounds": count,
        "verified": verified / count,
        "accepted": accepted / count,
        "acceptance_length": 1 + accepted / count,
        "acceptance_rate": accepted / verified if verified else None,
    }
    return figures, [result.output_ids for result in results]


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    target, draft = load_target(args.target), load_named_draft(args.draft)
    n = args.n or draft.config.gamma
    folder = draft_folder(args.draft)
    chosen = {x: choose_schedule(target, draft, folder, n, threshold=x) for x in args.thresholds}
    scaling = next(iter(chosen.values())).scaling
    proposer = make_proposer(target, draft, n, confidence=True, scaling=scaling)
    found = read_questions(
        args.data,
        ChatRenderer(target.tokenizer),
        seed=args.seed,
        limit=args.limit,
        max_prompt_tokens=args.max_prompt_tokens,
    )
    prompts = [list(one.ids) for one in found]
    if not prompts:
        raise DsparkError("data", str(args.data), "has no prompt that fits; raise --max-prompt-tokens")
    plain = [result.output_ids for _, result in sorted(Engine(target, max_batch=args.batch).run(asked(prompts, args)))]
    levels = []
    for threshold, one in chosen.items():
        figures, ids = serve(target, proposer, one.schedule, prompts, args)
        apart = sum(a != b for a, b in zip(ids, plain, strict=True))
        levels.append({"threshold": threshold, **figures, "answers_other_than_plain": apart})
        share = "-" if figures["acceptance_rate"] is None else f"{100 * figures['acceptance_rate']:.0f} %"
        print(
            f"threshold {threshold:.2f}: {figures['verified']:.2f} verified a round, "
            f"{figures['accepted']:.2f} accepted ({share}), {figures['acceptance_length']:.2f} tokens a round",
            file=sys.stderr,
            flush=True,
        )
    return {
        "machine": describe_machine(),
        "threads": torch.get_num_threads(),
        "settings": {key: str(value) for key, value in vars(args).items()},
        "prompts": len(prompts),
        "confidences": "raw" if scaling is None else "calibrated",
        "levels": levels,
    }


def asked(prompts: Sequence[list[int]], args: argparse.Namespace) -> list[Request]:
    return [Request(ids, args.max_tokens) for ids in prompts]


def draw(levels: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Share accepted of what is verified, tokens a round and drafts verified a round, against the threshold."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = (
        ("acceptance_rate", "accepted of the verified drafts"),
        ("acceptance_length", "tokens a round, bonus counted"),
        ("verified", "drafts verified a round"),
    )
    for panel, (key, label) in zip(figure.subplots(1, 3), panels, strict=True):
        known = [one for one in levels if one[key] is not None]
        panel.plot([one["threshold"] for one in known], [one[key] for one in known], marker="o")
        panel.set_xlabel("confidence threshold")
        panel.set_ylabel(label)
        if key == "acceptance_rate":
            panel.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="prompts: a folder of JSONL files, or one")
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("-n", type=int, default=None, help="draft tokens a round; all")
    parser.add_argument("--thresholds", type=numbers, default=tuple(k / 10 for k in range(10)), help="0,0.1,...,0.9")
    parser.add_argument("--limit", type=int, default=40, help="prompts")
    parser.add_argument("--batch", type=int, default=4, help="requests at a time")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(argv)


def numbers(text: str) -> tuple[float, ...]:
    return tuple(float(one) for one in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    result = sweep(args)
    title = f"{args.draft} for {args.target}, {result['prompts']} prompts, {result['confidences']} confidences"
    draw(result["levels"], title, args.out / "thresholds.png")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_program(main)
