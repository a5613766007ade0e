"""Several reports: what may stand side by side does, what may not does not and is named; and `dspark report`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from tests.bench.report_factory import HOSTILE, make_report, make_suite
from typer.testing import CliRunner

from dspark.bench.report import Report, read_report, write_report
from dspark.bench.report_commands import report_command, terminal_table
from dspark.bench.runs import LINES, compare_reports, runs_markdown
from dspark.errors import DsparkError

app = typer.Typer()
app.command()(report_command)


def pair(**changes: Any) -> dict[str, Report]:
    return {"old": make_report(), "new": make_report(**changes)}


def rows(table: Any) -> dict[tuple[str, str], list[str]]:
    return {(row[0], row[1]): row[2:] for row in table.rows}


def test_equal_runs_stand_side_by_side() -> None:
    found = compare_reports(pair())
    assert found.refusals == [] and found.differences == []
    assert found.acceptance is not None and found.speed is not None
    assert found.acceptance.header == ["suite", "drafter", "old", "new", "change"]
    assert rows(found.acceptance)["GSM8K", "DSpark n = 3"] == ["3.1454", "3.1454", "+0.0%"]
    assert rows(found.speed)["GSM8K", "DSpark n = 3"] == ["0.87x (0.81–0.94)", "0.87x (0.81–0.94)", "+0.0%"]
    assert rows(found.speed)["mean", "DSpark n = 7"][:2] == ["1.81x", "1.81x"]
    assert ("GSM8K", "DSpark n = 3, batch 4") in rows(found.speed)
    assert "Nothing but the figures." in runs_markdown(found)


def test_versions_and_weights_are_said_and_bar_nothing() -> None:
    runs = pair(dspark="0.2.0")
    runs["new"].machine["torch"] = "2.14.0"
    runs["new"].drafters[1].weights_sha256 = "cd" * 32
    found = compare_reports(runs)
    assert found.acceptance is not None and found.speed is not None and found.refusals == []
    assert "dspark: 0.1.0 in old; 0.2.0 in new" in found.differences
    assert "machine, torch: 2.13.0 in old; 2.14.0 in new" in found.differences
    assert any(line.startswith("drafter DSpark n = 3: ") and "cdcd" in line for line in found.differences)


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "another"},
        *(
            {"settings": {**make_report().settings, **one}}
            for one in (
                {"max_tokens": 64},
                {"sampling": "temperature 0.8"},
                {"template": "abc"},
                {"thinking": True},
                {"system_prompt": "Be brief."},
            )
        ),
    ],
    ids=["target", "max_tokens", "sampling", "template", "thinking", "system_prompt"],
)
def test_another_target_or_setting_of_the_tokens_bars_everything(changes: dict[str, Any]) -> None:
    found = compare_reports(pair(**changes))
    assert found.acceptance is None and found.speed is None
    assert any("not set side by side" in line for line in found.refusals)
    text = runs_markdown(found)
    assert "1.81x" not in text and "3.1454" not in text, "no figure that may not be compared"
    assert "## What differs" in text and "## Not compared" in text


def test_an_unknown_setting_bars_speeds() -> None:
    found = compare_reports(pair(settings={**make_report().settings, "something new": True}))
    assert found.speed is None and "something new: not given in old; yes in new" in found.differences


def test_ways_to_name_greedy_are_one() -> None:
    settings = {**make_report().settings, "temperature": 0.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0, "seed": None}
    del settings["sampling"]
    found = compare_reports(pair(settings=settings))
    assert found.differences == [] and found.speed is not None
    found = compare_reports(pair(settings={**settings, "temperature": 0.7}))
    assert found.acceptance is None
    assert found.differences == ["sampling: greedy in old; temperature 0.7, top_k -1, top_p 1.0, min_p 0.0 in new"]


@pytest.mark.parametrize(
    "changes",
    [
        {"machine": {**make_report().machine, "processor": "a faster one"}},
        *(
            {"settings": {**make_report().settings, **one}}
            for one in ({"threads": 8}, {"kernels": "none"}, {"concurrency": 4}, {"rate": 2.0}, {"engine": "vllm"})
        ),
        {"kind": "live"},
        {"baseline": "DSpark n = 3"},
    ],
    ids=["machine", "threads", "kernels", "concurrency", "rate", "engine", "kind", "baseline"],
)
def test_another_machine_bars_speeds_alone(changes: dict[str, Any]) -> None:
    found = compare_reports(pair(**changes))
    assert found.acceptance is not None and found.speed is None
    assert len(found.refusals) == 1 and found.refusals[0].startswith("speeds are not set side by side: ")
    assert found.refusals[0].endswith(" is not the same")


def test_batches_and_timed_prompts_bar_nothing_by_themselves() -> None:
    found = compare_reports(pair(settings={**make_report().settings, "batches": [1, 8], "speed_limit": 3}))
    assert found.acceptance is not None and found.speed is not None and found.refusals == []


def test_the_same_name_over_other_prompts_is_another_suite() -> None:
    """Everything but the hash is the same, in the only suite: no figure stands beside another."""
    runs = {"old": make_report(2, ("GSM8K",)), "new": make_report(2, ("GSM8K",))}
    assert compare_reports(runs).acceptance is not None
    runs["new"].suites[0].prompts_sha256 = "1" * 64
    found = compare_reports(runs)
    assert found.acceptance is None and found.speed is None
    assert found.refusals == ["GSM8K is not compared: its prompts are not the same"]
    assert "3.1454" not in runs_markdown(found) and "0.87x" not in runs_markdown(found)


def renamed(report: Report, name: str, other: str) -> Report:
    return Report.model_validate_json(report.model_dump_json().replace(name, other))


def test_a_drafter_of_another_name_with_the_same_weights_is_the_same() -> None:
    runs = {"old": make_report(2), "new": renamed(make_report(2), "DSpark n = ", "mine n = ")}
    found = compare_reports(runs)
    assert found.acceptance is not None and found.speed is not None
    assert rows(found.acceptance)["GSM8K", "DSpark n = 3"] == ["3.1454", "3.1454", "+0.0%"]
    assert {drafter for _, drafter in rows(found.acceptance)} == {"DSpark n = 3", "DSpark n = 7"}
    assert "drafter DSpark n = 3: named mine n = 3 in new (same weights and width)" in found.differences
    assert runs["new"].drafters[1].name == "mine n = 3", "the report itself stays as it is"
    for change in ({"weights_sha256": "cd" * 32}, {"n": 4}, {"kind": "dflash"}, {"weights_sha256": None}):
        other = renamed(make_report(2), "DSpark n = ", "mine n = ")
        other.drafters[1] = other.drafters[1].model_copy(update=change)
        found = compare_reports({"old": make_report(2), "new": other})
        assert rows(found.acceptance)["GSM8K", "mine n = 3"][:2] == ["—", "3.1454"], change


def test_what_differs_is_said_shortly() -> None:
    told = {"version": "0.9", "speculative": {"method": "dspark", "tokens": 7}}
    one = {**make_report().settings, **{f"knob {i}": i for i in range(20)}, "server endpoint": str(told), "about": told}
    told = {"version": "0.9", "speculative": {"method": "dspark", "tokens": 3}}
    two = {**make_report().settings, "server endpoint": str(told), "about": told, "note": "x\n" * 300}
    found = compare_reports({"old": make_report(settings=one), "new": make_report(settings=two)})
    assert len(found.differences) == LINES and found.differences[-1].startswith("and 12 more: ")
    assert all("{" not in line and "\n" not in line and len(line) < 200 for line in found.differences)
    assert len(found.refusals[-1]) < 200 and " more are not the same" in found.refusals[-1]
    assert found.acceptance is not None and found.speed is None
    few = [make_report(settings={**make_report().settings, "server endpoint": one["server endpoint"]}), make_report()]
    few[1].settings["server endpoint"] = two["server endpoint"]
    found = compare_reports(dict(zip(("old", "new"), few)))
    assert found.differences == ["server endpoint: speculative: tokens: 7 in old; 3 in new"]
    assert found.speed is not None, "that is what such a comparison is about"


def test_other_prompts_bar_their_suite() -> None:
    runs = pair()
    runs["new"].suites[0].prompts_sha256 = "0" * 64
    del runs["new"].suites[1]
    runs["new"].suites[-1].speed_questions = 3
    found = compare_reports(runs)
    assert found.refusals == [
        "GSM8K is not compared: its prompts are not the same",
        "MATH500 is not compared: new did not run it",
        "ruler-v2: speeds are not compared: other prompts were timed (30 in old; 3 in new)",
    ]
    assert found.acceptance is not None and found.speed is not None
    assert {suite for suite, _ in rows(found.acceptance)} == {"AIME26", "HumanEval", "ruler-v2", "mean"}
    assert {suite for suite, _ in rows(found.speed)} == {"AIME26", "HumanEval", "mean"}


def test_the_mean_is_over_the_compared_suites_that_are_not_apart() -> None:
    runs = {}
    for name in ("old", "new", "newest"):
        report = make_report(2, ("GSM8K", "AIME26"))
        apart = make_suite("GSM8K (trained on)", report.drafters, seed=3)
        apart.apart = True
        report.suites.append(apart)
        runs[name] = report
    found = compare_reports(runs)
    assert found.acceptance is not None and found.acceptance.header == ["suite", "drafter", "old", "new", "newest"]
    by_suite = rows(found.acceptance)
    mean = (float(by_suite["GSM8K", "DSpark n = 3"][0]) + float(by_suite["AIME26", "DSpark n = 3"][0])) / 2
    assert float(by_suite["mean", "DSpark n = 3"][0]) == pytest.approx(mean, abs=1e-4)


def test_figures_of_different_sources_say_so() -> None:
    runs = pair()
    for suite in runs["new"].suites:
        acceptance = suite.columns["DSpark n = 3"].acceptance
        assert acceptance is not None
        acceptance.source = "served"
    found = compare_reports(runs)
    assert rows(found.acceptance)["GSM8K", "DSpark n = 3"][:2] == ["3.1454 (replay)", "3.1454 (served)"]


def test_a_drafter_of_one_run_has_a_dash_in_the_other() -> None:
    found = compare_reports({"two": make_report(2), "three": make_report(3)})
    assert rows(found.acceptance)["GSM8K", "DFlash n = 3"] == ["—", "3.0575", "—"]


def test_one_report_is_no_comparison() -> None:
    with pytest.raises(DsparkError, match="at least two"):
        compare_reports({"one": make_report()})


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_one_report_is_written_anew_and_shown(tmp_path: Path) -> None:
    write_report(make_report(4), tmp_path / "report.json")
    out = run(tmp_path)
    assert (tmp_path / "report.md").read_text(encoding="utf-8").startswith("# dspark bench: ")
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("written")), out
    assert "n = 3 mean" in out and "+15.1%" in out and "0.87x" in out and "LiveCodeBench: not on this disk" in out
    assert "simple unweighted mean" in " ".join(out.split()) and "batch 1" in out
    other = tmp_path / "elsewhere"
    run(tmp_path / "report.json", "--out", other)
    assert sorted(one.name for one in other.iterdir()) == ["report.html", "report.md"]
    assert read_report(tmp_path).target == "SmolLM2-135M-Instruct"


def test_a_file_that_nests_without_end_is_one_line_of_error(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("[" * 200000)
    with pytest.raises(DsparkError, match="cannot be read as JSON") as refused:
        run(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


def test_several_reports_are_compared(tmp_path: Path) -> None:
    for name in ("a/run", "b/run"):
        write_report(make_report(dspark=f"0.{len(name)}.{name[0]}"), tmp_path / name / "report.json")
    out = run(tmp_path / "a/run", tmp_path / "b/run/report.json", "--out", tmp_path / "out")
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("written")), out
    text = (tmp_path / "out" / "comparison.md").read_text(encoding="utf-8")
    assert "| suite | drafter | run | run \\#2 | change |" in text and str(tmp_path) not in text
    assert "dspark: 0.5.a in run; 0.5.b in run \\#2" in text
    assert not (tmp_path / "a/run/report.md").exists(), "a comparison leaves the runs as they are"


def test_hostile_names_stay_names(tmp_path: Path) -> None:
    report = make_report(2)
    report.target, report.suites[0].name = HOSTILE + "\x1b[2J", "[bold]x[/bold]"
    write_report(report, tmp_path / "report.json")
    out = run(tmp_path)
    assert "\x1b" not in out and "[bold]x" in out


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    write_report(make_report(), tmp_path / "report.json")
    (tmp_path / "file").write_text("")
    for reports in ([tmp_path], [tmp_path, tmp_path]):
        with pytest.raises(DsparkError, match="out = "):
            run(*reports, "--out", tmp_path / "file")


def test_the_terminals_table_fits_and_skips_what_is_not_there() -> None:
    report = make_report()
    report.suites[0].columns["DSpark n = 3"].speed = []
    table = terminal_table(report)
    assert [row[:3] for row in table.rows[:3]] == [
        ["GSM8K", "plain", "1"],
        ["GSM8K", "plain", "4"],
        ["GSM8K", "DSpark n = 3", "—"],
    ]
    assert table.rows[2] == ["GSM8K", "DSpark n = 3", "—", "—", "—", "3.15"]
    assert [row[2] for row in table.rows if row[0] == "AIME26"] == ["1", "4"] * 3, "every batch"
