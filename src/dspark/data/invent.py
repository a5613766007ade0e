"""Prompts written by the target itself: it is given the beginning of a user turn and writes the rest.

A chat model has seen what people ask, so sampling its user turns gives prompts of the kind it answers, without any
data set (the idea of self-synthesised instructions, Xu et al. 2024, arXiv 2406.08464). They are prompts like any
others afterwards: `regenerate` asks them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from dspark.data.chat import ChatRenderer
from dspark.data.progress import TokenProgress
from dspark.data.prompts import Prompt, is_unicode, prompt_hash, write_text
from dspark.decoding.engine import Engine
from dspark.decoding.request import Request, SamplingSettings
from dspark.errors import DsparkError


def read_openings(path: str | Path | None = None) -> list[str]:
    """Beginnings of user turns, one a line (\\n for a line break, # for a remark); the package's own by default.

    Raises DsparkError when there is no such file, or none in it.
    """
    source = files("dspark").joinpath("assets/prompts/openings.txt") if path is None else Path(path)
    if not source.is_file():
        raise DsparkError("openings", str(path), "no such file; give a text file with one beginning a line")
    try:
        lines = source.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DsparkError("openings", str(path), f"is not UTF-8 text ({error.reason})") from None
    openings = [line.replace("\\n", "\n") for line in lines if line.strip() and not line.startswith("#")]
    if not openings:
        raise DsparkError("openings", str(path), "holds no beginning of a prompt")
    return openings


def invent(
    engine: Engine,
    renderer: ChatRenderer,
    openings: Sequence[str],
    count: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 0.95,
    max_tokens: int = 80,
    console: Console | None = None,
    quiet: bool = False,
) -> list[Prompt]:
    """Ask for `count` user turns, the openings in turn; what did not end by itself, or came twice, is left out.

    Number i is written with its own seed, so the result is a function of (openings, count, settings) alone.
    Raises DsparkError when the template does not show where a user turn goes, or count is not positive.
    """
    if count < 1:
        raise DsparkError("count", count, "must be at least 1")
    if temperature <= 0:
        raise DsparkError("temperature", temperature, "must be above 0: a greedy target writes one prompt an opening")
    tokenizer = engine.target.tokenizer
    head = renderer.user_turn_start()
    asked = [openings[i % len(openings)] for i in range(count)]

    def requests() -> Iterator[Request]:
        for number, opening in enumerate(asked):
            ids = tokenizer.encode(head + opening, add_special_tokens=False)
            digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
            sampling = SamplingSettings(temperature, 0, top_p, 0.0, int.from_bytes(digest[:8]) >> 1)
            yield Request(ids, max_tokens, sampling, engine.target.stop_ids)

    written: dict[int, str] = {}
    with TokenProgress("invent", count, console, quiet) as progress:
        for number, result in engine.run(requests()):
            progress.row(len(result.output_ids))
            if result.finish_reason == "stop":
                rest = tokenizer.decode(result.output_ids[:-1], clean_up_tokenization_spaces=False)
                written[number] = (asked[number] + rest).strip()
    return _distinct(written[number] for number in sorted(written))


def _distinct(texts: Iterator[str]) -> list[Prompt]:
    """Each prompt once, whatever its case and spacing; the id is of the exact text, so two sets agree on what it is."""
    found: dict[str, Prompt] = {}
    for text in texts:
        if text and is_unicode(text) and "\ufffd" not in text:
            identity = hashlib.sha256(text.encode()).hexdigest()[:16]
            found.setdefault(prompt_hash(text), Prompt(f"invented/{identity}", (text,)))
    return list(found.values())


def write_prompts(path: str | Path, prompts: Sequence[Prompt]) -> None:
    """JSONL of {"id", "turns"}, whole or not at all."""
    lines = (json.dumps({"id": one.id, "turns": list(one.turns)}, ensure_ascii=False) for one in prompts)
    write_text(path, "".join(line + "\n" for line in lines))
