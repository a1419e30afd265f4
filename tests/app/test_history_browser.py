"""A real Chromium on the history: charts that zoom together, the range picker, and marks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio

from app.journal.journal import open_journal
from tests.app.test_journal import row
from tests.fixtures_browser import IN_A_BROWSER, server, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER

HOSTILE = "<img src=x onerror=document.title='hacked'>"
CHARTS = 10


async def fill(folder: Path) -> None:
    """Two hours before now, of which the second half hour is missing."""
    now = int(time.time())
    async with open_journal(folder) as journal:
        for ago in range(7200, 0, -1):
            if not 3600 < ago < 5400:
                journal.put_row(row(now - ago, output_tokens=ago % 60, waiting=2.0, waiting_max=4.0, ttft_p95=0.3))
            if not ago % 1000:
                await journal.flush()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("state")
    trio.run(fill, folder)
    with server(settings={"server": {"state_dir": str(folder)}}) as (url, _):
        yield url


def span(page: Page) -> float:
    """Seconds between the ends of the charts."""
    shown = page.evaluate("new URL(document.querySelector('#json').href).searchParams.toString()")
    ends = dict(pair.split("=") for pair in shown.split("&"))
    return float(ends["to"]) - float(ends["from"])


def drawn(page: Page, charts: int = CHARTS) -> None:
    until(page, f"document.querySelectorAll('.uplot canvas').length === {charts}")


@pytest.mark.long
def test_a_drag_zooms_all_charts_and_a_double_click_goes_back(page: Page, base: str) -> None:
    page.goto(f"{base}/ops/history?range=7200")
    drawn(page)
    assert span(page) == 7200
    box: Any = page.locator(".u-over").first.bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.25, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, middle, steps=5)
    page.mouse.up()
    until(page, "location.search.startsWith('?from=')")
    until(page, "document.querySelector('#json').href.includes(new URLSearchParams(location.search).get('from'))")
    assert span(page) == pytest.approx(1800, abs=30)
    labels = page.locator(".uplot").evaluate_all("charts => charts.map(chart => chart.getAttribute('role'))")
    assert labels == ["img"] * CHARTS
    # The cursor over one chart is over all of them, at the same time.
    page.mouse.move(box["x"] + box["width"] * 0.5, middle)
    times = page.locator(".u-legend").evaluate_all("all => all.map(one => one.querySelector('.u-value').textContent)")
    assert len(times) == CHARTS
    assert len(set(times)) == 1
    page.reload()
    drawn(page)
    assert span(page) == pytest.approx(1800, abs=30)
    page.get_by_role("button", name="Wider").click()
    until(page, "location.search.includes('to=')")
    page.wait_for_timeout(300)
    assert span(page) == pytest.approx(3600, abs=60)
    page.locator(".u-over").first.dblclick()
    page.wait_for_timeout(500)
    assert span(page) == pytest.approx(1800, abs=60)


def test_the_picker_sets_the_range(page: Page, base: str) -> None:
    page.goto(f"{base}/ops/history")
    drawn(page)
    for name, seconds in (("15 min", 900), ("week", 604_800)):
        page.get_by_role("link", name=name, exact=True).click()
        until(page, f"document.querySelector('[data-range=\"{seconds}\"]').getAttribute('aria-current') === 'true'")
        assert span(page) == seconds
        assert page.url.endswith(f"range={seconds}")
    csv = page.evaluate("fetch(document.querySelector('#csv').href).then(a => a.text())")
    assert csv.startswith("time,requests_per_second")
    assert csv.count("\n") > 60


def test_a_change_is_marked_listed_and_text(page: Page, base: str) -> None:
    body = json.dumps({"max_num_seqs": 7, "reason": HOSTILE})
    page.goto(f"{base}/ops/history?range=900")
    drawn(page)
    page.evaluate(
        "body => fetch('/admin/config', {method: 'PATCH', headers: {'Content-Type': 'application/json'}, body})", body
    )
    page.reload()
    drawn(page)
    page.locator("#events").get_by_text(HOSTILE).wait_for()
    page.goto(f"{base}/ops")
    page.locator(".event.config title").first.wait_for(state="attached")
    assert HOSTILE in page.locator("[sse-swap=events]").inner_text()
    for path in ("/ops", "/ops/history", "/admin"):
        page.goto(base + path)
        assert page.locator("img").count() == 0
    assert "hacked" not in page.title()


def test_it_fits_every_window_and_is_right_without_javascript(browser: Browser, base: str) -> None:
    wide = browser.new_page(viewport={"width": 1920, "height": 800})
    wide.goto(f"{base}/ops/history?range=7200")
    drawn(wide)
    for width in (1920, 1440, 768, 390, 360):
        wide.set_viewport_size({"width": width, "height": 800})
        wide.wait_for_timeout(100)
        assert wide.evaluate("document.documentElement.scrollWidth") <= width, width
    wide.close()
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(f"{base}/ops/history?range=7200")
    assert plain.get_by_text("Output tokens/s").first.is_visible()
    assert plain.get_by_text("nothing was measured").first.is_visible()
    plain.get_by_role("link", name="6 h", exact=True).click()
    assert plain.url.endswith("range=21600")
    context.close()
