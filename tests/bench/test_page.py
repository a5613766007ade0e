"""The page: complete in itself, escaped, with the text of every answer in its rounds; written atomically."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dspark.bench import page as pages
from dspark.bench.compare import Comparison, Difference, Question, Run, modes_for, spans
from dspark.decoding.request import Round
from dspark.decoding.text import decode
from dspark.errors import DsparkError
from dspark.targets.transformers import TransformersTarget


@pytest.fixture(scope="module")
def html(target: TransformersTarget, comparison: Comparison) -> str:
    return pages.render_page(
        comparison,
        target.tokenizer,
        title="a <title> & more",
        settings={"target": "tiny <model>"},
        machine={"processor": "a & b"},
    )


class Reader(HTMLParser):
    """Text by answer, nesting errors, and every attribute that could reach outside."""

    VOID = frozenset({"meta", "input", "rect", "line", "polyline", "circle", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.answers: list[list[str]] = []
        self.parts: list[tuple[str, str]] = []
        self.outside: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.outside += [value for name, value in values.items() if name in ("src", "href", "action", "data")]
        if values.get("class") == "text":
            self.answers.append([])
        if tag not in self.VOID:
            self.open.append((tag, values.get("class", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if any(name == "text" for _, name in self.open):
            self.answers[-1].append(data)
            self.parts.append((self.open[-1][0], data))


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def test_page_needs_nothing_from_outside(html: str) -> None:
    reader = read(html)
    assert reader.outside == [] and not reader.tags & {"script", "link", "img", "iframe"}
    assert not re.search(r"https?://|url\(|@import", html)


def test_page_holds_every_answer_whole_and_escaped(
    html: str, target: TransformersTarget, comparison: Comparison
) -> None:
    reader = read(html)
    expected = [
        decode(target.tokenizer, comparison.runs[mode][i].output_ids)
        for i in range(len(comparison.questions))
        for mode in ("n = 3", "n = 7")
    ]
    assert ["".join(parts) for parts in reader.answers] == expected
    assert "&lt;b&gt;tell&lt;/b&gt; me &amp; more" in html and "<b>tell" not in html
    assert "a &lt;title&gt; &amp; more" in html and "tiny &lt;model&gt;" in html


def test_draft_tokens_and_the_targets_own_are_marked_apart(
    html: str, target: TransformersTarget, comparison: Comparison
) -> None:
    shown, made = {"b": 0, "i": 0}, {"draft": 0, "target": 0}
    for tag, data in read(html).parts:
        shown[tag] += len(data)
    for mode in ("n = 3", "n = 7"):
        for run in comparison.runs[mode]:
            for index, owner in (member for _, group in spans(run) for member in group):
                made[owner] += len(decode(target.tokenizer, [run.output_ids[index]]))  # special tokens have no text
    assert (shown["b"], shown["i"]) == (made["draft"], made["target"]) and made["draft"] > 10
    assert 'title="round 1: ' in html


def test_table_says_what_is_counted(html: str, comparison: Comparison) -> None:
    assert "bonus counted" in html and "bonus not counted" in html and "Same tokens" in html
    rows = pages.table_rows(comparison)
    assert [row.mode for row in rows] == ["plain", "n = 3", "n = 7"]
    assert rows[1].slots[3:] == [""] * 4 and all(slot for slot in rows[2].slots[:1])
    assert rows[1].macro == f"{comparison.acceptance(comparison.modes[1]).macro_length:.2f}"


def test_hostile_text_stays_text(byte_tokenizer: Any) -> None:
    text = "</div><script>alert('é')</script> \"quoted\" & 🙂"
    ids = byte_tokenizer(text).input_ids
    plain = Run("plain", "q", ids, "length", [Round(0, 0, 0)] * (len(ids) - 1), False, 2.0, 0.5)
    drafted = [Round(3, 3, 3)] * ((len(ids) - 1) // 4) + [Round(3, 3, 0)] * ((len(ids) - 1) % 4)
    fast = Run("n = 3", "q", ids, "length", drafted, False, 1.0, 0.5)
    made = Comparison(modes_for([3]), [Question("q", text, ids)], 64, {"plain": [plain], "n = 3": [fast]})
    html = pages.render_page(made, byte_tokenizer, title="t", settings={}, machine={})
    assert "".join(read(html).answers[0]) == text and "<script" not in html
    assert "2.00x" in html


def test_a_fault_is_shown_as_one(target: TransformersTarget, comparison: Comparison) -> None:
    fault = replace(comparison, differences=[Difference("n = 3", "q/0", 3, 5, 6, 1.5, tie=False)])
    html = pages.render_page(fault, target.tokenizer, title="t", settings={}, machine={})
    assert "NOT LOSSLESS" in html and "Same tokens" not in html
    tie = replace(comparison, differences=[Difference("n = 3", "q/0", 3, 5, 6, 1e-5, tie=True)])
    html = pages.render_page(tie, target.tokenizer, title="t", settings={}, machine={})
    assert "up to ties" in html and "NOT LOSSLESS" not in html


def test_writing_is_atomic(tmp_path: Path) -> None:
    out = tmp_path / "new folder" / "demo.html"
    assert pages.write_page(out, "one") == out and out.read_text() == "one"
    pages.write_page(out, "two é")
    assert out.read_text(encoding="utf-8") == "two é"
    with pytest.raises(UnicodeEncodeError):
        pages.write_page(out, "\ud800")  # fails halfway: the old page stays, no temporary file does
    assert out.read_text(encoding="utf-8") == "two é" and [p.name for p in out.parent.iterdir()] == ["demo.html"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DsparkError, match="out = "):
        pages.write_page(tmp_path / "file" / "demo.html", "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DsparkError, match="out = "):
        pages.write_page(tmp_path / "folder", "x")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
