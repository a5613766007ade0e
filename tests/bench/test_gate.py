"""The gate: what passes, what fails and how it says so, and that a missing figure never passes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from tests.bench.report_factory import add_peers, make_report
from typer.testing import CliRunner

from dspark.bench.figures import overall
from dspark.bench.gate import Failure, gate, notes
from dspark.bench.report import MissingSuite, Overall, Report, write_report
from dspark.bench.report_commands import gate_command
from dspark.errors import DsparkError

app = typer.Typer()
app.command()(gate_command)


@pytest.fixture
def report() -> Report:
    return make_report(missing=[])


def of(found: list[Failure]) -> Iterator[tuple[str | None, str | None, str]]:
    return ((one.drafter, one.suite, one.figure) for one in found)


def recount(report: Report) -> None:
    """The means over suites anew, after a suite's figures were changed."""
    report.overall = overall(report.suites, report.drafters, report.baseline)


def test_every_drafter_but_the_baseline_must_reach_the_bounds(report: Report) -> None:
    assert gate(report, min_acceptance=3.0, min_speedup=1.2) == []
    found = gate(report, min_acceptance=3.1, min_speedup=1.7, batch=1)
    assert list(of(found)) == [
        ("DSpark n = 3", None, "speedup"),
        ("DSpark n = 7", None, "acceptance length"),
    ]
    assert gate(report, min_acceptance=3.1, drafter="DSpark n = 3") == []


def test_a_failure_names_drafter_figure_bound_and_remedy(report: Report) -> None:
    line = str(gate(report, min_speedup=1.7, drafter="DSpark n = 3")[0])
    assert line == "DSpark n = 3, mean over suites, batch 1: speedup 1.57 is below 1.7; must be at least 1.7"
    close = Failure("d", None, "speedup", 1.1999, 1.2, "must be at least 1.2")
    assert "speedup 1.1999 is below 1.2;" in str(close), "never 1.20 is below 1.2"


def test_a_bound_that_is_met_exactly_is_met(report: Report) -> None:
    value = next(one.mean_speedup for one in report.overall if one.drafter == "DSpark n = 7")
    assert gate(report, min_speedup=value, drafter="DSpark n = 7", batch=1) == []
    assert gate(report, min_speedup=math.nextafter(value or 0, 9), drafter="DSpark n = 7", batch=1) != []


def test_named_suites_stand_each_on_their_own(report: Report) -> None:
    found = gate(report, min_speedup=1.0, suites=["GSM8K", "AIME26", "GSM8K"])
    assert list(of(found)) == [("DSpark n = 3", "GSM8K", "speedup")]
    assert "DSpark n = 3, GSM8K, batch 1: speedup 0.87 is below 1;" in str(found[0])


def test_speedups_must_hold_at_every_batch(report: Report) -> None:
    """At batch 4 the drafts gain less; a gate that looks at batch 1 alone would pass."""
    name = "DSpark n = 3"
    assert gate(report, min_speedup=1.5, drafter=name, batch=1) == []
    found = gate(report, min_speedup=1.5, drafter=name)
    speeds = [suite.columns[name].speed[1].speedup for suite in report.suites]
    assert [one.batch for one in found] == [4]
    assert found[0].value == pytest.approx(sum(one.value for one in speeds if one) / len(speeds))
    assert str(found[0]).startswith("DSpark n = 3, mean over suites, batch 4: speedup 1.")
    del report.suites[0].columns[name].speed[1]
    found = gate(report, min_speedup=0.1, drafter=name)
    assert [(one.batch, one.value) for one in found] == [(4, None)], "a suite without that batch makes no mean"
    for suite in report.suites:
        del suite.columns[name].speed[1:]
    assert [one.batch for one in gate(report, min_speedup=0.1)] == [4], "the others were timed at 4"


def test_acceptance_is_the_macro_length(report: Report) -> None:
    """The macro and the micro length apart: whoever takes the wrong one passes what fails, or the other way round."""
    name = "DSpark n = 7"
    for suite in report.suites:
        acceptance = suite.columns[name].acceptance
        assert acceptance is not None
        acceptance.macro_length, acceptance.micro_length = 2.0, 4.0
        acceptance.completion_per_round = acceptance.macro_length_without_loops = 4.5
    recount(report)
    for suites in ([], ["AIME26"]):
        found = gate(report, min_acceptance=3.0, drafter=name, suites=suites)
        assert [one.value for one in found] == [2.0]
        assert gate(report, min_acceptance=2.0, drafter=name, suites=suites) == []


def test_other_engines_columns_are_checked_only_by_name(report: Report) -> None:
    add_peers(report)
    assert {one.drafter for one in gate(report, min_speedup=20.0)} == {"DSpark n = 3", "DSpark n = 7"}
    assert gate(report, min_acceptance=1.0, min_speedup=1.0) == []
    found = gate(report, min_speedup=1.0, drafter="plain in Transformers")
    assert [(one.batch, one.value) for one in found] == [(1, pytest.approx(0.8))], "only at the batch it was timed at"
    assert gate(report, min_speedup=1.0, drafter="DSpark n = 3 in Transformers") == []
    report.drafters = [report.drafters[0], *report.drafters[-2:]]
    with pytest.raises(DsparkError, match="no drafter beside its baseline"):
        gate(report, min_speedup=1.0)


def test_the_lower_end_of_the_interval(report: Report) -> None:
    one = {"min_speedup": 1.7, "drafter": "DSpark n = 7"}
    assert gate(report, **one, suites=["MATH500"], batch=1) == []
    assert list(of(gate(report, **one, suites=["AIME26"], lower_bound=True, batch=1))) == []
    found = gate(report, min_speedup=1.9, drafter="DSpark n = 7", suites=["AIME26"], lower_bound=True, batch=1)
    assert list(of(found)) == [("DSpark n = 7", "AIME26", "speedup, lower bound")]
    over_suites = gate(report, **one, lower_bound=True, batch=1)
    ends = [suite.columns["DSpark n = 7"].speed[0].speedup for suite in report.suites]
    assert over_suites[0].value == pytest.approx(sum(one.low or 0 for one in ends if one) / 5), (
        "the mean of the lower ends"
    )


def test_no_interval_is_no_pass(report: Report) -> None:
    speedup = report.suites[1].columns["DSpark n = 7"].speed[0].speedup
    assert speedup is not None
    speedup.low = speedup.high = None
    for suites in ([], ["MATH500"]):
        found = gate(report, min_speedup=0.1, drafter="DSpark n = 7", suites=suites, lower_bound=True)
        assert [(one.value, one.batch) for one in found] == [(None, 1)]
        assert "is missing; the report does not have it" in str(found[0])
    assert gate(report, min_speedup=0.1, drafter="DSpark n = 7") == []


def test_a_missing_figure_fails(report: Report) -> None:
    report.overall = [one for one in report.overall if one.drafter != "DSpark n = 3"]
    report.overall[-1] = Overall(drafter="DSpark n = 7", suites=5, mean_macro_length=3.0)
    report.suites[0].columns["DSpark n = 7"].speed[0].speedup = None
    found = gate(report, min_acceptance=1.0, min_speedup=0.1)
    assert list(of(found)) == [
        ("DSpark n = 3", None, "acceptance length"),
        ("DSpark n = 7", None, "speedup"),
    ]
    del report.suites[0].columns["DSpark n = 7"]
    assert len(gate(report, 1.0, 0.1, drafter="DSpark n = 7", suites=["GSM8K"])) == 3, "one of them for each batch"
    for suite in report.suites:
        for column in suite.columns.values():
            column.speed = []
    assert [(one.value, one.batch) for one in gate(report, min_speedup=0.1, drafter="DSpark n = 7")] == [(None, None)]


def test_a_suite_that_could_not_be_had_fails(report: Report) -> None:
    report.missing = [MissingSuite(name="LiveCodeBench", reason="not on this disk")]
    found = gate(report, min_acceptance=1.0, suites=["LiveCodeBench"])
    assert [one.value for one in found] == [None, None]
    found = gate(report, min_acceptance=1.0)
    assert list(of(found)) == [(None, "LiveCodeBench", "suite")]
    assert str(found[0]).startswith("the report: suite: LiveCodeBench could not be had (not on this disk); ")
    assert gate(report, min_acceptance=1.0, allow_missing=True) == []
    assert gate(report, min_acceptance=1.0, suites=["GSM8K"]) == [], "somebody named the suites that matter"


def test_differences_and_replay_faults_fail_whatever_is_asked(report: Report) -> None:
    report.suites[2].not_lossless = ["NOT LOSSLESS: q/1, n = 7, token 3", "another"]
    report.suites[3].replay_faults = ["round 4"]
    found = gate(report, min_acceptance=1.0, suites=["GSM8K"])
    assert list(of(found)) == [(None, None, "lossless"), (None, None, "replay")]
    assert str(found[0]).startswith("the report: lossless: answers that differ from plain decoding's without a tie: 2")
    assert "NOT LOSSLESS: q/1, n = 7, token 3" in str(found[0])
    assert gate(report, min_acceptance=1.0, allow_differences=True) == []
    report.suites[2].not_lossless, report.suites[3].replay_faults = [], []
    report.suites[2].ties, report.suites[2].replay_ties = ["tie"], ["tie"]
    assert gate(report, min_acceptance=1.0) == [], "ties are no differences"
    report.kind, report.suites[2].not_lossless = "live", ["ids differ"]
    assert "answers that differ from the baseline's: 1" in str(gate(report, min_acceptance=1.0)[0])


def test_failed_requests_fail_where_they_are_checked(report: Report) -> None:
    report.suites[0].columns["DSpark n = 7"].failed = 2
    assert list(of(gate(report, min_acceptance=1.0))) == [("DSpark n = 7", "GSM8K", "requests")]
    assert gate(report, min_acceptance=1.0, drafter="DSpark n = 3") == []
    assert gate(report, min_acceptance=1.0, suites=["AIME26"]) == []
    assert gate(report, min_acceptance=1.0, allow_failed=True) == []
    report.suites[0].apart = True
    assert gate(report, min_acceptance=1.0) == [], "not in the means that are checked"
    assert any("failed" in note for note in notes(report))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({}, "bounds"),
        ({"drafter": "DSpark n = 3"}, "bounds"),
        ({"min_acceptance": 0.7}, "min_acceptance"),
        ({"min_acceptance": math.nan}, "min_acceptance"),
        ({"min_speedup": 0.0}, "min_speedup"),
        ({"min_speedup": math.inf}, "min_speedup"),
        ({"min_acceptance": 2.0, "lower_bound": True}, "lower_bound"),
        ({"min_acceptance": 2.0, "batch": 1}, "batch"),
        ({"min_speedup": 1.0, "batch": 2}, "batch"),
        ({"min_speedup": 1.0, "drafter": "nobody"}, "drafter"),
        ({"min_speedup": 1.0, "drafter": "plain"}, "drafter"),
        ({"min_speedup": 1.0, "suites": ["nothing"]}, "suite"),
    ],
)
def test_what_cannot_be_checked_is_refused(report: Report, given: dict, field: str) -> None:
    with pytest.raises(DsparkError) as refused:
        gate(report, **given)
    assert refused.value.field == field and "\n" not in str(refused.value)


def test_a_report_of_plain_decoding_alone_is_refused() -> None:
    with pytest.raises(DsparkError, match="no drafter beside its baseline"):
        gate(make_report(0), min_speedup=1.0)


def test_the_baseline_endpoint_is_not_checked(report: Report) -> None:
    report.baseline = "DSpark n = 3"
    assert {one.drafter for one in gate(report, min_speedup=5.0)} == {"DSpark n = 7"}


def run(tmp_path: Path, report: Report, *options: str) -> tuple[int, str]:
    write_report(report, tmp_path / "report.json")
    done = CliRunner().invoke(app, [str(tmp_path), *options])
    if isinstance(done.exception, DsparkError):
        raise done.exception
    return done.exit_code, done.output


def test_the_command_passes_fails_and_refuses(tmp_path: Path, report: Report) -> None:
    report.missing = [MissingSuite(name="LiveCodeBench", reason="not on this disk | give --data")]
    bounds = ("--min-acceptance", "2.5", "--min-speedup", "1.2")
    code, out = run(tmp_path, report, *bounds, "--allow-missing")
    assert code == 0 and out.splitlines() == [
        "note: not in the means: LiveCodeBench: not on this disk | give --data",
        "note: the p99 of 30 requests is their largest",
        "passed",
    ]
    code, out = run(tmp_path, report, *bounds)
    assert code == 1 and out.splitlines()[0].startswith("failed: the report: suite: LiveCodeBench could not be had")
    report.missing = []
    code, out = run(tmp_path, report, "--min-speedup", "1.7")
    assert code == 1 and out.splitlines()[0].startswith(
        "failed: DSpark n = 3, mean over suites, batch 1: speedup 1.57 is below 1.7"
    )
    assert sum(", batch 4: " in line for line in out.splitlines()) == 2
    assert ", batch 4: " not in run(tmp_path, report, "--min-speedup", "1.7", "--batch", "1")[1]
    assert "passed" not in out
    with pytest.raises(DsparkError, match="nothing to check"):
        run(tmp_path, report)
    with pytest.raises(DsparkError, match="is not there"):
        CliRunner().invoke(app, [str(tmp_path / "none"), "--min-speedup", "1"], catch_exceptions=False)


def test_the_command_as_json(tmp_path: Path, report: Report) -> None:
    code, out = run(tmp_path, report, "--min-speedup", "1.7", "--drafter", "DSpark n = 3", "--json")
    said = json.loads(out)
    assert code == 1 and said["passed"] is False
    assert said["failures"][0]["bound"] == 1.7 and said["failures"][0]["message"].startswith("DSpark n = 3")
    assert said["failures"][0]["batch"] == 1
    code, out = run(tmp_path, report, "--min-speedup", "1.2", "--suite", "AIME26", "--lower-bound", "--json")
    assert code == 0 and json.loads(out)["passed"] is True


def test_hostile_names_cannot_speak_to_the_terminal(tmp_path: Path, report: Report) -> None:
    report.suites[0].not_lossless = ["\x1b[2J\nforged: passed"]
    code, out = run(tmp_path, report, "--min-acceptance", "1")
    assert code == 1 and "\x1b" not in out and not any(line.startswith("forged") for line in out.splitlines())
