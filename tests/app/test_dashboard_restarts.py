"""A dashboard that stays open while its server is started again and again."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.fixtures_browser import IN_A_BROWSER, server, until
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

pytestmark = IN_A_BROWSER

# Idle connections to one server that Chromium keeps for later.
KEPT_BY_A_BROWSER = 6


def open_files(url: str) -> int:
    """Of the server, this question's connection among them."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return int(float(next(line for line in lines if line.startswith("process_open_fds ")).split()[1]))


def settles_at(url: str, most: int) -> bool:
    """Whether the server comes down to so many within ten seconds."""
    deadline = time.monotonic() + 10
    while open_files(url) > most:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def back_and_moving(page: Page) -> None:
    until(page, "document.getElementById('connection')?.hidden === true", 10)
    before = page.locator(".state").inner_text()
    until(page, f"document.querySelector('.state')?.innerText !== {before!r}", 10)


@pytest.mark.long
def test_it_comes_back_within_ten_seconds_with_one_stream(page: Page) -> None:
    streams: list[Request] = []
    ended: list[Request] = []
    page.on("request", lambda request: streams.append(request) if "/ops/events" in request.url else None)
    page.on("requestfinished", lambda request: ended.append(request))
    page.on("requestfailed", lambda request: ended.append(request))
    port = 0
    for _ in range(3):
        with server(step_seconds=0.01, port=port) as (url, process):
            if not port:
                port = int(url.rsplit(":", 1)[1])
                page.goto(f"{url}/ops")
            back_and_moving(page)
            assert len([stream for stream in streams if stream not in ended]) == 1
            process.send_signal(signal.SIGTERM)
            page.get_by_text("The server is shutting down").wait_for()
            process.wait(PATIENCE_SECONDS)
    assert len(streams) >= 3


@pytest.mark.long
def test_dashboards_that_are_gone_leave_no_connection(page: Page) -> None:
    with server(step_seconds=0.01) as (url, _):
        alone = open_files(url)
        for _ in range(10):
            page.goto(f"{url}/ops")
            until(page, "document.getElementById('connection')?.hidden === true", 10)
        page.goto("about:blank")
        assert settles_at(url, alone + KEPT_BY_A_BROWSER)
