"""Batches measured side by side: repetitions in turns, and what Transformers does with the same weights and rows.

Generation and capture as training data needs them; `benchmarks/generate.py` puts the comparisons together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig

from dspark.bench.compare import PLAIN, Question, Run, find_difference
from dspark.data.rows import Row
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request
from dspark.targets.base import Target
from dspark.targets.embedded import EMBEDDED, ensure_embedded
from dspark.training.features import HEAD_CHUNK, Features, log_sum_exp

Sample = dict[str, float]
Answers = list[list[int]]


def repeat(sides: dict[str, Callable[[], Sample]], repeats: int, budget: float) -> dict[str, list[Sample]]:
    """Every side once a repetition, in rotated order. A repetition that would end past `budget` s is not begun."""
    samples: dict[str, list[Sample]] = {side: [] for side in sides}
    begun = time.perf_counter()
    for turn in range(repeats):
        names = list(sides)
        shift = turn % len(names)
        for side in [*names[shift:], *names[:shift]]:
            samples[side].append(sides[side]())
        elapsed = time.perf_counter() - begun
        if elapsed * (turn + 2) / (turn + 1) > budget:
            break
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values), "n": len(values)}


def summarise(samples: dict[str, list[Sample]], bases: Sequence[str]) -> dict[str, Any]:
    """sides[side][figure] and ratio[base][side][rate], the latter of pairs from the same repetition."""
    figures = {side: {key: [s[key] for s in taken] for key in taken[0]} for side, taken in samples.items()}
    ratio: dict[str, Any] = {}
    for base in bases:
        for side, values in figures.items():
            rates = [key for key in values if key.endswith("_per_s")] if side != base else []
            pairs = {key: [a / b for a, b in zip(values[key], figures[base][key], strict=True)] for key in rates}
            if pairs:
                ratio.setdefault(base, {})[side] = {key: spread(each) for key, each in pairs.items()}
    sides = {side: {key: spread(each) for key, each in values.items()} for side, values in figures.items()}
    return {"sides": sides, "ratio": ratio}


def show(console: Console, title: str, result: dict[str, Any]) -> None:
    """Medians (lowest to highest) of all rates, and of the ratios of the first rate."""
    rates = [key for key in next(iter(result["sides"].values())) if key.endswith("_per_s")]
    table = Table(title=title)
    table.add_column("side")
    for header in (*rates, *(f"{rates[0]} / {base}" for base in result["ratio"])):
        table.add_column(header, justify="right")
    for side, figures in result["sides"].items():
        ratios = [sides.get(side, {}).get(rates[0]) for sides in result["ratio"].values()]
        table.add_row(side, *(shown(figures[key], 1) for key in rates), *(shown(ratio, 2) for ratio in ratios))
    console.print(table)


def shown(value: dict[str, float] | None, digits: int) -> str:
    if value is None:
        return ""
    middle, low, high = (f"{value[key]:.{digits}f}" for key in ("median", "min", "max"))
    return middle if value["n"] == 1 else f"{middle} ({low} to {high})"


def generation_sample(answers: Answers, seconds: float, prefill: float) -> Sample:
    """seconds: end to end; prefill: of which the passes over the prompts, which give one token of each row."""
    tokens = sum(map(len, answers))
    return {
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": (tokens - len(answers)) / (seconds - prefill),
        "tokens": tokens,
        "seconds": seconds,
        "prefill_seconds": prefill,
    }


class TimedTarget:
    """A target that adds up the seconds of its passes over prompts, those that give a request more than one token."""

    def __init__(self, target: Target) -> None:
        self.target, self.prefill = target, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def forward(self, batch: Any, taps: Sequence[int] = (), logits: Any = "all") -> Any:
        start = time.perf_counter()
        out = self.target.forward(batch, taps, logits)
        self.prefill += time.perf_counter() - start if any(len(ids) > 1 for _, ids in batch) else 0.0
        return out


def generate(
    target: Target, prompts: Answers, max_tokens: int, taps: Sequence[int] = (), dtype: torch.dtype = torch.bfloat16
) -> tuple[Answers, Sample]:
    """Plain greedy answers of all prompts at once. With taps every row's features are made too, and let go."""
    timed = TimedTarget(target)
    engine = Engine(timed, max_batch=len(prompts), capture_taps=tuple(taps))

    def keep(index: int, tapped: torch.Tensor, last_hidden: torch.Tensor) -> None:
        stored = last_hidden.to(dtype)
        Features(tapped.to(dtype), stored, log_sum_exp(target, stored, len(prompts[index]) - 1))

    start = time.perf_counter()
    results = dict(engine.run([Request(ids, max_tokens) for ids in prompts], keep if taps else None))
    seconds = time.perf_counter() - start
    answers = [results[index].output_ids for index in range(len(prompts))]
    return answers, generation_sample(answers, seconds, timed.prefill)


class Transformers:
    """The same weights as an ordinary Transformers model: float32, SDPA."""

    settings = "AutoModelForCausalLM, float32, attn_implementation=sdpa, default (dynamic) cache, no compilation"

    def __init__(self, target: Target) -> None:
        source = str(ensure_embedded()) if target.name == EMBEDDED else target.name
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
        self.model.eval().requires_grad_(False)
        self.stop_ids, pad = target.stop_ids, target.tokenizer.pad_token_id
        self.pad = pad if pad is not None else min(target.stop_ids, default=0)
        stops = sorted(target.stop_ids) or None
        self.model.generation_config = GenerationConfig(do_sample=False, eos_token_id=stops, pad_token_id=self.pad)
        self._clock: list[float] = []  # start and end of the first pass since it was emptied: the prompts'
        self.model.register_forward_pre_hook(self._tick)
        self.model.register_forward_hook(self._tick)

    def _tick(self, *_: Any) -> None:
        if len(self._clock) < 2:
            self._clock.append(time.perf_counter())

    def padded(self, rows: Answers, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and attention mask, both [rows, longest]."""
        width = max(map(len, rows))
        ids, mask = torch.full((len(rows), width), self.pad), torch.zeros(len(rows), width, dtype=torch.int64)
        for index, row in enumerate(rows):
            place = slice(width - len(row), width) if left else slice(len(row))
            ids[index, place], mask[index, place] = torch.tensor(row), 1
        return ids, mask

    def generate(self, prompts: Answers, max_tokens: int) -> tuple[Answers, Sample]:
        self._clock.clear()
        start = time.perf_counter()
        ids, mask = self.padded(prompts, left=True)
        written = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens)
        answers = [until_stop(row, self.stop_ids) for row in written[:, ids.shape[1] :].tolist()]
        seconds = time.perf_counter() - start
        return answers, generation_sample(answers, seconds, self._clock[1] - self._clock[0])

    @torch.no_grad()
    def capture(self, rows: Sequence[Row], taps: Sequence[int]) -> list[Features]:
        """One right-padded pass. Its last hidden state is the normed one: the other is not among what it returns."""
        read = [row.ids[:-1] for row in rows]
        ids, mask = self.padded(read, left=False)
        out = self.model.base_model(
            input_ids=ids, attention_mask=mask if len(rows) > 1 else None, output_hidden_states=True, use_cache=False
        )
        head, features = self.model.get_output_embeddings(), []
        for index, row in enumerate(rows):
            length, start = len(read[index]), len(row.prompt_ids) - 1
            last = out.last_hidden_state[index, :length]
            lse = [torch.zeros(start), *(head(part).logsumexp(-1) for part in last[start:].split(HEAD_CHUNK))]
            tapped = torch.cat([out.hidden_states[tap + 1][index, :length] for tap in taps], dim=-1)
            features.append(Features(tapped, last.clone(), torch.cat(lse)))
        return features


def until_stop(ids: list[int], stop_ids: frozenset[int]) -> list[int]:
    """Up to and including the first stop id."""
    end = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids) - 1)
    return ids[: end + 1]


def compare_ids(target: Target, questions: Sequence[Question], ours: Answers, theirs: Answers) -> dict[str, Any]:
    """Rows whose ids differ; `ties`: those where both ids lie within float noise of the target's best logit."""
    found = []
    for question, mine, other in zip(questions, ours, theirs, strict=True):
        runs = [Run(name, question.id, ids, "", [], False) for name, ids in ((PLAIN.name, mine), ("other", other))]
        found.append(find_difference(target, question, *runs))
    different = [one for one in found if one is not None]
    ties = sum(one.tie for one in different)
    return {
        "rows": len(questions),
        "differ": len(different),
        "ties": ties,
        "not_ties": [asdict(one) for one in different if not one.tie],
    }


def capture_packed(target: Target, rows: Sequence[Row], taps: Sequence[int]) -> list[Features]:
    """All rows in one ragged pass, as `InProcessFeatures` does one."""
    batch = [(target.new_state(len(row.ids) - 1), torch.tensor(row.ids[:-1])) for row in rows]
    out = target.forward(batch, taps=taps, logits="none")
    assert out.taps is not None
    counts = [len(ids) for _, ids in batch]
    parts = zip(rows, out.taps.split(counts), out.last_hidden.split(counts), strict=True)
    return [Features(t, last, log_sum_exp(target, last, len(row.prompt_ids) - 1)) for row, t, last in parts]


def largest_error(found: Sequence[Features], wanted: Sequence[Features]) -> dict[str, float]:
    """Of taps and log-sum-exp over rows: norm of the difference / norm."""
    error = {}
    for part in ("taps", "lse"):
        pairs = [(getattr(a, part), getattr(b, part)) for a, b in zip(found, wanted, strict=True)]
        error[part] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
    return error
