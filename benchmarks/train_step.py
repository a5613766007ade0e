"""One training step, chunked loss against dense: time, tokens/s, blocks/s, peak memory. Prints one JSON object.

    python benchmarks/train_step.py [--anchors 512 --row 2048 --vocab 49152 --repeats 3]

A step is the draft's training forward over one packed row, the loss and the backward pass; weights and features are
random. Each side runs in a child process of its own, in turns, so that its peak resident memory is its own: the
high-water mark of the steps minus what the process held before the first one (weights, row). `backbone` is the same
step with the loss left out, which both sides have in common. CPU seconds stand beside wall time, because they bear a
shared machine better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dspark.bench.command import HelpFormatter
from dspark.drafts.config import DraftConfig
from dspark.drafts.dspark import DSparkDraft
from dspark.training.anchors import build_anchor_batch, select_anchors
from dspark.training.loss import LossSettings, default_chunk, dense_loss, loss_and_backward, slot_weights

SIDES = ("backbone", "chunked", "dense")


def draft_config(vocabulary: int, draft_vocabulary: int, row: int) -> DraftConfig:
    """The shape of a small draft for a 135M target: 3 layers, width 576, 5 taps, 7 predictions, Markov rank 64."""
    return DraftConfig(
        hidden_size=576,
        num_hidden_layers=3,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        intermediate_size=1536,
        rms_norm_eps=1e-5,
        attention_bias=False,
        max_position_embeddings=max(row + 64, 8192),
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        layer_types=("full_attention",) * 3,
        sliding_window=None,
        sliding_window_non_causal=False,
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocabulary,
        target_layer_ids=(1, 8, 15, 22, 28),
        num_target_layers=30,
        target_name="random",
        mask_token_id=0,
        sample_from_anchor=True,
        block_size=7,
        markov_rank=64,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        training_length=row,
        prompt_recipe={"template_sha256": None, "thinking": None},
    )


class Step:
    """A bound random draft, one packed row and its anchors; calling it runs one step of the given side."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        config = draft_config(options.vocab, options.draft_vocab or options.vocab, options.row)
        self.draft = DSparkDraft(config)
        if config.reduced:
            self.draft.set_vocabulary(torch.randperm(config.vocab_size)[: config.draft_vocab_size].tolist())
        head = torch.randn(config.vocab_size, config.hidden_size) * config.hidden_size**-0.5
        self.draft.bind(head, head)
        self.positions = torch.arange(options.row)
        self.taps = torch.randn(options.row, 5 * config.hidden_size)
        self.last_hidden = torch.randn(options.row, config.hidden_size)
        self.lse = torch.cat([F.linear(part, head).logsumexp(-1) for part in self.last_hidden.split(64)])
        ids = torch.randint(config.vocab_size, (options.row,))
        supervised, document = torch.ones(options.row, dtype=torch.bool), torch.zeros(options.row, dtype=torch.int64)
        anchors = select_anchors(supervised, document, options.anchors, torch.Generator().manual_seed(0))
        self.batch = build_anchor_batch(ids, supervised, document, anchors, config.gamma)
        self.settings = LossSettings()
        self.scale = 1 / float(slot_weights(self.batch.mask, self.settings.decay).sum())

    def target_log_p(self, index: torch.Tensor) -> torch.Tensor:
        return F.linear(self.last_hidden[index], self.draft.head_rows).sub_(self.lse[index, None])

    def __call__(self, side: str) -> float:
        batch = self.batch
        self.draft.zero_grad(set_to_none=True)
        hidden = self.draft.train_hidden(
            self.taps, self.positions, batch.anchor_index, batch.anchor_ids, batch.doc_start
        )
        if side == "backbone":
            hidden.backward(torch.ones_like(hidden))
            return 0.0
        if side == "chunked":
            stats = loss_and_backward(self.draft, hidden, batch, self.target_log_p, self.settings, self.scale)
            return stats.total * self.scale
        loss = dense_loss(self.draft, hidden, batch, self.target_log_p, self.settings, self.scale)
        loss.backward()
        return loss.item()


def _resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes; without /proc the high-water mark of getrusage stands for both."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def measure(side: str, options: argparse.Namespace) -> dict[str, float]:
    """Run in a child: one step to warm up, then `--steps` timed ones."""
    step = Step(options)
    try:  # forget the peak of the set-up, where the kernel allows it
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass
    baseline = _resident("VmRSS")
    loss = step(side)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(options.steps):
        step(side)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "loss": loss,
        "wall_s": wall / options.steps,
        "cpu_s": cpu / options.steps,
        "peak_bytes": _resident("VmHWM") - baseline,
        "baseline_bytes": baseline,
    }


def _child(side: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def summarise(runs: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of times, the largest of peaks, and the ratios chunked / dense."""
    sides: dict[str, dict[str, float]] = {}
    for side, results in runs.items():
        wall = statistics.median(r["wall_s"] for r in results)
        sides[side] = {
            "loss": results[0]["loss"],
            "wall_s": wall,
            "cpu_s": statistics.median(r["cpu_s"] for r in results),
            "tokens_per_s": options.row / wall,
            "blocks_per_s": options.anchors / wall,
            "peak_mib": max(r["peak_bytes"] for r in results) / 2**20,
        }
    chunked, dense = sides["chunked"], sides["dense"]
    return {
        "settings": {
            "vocab": options.vocab,
            "draft_vocab": options.draft_vocab or options.vocab,
            "anchors": options.anchors,
            "gamma": 7,
            "row": options.row,
            "chunk": default_chunk(7, options.draft_vocab or options.vocab),
            "threads": torch.get_num_threads(),
            "repeats": options.repeats,
            "torch": torch.__version__,
            "machine": platform.machine(),
            "load_average": os.getloadavg()[0],
        },
        "sides": sides,
        "runs": runs,
        "ratio": {key: chunked[key] / dense[key] for key in ("peak_mib", "wall_s", "cpu_s")},
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--anchors", type=int, default=512, help="blocks in the row")
    parser.add_argument("--row", type=int, default=2048, help="tokens of the packed row")
    parser.add_argument("--vocab", type=int, default=49152, help="of the target")
    parser.add_argument("--draft-vocab", type=int, default=None, help="K of a reduced vocabulary (default: all)")
    parser.add_argument("--steps", type=int, default=1, help="timed steps per child")
    parser.add_argument("--repeats", type=int, default=3, help="children per side, in turns")
    parser.add_argument("--side", choices=SIDES, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side is not None:
        print(json.dumps(measure(options.side, options)))
        return
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side in SIDES:
            runs[side].append(_child(side))
    print(json.dumps(summarise(runs, options), indent=2))


if __name__ == "__main__":
    main()
