"""The page at `/` in a real browser, on the real server with the real pair. Slow; `make test-slow`.

Needs a Chromium (or Chrome) on the path, or Playwright's own, and the pip package playwright; skips without them.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="the page's test needs: pip install playwright")
expect = sync_api.expect

pytestmark = pytest.mark.slow

PROMPT = "A farmer packs 12 boxes of 24 eggs and sells 7 boxes. How many eggs are left?"
TOKENS = 40
START_S, ANSWER_S = 240, 180
WIDE, NARROW = (1600, "light"), (360, "dark")


@dataclass
class Seen:
    """What one page asked for and complained about."""

    urls: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def address(browser: Any, embedded_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real server on a free loopback port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    command = [str(Path(sys.executable).with_name("dspark")), "serve", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | {"OMP_NUM_THREADS": "1"})
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(address, server, log)
        yield address
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_until_ready(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if server.poll() is not None:
            pytest.fail(f"the server ended with {server.returncode}: {log.read_text()}")
        try:
            if httpx.get(f"{address}/v1/models", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"the server is not ready after {START_S} s: {log.read_text()}")


@pytest.fixture
def look(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Width and colours; a test marked `both_looks` runs with each."""
    return getattr(request, "param", WIDE)


both_looks = pytest.mark.parametrize("look", [WIDE, NARROW], indirect=True, ids=["wide", "narrow"])


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def page(browser: Any, address: str, seen: Seen, look: tuple[int, str]) -> Iterator[Any]:
    """The page, loaded; whatever a test does with it, it asks nobody but its server and complains about nothing."""
    width, scheme = look
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    opened.on("request", lambda request: seen.urls.append(request.url))
    opened.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
    opened.on("pageerror", lambda error: seen.complaints.append(str(error)))
    opened.goto(address)
    expect(opened.locator("#engine li")).not_to_have_count(0)
    yield opened
    context.close()
    assert [url for url in seen.urls if not url.startswith((address + "/", "data:,"))] == []
    assert seen.complaints == []


def ask(page: Any, prompt: str = PROMPT, **fields: object) -> None:
    """Fill in the form and press Run."""
    page.locator("#prompt").fill("")
    page.locator("#prompt").press_sequentially(prompt)
    for name, value in ({"max_tokens": TOKENS} | fields).items():
        page.locator(f"#{name}").fill(str(value))
    page.locator("#run").click()


def wait_for_end(page: Any) -> None:
    expect(page.locator("#run")).to_be_enabled(timeout=ANSWER_S * 1000)


def figure(page: Any, name: str) -> float:
    return float(page.locator(f"#{name}").inner_text().removesuffix("×"))


def no_overflow(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def answer_of(address: str, **settings: object) -> dict[str, Any]:
    """The API's own answer to the page's prompt."""
    model = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, **settings}
    response = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=ANSWER_S)
    response.raise_for_status()
    return response.json()


@both_looks
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_the_page_shows_what_the_api_says(page: Any, address: str, settings: dict[str, Any]) -> None:
    assert page.locator("#compare").is_checked() and no_overflow(page)
    ask(page, **settings)
    page.wait_for_selector("#answer .t >> nth=2", state="attached")
    assert page.locator("#stop").is_enabled(), "tokens show while others are still to come"
    wait_for_end(page)
    assert no_overflow(page)
    assert page.locator("#error").is_hidden()

    said = answer_of(address, **settings)
    text, usage = said["choices"][0]["message"]["content"], said["usage"]
    speculation = usage["speculation"]
    assert page.locator("#answer").text_content() == text
    assert page.locator("#plain").text_content() == text
    assert figure(page, "tokens") == usage["completion_tokens"] == page.locator("#answer .t").count()
    assert figure(page, "rounds") == speculation["rounds"] == page.locator("#strip .round").count()
    assert page.locator("#length").inner_text() == f"{speculation['acceptance_length']:.2f}"
    assert page.locator("#answer .drafted").count() == speculation["accepted"] > 0
    assert page.locator("#strip .slot.accepted").count() == speculation["accepted"]
    assert page.locator("#strip .well").count() == speculation["scheduled"], "each verified slot has its confidence"
    counts = page.locator("#histogram dd:last-child").all_inner_texts()
    shown = [int(text.split()[0]) for text in counts]
    assert shown == speculation["histogram"][: len(shown)] and not any(speculation["histogram"][len(shown) :])
    assert page.locator("#check").inner_text().startswith("Every count on this page equals")
    assert page.locator("#no-confidence").is_hidden()

    assert (
        page.locator("#verdict")
        .inner_text()
        .startswith(f"Same text, token by token: all {figure(page, 'tokens'):.0f} ")
    )
    first = page.locator("#speeds tr").first.locator("td").all_inner_texts()
    draft, plain = float(first[0]), float(first[1])
    assert first[2] == page.locator("#ratio").inner_text()
    assert figure(page, "ratio") == pytest.approx(draft / plain, rel=0.02)
    passes = page.locator("#speeds tr").nth(3).locator("td").all_inner_texts()[:2]
    assert passes == [str(speculation["rounds"]), str(usage["completion_tokens"] - 1)], "plain is one token a pass"
    assert "benchmarks/" in page.locator("#comparison").inner_text()

    page.locator("#compare").uncheck()
    ask(page, **settings)  # the next run is set against that plain speed while it goes on
    expect(page.locator("#ratio-note")).to_have_text(f"over {plain:.1f} tokens/s, the last plain run here")
    wait_for_end(page)
    assert figure(page, "ratio") == pytest.approx(figure(page, "speed") / plain, rel=0.02)


@both_looks
def test_rounds_by_keyboard_and_pointer(page: Any) -> None:
    """Ctrl + Enter runs; the arrow keys walk through the rounds; a token and its round point at each other."""
    page.locator("#max_tokens").fill(str(TOKENS))
    page.locator("#compare").uncheck()
    page.locator("#prompt").press("Control+Enter")
    expect(page.locator("#stop")).to_be_enabled()
    wait_for_end(page)
    rounds = page.locator("#strip .round")
    assert "slot 1" in rounds.first.get_attribute("aria-label")
    assert page.locator("#strip [tabindex='0']").count() == 1, "one stop of the Tab key for the whole strip"
    rounds.first.scroll_into_view_if_needed()
    page.mouse.move(100, 250)  # rests there while the keys scroll rounds and tokens under it
    rounds.first.focus()
    for number in range(2, rounds.count() + 1):
        page.keyboard.press("ArrowRight")
        page.wait_for_timeout(60)
        expect(page.locator("#detail")).to_contain_text(f"Round {number}: ")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(rounds.nth(1)).to_be_focused()
    expect(page.locator("#detail")).to_contain_text("Round 2: ")
    lit = page.locator("#answer .t.lit")
    assert {span.get_attribute("data-round") for span in lit.all()} == {"2"}
    drafted = page.locator("#answer .t.drafted").first
    drafted.hover()
    number = drafted.get_attribute("data-round")
    expect(page.locator("#strip [aria-current]")).to_have_attribute("data-round", number)
    title = drafted.get_attribute("title")
    assert re.match(rf"round {number}, slot 1 of \d+, confidence [01]\.\d\d: draft token, accepted, id \d+$", title), (
        title
    )
    assert page.locator("#comparison").is_hidden() and page.locator("#plain-pane").is_hidden()


def test_stop(page: Any) -> None:
    ask(page, "Tell a very long story about a lighthouse.", max_tokens=2000)
    page.wait_for_selector("#answer .t >> nth=4", state="attached")
    page.locator("#stop").click()
    expect(page.locator("#status")).to_have_text(re.compile(r"^Stopped after \d+ tokens\.$"))
    expect(page.locator("#run")).to_be_enabled()
    text = page.locator("#answer").text_content()
    assert page.locator("#plain").text_content() == "", "stopped is stopped: no plain run follows"
    ask(page, max_tokens=4)  # the server is free again
    wait_for_end(page)
    assert page.locator("#answer").text_content() != text
    assert page.locator("#status").inner_text().startswith("Done: ")


def test_the_servers_refusal_is_shown(page: Any, seen: Seen) -> None:
    ask(page, temperature=-1)
    expect(page.locator("#error")).to_be_visible()
    assert "temperature" in page.locator("#error").inner_text()
    expect(page.locator("#temperature")).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#temperature")).to_be_focused()
    # what the browser itself says about an answer that is not 2xx
    assert len(seen.complaints) == 1 and "status of 4" in seen.complaints.pop()
    ask(page, temperature=0, max_tokens=4)
    wait_for_end(page)
    assert page.locator("#error").is_hidden() and page.locator("[aria-invalid]").count() == 0


def test_the_key_is_sent_and_not_kept(page: Any) -> None:
    page.locator("#key-box summary").click()
    page.locator("#key").fill("secret")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, max_tokens=2)
    assert sent.value.headers["authorization"] == "Bearer secret"
    assert json.loads(sent.value.post_data)["speculate"] is True
    wait_for_end(page)
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def stream(*events: object) -> str:
    return "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)


def chunk(texts: list[str], accepted: int | None, finish: str | None = None) -> dict[str, Any]:
    """A round of three drafts, or the prompt's pass (accepted None), without confidence; `texts`: its tokens'."""
    count = None if accepted is None else 3
    tokens = [{"id": 9, "text": text, "drafted": index < (accepted or 0)} for index, text in enumerate(texts)]
    one = {"proposed": count, "scheduled": count, "accepted": accepted, "tokens": tokens}
    return {"choices": [{"index": 0, "delta": {"content": "".join(texts)}, "finish_reason": finish, "round": one}]}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (stream(chunk(["a"], None), {"error": {"message": "the <b>target</b> failed"}}), "the <b>target</b> failed"),
        (stream(chunk(["a"], None)), "The stream ended before the answer was complete."),
        (stream("{"), "The server sent something that is not JSON."),
    ],
    ids=["error", "early end", "not JSON"],
)
def test_a_stream_that_fails(page: Any, body: str, error: str) -> None:
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page)
    expect(page.locator("#error")).to_have_text(error)
    expect(page.locator("#run")).to_be_enabled()


def test_no_confidence_head_and_a_model_that_writes_html(page: Any) -> None:
    """No bars rather than zeros; text is text; what the server counts otherwise is said; no time, no speed."""
    usage = {"completion_tokens": 6, "speculation": {"rounds": 3, "proposed": 6, "scheduled": 6, "accepted": 3}}
    body = stream(
        chunk(["<b>"], None),
        chunk(["&lt;", "<img src=x>"], 1),
        chunk(["x", "\n"], 2, "stop"),
        {"choices": [], "usage": usage},
        "[DONE]",
    )
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page)
    wait_for_end(page)
    assert page.locator("#answer").text_content() == "<b>&lt;<img src=x>x\n"
    assert page.locator("#answer :not(span)").count() == 0
    assert page.locator("#no-confidence").is_visible()
    assert page.locator("#strip .well").count() == 0
    slots = [slot.get_attribute("class").split()[1] for slot in page.locator("#strip .slot").all()]
    # the second round has no token of the target's own: the answer ended inside it, so nothing was rejected there
    assert slots == ["accepted", "rejected", "unreached", "own", "accepted", "accepted", "unreached"]
    check = page.locator("#check").inner_text()
    assert "tokens: 5 here, 6 there" in check and "rounds: 2 here, 3 there" in check and "scheduled" not in check
    assert page.locator("#length").inner_text() == "2.50"
    assert not re.search("NaN|Infinity|undefined|null", page.locator("main").inner_text())


@both_looks
def test_a_clock_that_stands_still_gives_no_speed(page: Any) -> None:
    page.clock.install()
    page.clock.pause_at(time.time() + 3600)
    ask(page, max_tokens=3)
    wait_for_end(page)
    assert page.locator("#speed").inner_text() == "–" == page.locator("#ratio").inner_text()
    assert not re.search("NaN|Infinity", page.locator("main").inner_text())
    assert no_overflow(page)


def test_events_split_anywhere(page: Any) -> None:
    """Every split of the bytes in two and in three, and byte by byte, gives the same events."""
    text = (
        '\ufeffdata: {"a": "é卵🥚"}\n\n: a comment\n\nevent: x\r\ndata:one\r\ndata: two\r\n\r\n'
        "data\rdata:  three\r\r\nid: 1\n\ndata: [DONE]\n\ndata: never ended"
    )
    events = ['{"a": "é卵🥚"}', "one\ntwo", "\n three", "[DONE]"]
    differing = page.evaluate(
        """([text, events]) => {
            const bytes = new TextEncoder().encode(text), wanted = JSON.stringify(events), wrong = [];
            const check = (cuts) => {
                const parser = new EventParser(), found = [];
                cuts.reduce((from, to) => (found.push(...parser.push(bytes.slice(from, to))), to), 0);
                if (JSON.stringify(found) !== wanted) wrong.push([cuts.length, found]);
            };
            const places = [...bytes.keys(), bytes.length];
            check(places);
            for (const a of places) for (const b of places) if (a <= b) check([a, b, bytes.length]);
            return wrong;
        }""",
        [text, events],
    )
    assert differing == []
