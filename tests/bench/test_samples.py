"""The journal of a bench: it goes on with its own, and refuses others' and what is damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dspark.bench.samples import Journal, Sample, unit_key
from dspark.decoding.request import Round
from dspark.errors import DsparkError

SETTINGS = {"limit": 4, "drafters": [["plain", None]]}
ROUNDS = [Round(3, 3, 2), Round(3, 3, 0)]


def sample(question: str) -> Sample:
    return Sample("maths", question, "mine n = 3", "replay", rounds=ROUNDS, arrivals=[(0.25, 1), (0.5, 3)])


@pytest.fixture
def written(tmp_path: Path) -> list[str]:
    """The lines of a journal of two units."""
    journal = Journal(tmp_path / "samples.jsonl", SETTINGS)
    for question in ("a", "b"):
        journal.add(f"maths {question}", [sample(question)])
    return (tmp_path / "samples.jsonl").read_text().splitlines(keepends=True)


def test_samples_come_back_as_they_were(tmp_path: Path, written: list[str]) -> None:
    journal = Journal(tmp_path / "samples.jsonl", SETTINGS)
    assert list(journal.samples()) == [sample("a"), sample("b")]
    assert list(journal.done) == ["maths a", "maths b"]


def test_it_goes_on_after_a_torn_line(tmp_path: Path, written: list[str]) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(written)[:-9])
    journal = Journal(path, SETTINGS)
    assert list(journal.done) == ["maths a"]
    assert path.read_text() == "".join(written[:2])
    journal.add("maths b", [sample("b")])
    assert path.read_text() == "".join(written)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({**SETTINGS, "limit": 5}, "limit = 5: .* holds results of 4"),
        ({"limit": 4}, "drafters = None"),
        ({**SETTINGS, "more": 1}, "more = 1: .* holds results of None"),
    ],
)
def test_results_of_others_are_refused_by_field(
    tmp_path: Path, written: list[str], settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(DsparkError, match=named):
        Journal(tmp_path / "samples.jsonl", settings)
    assert (tmp_path / "samples.jsonl").read_text() == "".join(written)


@pytest.mark.parametrize("begun", ["", '{"limit": 4', '{"limit": 4, "drafters": [["plain", null]]}'])
def test_killed_while_it_wrote_its_header_it_begins_anew(tmp_path: Path, begun: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(begun)
    Journal(path, SETTINGS).add("maths a", [sample("a")])
    assert list(Journal(path, SETTINGS).samples()) == [sample("a")]


def test_facts_are_kept_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    journal = Journal(path, SETTINGS)
    journal.keep("counters", [1])
    journal.add("maths a", [sample("a")])
    journal.keep("counters", [1, 2])
    again = Journal(path, SETTINGS)
    assert again.facts == {"counters": [1, 2]} and list(again.done) == ["maths a"]


def test_no_two_units_share_a_key() -> None:
    assert unit_key("a", "acceptance", "x acceptance y") != unit_key("a acceptance x", "acceptance", "y")


@pytest.mark.parametrize("header", ['{"limit": 5', "[]\n", "{}}\n", "[" * 9999 + "\n", "\x00\n"])
def test_a_damaged_header_is_no_other_setting(tmp_path: Path, header: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(header)
    with pytest.raises(DsparkError, match=r"samples.jsonl:1.* is damaged; remove"):
        Journal(path, SETTINGS)
    assert path.read_text() == header


@pytest.mark.parametrize("line", ["{}", '{"unit": "x"}', '{"unit": "x", "samples": [{"suite": 1}]}', "x", "[" * 9999])
def test_a_damaged_line_is_named(tmp_path: Path, written: list[str], line: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(written[0] + line + "\n" + written[1])
    with pytest.raises(DsparkError, match=r"samples.jsonl:2.* is damaged; remove"):
        Journal(path, SETTINGS)
