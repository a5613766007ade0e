"""Throughput under load: plain decoding, fixed drafts and scheduled ones, for more and more users at once.

    python benchmarks/load.py --data DIR --out runs/load > load.json                  # the embedded pair, measured
    python benchmarks/load.py --simulate benchmarks/gpus.yaml --rounds ROUNDS.npz --out runs/load > gpus.json

Measured: a closed loop, in this process. Every user asks a prompt, waits for the whole answer and asks the next one, so
that `users` requests are in flight until the prompts run out. An engine for each mode serves the same prompts,
greedily, and must give the same ids; the engines take turns, step by step, always the one that has had the least time
so far, so that a machine that slows down for a while does so for all of them alike. Tokens a second are tokens over an
engine's own seconds, prompts included; the ratio is that of the best other mode's seconds to those of `scheduled`, the
median over repetitions with a bootstrap interval. --clock process counts this process's processor time instead, for a
machine busy with other work (give it one thread then: OMP_NUM_THREADS=1). `scheduled` needs temperatures beside the
draft and a cost profile (`dspark calibrate`); with --storage or --profile the costs are measured here first.

Simulated: rounds of a real draft (rounds.npz of `dspark calibrate --out`), each user going through those of a prompt
after another, on a GPU whose passes take what the file's figures say (its comment has the formula). Gate and schedule
are the engine's own; what is verified is accepted as far as it was in the real round.

Both write load.png (tokens a second in all, for each user, drafts verified a round) into --out. A table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import yaml
from matplotlib.figure import Figure
from scipy.special import expit

from dspark.bench.command import HelpFormatter, run_program
from dspark.bench.compare import read_questions
from dspark.calibration.cost import CostProfile
from dspark.calibration.profiles import measure_profile
from dspark.calibration.rounds import Rounds
from dspark.calibration.schedule import know
from dspark.calibration.stored import read_calibration
from dspark.calibration.temperature import fit_scaling
from dspark.checkpoints.builtin import draft_folder, load_named_draft
from dspark.checkpoints.native import weights_sha256
from dspark.data.chat import ChatRenderer
from dspark.decoding.drafting import Proposal
from dspark.decoding.engine import Engine
from dspark.decoding.planner import Costs, Fixed, Mode, Planner
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Active, NoState, Request, Round
from dspark.errors import DsparkError
from dspark.machine import describe_machine
from dspark.targets.transformers import load_target

MODES = {"plain": 0, "fixed 3": 3, "fixed 7": 7, "scheduled": 7}
USERS = (1, 2, 4, 8, 16, 32, 64)
PREFILL = 256


@dataclass
class Load:
    """One mode at one number of users. scheduled, proposed: draft tokens a round and request."""

    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    scheduled: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, record: Round) -> None:
        self.rounds += 1
        self.scheduled += record.scheduled
        self.proposed += record.proposed
        self.accepted += record.accepted

    def figures(self, users: int) -> dict[str, float]:
        rate, rounds = self.tokens / self.seconds, max(self.rounds, 1)
        return {
            "tokens_per_s": rate,
            "per_user": rate / users,
            "scheduled": self.scheduled / rounds,
            "proposed": self.proposed / rounds,
            "accepted": self.accepted / rounds,
        }


# Measured


class Measured:
    """The embedded pair, or another one, in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target = load_target(args.target, storage=None if args.storage == "exact" else args.storage)
        self.draft = load_named_draft(args.draft)
        folder, sha256 = draft_folder(args.draft), weights_sha256(self.draft)
        self.gamma = self.draft.config.gamma
        known = know(self.target, self.draft, folder, self.gamma, sha256)
        profile, calibration = known.profile, known.calibration
        if args.profile is not None and args.profile.is_file():
            profile = CostProfile.load(args.profile)
        elif args.profile is not None or args.storage != "exact":
            profile = measure_profile(self.target, self.draft, args.draft)
            if args.profile is not None:
                profile.save(args.profile)
        if profile is None or calibration is None:
            raise DsparkError("scheduled", "; ".join(known.missing), "dspark calibrate makes what is missing")
        self.profile: CostProfile = profile
        self.scaling = calibration.scaling
        renderer, length = ChatRenderer(self.target.tokenizer), args.max_prompt_tokens
        count = max(max(args.users) * args.asked, args.least)
        found = read_questions(args.data, renderer, seed=args.seed, limit=count, max_prompt_tokens=length)
        self.prompts = [list(one.ids) for one in found]
        if len(self.prompts) < count:
            raise DsparkError("data", str(args.data), f"has {len(self.prompts)} prompts that fit, {count} are needed")

    def engine(self, mode: str, users: int) -> Engine:
        n = min(MODES[mode], self.gamma)
        planned = mode == "scheduled"
        proposer = make_proposer(
            self.target, self.draft if n else None, n or None, confidence=planned, scaling=self.scaling
        )
        schedule = Planner(self.profile, n, self.args.mode) if planned else Fixed()
        return Engine(self.target, proposer, users, prefill_tokens=PREFILL, schedule=schedule)

    def level(self, users: int) -> dict[str, Any]:
        """Every mode at this number of users, side by side, `repeats` times."""
        engines = {mode: self.engine(mode, users) for mode in MODES}
        prompts = self.prompts[: max(users * self.args.asked, self.args.least)]
        self.serve(engines, prompts[: min(users, 4)], 24)  # warm-up
        runs: dict[str, list[Load]] = {mode: [] for mode in MODES}
        apart = dict.fromkeys(MODES, 0)
        for _ in range(self.args.repeats):
            served = self.serve(engines, prompts, self.args.max_tokens)
            for mode, (load, ids) in served.items():
                runs[mode].append(load)
                apart[mode] += sum(a != b for a, b in zip(ids, served["plain"][1], strict=True))
        seconds = {mode: np.array([load.seconds for load in loads]) for mode, loads in runs.items()}
        modes = {mode: together(loads).figures(users) for mode, loads in runs.items()}
        best = max((mode for mode in MODES if mode != "scheduled"), key=lambda mode: modes[mode]["tokens_per_s"])
        ratio, low, high = speedup(seconds[best], seconds["scheduled"], self.args.seed)
        return {
            "users": users,
            "prompts": len(prompts),
            "modes": modes,
            "scheduled_over_best_other": {"other": best, "median": ratio, "low": low, "high": high},
            "seconds": {mode: values.tolist() for mode, values in seconds.items()},
            "answers_other_than_plain": apart,
        }

    def serve(
        self, engines: dict[str, Engine], prompts: Sequence[list[int]], tokens: int
    ) -> dict[str, tuple[Load, list[list[int]]]]:
        """All prompts in every engine, a step of the one that has had the least time so far after another: what slows
        the machine down for a while slows all of them."""
        clock = time.process_time if self.args.clock == "process" else time.perf_counter
        asked = {mode: [engine.add(Request(ids, tokens)) for ids in prompts] for mode, engine in engines.items()}
        loads = {mode: Load() for mode in engines}
        while running := [mode for mode, engine in engines.items() if engine.busy]:
            mode = min(running, key=lambda one: loads[one].seconds)
            start = clock()
            steps = engines[mode].step()
            loads[mode].seconds += clock() - start
            for active, step in steps:
                if active.result.error is not None:
                    raise active.result.error
                if step.round is not None:
                    loads[mode].add(step.round)
        for mode, actives in asked.items():
            loads[mode].tokens = sum(len(active.result.output_ids) for active in actives)
        return {mode: (loads[mode], [active.result.output_ids for active in asked[mode]]) for mode in engines}


def together(loads: Sequence[Load]) -> Load:
    """All repetitions as one."""
    whole = Load()
    for load in loads:
        for field in fields(Load):
            setattr(whole, field.name, getattr(whole, field.name) + getattr(load, field.name))
    return whole


def speedup(other: np.ndarray, ours: np.ndarray, seed: int) -> tuple[float, float, float]:
    """The median over repetitions of seconds other / ours, and 95 % of what comes out when repetitions are drawn again,
    with replacement."""
    ratios = other / ours
    drawn = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(np.median(ratios)), float(low), float(high)


# Simulated


class Gpu:
    """Costs from a GPU's published figures (see gpus.yaml): the dearer of reading and computing, and a fixed part."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.widths = given, (1, 2, 3, 4, 5, 6, 7)

    def seconds(self, tokens: Any, requests: int, parameters: float, kv: float, fixed: float) -> Any:
        g = self.given
        read = (parameters * g["bytes_per_parameter"] + requests * g["context"] * kv) / (g["bandwidth"] * g["reached"])
        computed = 2 * parameters * np.asarray(tokens) / (g["flops"] * g["computed"])
        return np.maximum(read, computed) + fixed

    def verify_table(self, requests: int, most: int) -> np.ndarray:
        g = self.given
        tokens = np.maximum(np.arange(most + 1), requests)
        return self.seconds(tokens, requests, g["parameters"], g["kv_bytes"], g["fixed"])

    def draft_seconds(self, requests: int, n: int | None = None) -> float:
        g = self.given
        tokens = requests * (n or 7)
        return float(self.seconds(tokens, requests, g["draft_parameters"], g["draft_kv_bytes"], g["draft_fixed"]))

    def context_seconds(self, tokens: int) -> float:
        return 0.0  # beside the target's own reading of them


def simulate(
    costs: Costs,
    sessions: Sequence[Rounds],
    confidences: Sequence[np.ndarray],
    users: int,
    mode: str,
    args: argparse.Namespace,
) -> Load:
    """`users` users for --seconds of the machine's own time."""
    generator, n = np.random.default_rng(args.seed), MODES[mode]
    planner = Planner(costs, n, args.mode) if mode == "scheduled" else None
    load = Load()

    def start() -> tuple[Active, int, int]:
        active = Active(0, Request([0]), "greedy", 0, [0], 1, frozenset(), NoState())
        session = int(generator.integers(len(sessions)))
        return active, session, int(generator.integers(len(sessions[session])))

    batch = [start() for _ in range(users)]
    while load.seconds < args.seconds:
        actives = [active for active, _, _ in batch]
        drafting, width = (actives if n else [], n) if planner is None else planner.choose(actives, 0, 0)
        width = width or n
        inside = set(drafting)
        proposals = {
            a: Proposal([0] * width, [None] * width, confidences[s][at, :width].tolist())
            for a, s, at in batch
            if a in inside
        }
        if planner is not None:
            planner.cut(drafting, [proposals[active] for active in drafting])
        count = users
        for place, (active, session, at) in enumerate(batch):
            proposal = proposals.get(active) or Proposal()
            length = len(proposal.tokens)
            accepted = min(length, int(sessions[session].accepted[at]))
            record = Round(width if active in inside else 0, length, accepted)
            load.add(record)
            load.tokens += accepted + 1
            count += length
            if planner is not None:
                planner.learn(active, proposal, record)
            batch[place] = (active, session, at + 1) if at + 1 < len(sessions[session]) else start()
        seconds = float(costs.verify_table(users, count)[count])
        seconds += costs.draft_seconds(len(drafting), width) if drafting else 0.0
        load.seconds += seconds
        if planner is not None:
            planner.took(seconds)
    return load


def simulated(args: argparse.Namespace) -> dict[str, Any]:
    """Every GPU of the file at every number of users."""
    rounds = Rounds.load(args.rounds)
    if rounds.logits.shape[1] != MODES["scheduled"]:
        raise DsparkError("rounds", str(args.rounds), f"must be of {MODES['scheduled']} slots")
    stored = read_calibration(draft_folder(args.draft))
    scaling = np.array(fit_scaling(rounds) if stored is None else stored.scaling)
    names = np.char.add(np.char.add(rounds.domain, "/"), rounds.prompt)
    sessions = [rounds.where(names == name) for name in dict.fromkeys(names.tolist())]
    confidences = [expit(one.logits * scaling[:, 0] + scaling[:, 1]) for one in sessions]
    found = {}
    for gpu in yaml.safe_load(args.simulate.read_text(encoding="utf-8"))["gpus"]:
        costs, levels = Gpu(gpu), []
        for users in args.users:
            loads = {mode: simulate(costs, sessions, confidences, users, mode, args) for mode in MODES}
            figures = {mode: load.figures(users) for mode, load in loads.items()}
            best = max(f["tokens_per_s"] for mode, f in figures.items() if mode != "scheduled")
            ratio = figures["scheduled"]["tokens_per_s"] / best
            levels.append({"users": users, "modes": figures, "scheduled_over_best_other": {"median": ratio}})
            show(gpu["name"], levels[-1])
        found[gpu["name"]] = {"costs": gpu, "levels": levels}
    return found


# Both


def show(name: str, level: dict[str, Any]) -> None:
    cells = [f"{mode} {one['tokens_per_s']:9.1f} ({one['scheduled']:.2f})" for mode, one in level["modes"].items()]
    ratio = level["scheduled_over_best_other"]
    known = f" ({ratio['low']:.3f} to {ratio['high']:.3f}, {ratio['other']})" if "low" in ratio else ""
    text = f"{name:<24}{level['users']:>5} users: {'  '.join(cells)}  ratio {ratio['median']:.3f}{known}"
    print(text, file=sys.stderr, flush=True)


def draw(levels_of: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Tokens a second in all, for each user, drafts verified a round, a row for each machine."""
    figure = Figure(figsize=(13, 3.4 * len(levels_of)), layout="constrained")
    rows = figure.subplots(len(levels_of), 3, squeeze=False)
    panels = (
        ("tokens_per_s", "tokens/s in all"),
        ("per_user", "tokens/s for a user"),
        ("scheduled", "drafts verified a round and request"),
    )
    for row, (name, levels) in zip(rows, levels_of.items(), strict=True):
        for panel, (key, label) in zip(row, panels, strict=True):
            for mode in MODES:
                values = [level["modes"][mode][key] for level in levels]
                panel.plot([level["users"] for level in levels], values, marker="o", label=mode)
            panel.set_xscale("log", base=2)
            panel.set_xlabel("users")
            panel.set_ylabel(label)
            panel.set_title(name, fontsize=9)
        row[0].set_yscale("log")
        row[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", type=Path, help="prompts: a folder of JSONL files, or one")
    parser.add_argument("--target", default="embedded:smollm2-135m")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--storage", default="exact", help="how the target's weights are kept")
    parser.add_argument("--profile", type=Path, help="cost profile to use, measured and written when it is not there")
    parser.add_argument("--mode", choices=get_args(Mode), default="auto", help="of the schedule")
    parser.add_argument("--users", type=numbers, default=None, help="1,2,4, ...; default: to 64, simulated to 1024")
    parser.add_argument("--asked", type=int, default=2, help="prompts of each user")
    parser.add_argument("--least", type=int, default=8, help="prompts at least, for few users")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-prompt-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clock", choices=["wall", "process"], default="wall", help="what is counted as seconds")
    parser.add_argument("--simulate", type=Path, help="file of GPUs")
    parser.add_argument("--rounds", type=Path, help="rounds.npz to simulate with")
    parser.add_argument("--seconds", type=float, default=20.0, help="simulated seconds of each run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    for name in ("asked", "least", "max_tokens", "max_prompt_tokens", "repeats", "seconds"):
        if getattr(args, name) <= 0:
            raise DsparkError(name, getattr(args, name), "must be more than 0")
    if args.users is not None and min(args.users) < 1:
        raise DsparkError("users", min(args.users), "must be at least 1")
    return args


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.simulate is not None:
        if args.rounds is None:
            raise DsparkError("rounds", None, "give the rounds.npz of a draft to simulate with")
        args.users = args.users or tuple(2**k for k in range(11))
        found = simulated(args)
        result: dict[str, Any] = {"gpus": found, "rounds": len(Rounds.load(args.rounds))}
        levels = {name: one["levels"] for name, one in found.items()}
    else:
        if args.data is None:
            raise DsparkError("data", None, "give prompts to ask")
        args.users = args.users or USERS
        bench, levels_ = Measured(args), []
        for users in args.users:
            levels_.append(bench.level(users))
            show(args.storage, levels_[-1])
        result = {
            "machine": describe_machine(),
            "threads": torch.get_num_threads(),
            "storage": args.storage,
            "settings": {key: str(value) for key, value in vars(args).items()},
            "profile": bench.profile.model_dump(mode="json"),
            "levels": levels_,
        }
        levels = {f"{args.target}, {args.storage}": levels_}
    draw(levels, args.out / "load.png")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    run_program(main)
