"""Which rows and anchors a step trains on, and a reader thread that has their features ready in time.

Row order and anchors are functions of (seed, step) alone: a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.data.rows import PackedRow, Row, pack, split_held_out
from dspark.errors import DsparkError
from dspark.training.anchors import AnchorBatch, build_anchor_batch, select_anchors
from dspark.training.features import Features, FeatureSource
from dspark.training.loss import slot_weights
from dspark.training.recipe import DataSection, TrainingSection


def generator(*key: object) -> torch.Generator:
    """A generator seeded by the hash of a key such as (seed, "anchors", step)."""
    digest = hashlib.sha256("/".join(map(str, key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def held_out_draw(row: Row) -> float:
    """A number in [0, 1) that depends on the prompt's id only: all turns of a prompt fall on the same side."""
    return int.from_bytes(hashlib.sha256(row.source.encode()).digest()[:8], "little") / 2**64


def split_rows(rows: Sequence[Row], data: DataSection) -> tuple[list[Row], list[Row]]:
    """(training rows, held-out rows), the held-out ones in the order of their prompts' hashes.

    A prompt that shares a user turn with a held-out one under another id, in any turn of the two, is left out whole.
    Raises DsparkError when no row would be left to train on.
    """
    hashes = {row.source: held_out_draw(row) for row in rows}
    if data.held_out is None:
        train, held = split_held_out(rows, data.validation_share)
    else:
        out = set(sorted(hashes, key=lambda source: hashes[source])[: data.held_out])
        train = [row for row in rows if row.source not in out]
        held = [row for row in rows if row.source in out]
    words = {_turn_key(row) for row in held}
    shared = {row.source for row in train if _turn_key(row) in words}
    train = [row for row in train if row.source not in shared]
    if not train:
        raise DsparkError(
            "data.held_out",
            data.held_out,
            f"leaves no row to train on ({len(rows)} rows); hold fewer prompts out, or give more rows",
        )
    train = _chosen_rows(train, data)
    return train, sorted(held, key=lambda row: (hashes[row.source], row.turn, row.id))


def _turn_key(row: Row) -> str | tuple[int, ...]:
    """What two rows with the same user turn share: the hash of its words, or all ids of a row made without one."""
    return row.prompt_hash or tuple(row.prompt_ids)


def _chosen_rows(train: list[Row], data: DataSection) -> list[Row]:
    """What `data.answers` and `data.training_rows` leave of the training rows, in their order."""
    if data.answers != "all":
        kept = [row for row in train if (row.temperature == 0.0) == (data.answers == "greedy")]
        if not kept:
            raise DsparkError("data.answers", data.answers, f"none of {len(train)} training rows is {data.answers}")
        train = kept
    if data.training_rows is None:
        return train
    if data.training_rows > len(train):
        raise DsparkError("data.training_rows", data.training_rows, f"there are {len(train)} rows; ask for fewer")
    draws = {row.id: hashlib.sha256(row.id.encode()).digest() for row in train}
    kept_ids = set(sorted(draws, key=lambda row_id: draws[row_id])[: data.training_rows])
    return [row for row in train if row.id in kept_ids]


def trainable(row: Row, max_length: int) -> bool:
    """Whether at least one anchor fits: two answer tokens within `max_length`."""
    return len(row.answer_ids) >= 2 and len(row.prompt_ids) + 2 <= max_length


def cut(row: Row, max_length: int) -> Row:
    """The row's first `max_length` tokens."""
    if len(row.ids) <= max_length:
        return row
    return row.model_copy(update={"answer_ids": row.answer_ids[: max_length - len(row.prompt_ids)], "finish": "length"})


@dataclass
class MicroPlan:
    """One packed flat row [S] and its anchors, known from ids alone."""

    rows: list[Row]
    packed: PackedRow
    anchors: AnchorBatch


@dataclass
class MicroBatch:
    """A plan with features: taps [S, m * d], last_hidden [S, d], lse [S] (all float32; the last token of each row,
    which the target never read, is zero and never used). scale: 1 / pooled weight sum of the whole step."""

    step: int
    last: bool
    plan: MicroPlan
    taps: Tensor
    last_hidden: Tensor
    lse: Tensor
    scale: float


def block_width(training: TrainingSection, gamma: int, step: int, micro: int) -> int:
    """Predictions of a micro-batch's blocks: one of `training.block_widths`, drawn by (seed, step, micro), else gamma.

    Serving n tokens runs blocks of n slots, which see fewer masks beside them than the first n of gamma slots do.
    """
    widths = tuple(range(1, gamma + 1)) if training.block_widths == "all" else training.block_widths
    if widths is None:
        return gamma
    source = generator(training.seed, "width", step, micro)
    return widths[int(torch.randint(len(widths), (1,), generator=source))]


def make_plan(rows: Sequence[Row], anchors_per_row: int, width: int, source: torch.Generator) -> MicroPlan:
    """Pack rows and draw up to `anchors_per_row` anchors in each (docs/method.md section 3), of `width` slots."""
    packed = pack(rows)
    chosen, start = [], 0
    for row in rows:
        piece = slice(start, start + len(row.ids))
        picked = select_anchors(packed.loss_mask[piece], packed.document_ids[piece], anchors_per_row, source)
        chosen.append(picked + start)
        start = piece.stop
    anchors = build_anchor_batch(packed.ids, packed.loss_mask, packed.document_ids, torch.cat(chosen), width)
    return MicroPlan(list(rows), packed, anchors)


def gather(plan: MicroPlan, features: Sequence[Features]) -> tuple[Tensor, Tensor, Tensor]:
    """Features of the packed row in float32: taps [S, m * d], last_hidden [S, d], lse [S]."""
    size = len(plan.packed.ids)
    taps = torch.zeros(size, features[0].taps.shape[1])
    last_hidden = torch.zeros(size, features[0].last_hidden.shape[1])
    lse = torch.zeros(size)
    start = 0
    for row, item in zip(plan.rows, features, strict=True):
        length = len(row.ids) - 1
        for whole, part in ((taps, item.taps), (last_hidden, item.last_hidden), (lse, item.lse)):
            whole[start : start + length].copy_(part[:length])
        start += length + 1
    return taps, last_hidden, lse


class Batches:
    """The endless sequence of micro-batches of a run."""

    def __init__(
        self, rows: Sequence[Row], source: FeatureSource, data: DataSection, training: TrainingSection, gamma: int
    ):
        self.rows = [row for row in rows if trainable(row, data.max_length)]
        if not self.rows:
            raise DsparkError("data.rows", len(rows), f"no row has two answer tokens within {data.max_length} tokens")
        self.source, self.training, self.gamma, self.max_length = source, training, gamma, data.max_length
        self._order: tuple[int, list[int]] = (-1, [])

    def _row_index(self, position: int) -> int:
        """Row at a position of the endless order: epoch after epoch, each its own permutation."""
        epoch, offset = divmod(position, len(self.rows))
        if self._order[0] != epoch:
            order = torch.randperm(len(self.rows), generator=generator(self.training.seed, "order", epoch)).tolist()
            self._order = (epoch, order)
        return self._order[1][offset]

    def full_rows(self, step: int, micro: int) -> list[Row]:
        count = self.training.rows_per_step
        start = (step * self.training.accumulation + micro) * count
        return [self.rows[self._row_index(start + i)] for i in range(count)]

    def micro_batches(self, step: int) -> Iterator[MicroBatch]:
        """The step's micro-batches, all with the same pooled scale (weights depend on masks only)."""
        wholes, plans, weight = [], [], 0.0
        for micro in range(self.training.accumulation):
            whole = self.full_rows(step, micro)
            source = generator(self.training.seed, "anchors", step, micro)
            cut_rows = [cut(row, self.max_length) for row in whole]
            width = block_width(self.training, self.gamma, step, micro)
            plan = make_plan(cut_rows, self.training.anchors_per_row, width, source)
            weight += float(slot_weights(plan.anchors.mask, self.training.loss.decay).double().sum())
            wholes.append(whole)
            plans.append(plan)
        for index, (whole, plan) in enumerate(zip(wholes, plans, strict=True)):
            taps, last_hidden, lse = gather(plan, [self.source.get(row) for row in whole])
            yield MicroBatch(step, index + 1 == len(plans), plan, taps, last_hidden, lse, 1.0 / weight)


class Reader:
    """Reads micro-batches of steps first..last-1 in a thread, `depth` ahead of the trainer. Iterating raises what the
    thread raised. `close` ends the thread."""

    def __init__(self, batches: Batches, first: int, last: int, depth: int = 2) -> None:
        self._queue: queue.Queue[MicroBatch | BaseException | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(batches, first, last), daemon=True, name="reader")
        self._thread.start()

    def _read(self, batches: Batches, first: int, last: int) -> None:
        try:
            for step in range(first, last):
                for batch in batches.micro_batches(step):
                    if not self._put(batch):
                        return
            self._put(None)
        except BaseException as error:  # handed to the trainer, which raises it
            self._put(error)

    def _put(self, item: MicroBatch | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def __iter__(self) -> Iterator[MicroBatch]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
