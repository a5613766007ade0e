"""What the target computed on a row, which is all that a draft learns from.

Features come from the target itself (`InProcessFeatures`) or from disk (`CachedFeatures`, written once by
`FeatureWriter`). On disk: a folder with `index.json` and safetensors shards, keys `<row id>.taps`,
`<row id>.last_hidden`, `<row id>.lse`; the index holds a hash of each row's token ids, so that features are never read
for other ids than they were computed from. Layer ids are 0-based, a tap is the value after the layer; the last hidden
state is the one before the target's final norm.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dspark.data.rows import Row, ids_hash
from dspark.errors import DsparkError
from dspark.locks import lock_for_writing
from dspark.targets.base import Target

FORMAT = 2  # 2: a hash of the ids of every row, the dtype of the target
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
DtypeName = Literal["bf16", "fp32"]
HEAD_CHUNK = 256  # positions whose logits over V exist at one time


@dataclass
class Features:
    """The target's view of one row of T + 1 tokens (the last token is never read).

    taps [T, m * d], last_hidden [T, d] (pre-norm), lse [T] fp32: log-sum-exp over V of the target's logits, 0 at the
    positions inside the prompt, which predict no label.
    """

    taps: Tensor
    last_hidden: Tensor
    lse: Tensor

    def head(self, length: int) -> Features:
        """The first `length` positions."""
        return Features(self.taps[:length], self.last_hidden[:length], self.lse[:length])

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.taps, self.last_hidden, self.lse))


class FeatureSource(Protocol):
    """Where the trainer gets a row's features from. `get` may be called from any thread."""

    taps: tuple[int, ...]

    def get(self, row: Row) -> Features:
        """Features of all T = len(row.ids) - 1 positions. Raises DsparkError when it has none."""


class InProcessFeatures:
    """The target's own forward pass, on the fly."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target, self.taps = target, tuple(taps)
        self._lock = threading.Lock()  # a target serves one pass at a time; the reader thread and validation share it

    @torch.no_grad()
    def get(self, row: Row) -> Features:
        ids = torch.tensor(row.ids[:-1], dtype=torch.int64)
        with self._lock:
            state = self.target.new_state(len(ids))
            out = self.target.forward([(state, ids)], taps=self.taps, logits="none")
            assert out.taps is not None
            lse = log_sum_exp(self.target, out.last_hidden, len(row.prompt_ids) - 1)
        return Features(out.taps, out.last_hidden, lse)


@torch.no_grad()
def log_sum_exp(target: Target, last_hidden: Tensor, start: int = 0) -> Tensor:
    """Of the target's logits over all V: pre-norm states [T, d] -> [T] fp32, a chunk of positions at a time.

    Positions before `start` get 0: those inside a prompt predict no label, and the head is the dearest layer.
    """
    chunks = last_hidden[start:].to(target.dtype).split(HEAD_CHUNK)
    computed = [target.head(h).float().logsumexp(-1) for h in chunks if len(h)]
    return torch.cat([torch.zeros(start), *computed])


class CachedFeatures:
    """Features written to disk before. `expect` checks that they belong to this target and have these taps.

    `get` gives the taps that are stored, after `expect` those that were expected: some of the stored ones in any order,
    and the last layer, whose output is the last hidden state and so always there.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self.stored: tuple[int, ...] = tuple(self.index["taps"])
        self.taps = self.stored
        self._shards: dict[str, Any] = {}
        self._lock = threading.Lock()

    def __contains__(self, row: Row) -> bool:
        """Whether it holds what the target computed on exactly these ids."""
        entry = self.index["rows"].get(row.id)
        return entry is not None and entry["ids"] == ids_hash(row)

    def expect(self, target_name: str, taps: Sequence[int], hidden_size: int, num_layers: int) -> None:
        """Choose what `get` gives. Raises DsparkError naming the first thing that differs, or the taps it lacks."""
        wanted = _signature(target_name, self.stored, hidden_size, num_layers)
        for field, value in wanted.items():
            if self.index[field] != value:
                raise DsparkError(f"features.{field}", self.index[field], f"{self.folder} must have {value!r}")
        missing = [tap for tap in taps if tap not in self.stored and tap != num_layers - 1]
        if missing:
            raise DsparkError("features.taps", list(self.stored), f"{self.folder} lacks taps {missing}; capture again")
        self.taps = tuple(taps)

    def _chosen(self, stored: Tensor, last_hidden: Tensor) -> Tensor:
        """The columns of `self.taps` among those of the stored ones: [T, stored * d] -> [T, m * d]."""
        if self.taps == self.stored:
            return stored
        width = last_hidden.shape[-1]
        columns = dict(zip(self.stored, stored.split(width, dim=-1), strict=True))
        return torch.cat([columns.get(tap, last_hidden) for tap in self.taps], dim=-1)

    def _shard(self, name: str) -> Any:
        with self._lock:
            if name not in self._shards:
                path = self.folder / name
                try:
                    self._shards[name] = safe_open(path, framework="pt")
                except (OSError, SafetensorError) as error:
                    raise DsparkError("features", str(path), f"cannot be read ({error}); capture again") from error
            return self._shards[name]

    def get(self, row: Row) -> Features:
        entry = self.index["rows"].get(row.id)
        if entry is None:
            raise DsparkError("features", str(self.folder), f"has no row {row.id!r}; capture the rows it lacks")
        if entry["ids"] != ids_hash(row):
            remedy = (
                f"{self.folder} holds features of other ids under this id: the row was changed since; capture again"
            )
            raise DsparkError("features", row.id, remedy)
        shard = self._shard(entry["shard"])
        try:
            taps, last, lse = [shard.get_tensor(f"{row.id}.{part}") for part in ("taps", "last_hidden", "lse")]
        except SafetensorError as error:
            raise DsparkError("features", row.id, f"is not in {entry['shard']} ({error}); capture again") from error
        return Features(self._chosen(taps, last), last, lse)


def _signature(target_name: str, taps: Sequence[int], hidden_size: int, num_layers: int) -> dict[str, Any]:
    return {"target": target_name, "taps": list(taps), "hidden_size": hidden_size, "num_layers": num_layers}


def read_index(folder: Path) -> dict[str, Any]:
    """`index.json` of a feature folder. Raises DsparkError when it is missing or not one of ours."""
    path = folder / "index.json"
    if not path.is_file():
        raise DsparkError("features", str(folder), "no index.json there; give a folder written by a capture")
    try:
        index = json.loads(path.read_text())
    except ValueError as error:
        raise DsparkError("features", str(path), f"is not valid JSON ({error}); capture again") from error
    needed = {"format", "target", "target_dtype", "taps", "hidden_size", "num_layers", "dtype", "pre_norm", "rows"}
    if isinstance(index, dict) and index.get("format") == 1:
        remedy = "is of an older version, which did not note what ids the states belong to; remove the folder"
        raise DsparkError("features", str(folder), f"{remedy} and capture again")
    if not isinstance(index, dict) or needed - index.keys() or index["format"] != FORMAT or not index["pre_norm"]:
        raise DsparkError("features", str(path), f"must hold {sorted(needed)}, format {FORMAT}, pre-norm states")
    rows = index["rows"]
    whole = isinstance(index["taps"], list) and isinstance(rows, dict)
    if not whole or not all(isinstance(entry, dict) and {"shard", "ids"} <= entry.keys() for entry in rows.values()):
        raise DsparkError("features", str(path), "has damaged taps or rows; remove the folder and capture again")
    return index


def estimate_bytes(rows: Iterable[Row], taps: int, d: int, dtype: DtypeName = "bf16") -> int:
    """Bytes on disk of these rows' features: T x ((m + 1) x d x size + 4)."""
    per_token = (taps + 1) * d * DTYPES[dtype].itemsize + 4
    return sum(len(row.ids) - 1 for row in rows) * per_token


def check_disk(folder: str | Path, needed: int, say: Callable[[str], None] = print) -> None:
    """Print what the features will take; raises DsparkError when the disk has less."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    say(f"features: {needed / 2**30:.2f} GiB to write to {folder}, {free / 2**30:.1f} GiB free")
    if needed > free * 0.95:
        remedy = (
            f"needs {needed / 2**30:.2f} GiB and has {free / 2**30:.2f} free; use another disk or features in process"
        )
        raise DsparkError("features", str(folder), remedy)


class FeatureWriter:
    """Writes features shard by shard. A shard becomes part of the folder when index.json names it, so a kill at any
    moment leaves a readable folder; rows not in it (`row in writer`) are simply added again, and so is a row whose ids
    have changed. It holds the folder's lock until `close`.

    Raises DsparkError when the folder already holds features of another target, taps or dtype, or another run writes.
    """

    def __init__(
        self,
        folder: str | Path,
        target: Target,
        taps: Sequence[int],
        dtype: DtypeName = "bf16",
        shard_bytes: int = 256 * 2**20,
    ) -> None:
        if dtype not in DTYPES:
            raise DsparkError("dtype", dtype, "must be bf16 or fp32")
        self.folder, self.dtype, self.shard_bytes = Path(folder), dtype, shard_bytes
        self.target, self.taps = target, tuple(taps)
        self._pending: dict[str, tuple[str, Features]] = {}  # row id -> (hash of its ids, features)
        self._pending_bytes = 0
        self._lock = lock_for_writing(self.folder, "features")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.index = self._open_index()
        except BaseException:
            self._lock.release()
            raise

    def _open_index(self) -> dict[str, Any]:
        signature = _signature(self.target.name, self.taps, self.target.hidden_size, self.target.num_layers)
        signature |= {"target_dtype": str(self.target.dtype).removeprefix("torch."), "dtype": self.dtype}
        if not (self.folder / "index.json").exists():
            return {"format": FORMAT, **signature, "pre_norm": True, "rows": {}}
        index = read_index(self.folder)
        for field, wanted in signature.items():
            if index[field] != wanted:
                remedy = f"{self.folder} holds other features than {wanted!r}"
                raise DsparkError(f"features.{field}", index[field], remedy)
        return index

    def __contains__(self, row: Row) -> bool:
        """Whether the states of exactly these ids are written or pending."""
        held, pending = self.index["rows"].get(row.id), self._pending.get(row.id)
        known = pending[0] if pending is not None else held and held["ids"]
        return bool(known == ids_hash(row))

    def add(self, row: Row, features: Features) -> None:
        """Check (`check_features`) and keep one row; a full shard is written at once."""
        if row in self:
            return
        check_features(row, features, len(self.taps), self.target.hidden_size)
        kind = DTYPES[self.dtype]
        kept = Features(features.taps.to(kind), features.last_hidden.to(kind), features.lse.float())
        self._pending[row.id] = (ids_hash(row), kept)
        self._pending_bytes += kept.nbytes
        if self._pending_bytes >= self.shard_bytes:
            self.flush()

    def write(self, row: Row, taps: Tensor, last_hidden: Tensor) -> None:
        """Keep what a generating pass captured (`data/regenerate.py:FeatureSink`): taps [T, m * d], last_hidden [T, d].

        The log-sum-exp is taken from the states as stored, so that p sums to one exactly as it will be read.
        """
        stored = last_hidden.to(DTYPES[self.dtype])
        self.add(row, Features(taps, stored, log_sum_exp(self.target, stored, len(row.prompt_ids) - 1)))

    def flush(self) -> None:
        """Write what is pending as one more shard, then the index that names it."""
        if self._pending:
            numbers = [int(path.stem.removeprefix("shard-")) for path in self.folder.glob("shard-*.safetensors")]
            name = f"shard-{max(numbers, default=-1) + 1:05d}.safetensors"
            tensors = {}
            for row_id, (_, f) in self._pending.items():
                for part in ("taps", "last_hidden", "lse"):
                    tensors[f"{row_id}.{part}"] = getattr(f, part).contiguous()
            temporary = self.folder / (name + ".tmp")
            save_file(tensors, temporary)
            os.replace(temporary, self.folder / name)
            for row_id, (digest, _) in self._pending.items():
                self.index["rows"][row_id] = {"shard": name, "ids": digest}
            self._pending, self._pending_bytes = {}, 0
        temporary = self.folder / "index.json.tmp"
        temporary.write_text(json.dumps(self.index))
        os.replace(temporary, self.folder / "index.json")

    def close(self) -> None:
        """Write what is pending and let the folder go."""
        try:
            self.flush()
        finally:
            self._lock.release()

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cache_features(
    source: InProcessFeatures, rows: Sequence[Row], writer: FeatureWriter, say: Callable[[str], None] = print
) -> int:
    """Run the target once over the rows that the folder lacks; returns how many that were."""
    missing = [row for row in rows if row not in writer]
    if missing:
        check_disk(
            writer.folder, estimate_bytes(missing, len(writer.taps), source.target.hidden_size, writer.dtype), say
        )
    for number, row in enumerate(missing):
        if number % 200 == 0:
            say(f"features: {number}/{len(missing)} rows")
        features = source.get(row)
        writer.write(row, features.taps, features.last_hidden)
    writer.flush()
    return len(missing)


def check_features(row: Row, features: Features, taps: int, hidden_size: int) -> None:
    """Raises DsparkError on wrong shapes, non-finite values or a tap without any variance."""
    t = len(row.ids) - 1
    shapes = {"taps": (t, taps * hidden_size), "last_hidden": (t, hidden_size), "lse": (t,)}
    for part, shape in shapes.items():
        value: Tensor = getattr(features, part)
        if tuple(value.shape) != shape:
            raise DsparkError(f"features.{part} of row {row.id}", tuple(value.shape), f"must have shape {shape}")
        if not torch.isfinite(value).all():
            raise DsparkError(f"features.{part} of row {row.id}", "non-finite", "the capture is broken; capture again")
    states = [*features.taps.split(hidden_size, dim=-1), features.last_hidden] if taps else [features.last_hidden]
    for index, state in enumerate(states):
        if state.float().var() == 0:
            name = f"tap {index}" if index < taps else "last_hidden"
            raise DsparkError(f"features of row {row.id}", name, "has zero variance; the capture is broken")


@torch.no_grad()
def verify_features(target: Target, row: Row, features: Features, taps: Sequence[int]) -> dict[str, float]:
    """Rebuild the target's logits from the captured states and compare them with a fresh pass of the target.

    Returns relative errors by norm: logits, lse and each tap. Raises DsparkError when one is past what the storage
    type explains (1e-3 in fp32, 3e-2 in bf16): layers off by one, post-norm states, a wrong batch row.
    """
    check_features(row, features, len(taps), target.hidden_size)
    ids = torch.tensor(row.ids[:-1], dtype=torch.int64)
    out = target.forward([(target.new_state(len(ids)), ids)], taps=taps, logits="all")
    assert out.taps is not None
    stored, width = features.last_hidden.dtype, target.hidden_size
    rebuilt = torch.cat([target.head(h.to(target.dtype)) for h in features.last_hidden.split(HEAD_CHUNK)])
    fresh = out.logits.float()
    start = len(row.prompt_ids) - 1
    lse = _relative(features.lse[start:], fresh[start:].logsumexp(-1))
    errors = {"logits": _relative(rebuilt, fresh), "lse": lse}
    for index, tap in enumerate(taps):
        columns = slice(index * width, (index + 1) * width)
        errors[f"tap {tap}"] = _relative(features.taps[:, columns], out.taps[:, columns])
    limit = 1e-3 if stored == torch.float32 and target.dtype == torch.float32 else 3e-2
    for name, error in errors.items():
        if not error <= limit:
            remedy = f"differs from the target's own pass by {error:.2e} (limit {limit:.0e}); capture again"
            raise DsparkError(f"features of row {row.id}", name, remedy)
    return errors


def _relative(value: Tensor, reference: Tensor) -> float:
    value, reference = value.float(), reference.float()
    return float((value - reference).norm() / reference.norm().clamp_min(1e-12))


def features_folder(rows: Path) -> Path:
    """Where the features of a rows file are kept: rows.jsonl -> rows.features, rows.0 -> rows.0.features."""
    return rows.with_name(rows.name.removesuffix(".jsonl") + ".features")


def feature_source(rows: Path, target: Target, taps: Sequence[int]) -> FeatureSource:
    """The features kept beside a rows file, or, where none are, the target's own passes.

    Raises DsparkError when those kept are of another target or lack a tap.
    """
    folder = features_folder(rows)
    if not folder.is_dir():
        return InProcessFeatures(target, taps)
    cached = CachedFeatures(folder)
    cached.expect(target.name, taps, target.hidden_size, target.num_layers)
    return cached
