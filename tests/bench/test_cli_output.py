"""Streaming to a terminal or a pipe, the summary line and the JSON object of `dspark generate`."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
from rich.console import Console

from dspark.cli_output import StreamPrinter, generate, json_result, summary_line
from dspark.decoding.engine import Engine
from dspark.decoding.proposers import make_proposer
from dspark.decoding.request import Request, Round
from dspark.decoding.text import decode
from dspark.drafts.dspark import DSparkDraft
from dspark.targets.transformers import TransformersTarget

CYAN, MAGENTA, ANY_STYLE = "\x1b[36m", "\x1b[35m", re.compile(r"\x1b\[[0-9;]*m")


class Chunks(io.StringIO):
    """Remembers each flush."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def flush(self) -> None:
        if self.getvalue() and (not self.seen or self.seen[-1] != self.getvalue()):
            self.seen.append(self.getvalue())


def terminal() -> Console:
    return Console(file=Chunks(), force_terminal=True, color_system="standard", width=20, legacy_windows=False)


def test_accepted_tokens_are_coloured_by_turns_and_the_targets_own_are_plain(byte_tokenizer: Any) -> None:
    console = terminal()
    printer = StreamPrinter(console, byte_tokenizer)
    for text, record in [("a", None), ("bcd", Round(3, 3, 2)), ("e", Round(3, 3, 0)), ("fg", Round(3, 3, 2))]:
        printer.step(byte_tokenizer(text).input_ids, record)
    printer.finish()
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert out == f"a{CYAN}bc\x1b[0mde{CYAN}fg\x1b[0m\n"
    printer = StreamPrinter(console, byte_tokenizer)
    printer.step(byte_tokenizer("xy").input_ids, Round(1, 1, 1))
    printer.step(byte_tokenizer("zw").input_ids, Round(1, 1, 1))
    assert console.file.getvalue().endswith(f"{CYAN}x\x1b[0my{MAGENTA}z\x1b[0mw")  # type: ignore[attr-defined]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_no_half_character_and_no_lost_line_width(byte_tokenizer: Any, on_terminal: bool) -> None:
    text = "日本語🙂 [bold]no markup[/bold] and a line that is much longer than the terminal is wide"
    console = terminal() if on_terminal else Console(file=Chunks(), width=20)
    printer = StreamPrinter(console, byte_tokenizer)
    for one in byte_tokenizer(text).input_ids:
        printer.step([one], Round(1, 1, 0))
    printer.finish()
    assert ANY_STYLE.sub("", console.file.getvalue()) == text + "\n"  # type: ignore[attr-defined]
    assert not any("\ufffd" in seen for seen in console.file.seen)  # type: ignore[attr-defined]
    assert len(console.file.seen) > len("日本語") + 20  # type: ignore[attr-defined]  # it streamed


def test_a_terminal_never_obeys_the_model(byte_tokenizer: Any) -> None:
    console = terminal()
    printer = StreamPrinter(console, byte_tokenizer)
    printer.step(byte_tokenizer("a\x1b[2Jb\rc").input_ids, None)
    printer.finish()
    assert console.file.getvalue() == "a\\x1b[2Jb\\x0dc\n"  # type: ignore[attr-defined]


def test_generate_streams_what_json_says(target: TransformersTarget, draft: DSparkDraft) -> None:
    engine = Engine(target, make_proposer(target, draft, 7))
    request = Request(target.tokenizer("hello, tell me").input_ids, max_tokens=24)
    console = Console(file=io.StringIO())
    generated = generate(engine, request, target.tokenizer, StreamPrinter(console, target.tokenizer))
    value = json.loads(json.dumps(json_result(generated)))
    names = ["text", "token_ids", "finish_reason", "tokens_per_s", "acceptance_length", "rounds"]
    assert list(value) == names
    assert console.file.getvalue() == value["text"] + "\n"  # type: ignore[attr-defined]
    assert value["text"] == decode(target.tokenizer, value["token_ids"])
    assert value["finish_reason"] in ("stop", "length")
    accepted = [one["accepted"] for one in value["rounds"]]
    assert all(list(one) == ["proposed", "scheduled", "accepted"] for one in value["rounds"])
    assert value["acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert value["tokens_per_s"] == pytest.approx(len(value["token_ids"]) / generated.seconds)
    line = summary_line(generated)
    assert f"{len(accepted)} rounds" in line and "(bonus counted)" in line and "tokens/s" in line


def test_one_token_has_no_acceptance_length(target: TransformersTarget) -> None:
    request = Request(target.tokenizer("hello").input_ids, max_tokens=1)
    generated = generate(Engine(target, make_proposer(target, None)), request, target.tokenizer)
    value = json_result(generated)
    assert value["acceptance_length"] is None and value["rounds"] == [] and len(value["token_ids"]) == 1
    assert "acceptance" not in summary_line(generated)
