"""Tensors of a checkpoint folder: one model.safetensors or several named by an index. Nothing is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dspark.errors import DsparkError

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(folder: Path) -> tuple[Shapes, dict[str, Path]]:
    """Shape and file of every tensor, read from the headers alone.

    Raises DsparkError for a folder without safetensors, a damaged file, an index that does not match its files or that
    names one outside the folder.
    """
    shapes: Shapes = {}
    homes: dict[str, Path] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from None
        twice = sorted(set(found) & set(shapes))
        if twice:
            raise DsparkError(path.name, twice[0], "is in two files of the checkpoint; copy it again")
        shapes |= found
        homes |= dict.fromkeys(found, path)
    return shapes, homes


def load_tensors(homes: Mapping[str, Path], names: list[str]) -> dict[str, Tensor]:
    """The named tensors, as they are stored. Raises DsparkError for a damaged file."""
    tensors: dict[str, Tensor] = {}
    for path in sorted({homes[name] for name in names}):
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in names if homes[name] == path}
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from None
    return {name: tensors[name] for name in names}


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, each once."""
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        return _indexed(folder / INDEX_FILE)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise DsparkError(
            "draft", pickles[0], "is a pickle, which can run code when it is read; get the checkpoint as safetensors"
        )
    raise DsparkError("draft", str(folder), f"holds no {WEIGHTS_FILE}; copy the checkpoint again")


def _indexed(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DsparkError(
            INDEX_FILE, str(index), "has no weight_map of file names; copy the checkpoint again"
        ) from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise DsparkError(INDEX_FILE, name, "must name .safetensors files beside it, and nothing else")
        if not (index.parent / name).is_file():
            raise DsparkError(INDEX_FILE, name, "is missing; copy the checkpoint again")
    return [index.parent / name for name in names]


def _damaged(path: Path, error: BaseException) -> DsparkError:
    return DsparkError(
        path.name, str(path), f"is not a whole safetensors file ({' '.join(str(error).split())}); copy it again"
    )
