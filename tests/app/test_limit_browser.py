"""A real Chromium on `/ops/limit`: begun, seen growing, stopped by keyboard, compared; and without a script."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.app.limit_lines import whole_script, wish, write_script
from tests.app.test_accessibility import SCHEMES, faults
from tests.fixtures_browser import IN_A_BROWSER, server, until
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER

HOSTILE = "<img src=x onerror=document.title='hacked'>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("limit")


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    command = write_script(folder / "script.jsonl", [])
    with server(limit_command=command) as (url, _):
        yield url


def wait_for_the_end(base: str) -> str:
    """Of the last search; gives its name."""
    until_then = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until_then:
        told = httpx.get(f"{base}/ops/limit.json", timeout=PATIENCE_SECONDS).json()["search"]
        if told["end"]:
            return str(told["id"])
        time.sleep(0.05)
    raise AssertionError("it does not end")


@pytest.mark.long
def test_a_search_is_begun_seen_growing_and_stopped_with_the_keyboard(page: Page, base: str, folder: Path) -> None:
    script = whole_script(think_time=20.0)
    script.insert(7, {"wait": str(folder / "go")})
    script.insert(-1, {"wait": str(folder / "never")})
    write_script(folder / "script.jsonl", script)
    page.goto(f"{base}/ops/limit")
    page.fill("#note", HOSTILE)
    page.focus("#note")
    page.keyboard.press("Enter")
    page.get_by_text("5.20 requests/s: 37 of 400").wait_for()
    until(page, "document.querySelectorAll('.curve .spot').length === 6")
    assert page.locator(".curve .trying").count() == 3
    assert page.locator("#workload").is_disabled()
    (folder / "go").touch()
    until(page, "document.querySelectorAll('.curve .spot').length === 21")
    assert page.locator("table.runs .no .verdict").first.inner_text() == "no: first tokens come too late"
    page.get_by_role("button", name="Stop").focus()
    page.wait_for_timeout(1200)  # what moves each second leaves the focus where it is
    page.keyboard.press("Enter")
    page.get_by_text("It was stopped.").wait_for()
    assert page.locator(".kept li").count() == 1
    assert page.locator("#workload").is_enabled()
    assert page.locator("img").count() == 0
    assert "hacked" not in page.title()


def test_what_is_typed_stays_while_the_page_moves(page: Page, base: str) -> None:
    page.goto(f"{base}/ops/limit")
    page.fill("#think_time", "12")
    before = page.locator("[sse-swap=clock]").inner_text()
    until(page, f"document.querySelector('[sse-swap=clock]').textContent !== '{before}'")
    assert page.input_value("#think_time") == "12"


def test_two_searches_are_compared_and_one_is_forgotten(page: Page, base: str, folder: Path) -> None:
    write_script(folder / "script.jsonl", whole_script())
    for note in ("before", "after"):
        assert httpx.post(f"{base}/ops/limit", json=wish(note=note)).status_code == 202
        page.goto(f"{base}/ops/limit")
        page.locator(".kept li").filter(has_text=note).wait_for()
    page.get_by_role("button", name="Compare two").click()
    page.get_by_text("That is the same").wait_for()
    assert page.locator(".spot.older").count() == 21
    page.goto(f"{base}/ops/limit")
    number = page.locator(".kept li").count()
    page.locator(".kept a").first.click()
    page.get_by_role("button", name="Forget this search").click()
    until(page, f"document.querySelectorAll('.kept li').length === {number - 1}")


@pytest.mark.long
def test_it_fits_every_window_and_is_right_without_javascript(browser: Browser, base: str, folder: Path) -> None:
    write_script(folder / "script.jsonl", whole_script(think_time=20.0, price_per_hour=2.0))
    asked = wish(think_time=20.0, price_per_hour=2.0, note="long" * 40)
    assert httpx.post(f"{base}/ops/limit", json=asked).status_code == 202
    found = wait_for_the_end(base)
    wide = browser.new_page(viewport={"width": 1920, "height": 800})
    for path in ("/ops/limit", f"/ops/limit/{found}"):
        wide.goto(base + path)
        for width in (1920, 1440, 1000, 768, 390, 360):
            wide.set_viewport_size({"width": width, "height": 800})
            wide.wait_for_timeout(100)
            assert wide.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
    wide.close()
    context = browser.new_context(java_script_enabled=False)
    plain = context.new_page()
    plain.goto(f"{base}/ops/limit")
    assert plain.get_by_text("5.80 requests/s").first.is_visible()
    assert plain.locator(".curve .spot").count() == 21
    plain.get_by_role("button", name="Look for the limit").click()
    assert plain.url == f"{base}/ops/limit"
    context.close()
    wait_for_the_end(base)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_no_serious_fault_while_one_runs_and_afterwards(
    browser: Browser, base: str, folder: Path, scheme: str
) -> None:
    go = folder / f"go-{scheme}"
    script = whole_script(think_time=20.0)
    script.insert(-2, {"wait": str(go)})
    write_script(folder / "script.jsonl", script)
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"{base}/ops/limit")
    assert httpx.post(f"{base}/ops/limit", json=wish(think_time=20.0)).status_code == 202
    until(page, "document.querySelectorAll('.curve .spot').length > 12")
    assert not faults(page)
    go.touch()
    page.get_by_text("Operating limit", exact=True).wait_for()
    assert not faults(page)
    page.locator(".kept a").first.click()
    page.get_by_text("Operating limit", exact=True).wait_for()
    assert not faults(page)
    context.close()
