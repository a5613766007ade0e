"""The compiled library that fits this processor, and its C structs (kernels.cpp) as ctypes sees them."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dspark.errors import DsparkError

KINDS = ("avx512", "avx2", "plain")
"""The widest first."""
SETTING = "DSPARK_KERNELS"
"""Environment variable: one of KINDS instead of the best that this processor can run, or "none"."""


class CMatrix(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("inputs", ctypes.c_int32),
        ("padding", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class CLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm")),
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        ("window", ctypes.c_int64),
        ("causal", ctypes.c_int64),
    ]


class CDecoder(ctypes.Structure):
    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in "layers width heads kv_heads head_dim rotary_dims intermediate padding".split()
        ),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layer", ctypes.POINTER(CLayer)),
    ]


class CSegment(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("row", "count", "start", "capacity")),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    ]


def kind() -> str | None:
    """Which library is used: "avx512", "avx2" or "plain"; None where none was built, or none is wanted.

    PyTorch knows the processor. Raises DsparkError for a DSPARK_KERNELS that is no kind.
    """
    wanted = os.environ.get(SETTING, "")
    if wanted not in ("", "none", *KINDS):
        raise DsparkError(SETTING, wanted, f"must be one of {', '.join(KINDS)} or none")
    first = {"AVX512": 0, "AVX2": 1}.get(torch.backends.cpu.get_cpu_capability(), 2)
    fitting = KINDS[first:] if not wanted else tuple(name for name in KINDS[first:] if name == wanted)
    return next((name for name in fitting if _path(name) is not None), None)


def explain() -> str:
    """One line: which kernels are used, or why none are and what is used instead."""
    chosen, wanted = kind(), os.environ.get(SETTING)
    if chosen is not None and library() is not None:
        return f"{chosen}, {library().dspark_vector_width()} numbers at a time"
    built = [name for name in KINDS if _path(name) is not None]
    if wanted and (built or wanted == "none"):
        reason = f"{SETTING} is {wanted}"
    elif chosen is not None:
        reason = f"the library for {chosen} cannot be loaded"
    else:
        reason = "none were built: reinstall where there is a C++ compiler"
    return f"none ({reason}); linear layers go through PyTorch's own packed products"


@cache
def _path(name: str) -> Path | None:
    folder = Path(__file__).parent
    return next((path for end in EXTENSION_SUFFIXES if (path := folder / f"_{name}{end}").is_file()), None)


def library() -> Any:
    """The library of `kind()`; None where there is none or it cannot be loaded."""
    name = kind()
    return None if name is None else load(name)


@cache
def load(name: str) -> Any:
    """One of KINDS, which the processor must be able to run; None where it was not built or cannot be loaded."""
    path = _path(name)
    if path is None:
        return None
    try:
        found = ctypes.CDLL(str(path))
    except OSError:
        return None
    pointer, long, integer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    signatures: dict[str, list[Any]] = {
        "pack": [integer, pointer, integer, integer, pointer, pointer, integer, integer],
        "multiply": [pointer, pointer, long, pointer, integer],
        "decode": [pointer, pointer, long, pointer, pointer, pointer, long, pointer, long, pointer, integer],
        "context": [pointer, pointer, long, pointer, pointer, pointer, pointer, pointer, pointer, long, integer],
        "head": [pointer, long, pointer, long, pointer, ctypes.c_float, *[pointer] * 4, integer],
        "markov": [pointer, long, long, pointer, pointer, pointer, pointer, pointer, integer],
    }
    for function, arguments in signatures.items():
        getattr(found, f"dspark_{function}").argtypes = arguments
        getattr(found, f"dspark_{function}").restype = integer if function == "pack" else None
    found.dspark_packed_bytes.argtypes, found.dspark_packed_bytes.restype = [integer] * 3, long
    found.dspark_vector_width.argtypes, found.dspark_vector_width.restype = [], integer
    return found


class _Own(threading.local):
    threads = 0


_own = _Own()
_lock = threading.Lock()
_passes, _number = 0, 1  # threads that are inside `own_threads`, and PyTorch's number before the first of them was


def threads() -> int:
    """With how many threads the kernels run: PyTorch's number."""
    return _own.threads or torch.get_num_threads()


@contextmanager
def own_threads() -> Iterator[None]:
    """Inside, PyTorch's operations run in the calling thread alone, and the kernels with all threads.

    PyTorch's threads stay awake for milliseconds after an operation that used them, and a pass that begins meanwhile
    takes twice as long, because they sit where its own threads should run.
    """
    if library() is None or _own.threads:
        yield
        return
    global _passes, _number
    with _lock:
        if not _passes:  # else PyTorch may say 1, to a thread that asks it for the first time
            _number = torch.get_num_threads()
        _passes, _own.threads = _passes + 1, _number
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_own.threads)
        with _lock:
            _passes, _own.threads = _passes - 1, 0


def address(tensor: Tensor | None) -> int | None:
    """Where a tensor's numbers are; None for none. It must be contiguous and outlive the use."""
    assert tensor is None or tensor.is_contiguous()
    return None if tensor is None else tensor.data_ptr()


def addresses(tensors: Sequence[Tensor]) -> Any:
    """A C array of pointers."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
