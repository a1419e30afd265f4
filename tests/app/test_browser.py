"""A real Chromium drives the pages over the whole server with the fake model: dashboard, tuning, login."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.fixtures_browser import IN_A_BROWSER, ask, server, until
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER


@pytest.mark.long
def test_the_dashboard_moves_and_shows_who_sits_where(page: Page, base: str, browser: Browser) -> None:
    chat = browser.new_context().new_page()
    chat.goto(base)
    page.goto(f"{base}/ops")
    connects = page.evaluate(
        "performance.getEntriesByType('resource').filter(e => e.name.endsWith('/ops/events')).length"
    )
    ask(chat, "watch me", 400)
    page.get_by_text("1 running · 0 waiting").wait_for()
    row = page.locator(".requests tbody tr").first
    assert row.locator("td").nth(1).inner_text() == "1"
    short = row.locator(".id").inner_text()
    titles = page.locator(".steps title").all_text_contents()
    assert any(short in title and "seat 1" in title for title in titles)
    before = page.locator(".requests tbody td:nth-child(5)").first.inner_text()
    until(page, f"document.querySelector('.requests tbody td:nth-child(5)').textContent !== '{before}'")
    chat.click("#stop")
    page.get_by_text("Nothing runs and nobody waits.").wait_for()
    assert connects <= 1
    chat.context.close()


@pytest.mark.long
def test_the_dashboard_says_when_it_stands_still_and_comes_back(page: Page) -> None:
    with server(step_seconds=0.01) as (url, process):
        page.goto(f"{url}/ops")
        until(page, "performance.getEntriesByType('resource').length > 3")
        page.wait_for_timeout(1500)
        assert page.locator("#connection").is_hidden()
        process.send_signal(signal.SIGTERM)
        page.get_by_text("The server is shutting down").wait_for()
        process.wait(PATIENCE_SECONDS)
        with server(step_seconds=0.01, port=int(url.rsplit(":", 1)[1])) as (again, _):
            assert again == url
            until(page, "document.getElementById('connection')?.hidden === true", 15)


def test_login_once_then_chat_and_dashboard(page: Page) -> None:
    security = {"admin_token": "letmein", "api_keys": ["me=secret"]}
    with server(settings={"security": security}) as (url, _):
        page.goto(f"{url}/ops")
        assert "/login" in page.url
        page.fill("#token", "wrong")
        page.press("#token", "Enter")
        page.get_by_role("alert").wait_for()
        page.fill("#token", "letmein")
        page.press("#token", "Enter")
        page.wait_for_url(f"{url}/ops")
        page.get_by_role("heading", name="The table").wait_for()
        page.goto(url)
        page.fill("#token", "secret")
        page.press("#token", "Enter")
        page.wait_for_url(f"{url}/")
        ask(page, "hello", 4).locator(".facts").get_by_text("4 tokens", exact=True).wait_for()
        assert page.evaluate("document.cookie") == ""


def test_keys_are_made_copied_and_revoked(page: Page) -> None:
    with server() as (url, _):
        page.goto(f"{url}/admin")
        page.get_by_role("link", name="API keys").click()
        assert "Making the first key closes it" in page.locator("#access").inner_text()
        page.fill("#name", "<b>alice</b>")
        page.fill("#max_concurrent", "4")
        page.click("#make")
        page.get_by_text("shown this once").wait_for()
        secret = page.input_value("#secret")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("#copy")
        page.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == secret
        status = "fetch('/v1/models', {headers: {Authorization: 'Bearer %s'}}).then(a => a.status)"
        assert page.evaluate(status % secret) == 200
        assert page.evaluate(status % "other") == 401
        # Loading the page again neither makes another key nor shows the secret.
        page.reload()
        assert page.locator("#secret").count() == 0
        assert page.locator("#keys li").count() == 1
        item = page.locator("#keys li").first
        assert "<b>alice</b>" in item.inner_text()
        assert re.search("4 at once.*last used", item.inner_text(), re.DOTALL)
        page.fill("#name", "<b>alice</b>")
        page.press("#name", "Enter")
        page.locator("#name-error").get_by_text("There is a key called").wait_for()
        item.locator("summary").click()
        item.get_by_role("button", name="Revoke this key").click()
        page.get_by_text("No key is valid").wait_for()
        assert page.evaluate(status % secret) == 401
        page.locator(".gone summary").click()
        page.get_by_role("button", name="Forget them and open the API").click()
        until(page, "document.querySelector('#access').textContent.includes('No key is needed yet')")
        assert page.evaluate(status % "anything") == 200


def test_keys_are_made_and_revoked_without_javascript(browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    with server() as (url, _):
        page.goto(f"{url}/admin/keys")
        page.fill("#name", "bob")
        page.press("#name", "Enter")
        assert page.input_value("#secret").startswith("sk-relevo-")
        page.locator("#keys summary").click()
        page.get_by_role("button", name="Revoke this key").click()
        assert "nobody can use the API" in page.locator("#access").inner_text()
    context.close()


@pytest.mark.parametrize("path", ["/", "/ops", "/admin", "/admin/keys", "/docs", "/login", "/nowhere"])
def test_nothing_is_wider_than_the_window(browser: Browser, base: str, path: str) -> None:
    page = browser.new_page(viewport={"width": 1920, "height": 800})
    page.goto(base + path)
    for width in (1920, 1440, 768, 390, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("window.innerWidth") == width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_pages_are_right_without_javascript(browser: Browser, base: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(base)
    assert "Chat needs JavaScript" in page.inner_text("main")
    assert not page.locator("#composer").is_visible()
    page.goto(f"{base}/ops")
    assert page.get_by_text("First token p95").is_visible()
    assert page.locator(".steps").is_visible()
    page.goto(f"{base}/admin")
    assert page.locator("#apply").is_enabled()
    context.close()
