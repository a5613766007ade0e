"""report.md: the published tables' shape, honest words, and nothing quoted that could break it."""

from __future__ import annotations

import re

import pytest
from tests.bench.report_factory import AIME, HOSTILE, SUITES, add_peers, make_report, make_suite

from dspark.bench.markdown import escape, fenced, markdown_table, report_markdown, visible
from dspark.bench.report import Column, Rendered, Report
from dspark.bench.tables import Table, change, milliseconds, number, setting, speed_table, times
from dspark.bench.verdict import training_lines, verdict


@pytest.fixture(scope="module")
def text() -> str:
    return report_markdown(make_report())


def section(text: str, title: str) -> str:
    """What stands under a heading, up to the next of its level or above."""
    level = re.search(rf"^(#+) {re.escape(title)}$", text, re.M)
    assert level is not None, f"no heading {title}"
    rest = text[level.end() :]
    end = re.search(rf"^#{{1,{len(level[1])}}} ", rest, re.M)
    return rest[: end.start()] if end else rest


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, the ruler left out."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append(cells(line))
        elif found[-1]:
            found.append([])
    return [[rows[0], *rows[2:]] for rows in found if rows]


def test_the_speed_table_is_the_published_one(text: str) -> None:
    header, *rows = tables(section(text, "Speed"))[0]
    assert header[:5] == ["target", "draft", "n = 3 mean speedup", "n = 7 mean speedup", "change from n = 3"]
    assert header[5:] == ["checkpoint"] and rows[0][5] == "runs/draft, 2,249,289,601 parameters"
    assert len(rows) == 1 and rows[0][:2] == ["SmolLM2-135M-Instruct", "DSpark"]
    low, high = (float(cell.removesuffix("x")) for cell in rows[0][2:4])
    assert re.fullmatch(r"[+-]\d+\.\d%", rows[0][4])
    assert "**Mean speedup, batch 1**" in text and "speedups at batch 1" in text
    assert float(rows[0][4].removesuffix("%")) / 100 == pytest.approx(high / low - 1, abs=0.01)
    said = section(text, "Speed")
    assert (
        f"simple unweighted mean over {', '.join(SUITES)}" in said and "not weighted by the number of prompts" in said
    )


def test_a_slower_drafter_reads_as_one(text: str) -> None:
    line = next(line for line in text.splitlines() if line.startswith("| GSM8K | DSpark n = 3 | 1 |"))
    assert re.search(r"\| 0\.\d\dx \(0\.\d\d–0\.\d\d\) \|", line)
    assert times(0.9) == "0.90x" and change(-0.11) == "-11.0%"


def test_the_acceptance_table_is_the_published_one_with_other_means_named(text: str) -> None:
    part = section(text, "Acceptance length")
    header, *rows = tables(section(part, "DSpark n = 7"))[0]
    assert header[:3] == ["Dataset", "Questions", "acc_len"]
    assert header[3:6] == ["micro", "completion / round", "acc_len without loops"] and header[-1] == "source"
    assert [row[0] for row in rows] == list(SUITES)
    assert all(re.fullmatch(r"\d\.\d{4}", row[2]) and row[2] != row[3] for row in rows)
    assert rows[-1][1] == "30 (10 per partition)"
    assert "bonus counted" in part and "no acceptance length" in part and "replay: the draft walked" in part
    assert "actual prompts span 1,000,432–1,047,925 tokens" in part
    assert "partition acc_len is 4.4658 for MK, 4.3081 for MV, 3.9919 for QA; their mean is 4.2553." in part


def test_a_span_that_is_not_recorded_is_said(text: str) -> None:
    report = make_report()
    report.suites[-1].shortest_prompt = None
    assert "the prompts' actual span is not recorded; partition" in report_markdown(report)


def test_output_length_buckets_as_published() -> None:
    report = make_report(1, ("AIME26",))
    acceptance = report.suites[0].columns["DSpark n = 3"].acceptance
    assert acceptance is not None
    for bucket, (_, _, _, value) in zip(acceptance.by_output_length, AIME):
        bucket.macro_length = value
    header, *rows = tables(section(report_markdown(report), "AIME26"))[0]
    assert header == ["Output-token bucket", "Questions", "Actual output range", "DSpark n = 3"]
    assert rows[0] == ["0-1K", "13", "192–885", "3.1310"]
    assert rows[4] == ["8-16K", "0", "—", "—"] and rows[5] == ["16-32K", "0", "—", "—"]
    assert rows[6] == ["32K+", "2", "54,545–224,703", "4.9194"]


def test_empty_buckets_at_the_ends_are_left_out() -> None:
    report = make_report(1, ("AIME26",))
    acceptance = report.suites[0].columns["DSpark n = 3"].acceptance
    assert acceptance is not None
    for bucket in (acceptance.by_output_length[0], acceptance.by_output_length[-1]):
        bucket.questions, bucket.shortest, bucket.longest, bucket.macro_length = 0, None, None, None
    rows = tables(section(report_markdown(report), "AIME26"))[0]
    assert [row[0] for row in rows[1:]] == ["1-2K", "2-4K", "4-8K"]
    acceptance.by_context_depth[1].rounds = 0
    part = tables(section(report_markdown(report), "AIME26"))
    assert ["drafter", "0-512"] in [rows[0] for rows in part], "no depth that no drafter has"


def test_drafters_whose_answers_differ_get_tables_of_their_own() -> None:
    report = make_report(3, ("AIME26",))
    acceptance = report.suites[0].columns["DSpark n = 7"].acceptance
    assert acceptance is not None
    acceptance.by_output_length[0].questions = 12
    found = [
        rows[0][3:] for rows in tables(section(report_markdown(report), "AIME26")) if rows[0][0].startswith("Outp")
    ]
    assert found == [["DSpark n = 3", "DFlash n = 3"], ["DSpark n = 7"]]


def test_details_of_a_suite(text: str) -> None:
    part = section(text, "HumanEval")
    by_head = {rows[0][1]: rows for rows in tables(part)}
    assert by_head["slot 1"][1][4:] == ["—"] * 4, "a draft of three has no slot 4"
    assert by_head["0-512"][0] == ["drafter", "0-512", "512-1K"], "no column that nobody has rounds in"
    assert by_head["0"][0][-1] == "nothing verified"
    assert sum(int(cell.replace(",", "")) for cell in by_head["0"][2][1:-1]) == 2000
    latency = by_head["batch"]
    assert [row[:2] for row in latency[1:3]] == [["plain", "1"], ["plain", "4"]]
    assert latency[3][2:] == [
        *("200.0 / 190.0 / 310.0", "25.1 / 24.0 / 51.0", "25.1 / 24.0 / 51.0", "2,500.0 / 2,400.0 / 5,100.0"),
        *("4.20", "25.1", "1.2%", "0.3%"),
    ]
    assert latency[1][6] == "—", "plain decoding drafts nothing"


def test_what_the_report_says_of_itself(text: str) -> None:
    assert "**Same tokens**" in text and "the replay was set beside the served rounds of 150 requests" in text
    assert "- LiveCodeBench: not on this disk \\| give --data" in text
    assert "| max_tokens | 512 |" in text and "| processor | a processor, 2 cores |" in text
    assert "| batches | 1, 4 |" in text
    assert "````text\n<|im_start|>user\n```\nWhat?\n" in text


def test_faults_ties_failures_and_prompts_trained_on_are_listed() -> None:
    report = make_report()
    first = report.suites[0]
    first.not_lossless, first.ties = ["NOT LOSSLESS: q"], ["tie: r"]
    first.replay_faults, first.replay_ties = ["fault: s"], ["tie: t"]
    first.flagged = [f"q{i}" for i in range(8)]
    first.columns["DSpark n = 7"].failed = 3
    first.columns["DSpark n = 7"].note = "the server told nothing"
    report.drafters[1].trained_on = False
    apart = make_suite("GSM8K (trained on)", report.drafters)
    apart.apart = True
    report.suites.append(apart)
    text = report_markdown(report)
    assert "**NOT LOSSLESS**: 1 difference from plain decoding, 1 fault of the replay" in text
    assert "- GSM8K: NOT LOSSLESS: q" in section(text, "Not lossless")
    assert "- GSM8K: fault: s" in section(text, "Replay faults")
    assert section(text, "Ties").strip().splitlines() == ["- GSM8K: tie: r", "- GSM8K: replay: tie: t"]
    trained = section(text, "Prompts in the training set")
    assert "8 prompts" in trained and "and 3 more" in trained and "GSM8K (trained on): apart, in no mean" in trained
    assert "DSpark n = 3: its draft does not list" in trained
    assert "3 requests failed; the figures are over the rest" in section(text, "Failures")
    assert "the server told nothing" in section(text, "Failures")
    means = section(text, "Speed").split("### ")[0]
    assert "GSM8K" in means and "(trained on)" not in means, "not among the suites of the mean"


def test_claims_no_more_than_was_compared() -> None:
    replayed = make_report()
    for suite in replayed.suites:
        for column in suite.columns.values():
            column.speed = []
    assert "**Not compared**" in report_markdown(replayed) and "Nothing was timed." in report_markdown(replayed)
    live = make_report(kind="live", baseline="plain")
    live.suites[0].columns["DSpark n = 3"].speed[0].batch = 0
    assert "**No difference found**" in report_markdown(live)
    assert "| GSM8K | DSpark n = 3 | open loop |" in report_markdown(live)
    live.suites[0].not_lossless = ["ids differ from token 3 on"]
    text = report_markdown(live)
    assert "**Answers differ**" in text and "ids differ" in section(text, "Answers that differ")
    assert "NOT LOSSLESS" not in text, "a tie cannot be told from outside"
    assert "**Not compared**" in report_markdown(make_report(kind="live", baseline=None))


def test_without_two_widths_the_mean_speedups_stand_alone() -> None:
    header, *rows = tables(section(report_markdown(make_report(1)), "Speed"))[0]
    assert header == ["target", "draft", "mean speedup", "checkpoint"] and rows[0][1] == "DSpark n = 3"


def test_a_draft_of_one_width_has_a_dash_for_the_other() -> None:
    _, *rows = tables(section(report_markdown(make_report(3)), "Speed"))[0]
    assert [row[1] for row in rows] == ["DSpark", "DFlash"]
    assert rows[1][3:5] == ["—", "—"] and rows[1][2].endswith("x")


def test_few_rounds_show_their_counts() -> None:
    report = make_report(1, ("AIME26",))
    acceptance = report.suites[0].columns["DSpark n = 3"].acceptance
    assert acceptance is not None
    for slot, (taken, verified) in zip(acceptance.conditional, [(5, 10), (2, 9), (0, 0)]):
        slot.accepted, slot.verified, slot.rate = taken, verified, taken / verified if verified else None
    found = {rows[0][1]: rows for rows in tables(section(report_markdown(report), "AIME26"))}
    assert found["slot 1"][1] == ["DSpark n = 3", "0.500", "0.222 (2/9)", "—"]


def test_the_headline_is_ours_and_says_its_batch() -> None:
    report = make_report()
    add_peers(report)
    text = report_markdown(report)
    assert "- **1.81x** mean speedup of DSpark n = 7, end to end, batch 1, the fastest of 2" in text
    assert "- **3.13** tokens a target pass with DSpark n = 3" in text
    assert "| DSpark n = 3 in Transformers | 1 | 9.00x |" in text, "it is shown among the means"
    assert "| served |" in text and "| GSM8K | 5 |" in text, "its acceptance with the questions it is over"
    for mean in report.overall:
        mean.batch = 4
    assert "end to end, batch 4," in report_markdown(report) and "Mean speedup, batch 4" in report_markdown(report)


def test_acceptance_over_a_part_of_the_questions_is_no_headline() -> None:
    report = make_report()
    acceptance = report.suites[2].columns["DSpark n = 3"].acceptance
    assert acceptance is not None
    acceptance.questions -= 1
    assert "tokens a target pass with DSpark n = 7" in report_markdown(report)


def test_rounds_in_transformers_have_a_line_of_their_own() -> None:
    report = make_report()
    add_peers(report)
    title, name = "Rounds in Transformers", "DSpark n = 3 in Transformers"
    said = section(report_markdown(report), title).strip()
    assert said == f"- {name}: rounds equal ours on 25 of 25 timed requests"
    report.suites[0].replay_faults = [
        f"REPLAY DIFFERS: q/1, {name}, round 4: served 1 of 3",
        "q/2, DSpark n = 3, round 1: x",
    ]
    report.suites[1].replay_ties = [f"tie: q/3, {name}, round 2: served 1 of 3"]
    lines = section(report_markdown(report), title).strip().splitlines()
    assert lines[0] == f"- {name}: rounds equal ours on 23 of 25 timed requests" and len(lines) == 3
    assert title not in report_markdown(make_report())


def test_a_column_without_gaps_says_why() -> None:
    report = make_report()
    add_peers(report)
    report.suites[0].columns["plain"].speed[0].inter_token = None
    latency = next(rows for rows in tables(section(report_markdown(report), "GSM8K")) if rows[0][1] == "batch")
    gaps = {(row[0], row[1]): row[3] for row in latency}
    assert gaps["plain in Transformers", "1"] == "— (answers are not streamed)"
    assert gaps["plain", "1"] == "— (no second chunk)" and gaps["plain", "4"] == "25.1 / 24.0 / 51.0"


def test_what_is_known_of_training_sets() -> None:
    def said(report: Report) -> str:
        return " ".join(training_lines(report))

    clean = "no prompt of these suites is in a training set: every draft lists its own"
    report = make_report()
    add_peers(report)
    assert said(report) == clean, "other engines' columns have our drafts"
    report.drafters[2].trained_on = None
    assert said(report).startswith("DSpark n = 7: not known here") and clean not in said(report)
    live = make_report(1, kind="live")
    assert said(live) == "DSpark n = 3: not known here: a server does not list its draft's prompts"
    assert training_lines(make_report(0)) == []


def test_the_verdict_counts_what_was_compared() -> None:
    report = make_report()
    for suite in report.suites:
        suite.columns["plain"].compared = 99
        suite.columns["DSpark n = 3"].compared = 300
    assert verdict(report).detail == "1,500 served answers compared, each equal to plain decoding's, id by id"
    report.suites[0].ties = ["tie"]
    assert verdict(report).detail == "1 tie of the target itself, among 1,500 answers compared"
    assert verdict(make_report()).detail == "every served answer equals plain decoding's, id by id"


def test_nothing_to_divide_by_is_a_dash() -> None:
    report = make_report()
    report.suites[0].columns["plain"].speed[0].tokens_per_s = None
    assert "| GSM8K | plain | 1 | — | 1 (baseline) |" in report_markdown(report)


def test_an_almost_empty_report_is_no_error() -> None:
    empty = make_report(0, (), overall=[], changes=[], rendered=None, answers=[], missing=[], notes=[])
    text = report_markdown(empty)
    assert "Nothing was timed." in text and "No acceptance figures." in text
    report = make_report()
    report.suites[0].columns = {"DSpark n = 3": Column(failed=1)}
    assert "1 request failed" in report_markdown(report)


def test_whatever_is_quoted_stays_one_cell_or_line() -> None:
    report = make_report(
        rendered=Rendered(suite="s|t", question="q\nr", tokens=2, text=HOSTILE + "\n```\n`````\n\x1b[31m")
    )
    report.target = HOSTILE
    report.suites[0].name = "a|b\n# c"
    report.notes = ["# no heading\n- no list <b>x</b> [l](javascript:x) *y* $z$"]
    text = report_markdown(report)
    assert "<script" not in text.replace("\\<script", "").split("``````text")[0]
    assert "a\\|b \\# c" in text and "\n# c" not in text
    for rows in tables(text):
        assert len({len(row) for row in rows}) == 1, rows[0]
    assert "- \\# no heading - no list \\<b\\>x\\</b\\> \\[l\\](javascript:x) \\*y\\* \\$z\\$" in text
    assert "``````text\n" in text and "\\x1b[31m" in text and "\x1b" not in text


def test_escape_leaves_names_readable() -> None:
    assert escape("acc_len") == "acc_len" and escape("_x_") == "\\_x\\_" and escape("n = 3") == "n = 3"
    assert visible("a\x00\u202eb\té\n") == "a\\x00\\x202eb\té\n"
    assert fenced("no ticks").startswith("```text\n") and fenced("````").startswith("`````text\n")
    assert markdown_table(Table("t", ["a", "b"], [["x|y", "1"]])) == "| a | b |\n| --- | ---: |\n| x\\|y | 1 |"


def test_figures_as_shown() -> None:
    assert (number(None), number(1234.5678, 4)) == ("—", "1,234.5678")
    assert (milliseconds(None), milliseconds(0.0042), milliseconds(2.5)) == ("—", "4.20", "2,500.0")
    assert (
        setting([1, 4]) == "1, 4" and setting({"a": None, "b": [True]}) == "a: none, b: yes" and setting([]) == "none"
    )


def test_the_interval_says_its_level() -> None:
    assert "the 95% interval" in speed_table(make_report()).note
    report: Report = make_report()
    for suite in report.suites:
        for column in suite.columns.values():
            for speed in column.speed:
                if speed.speedup is not None:
                    speed.speedup.level = 0.9
    assert "the 90% interval" in speed_table(report).note
