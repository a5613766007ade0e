"""Choices of a draft and its training, compared at equal compute: as many seconds of training each.

    python benchmarks/choices.py --base smollm2-135m data.rows=ROWS.jsonl data.features=FOLDER \\
        --choices benchmarks/choices.yaml --seconds 150 --out runs/choices

Every choice is the base recipe with a few values changed. A few steps of it are timed (processor time, so that
other work on the machine favours none), it is trained for as many as fit --seconds (the learning rate runs its full
course over exactly these), and the last weights are measured on the
same held-out greedy rows as all others: replay acceptance (macro over prompts, bonus counted), teacher-forced tau, kept
mass, and what a draft pass costs beside the target as serving loads it. Where choices differ in `data.answers`, all of
the group train on the same number of rows.

Results are appended to OUT/choices.jsonl; a second call with the same settings goes on from there. Progress goes to
stderr, Markdown tables to stdout. Exit code 1 when a choice failed, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console

from dspark.bench.command import HelpFormatter, run_program
from dspark.bench.metrics import acceptance_length
from dspark.bench.passes import measure_passes
from dspark.checkpoints.native import load_draft
from dspark.data.rows import Row
from dspark.decoding.proposers import DSparkProposer, make_proposer
from dspark.decoding.replay import replay
from dspark.drafts.dspark import DSparkDraft
from dspark.errors import DsparkError
from dspark.targets.transformers import load_target
from dspark.training.batches import split_rows, trainable
from dspark.training.features import FeatureSource
from dspark.training.recipe import Recipe, load_recipe
from dspark.training.setup import open_features, read_training_rows
from dspark.training.state import data_fingerprint
from dspark.training.trainer import train
from dspark.training.validation import REPLAY_BATCH, Validator

THROWN_AWAY = 2  # first steps, which pay for warming up
PASS_CONTEXT = 256
CHOICES = Path(__file__).with_name("choices.yaml")
RESAMPLES = 4000
BASELINE = "baseline"
FREE_DATA = {"answers", "training_rows", "vocabulary_prompts"}  # of data, what a choice may change


@dataclass(frozen=True)
class Choice:
    """A name in a group, and what it changes in the base recipe (`section.key=value`)."""

    group: str
    name: str
    overrides: tuple[str, ...]

    def recipe(self, base: str, given: Sequence[str]) -> Recipe:
        return load_recipe(base, [*given, *self.overrides])


def read_choices(path: Path, only: Sequence[str] | None) -> list[Choice]:
    """Choices of a YAML file {group: {name: [override, ...]}}, the baseline first; `only` these groups and it.

    Raises DsparkError for another form, or a group that is not there.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        found = [
            Choice(str(group), str(name), tuple(map(str, overrides)))
            for group, choices in content.items()
            for name, overrides in choices.items()
        ]
    except (OSError, AttributeError, TypeError, yaml.YAMLError) as error:
        raise DsparkError("choices", str(path), f"must be {{group: {{name: [override]}}}} ({error})") from None
    groups = list(dict.fromkeys(choice.group for choice in found))
    if unknown := sorted(set(only or ()) - set(groups)):
        raise DsparkError("only", unknown, f"the groups are {', '.join(groups)}")
    kept = [choice for choice in found if not only or choice.group in (*only, BASELINE)]
    return sorted(kept, key=lambda choice: choice.group != BASELINE)


def match_rows(choices: Sequence[Choice], args: argparse.Namespace, rows: Sequence[Row]) -> list[Choice]:
    """In a group whose choices differ in `data.answers`, each trains on as many rows as the poorest of them has.

    A choice without any row stays as it is and fails when its turn comes.
    """
    available: dict[str, dict[str, int]] = defaultdict(dict)
    for choice in choices:
        recipe = choice.recipe(args.base, args.overrides)
        if any(override.startswith("data.answers=") for override in choice.overrides):
            try:
                available[choice.group][choice.name] = len(split_rows(rows, recipe.data)[0])
            except DsparkError:
                continue
    matched = []
    for choice in choices:
        counts = available.get(choice.group, {})
        extra = (f"data.training_rows={min(counts.values())}",) if choice.name in counts else ()
        matched.append(replace(choice, overrides=choice.overrides + extra))
    return matched


class Workbench:
    """What all choices share, loaded once: rows, target (plain for training, packed for pass times), features."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.base = load_recipe(args.base, args.overrides)
        self.rows = read_training_rows(self.base)
        _, held = split_rows(self.rows, self.base.data)
        greedy = [row for row in held if row.temperature == 0.0 and trainable(row, self.base.data.max_length)]
        self.held = greedy[: args.held_rows]
        if not self.held:
            raise DsparkError("data.held_out", self.base.data.held_out, "holds out no greedy row to measure on")
        self.target = load_target(self.base.target, packed=False)
        self.serving = load_target(self.base.target)
        self._sources: dict[tuple[int, ...], FeatureSource] = {}

    def source(self, recipe: Recipe) -> FeatureSource:
        taps = tuple(recipe.draft_config().target_layer_ids)
        if taps not in self._sources:
            self._sources[taps] = open_features(recipe, self.target, self.rows, say)
        return self._sources[taps]

    def key(self, recipe: Recipe) -> str:
        """Of everything that a result depends on, this machine and its load aside."""
        content = recipe.model_dump(mode="json")
        for field in ("out", "steps", "log_every", "validate_every", "save_every", "validation_rows", "replay_rows"):
            del content["training"][field]
        for field in ("rows", "features"):  # where they lie does not matter, the rows' fingerprint does
            del content["data"][field]
        args, held = self.args, [row.id for row in self.held]
        content["measured"] = [data_fingerprint(self.rows), held, args.seconds, args.ns, torch.get_num_threads()]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def run(self, recipe: Recipe) -> dict[str, Any]:
        """Time, train and measure one choice. Raises KeyboardInterrupt when training was interrupted."""
        with TemporaryDirectory(prefix="training-", dir=self.args.out) as folder:
            _, timed = self._train(recipe, THROWN_AWAY + self.args.timed_steps, Path(folder) / "timed")
            step_seconds = fmean(timed[THROWN_AWAY:])
            steps = max(1, int(self.args.seconds / step_seconds))
            say(f"  {step_seconds:.3f} s a step, so {steps} steps")
            draft, spent = self._train(recipe, steps, Path(folder) / "run")
        return {
            "steps": steps,
            "step_seconds": step_seconds,
            "train_seconds": sum(spent),
            "parameters": sum(parameter.numel() for parameter in draft.parameters()),
            **self.measure(draft, recipe),
        }

    def _train(self, recipe: Recipe, steps: int, out: Path) -> tuple[DSparkDraft, list[float]]:
        """(the draft after the last step, as it would be saved; processor seconds of each step and thread)."""
        quiet = {"validation_rows": 0, "replay_rows": 0, "validate_every": 0, "save_every": 0, "log_every": 1}
        changed = recipe.training.model_copy(update={**quiet, "steps": steps, "out": str(out)})
        result = train(
            recipe.model_copy(update={"training": changed}), target=self.target, source=self.source(recipe),
            rows=self.rows, console=Console(quiet=True),
        )  # fmt: skip
        if result.interrupted:
            raise KeyboardInterrupt
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        threads = torch.get_num_threads()
        spent = [line["step_cpu_s"] / threads for line in lines if line["kind"] == "train"]
        return load_draft(out / "last"), spent

    def measure(self, draft: DSparkDraft, recipe: Recipe) -> dict[str, Any]:
        """Figures on the held-out rows, with the base recipe's anchors, loss and arithmetic for all choices."""
        source, gamma = self.source(recipe), draft.config.gamma
        training = self.base.training.model_copy(update={"validation_rows": len(self.held), "replay_rows": 0})
        validator = Validator(self.held, source, self.base.model_copy(update={"training": training}), gamma)
        draft.bind(self.target.embedding_weight, self.target.head_weight)
        forced = validator.run(draft, self.target)
        context = list(islice(cycle(token for row in self.held for token in row.ids), PASS_CONTEXT))
        context = context[: self.serving.max_context - gamma - 1]
        replays, passes = {}, {}
        for n in self.args.ns:
            times = measure_passes(self.serving, draft, context, (1, n + 1), n, self.args.repeats)
            passes[str(n)] = {
                "draft_ms": 1000 * times.draft_seconds,
                "share_of_verify_1": times.draft_share,
                "verify_1_ms": 1000 * times.verify[0].seconds,
                "verify_ms": 1000 * times.verify[1].seconds,
            }
            replays[str(n)] = self._replay(draft, source, n)
        figures = {name: forced[name] for name in ("tau_teacher_forced", "kept_mass", "loss")}
        return {**figures, "replay": replays, "passes": passes}

    def _replay(self, draft: DSparkDraft, source: FeatureSource, n: int) -> dict[str, Any]:
        """Acceptance length of each prompt (mean over its turns, bonus counted), and their means by set of prompts."""
        proposer = make_proposer(self.serving, draft, n)
        assert isinstance(proposer, DSparkProposer)
        items = ((row, source.get(row).taps.float()) for row in self.held)
        lengths: dict[str, list[float]] = defaultdict(list)
        for row, rounds in zip(self.held, replay(proposer, items, REPLAY_BATCH), strict=True):
            if (length := acceptance_length(rounds)) is not None:
                lengths[row.source].append(length)
        prompts = {source: fmean(values) for source, values in lengths.items()}
        sets: dict[str, list[float]] = defaultdict(list)
        for name, length in prompts.items():
            sets[name.partition("/")[0]].append(length)
        macro = {name: fmean(values) for name, values in sorted(sets.items())}
        return {"macro": fmean(prompts.values()), "sets": macro, "prompts": prompts}


def bootstrap(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of a mean over prompts, seeded."""
    table = np.asarray(values)
    draws = np.random.default_rng(0).integers(0, len(table), size=(RESAMPLES, len(table)))
    low, high = np.quantile(table[draws].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def replay_cell(record: dict[str, Any], n: str) -> str:
    low, high = bootstrap(list(record["replay"][n]["prompts"].values()))
    return f"{record['replay'][n]['macro']:.3f} [{low:.3f}, {high:.3f}]"


def gain_cell(record: dict[str, Any], baseline: dict[str, Any] | None, n: str) -> str:
    """Difference to the baseline, paired by prompt, with its interval."""
    if baseline is None or baseline is record:
        return ""
    mine, theirs = record["replay"][n]["prompts"], baseline["replay"][n]["prompts"]
    gains = [length - theirs[name] for name, length in mine.items() if name in theirs]
    low, high = bootstrap(gains)
    return f"{fmean(gains):+.3f} [{low:+.3f}, {high:+.3f}]"


def speed_estimate(record: dict[str, Any], n: str) -> float:
    """Tokens per second over plain decoding's, if decoding were nothing but passes: tau T(1) / (T_draft + T(n + 1))."""
    passes = record["passes"][n]
    return record["replay"][n]["macro"] * passes["verify_1_ms"] / (passes["draft_ms"] + passes["verify_ms"])


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))


def tables(records: Sequence[dict[str, Any]], ns: Sequence[int]) -> str:
    """Two Markdown tables: the figures of every choice, and its acceptance by set of prompts."""
    counts = [str(n) for n in ns]
    baseline = next((record for record in records if record["group"] == BASELINE), None)
    header = ["group", "choice", "parameters", "steps", "s/step", "kept mass", "tau (teacher)"]
    for n in counts:
        header += [f"replay n={n}", f"gain n={n}", f"draft pass n={n}", f"speed n={n} (estimate)"]
    lines = []
    for record in records:
        line = [record["group"], record["name"], f"{record['parameters']:,}", str(record["steps"])]
        line += [f"{record['step_seconds']:.3f}", f"{record['kept_mass']:.4f}", f"{record['tau_teacher_forced']:.3f}"]
        for n in counts:
            passes = record["passes"][n]
            line += [replay_cell(record, n), gain_cell(record, baseline, n)]
            line += [f"{passes['draft_ms']:.1f} ms ({passes['share_of_verify_1']:.2f})"]
            line += [f"{speed_estimate(record, n):.2f}x"]
        lines.append(line)
    sets = sorted({name for record in records for name in record["replay"][counts[0]]["sets"]})
    by_set = []
    for record in records:
        macros = [record["replay"][n]["sets"].get(name) for n in counts for name in sets]
        by_set.append([record["group"], record["name"], *("" if m is None else f"{m:.3f}" for m in macros)])
    names = ["group", "choice", *(f"{s} n={n}" for n in counts for s in sets)]
    note = (
        "Acceptance lengths: macro over prompts, bonus counted, 95 % bootstrap over prompts; gain: paired by prompt. "
    )
    note += "Draft pass: milliseconds and share of T_verify(1)."
    return "\n\n".join([markdown(header, lines), note, markdown(names, by_set)])


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """Finished choices by key; a torn last line (a kill while writing) is cut off."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return {record["key"]: record for record in map(json.loads, whole.splitlines())}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_all(bench: Workbench, choices: Sequence[Choice], args: argparse.Namespace, shown: list[dict[str, Any]]) -> int:
    """Run what is not on file yet, append it, and collect all records in `shown`. Returns how many failed."""
    path = args.out / "choices.jsonl"
    done, failed, spent = read_records(path), 0, list[float]()
    recipes = [choice.recipe(args.base, args.overrides) for choice in choices]
    keys = [bench.key(recipe) for recipe in recipes]
    left = sum(key not in done for key in keys)
    for number, (choice, recipe, key) in enumerate(zip(choices, recipes, keys, strict=True), start=1):
        labels = {"group": choice.group, "name": choice.name, "overrides": list(choice.overrides)}
        if key not in done:
            minutes = left * (fmean(spent) if spent else 1.5 * args.seconds) / 60
            say(f"[{number}/{len(choices)}] {choice.group}: {choice.name} (about {minutes:.0f} min left)")
            started = time.perf_counter()
            try:
                done[key] = {**labels, "key": key, **bench.run(recipe)}
            except DsparkError as error:
                say(f"  failed: {error}")
                failed += 1
            else:
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[key]) + "\n")
                spent.append(time.perf_counter() - started)
            left -= 1
        if key in done:
            shown.append({**done[key], **labels})
    return failed


def check_same_data(choices: Sequence[Choice], bench: Workbench, args: argparse.Namespace) -> None:
    """Raises DsparkError for a choice that would be measured on other rows, or whose recipe is wrong."""
    base = bench.base
    for choice in choices:
        recipe = choice.recipe(args.base, args.overrides)
        fields = {
            name for name in type(base.data).model_fields if getattr(recipe.data, name) != getattr(base.data, name)
        }
        if fields - FREE_DATA or recipe.target != base.target or recipe.draft_config().gamma < max(args.ns):
            remedy = f"must keep the target, predict {max(args.ns)} tokens, and of data change {sorted(FREE_DATA)} only"
            raise DsparkError(f"choice {choice.group}: {choice.name}", list(choice.overrides), remedy)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("overrides", nargs="*", help="section.key=value, for the base recipe and so for all choices")
    parser.add_argument("--base", default="smollm2-135m", help="recipe name or path")
    parser.add_argument("--choices", type=Path, default=CHOICES, help="YAML file {group: {name: [override, ...]}}")
    parser.add_argument("--only", help="groups to run beside the baseline, with commas (default: all)")
    parser.add_argument("--seconds", type=float, default=150.0, help="of training a choice: processor time a thread")
    parser.add_argument("--timed-steps", type=int, default=12, help="steps that are timed first")
    parser.add_argument("--held-rows", type=int, help="the first N held-out greedy rows to measure on (default: all)")
    parser.add_argument("--ns", default="7,3", help="draft tokens a round to measure")
    parser.add_argument("--repeats", type=int, default=30, help="timed draft passes")
    parser.add_argument("--out", type=Path, required=True, help="folder of results, made or gone on with")
    args = parser.parse_intermixed_args(argv)
    args.ns = [int(n) for n in args.ns.split(",")]
    args.only = args.only.split(",") if args.only else None
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    choices = read_choices(args.choices, args.only)
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Workbench(args)
    check_same_data(choices, bench, args)
    choices = match_rows(choices, args, bench.rows)
    say(f"{len(choices)} choices, {len(bench.rows)} rows, measured on {len(bench.held)} held-out greedy rows")
    shown: list[dict[str, Any]] = []
    code = 0
    try:
        code = 1 if run_all(bench, choices, args, shown) else 0
    except KeyboardInterrupt:
        say("stopped; the same command goes on from here")
        code = 130
    if shown:
        print(tables(shown, args.ns))
    return code


if __name__ == "__main__":
    run_program(main)
