"""report.html in a real browser: it draws, sorts, shows rounds, fetches nothing, in both colours and narrow. Slow.

Needs a Chromium (or Chrome) on the path, or Playwright's own, and the pip package playwright; skips without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.bench.report_factory import HOSTILE, make_report

from dspark.bench.report_page import write_report_page

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's test needs: pip install playwright")
expect = sync_api.expect

pytestmark = pytest.mark.slow

LOOKS = [(1280, "light"), (1200, "dark"), (360, "dark")]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of ten drafters whose texts try to be markup."""
    report = make_report(10, notes=[HOSTILE], target="a <target> & more")
    report.suites[0].columns["DFlash n = 3"].acceptance = None
    return write_report_page(report, tmp_path_factory.mktemp("report") / "report.html").as_uri()


@pytest.fixture(params=LOOKS, ids=lambda look: f"{look[0]} {look[1]}")
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, loaded; whatever a test does with it, it asks for nothing but its own file and never complains."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    urls: list[str] = []
    complaints: list[str] = []
    opened.on("request", lambda one: urls.append(one.url))
    opened.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    opened.goto(address)
    opened.look = request.param
    yield opened
    context.close()
    assert [url for url in urls if url not in (address, "data:,")] == []
    assert complaints == []


def column(table: Any, index: int) -> list[str]:
    return [text.strip() for text in table.locator(f"tbody td:nth-child({index + 1})").all_text_contents()]


def head(table: Any, name: str) -> tuple[Any, int]:
    names = [text.strip() for text in table.locator("thead th").all_text_contents()]
    return table.locator("thead th").nth(names.index(name)), names.index(name)


def card(page: Any, title: str) -> Any:
    return page.locator("section.card", has=page.get_by_role("heading", name=title, exact=True)).locator("table")


def test_it_draws(page: Any) -> None:
    assert page.locator("svg").count() == 10 and page.locator("svg rect").count() > 100
    for bar in page.locator("figure").first.locator("rect").all():
        assert bar.bounding_box()["width"] > 20
    fills = page.evaluate(
        "[...document.querySelectorAll('figure:first-of-type rect')].map(r => getComputedStyle(r).fill)"
    )
    assert len(set(fills[:10])) == 10, "ten drafters, ten colours"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 23, 26)" if page.look[1] == "dark" else "rgb(247, 247, 245)"), "our style was let in"


def test_nothing_leaves_its_place(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "the page does not scroll aside"
    wide = page.evaluate("[...document.querySelectorAll('.scroll')].filter(x => x.scrollWidth > x.clientWidth).length")
    assert wide > 0, "wide tables do"
    expect(page.locator("h1")).to_have_text("dspark bench: a <target> & more")


def test_wide_tables_scroll_to_their_last_column(page: Any) -> None:
    """The Suites table is wider than its card: what is outside can be reached, nothing is cut."""
    window = page.get_by_role("region", name="Suites", exact=True)
    before = window.evaluate("x => [x.scrollWidth > x.clientWidth, getComputedStyle(x).overflowX]")
    assert before == [True, "auto"]
    window.evaluate("x => { x.scrollLeft = x.scrollWidth; }")
    last, around = window.locator("th").last.bounding_box(), window.bounding_box()
    assert last["x"] + last["width"] <= around["x"] + around["width"] + 1
    card = page.locator("section.card", has=window).bounding_box()
    assert around["x"] + around["width"] <= card["x"] + card["width"]


def test_cards_of_a_row_are_equally_high(page: Any) -> None:
    for place in (".facts > *", ".charts > *"):
        boxes = [one.bounding_box() for one in page.locator(place).all()]
        rows: dict[int, set[int]] = {}
        for box in boxes:
            rows.setdefault(round(box["y"]), set()).add(round(box["height"]))
        assert boxes and all(len(heights) == 1 for heights in rows.values()), rows
        if place.startswith(".facts"):
            assert len({round(box["height"]) for box in boxes}) == 1


def test_no_label_lies_across_the_dashed_line(page: Any) -> None:
    found = page.evaluate(
        """() => [...document.querySelectorAll('svg')].flatMap(svg => {
          const line = svg.querySelector('line.base');
          if (!line) return [];
          const x = line.getBoundingClientRect().x;
          return [...svg.querySelectorAll('text')].filter(t => t.textContent !== '1x')
            .map(t => [t.textContent, t.getBoundingClientRect()])
            .filter(([_, box]) => box.left < x && x < box.right).map(([text]) => text);
        })"""
    )
    assert found == []


def test_tables_sort_by_a_click(page: Any) -> None:
    table = card(page, "Acceptance length")
    before = column(table, 1)
    clicked, index = head(table, "acc_len")
    clicked.locator("button").click()
    assert clicked.get_attribute("aria-sort") == "descending"
    down = [float(text) for text in column(table, index)]
    assert down == sorted(down, reverse=True) and column(table, 1) != before
    clicked.locator("button").press("Enter")
    assert clicked.get_attribute("aria-sort") == "ascending"
    up = [float(text) for text in column(table, index)]
    assert up == sorted(up) and sorted(up) == sorted(down)
    words, index = head(table, "Dataset")
    words.locator("button").click()
    assert words.get_attribute("aria-sort") == "ascending" and clicked.get_attribute("aria-sort") is None
    assert column(table, index) == sorted(column(table, index), key=str.lower)


def test_a_dash_stays_last_and_commas_are_no_obstacle(page: Any) -> None:
    page.locator("summary", has_text="AIME26").click()
    table = page.get_by_role("region", name="AIME26: acc_len by output length").locator("table")
    clicked, index = head(table, "Actual output range")
    for _ in range(2):
        clicked.locator("button").click()
        found = column(table, index)
        assert found[-2:] == ["—", "—"], "empty buckets between full ones"
        lows = [int(text.split("–")[0].replace(",", "")) for text in found[:-2]]
        assert lows == sorted(lows, reverse=clicked.get_attribute("aria-sort") == "descending")
    buckets, index = head(table, "Output-token bucket")
    buckets.locator("button").click()
    assert column(table, index) == ["0-1K", "1-2K", "2-4K", "4-8K", "8-16K", "16-32K", "32K+"]


def test_answers_show_their_rounds_by_drafter(page: Any) -> None:
    assert page.locator(".question").text_content() == HOSTILE
    shown = page.locator(".answer:visible")
    assert shown.count() == 1 and "DSpark n = 7" in shown.inner_text()
    page.get_by_role("radio", name="DSpark n = 3").check()
    assert shown.count() == 1 and "DSpark n = 3" in shown.inner_text()
    assert shown.locator(".text").text_content() == "12 times </div> 3 is <script> 36.\n"
    colours = shown.locator(".r b").evaluate_all("all => all.map(x => getComputedStyle(x).backgroundColor)")
    assert len(colours) == 2 and len(set(colours)) == 2
    assert shown.locator(".r").nth(1).get_attribute("title") == "round 1: 2 of 3 draft tokens accepted"
