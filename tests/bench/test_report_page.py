"""report.html: complete in itself, escaped, with every chart, table and round; written atomically."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.bench.report_factory import HOSTILE, SUITES, add_peers, make_answer, make_report

from dspark.bench.report import Ratio, Report
from dspark.bench.report_charts import (
    Chart,
    colours,
    depth_chart,
    histogram_chart,
    length_chart,
    slot_chart,
    speed_charts,
)
from dspark.bench.report_page import csp_hash, render_report, segments, write_report_page
from dspark.bench.verdict import headlines


class Reader(HTMLParser):
    """Nesting, tags, what could reach outside, inline scripts and styles, texts by class."""

    VOID = frozenset({"meta", "input", "rect", "line", "polyline", "circle", "br", "link"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, str]] = []
        self.outside: list[str] = []
        self.handlers: list[str] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.answers: list[list[str]] = []
        self.questions: list[str] = []
        self.policy = ""
        self.titles: list[str] = []
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.count[tag] = self.count.get(tag, 0) + 1
        self.outside += [value for name, value in values.items() if name in ("src", "href", "action", "data")]
        self.handlers += [name for name in values if name.startswith("on") or name == "style"]
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"]
        if values.get("class") == "text":
            self.answers.append([])
        if values.get("class") == "question":
            self.questions.append("")
        if "title" in values:
            self.titles.append(values["title"])
        if tag not in self.VOID:
            self.open.append((tag, values.get("class", "")))
        if tag in self.inline:
            self.inline[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] in self.inline:
            self.inline[self.open[-1][0]][-1] += data
        if any(name == "text" for _, name in self.open):
            self.answers[-1].append(data)
        if self.open and self.open[-1][1] == "question":
            self.questions[-1] += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def html() -> str:
    return render_report(make_report(4))


def test_nothing_comes_from_outside_and_only_our_script_runs(html: str) -> None:
    reader = read(html)
    assert set(reader.outside) == {"data:,"} and reader.handlers == []
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest", html)
    assert len(reader.inline["script"]) == len(reader.inline["style"]) == 1
    policy = dict(part.strip().split(" ", 1) for part in reader.policy.split(";"))
    assert policy["default-src"] == "'none'" and "unsafe" not in reader.policy
    assert policy["script-src"] == csp_hash(reader.inline["script"][0])
    assert policy["style-src"] == csp_hash(reader.inline["style"][0])


def test_hostile_texts_stay_texts() -> None:
    report = make_report(2, target=HOSTILE, notes=[HOSTILE])
    report.suites[0].name = HOSTILE
    report.suites[1].not_lossless = [HOSTILE]
    report.drafters[1].draft = HOSTILE
    assert report.rendered is not None
    report.rendered.text = HOSTILE
    report.settings[HOSTILE] = report.machine[HOSTILE] = HOSTILE
    reader = read(render_report(report))
    assert reader.count["script"] == 1 and "alert" not in reader.inline["script"][0]
    assert reader.questions == [HOSTILE]


def test_a_drafters_name_is_escaped_in_charts_and_buttons() -> None:
    report = make_report(1)
    text = report.model_dump_json().replace("DSpark n = 3", "<img src=x onerror=alert(1)> n = 3")
    reader = read(render_report(Report.model_validate_json(text)))
    assert "img" not in reader.count and reader.handlers == []


def test_answers_are_whole_and_cut_into_rounds() -> None:
    report = make_report(2)
    reader = read(render_report(report))
    assert ["".join(parts) for parts in reader.answers] == ["12 times </div> 3 is <script> 36.\n"] * 2
    assert "round 1: 2 of 3 draft tokens accepted" in reader.titles
    assert "prompt pass: the target's first token" in reader.titles
    made = segments(make_answer("d").pieces)
    assert [one.shade for one in made] == [0, 1, 0, 1]
    assert made[1].parts == [("draft", " times </div>"), ("target", " 3")]


def test_answers_of_one_prompt_stand_together() -> None:
    other = make_answer("DSpark n = 3", suite="AIME26")
    report = make_report(2)
    report.answers.append(other)
    html = render_report(report)
    assert html.count('<article class="card">') == 2 and html.count('type="radio"') == 2
    assert "body:has(#d1:checked) .answer.d1" in html
    assert "Answers, round by round" not in render_report(make_report(2, answers=[]))


def test_tables_say_what_sorts_and_what_a_drafters_colour_is(html: str) -> None:
    assert html.count('<th scope="col"') == html.count('<button type="button">')
    assert '<span class="dot f1"></span>DSpark n = 3' in html and '<span class="dot f0"></span>plain' in html
    assert "0.87x (0.81–0.94)" in html and "simple unweighted mean" in html


def test_headlines_are_honest() -> None:
    report = make_report(2)
    cards = list(headlines(report))
    assert [card.figure for card in cards] == ["Same tokens", "1.81x", "3.13", "150"]
    assert cards[0].tone == "good" and "1 more could not be had" in cards[3].said
    for mean in report.overall:
        mean.mean_speedup = None if mean.mean_speedup is None else 0.9
    report.suites[0].not_lossless = ["x"]
    cards = list(headlines(report))
    assert cards[0].tone == cards[1].tone == "bad" and cards[0].figure == "NOT LOSSLESS"
    assert cards[1].figure == "0.90x" and "slower than plain decoding" in cards[1].said
    assert "batch 1" in cards[1].said
    alone = headlines(make_report(1))[1].said
    assert alone.endswith("end to end, batch 1"), "of one, nobody is the fastest"


def test_other_engines_win_nothing() -> None:
    report = make_report(2)
    add_peers(report)
    cards = list(headlines(report))
    assert [card.figure for card in cards[1:3]] == ["1.81x", "3.13"] and "of 2" in cards[1].said
    html = render_report(report)
    assert "DSpark n = 3 in Transformers: rounds equal ours on 25 of 25 timed requests" in html
    assert "9.00x" in html
    for chart in (slot_chart(report), depth_chart(report), length_chart(report), histogram_chart(report)):
        assert chart is not None
        titles = [mark.title for mark in (*chart.dots, *chart.boxes)]
        assert titles and not any("Transformers" in title for title in titles), "its rounds are of other prompts"


def test_controls_and_turned_letters_are_seen() -> None:
    nasty = "a\x1b[2Jb\x00c" + "".join(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A)))) + "\u200d🙂\n\tend"
    report = make_report(2, target=nasty, notes=[nasty], answers=[make_answer("DSpark n = 3", nasty)])
    report.suites[0].name = report.settings["x"] = nasty
    html = render_report(report)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]", html)
    shown = "a\\x1b[2Jb\\x00c\\x202a\\x202b\\x202c\\x202d\\x202e\\x2066\\x2067\\x2068\\x2069\u200d🙂\n\tend"
    reader = read(html)
    assert reader.questions == [shown] and csp_hash(reader.inline["style"][0]) in reader.policy


def test_colours_are_the_same_everywhere_and_differ_up_to_ten() -> None:
    report = make_report(10)
    shade = colours(report)
    assert shade["plain"] == 0 and sorted(shade.values()) == list(range(11))
    charts = [slot_chart(report), depth_chart(report), length_chart(report), histogram_chart(report)]
    for chart in [*speed_charts(report), *charts]:
        assert chart is not None
        for mark in [*chart.boxes, *chart.dots]:
            owner = next(name for name in shade if mark.title.startswith((f"{name},", f"{name}:")))
            assert mark.colour == shade[owner]


def inside(chart: Chart) -> bool:
    """Whether every shape lies on the canvas."""
    across = [x for one in chart.boxes for x in (one.x, one.x + one.width)]
    across += [x for one in chart.rules for x in (one.x1, one.x2)] + [one.x for one in chart.dots]
    down = [y for one in chart.boxes for y in (one.y, one.y + one.height)]
    down += [y for one in chart.rules for y in (one.y1, one.y2)] + [one.y for one in chart.dots]
    words = all(0 <= one.x <= chart.width and 0 <= one.y <= chart.height for one in chart.words)
    return words and all(0 <= x <= chart.width for x in across) and all(0 <= y <= chart.height for y in down)


@pytest.mark.parametrize("drafters", [1, 2, 10])
def test_charts_stay_on_their_canvas(drafters: int) -> None:
    report = make_report(drafters)
    for chart in [*speed_charts(report), slot_chart(report), length_chart(report), depth_chart(report)]:
        assert chart is not None and inside(chart), chart.title
    histogram = histogram_chart(report)
    assert histogram is not None and inside(histogram)
    assert all(one.width > 0 for one in histogram.boxes)


def test_speed_bars_are_their_speedups_on_one_scale() -> None:
    report = make_report(2)
    charts = speed_charts(report)
    assert [chart.title for chart in charts][:2] == ["Speedup, mean of 5 suites, batch 1", "Speedup, GSM8K"]
    assert len(charts) == 1 + len(SUITES)
    base = next(rule for rule in charts[0].rules if rule.kind == "base")
    unit = base.x1 - charts[0].boxes[0].x
    for chart, suite in zip(charts[1:], report.suites, strict=True):
        for bar, name in zip(chart.boxes, ("DSpark n = 3", "DSpark n = 7"), strict=True):
            speedup = suite.columns[name].speed[0].speedup
            assert speedup is not None and bar.width / unit == pytest.approx(speedup.value, abs=0.01)
        assert sum(rule.kind == "whisker" for rule in chart.rules) == 6
    assert not any(rule.kind == "whisker" for rule in charts[0].rules), "the mean has no interval"


def test_a_missing_speedup_is_a_dash_and_no_speed_no_chart() -> None:
    report = make_report(2)
    report.suites[0].columns["DSpark n = 3"].speed = []
    chart = speed_charts(report)[1]
    assert len(chart.boxes) == 1 and any(one.text == "—" for one in chart.words)
    for suite in report.suites:
        for column in suite.columns.values():
            column.speed = []
    report.overall = []
    assert speed_charts(report) == [] and "<h2>Speedup</h2>" not in render_report(report)


def test_what_is_over_all_suites_is_pooled_exactly() -> None:
    report = make_report(1, ("GSM8K", "AIME26"))
    first, second = (suite.columns["DSpark n = 3"].acceptance for suite in report.suites)
    assert first is not None and second is not None
    first.conditional[0].accepted, first.conditional[0].verified = 1, 10
    second.conditional[0].accepted, second.conditional[0].verified = 80, 90
    first.by_output_length[0].questions, first.by_output_length[0].macro_length = 1, 2.0
    second.by_output_length[0].questions, second.by_output_length[0].macro_length = 3, 4.0
    slots, lengths = slot_chart(report), length_chart(report)
    assert slots is not None and slots.dots[0].title == "DSpark n = 3, slot 1: 81 of 100 = 0.81"
    assert lengths is not None and lengths.dots[0].title == "DSpark n = 3, 0-1K: 3.50 over 4 questions"
    assert len(lengths.dots) == 5 and len(lengths.lines) == 1
    labels = [one.text for one in lengths.words if one.anchor == "middle"]
    assert labels == ["0-1K", "1-2K", "2-4K", "4-8K", "32K+"], "no bucket that nobody has"
    second_suite = report.suites[1]
    second_suite.apart = True
    slots = slot_chart(report)
    assert slots is not None and slots.dots[0].title.endswith("1 of 10 = 0.10"), "what is apart is in no mean"


def test_a_bucket_that_one_drafter_lacks_breaks_its_line() -> None:
    report = make_report(2, ("AIME26",))
    acceptance = report.suites[0].columns["DSpark n = 3"].acceptance
    assert acceptance is not None
    acceptance.by_output_length[2].questions, acceptance.by_output_length[2].macro_length = 0, None
    chart = length_chart(report)
    assert chart is not None and len(chart.lines) == 3 and len(chart.dots) == 9


def test_one_bucket_makes_no_chart() -> None:
    report = make_report(1, ("AIME26",))
    acceptance = report.suites[0].columns["DSpark n = 3"].acceptance
    assert acceptance is not None
    del acceptance.by_output_length[1:], acceptance.by_context_depth[1:]
    assert length_chart(report) is None and depth_chart(report) is None and slot_chart(report) is not None


@pytest.mark.parametrize("speedup", [0.3, 0.7, 0.85, 0.95, 0.999, 1.0, 1.05, 1.4, 3.0, 12.0])
def test_no_label_lies_across_the_line(speedup: float) -> None:
    report = make_report(2, ("AIME26",))
    for column in report.suites[0].columns.values():
        for speed in column.speed:
            if speed.speedup is not None:
                speed.speedup = Ratio(value=speedup, low=speedup * 0.95, high=speedup * 1.02)
    report.suites[0].columns["DSpark n = 7"].speed = []
    chart = speed_charts(report)[-1]
    line = next(rule.x1 for rule in chart.rules if rule.kind == "base")
    labels = [one for one in chart.words if (one.text.endswith("x") and one.anchor == "start") or one.text == "—"]
    assert len(labels) == 2 and inside(chart)
    for one in labels:
        assert one.x > line or one.x + 6.8 * len(one.text) < line, (one.text, one.x, line)
        assert one.x + 6.8 * len(one.text) <= chart.width


def test_a_report_without_acceptance_or_anything_renders() -> None:
    report = make_report(2)
    for suite in report.suites:
        for column in suite.columns.values():
            column.acceptance = None
    html = render_report(report)
    assert "<h2>Acceptance</h2>" not in html
    read(html)
    read(render_report(make_report(0, (), overall=[], changes=[], rendered=None, answers=[], missing=[], notes=[])))


def test_it_is_written_whole(tmp_path: Path) -> None:
    out = write_report_page(make_report(), tmp_path / "new" / "report.html")
    assert read(out.read_text(encoding="utf-8")).count["svg"] == 10
    assert [one.name for one in out.parent.iterdir()] == ["report.html"]
