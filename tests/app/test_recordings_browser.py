"""The page of recordings in a real Chromium: it follows what is recorded, and its buttons do what they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.app.serving import CHAT, chat_body
from tests.fixtures_browser import IN_A_BROWSER, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = IN_A_BROWSER


@pytest.mark.long
def test_a_recording_is_begun_followed_stopped_downloaded_and_deleted(page: Page, base: str) -> None:
    page.goto(f"{base}/admin/recordings")
    assert "Nothing is recorded now" in page.inner_text("#now")
    page.click("#record")
    assert "Recording now" in page.inner_text("#now")
    httpx.post(base + CHAT, json=chat_body(max_tokens=2))
    until(page, "document.getElementById('now').innerText.includes('1 request')")
    page.click("#stop")
    until(page, "document.getElementById('last') !== null")
    assert "ended with 1 request" in page.inner_text("#last")
    with page.expect_download() as started:
        page.click("#kept a")
    assert json.loads(started.value.path().read_text())["output_length"] == 2
    page.click("#kept summary")
    page.click("#kept button")
    assert "There are none." in page.inner_text("section[aria-label=Kept]")
