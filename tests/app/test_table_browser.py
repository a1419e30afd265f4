"""A real Chromium on the table and the requests: pointing, keys, standing still, earlier steps, aborts, timelines."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures_browser import IN_A_BROWSER, server, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER

NEWEST = "+document.querySelector('.plot.table').dataset.last"
CELL = "document.getElementById('cell').textContent"


def complete(url: str, prompt: str, max_tokens: int) -> None:
    """Ask and read to the end."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with contextlib.suppress(urllib.error.HTTPError):  # where it is aborted
        urllib.request.urlopen(request, timeout=60).read()


def finished(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/ops/requests.json", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["finished"]
    return found


@contextlib.contextmanager
def asking(url: str, prompt: str = "a long one", max_tokens: int = 450) -> Iterator[None]:
    """A request that goes on meanwhile."""
    thread = threading.Thread(target=complete, args=(url, prompt, max_tokens), daemon=True)
    thread.start()
    yield
    thread.join(60)


@pytest.fixture(scope="module")
def busy() -> Iterator[str]:
    """A server whose log has 450 steps of two seats, and rests."""
    with server(step_seconds=0.001, limits={"max_num_seqs": 2}) as (url, _):
        long_one = threading.Thread(target=complete, args=(url, "x" * 100, 450))
        long_one.start()
        names = iter("abcdefghijklmnopqrstuvw")
        while long_one.is_alive():
            complete(url, next(names) * 8, 30)
        yield url


def cell_box(page: Page) -> dict[str, float]:
    """Of the seats' part of the picture, in pixels of the window."""
    page.locator("#picture").scroll_into_view_if_needed()
    found: dict[str, float] = page.evaluate(
        "(() => { const b = document.querySelector('.steps').getBoundingClientRect();"
        " return {x: b.x, y: b.y, width: b.width, pitch: +document.querySelector('.plot.table').dataset.pitch} })()"
    )
    return found


@pytest.mark.long
def test_pointing_tells_what_a_cell_is(page: Page, busy: str) -> None:
    page.goto(f"{busy}/ops")
    until(page, f"{NEWEST} > 400")
    box = cell_box(page)
    table = json.loads(page.locator(".plot.table").get_attribute("data-cells") or "")
    (seat, first, last, phase, tokens, name) = next(run for run in table["runs"] if run[3:5] == [0, 8])
    assert (table["phases"][phase], first, tokens) == ("prefill", last, 8)
    page.mouse.move(box["x"] + box["width"] * (first + 0.5) / 120, box["y"] + box["pitch"] * (seat + 0.5))
    words = page.locator("#cell").inner_text()
    step = table["first"] + first - table["offset"]
    computed = sum([run[4] for run in table["runs"] if run[1] <= first <= run[2]])
    told = f"step {step} computed {computed} of 64 tokens"
    assert words == f"Seat {seat + 1}: {table['names'][name]} reads its prompt, 8 tokens · {told}"
    assert page.locator(".cursor").count() == 1
    # The next cell is another step; below the seats it is the step alone.
    page.mouse.move(box["x"] + box["width"] * (first + 1.5) / 120, box["y"] + box["pitch"] * (seat + 0.5))
    assert "decodes, 1 token · step" in page.locator("#cell").inner_text()
    page.mouse.move(box["x"] + box["width"] * (first + 0.5) / 120, box["y"] + box["pitch"] * 2 + 30)
    assert page.locator("#cell").inner_text() == told
    # Where the mouse leaves, what it told last stays, and leads to the timeline.
    page.mouse.move(box["x"] + box["width"] * (first + 0.5) / 120, box["y"] + box["pitch"] * (seat + 0.5))
    page.locator("#cell-request").click()
    page.wait_for_url(re.compile("/ops/requests/[0-9]+$"))
    assert page.locator(".who").inner_text() == table["names"][name]


def test_the_arrow_keys_go_from_cell_to_cell_and_back_in_time(page: Page, busy: str) -> None:
    page.goto(f"{busy}/ops")
    until(page, f"{NEWEST} > 400")
    newest = page.evaluate(NEWEST)
    page.focus("#picture")
    page.keyboard.press("ArrowLeft")
    assert "Seat 1: " in page.locator("#cell").inner_text()
    assert f"step {newest} computed" in page.locator("#cell").inner_text()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    assert "Seat 2: " in page.locator("#cell").inner_text()
    assert f"step {newest - 1} computed" in page.locator("#cell").inner_text()
    page.keyboard.press("Home")
    assert f"step {newest - 119} computed" in page.locator("#cell").inner_text()
    # One further is out of sight: that part of the past is fetched, the focus stays, the picture stands still.
    page.keyboard.press("ArrowLeft")
    until(page, f"{NEWEST} === {newest - 1}")
    until(page, f"{CELL}.includes('step {newest - 120} computed')")
    assert page.evaluate("document.activeElement.id") == "picture"
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    page.keyboard.press("PageUp")
    until(page, f"{NEWEST} === {newest - 121}")
    page.keyboard.press("Escape")
    assert page.locator(".cursor").count() == 0
    page.keyboard.press(" ")
    until(page, f"{NEWEST} === {newest}")
    page.keyboard.press("ArrowLeft")
    if page.locator("#cell-request").is_hidden():  # it was the other seat that computed last
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile("/ops/requests/[0-9]+$"))


def test_the_slider_and_the_buttons_go_through_the_past(page: Page, busy: str) -> None:
    page.goto(f"{busy}/ops")
    until(page, f"{NEWEST} > 400")
    newest = page.evaluate(NEWEST)
    assert page.locator("#later").is_disabled()
    page.click("#earlier")
    until(page, f"{NEWEST} === {newest - 60}")
    assert page.locator(".note").get_by_text(f"steps {newest - 179} to {newest - 60}").is_visible()
    page.evaluate("(() => { const s = document.getElementById('at-step'); s.value = s.min;"
                  " s.dispatchEvent(new Event('input')); })()")  # fmt: skip
    until(page, f"{NEWEST} === 120")
    assert page.locator("#earlier").is_disabled()
    page.click("#later")
    until(page, f"{NEWEST} === 180")
    # Requests that are out of sight have the colours they had.
    assert page.locator(".steps rect.c-none").count() == 0


@pytest.mark.long
def test_standing_still_is_for_the_picture_alone(page: Page) -> None:
    with server(step_seconds=0.02) as (url, _), asking(url, max_tokens=400):
        page.goto(f"{url}/ops")
        until(page, f"{NEWEST} > 10")
        page.click("#pause")
        held = page.evaluate(NEWEST)
        out = page.locator(".requests.open tbody td:nth-child(5)").first.inner_text()
        until(page, f"document.querySelector('.requests.open tbody td:nth-child(5)')?.textContent !== '{out}'")
        assert page.evaluate(NEWEST) == held
        assert page.locator("#pause").inner_text() == "Go on"
        page.click("#pause")
        until(page, f"{NEWEST} > {held}")
        # The cursor stays on its step while the picture moves on, and the focus where it was.
        page.focus("#picture")
        page.keyboard.press("ArrowLeft")
        told, at = (
            page.locator("#cell").inner_text(),
            page.evaluate("+document.querySelector('.cursor').x.baseVal.value"),
        )
        until(page, f"+document.querySelector('.cursor')?.x.baseVal.value < {at}")
        assert page.locator("#cell").inner_text() == told
        assert page.evaluate("document.activeElement.id") == "picture"


@pytest.mark.long
def test_a_request_is_aborted_after_a_question(page: Page) -> None:
    with server(step_seconds=0.02) as (url, _), asking(url):
        page.goto(f"{url}/ops")
        row = page.locator(".requests.open tbody tr").first
        row.wait_for()
        asked: list[str] = []
        answers = iter((False, True))

        def answer(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.accept() if next(answers) else dialog.dismiss()

        page.on("dialog", answer)
        page.locator(".requests.open button").first.click()
        page.wait_for_timeout(1200)
        assert row.is_visible()
        page.locator(".requests.open button").first.click()
        page.get_by_text("Nothing runs and nobody waits.").wait_for()
        assert page.url == f"{url}/ops"
        assert len(asked) == 2
        assert re.search("Abort the request cmpl-", asked[0])
        page.locator(".requests.gone tbody tr").get_by_text("aborted, by an operator").wait_for()
        # Its line opens to its timeline.
        page.locator(".requests.gone a.id").first.click()
        page.get_by_role("heading", name="Aborted").wait_for()
        assert page.locator(".strip rect.c8").count() == 2
        assert page.locator(".spans tbody tr").count() == 3


@pytest.mark.long
def test_a_timeline_goes_on_until_its_request_ends(page: Page) -> None:
    with server(step_seconds=0.02) as (url, _), asking(url, max_tokens=250):
        page.goto(f"{url}/ops")
        page.locator(".requests.open a.id").first.click()
        page.get_by_role("heading", name="Running on seat 1").wait_for()
        page.get_by_role("heading", name="Cut at its limit").wait_for(timeout=30_000)
        assert page.locator("#life").get_attribute("hx-get") is None
        assert "250 tokens" in page.locator(".facts-list").inner_text()
        # From a step of its life to the table of that time.
        page.locator(".spans a").last.click()
        page.wait_for_url(re.compile(r"/ops\?to="))
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"


def test_steps_that_could_not_be_fetched_are_when_they_are_asked_for_again(page: Page, busy: str) -> None:
    page.goto(f"{busy}/ops")
    until(page, f"{NEWEST} > 400")
    page.route("**/ops/table?*", lambda route: route.abort())
    with page.expect_event("requestfailed"):
        page.click("#earlier")
    page.unroute("**/ops/table?*")
    page.click("#earlier")
    until(page, "document.querySelector('.plot.table[data-past]') !== null")


def test_all_of_it_works_without_javascript(browser: Browser, busy: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{busy}/ops")
    page.get_by_role("link", name="Earlier steps").click()
    assert re.search(r"\?to=\d+#table$", page.url)
    assert page.locator(".plot.table[data-past]").count() == 1
    assert not page.locator("#reading").is_visible()
    page.get_by_role("link", name="Requests", exact=True).click()
    last = finished(busy)[0]["request_id"]
    page.fill("#id", last)
    page.get_by_role("button", name="Find").click()
    assert page.locator(".who").inner_text() == last
    context.close()
    with server(step_seconds=0.02) as (url, _), asking(url):
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(f"{url}/ops/requests")
        while not page.locator(".requests.open button").count():
            page.reload()
        page.locator(".requests.open button").first.click()
        assert re.search(r"/ops/requests/1$", page.url)
        page.wait_for_timeout(300)
        page.reload()
        assert page.get_by_role("heading", name="Aborted").is_visible()
        context.close()


@pytest.mark.parametrize("seats", [4, 256])
def test_the_table_is_no_wider_than_its_window(browser: Browser, seats: int) -> None:
    limits = {"max_num_seqs": seats, "max_num_batched_tokens": 600, "capacity_num_seqs": 256,
              "capacity_num_batched_tokens": 600}  # fmt: skip
    with server(step_seconds=0.01, limits=limits, num_blocks=4096) as (url, _):
        complete(url, "x" * 30, 40)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        for path in ("/ops", "/ops/requests", "/ops/requests/1"):
            page.goto(url + path)
            for width in (1440, 390):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        page.close()
