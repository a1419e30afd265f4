"""A real Chromium drives the pages over the whole server with the fake model: chat, dashboard, tuning, login."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import playwright.sync_api as playwright_api
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    f"--{flag}"
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync",
    )
]  # fmt: skip

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None and os.environ.get("REQUIRE_BROWSER") != "1",
        reason="there is no Chromium on this machine (REQUIRE_BROWSER=1 makes that a failure)",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.fail("REQUIRE_BROWSER=1, and there is no Chromium on this machine")
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@contextmanager
def server(**options: Any) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process of a server of one's own."""
    options = {"step_seconds": 0.02, **options}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve_fake", json.dumps(options)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        wait_for_port(int(url.rsplit(":", 1)[1]))
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 15
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def until(page: Page, condition: str, seconds: float = 10) -> None:
    """Wait for a JavaScript condition. Playwright's own waiting needs `eval`, which the pages forbid."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if page.evaluate(condition):
                return
        except playwright_api.Error:
            pass  # the page is just being loaded anew
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with server() as (url, _):
        yield url


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; a script error or a broken Content-Security-Policy fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(10_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Security" in message.text else None)
    yield page
    context.close()
    assert not faults


def ask(page: Page, text: str, max_tokens: int) -> Any:
    """Send a message; gives the last answer's element."""
    page.fill("#max-tokens", str(max_tokens))
    page.fill("#message", text)
    page.press("#message", "Enter")
    return page.locator("#log .assistant").last


def test_chat_streams_an_answer_and_counts_it(page: Page, base: str) -> None:
    page.goto(base)
    answer = ask(page, "hello", 30)
    answer.locator(".facts").get_by_text("30 tokens", exact=True).wait_for()
    assert len(answer.locator(".text").inner_text().strip()) > 20
    facts = answer.locator(".facts").inner_text()
    assert "to first token" in facts
    assert re.search(r"[\d.]+ tokens/s", facts)
    assert "cut at the longest answer" in facts
    assert page.locator("#send").is_visible()
    # The second turn carries the first: its prompt is longer than both messages alone.
    prompt = int(re.search(r"(\d+) prompt tokens", facts)[1])  # type: ignore[index]
    second = ask(page, "and again", 5)
    second.locator(".facts").get_by_text("5 tokens", exact=True).wait_for()
    assert int(re.search(r"(\d+) prompt tokens", second.locator(".facts").inner_text())[1]) > prompt + 30  # type: ignore[index]
    page.click("#new")
    assert page.locator("#log li").count() == 0
    assert page.evaluate("document.activeElement.id") == "message"


def test_an_answer_is_seen_while_it_is_written_and_stops_at_once(page: Page, base: str) -> None:
    page.goto(base)
    answer = ask(page, "a long one", 400)
    until(page, "document.querySelector('#log .assistant .text').textContent.length > 5")
    assert "writing" in (answer.get_attribute("class") or "")
    assert answer.get_attribute("aria-busy") == "true"
    page.click("#stop")
    answer.locator(".facts").get_by_text("stopped after").wait_for()
    facts = answer.locator(".facts").inner_text()
    assert re.search(r"about [\d.]+ tokens/s", facts)
    assert 5 < int(re.search(r"about (\d+) tokens\b(?!/)", facts)[1]) < 400  # type: ignore[index]
    until(page, "fetch('/ops/stats.json').then(a => a.json()).then(s => s.requests.running === 0)")
    written = answer.locator(".text").inner_text()
    page.wait_for_timeout(200)
    assert answer.locator(".text").inner_text() == written
    # A new chat in the midst of an answer begins with nothing of the old one.
    ask(page, "a third", 400)
    until(page, "document.querySelectorAll('#log .assistant .text')[1].textContent.length > 5")
    page.click("#new")
    fresh = ask(page, "hi", 2).locator(".facts")
    fresh.get_by_text("2 tokens", exact=True).wait_for()
    assert "4 prompt tokens" in fresh.inner_text()
    # Escape stops from the keyboard.
    second = ask(page, "another", 400)
    until(page, "document.querySelectorAll('#log .assistant .text')[1].textContent.length > 5")
    page.keyboard.press("Escape")
    second.locator(".facts").get_by_text("stopped after").wait_for()


def test_hostile_text_stays_text(page: Page, base: str) -> None:
    page.goto(base)
    hostile = "<img src=x onerror=document.title='hacked'>"
    ask(page, hostile, 3).locator(".facts").get_by_text("3 tokens", exact=True).wait_for()
    assert page.locator("#log img").count() == 0
    assert page.locator("#log .user .text").inner_text() == hostile
    assert "hacked" not in page.title()


def test_errors_are_told_in_words(page: Page, base: str) -> None:
    page.goto(base)
    answer = ask(page, "x" * 600, 5)
    failure = answer.locator(".failure")
    failure.wait_for()
    assert "longer than the model can read" in failure.inner_text()

    def refuse(code: str, status: int, headers: dict[str, str]) -> None:
        error = {"error": {"code": code, "message": "no", "depth": 256, "limit": 256}}
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(
                status=status, headers=headers, content_type="application/json", body=json.dumps(error)
            ),
        )

    refuse("queue_full", 503, {"Retry-After": "12"})
    failure = ask(page, "hello", 5).locator(".failure")
    failure.wait_for()
    assert "The server is full: 256 wait already" in failure.inner_text()
    assert "about 12 s" in failure.inner_text()
    page.unroute("**/v1/chat/completions")
    refuse("draining", 503, {})
    failure.get_by_role("button").click()
    page.get_by_text("shutting down and takes nothing new").wait_for()
    page.unroute("**/v1/chat/completions")
    # A stream that ends without its end mark is not taken for a whole answer.
    chunk = json.dumps({"choices": [{"delta": {"content": "half an ans"}, "finish_reason": None}]})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {chunk}\n\n"),
    )
    failure = ask(page, "hello", 5).locator(".failure")
    failure.wait_for()
    assert "interrupted" in failure.inner_text()
    page.unroute("**/v1/chat/completions")
    # Asking again after all of that works: what was not answered was not kept.
    failure.get_by_role("button").click()
    page.locator("#log .assistant").last.locator(".facts").get_by_text("5 tokens", exact=True).wait_for()


def test_thinking_is_shown_apart_and_folded_away(page: Page, base: str) -> None:
    page.goto(base)
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "<b>Hm"}, {"reasoning_content": ", so."}]

    def answer(*more: dict[str, str]) -> Any:
        chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in (*deltas, *more)]
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return lambda route: route.fulfill(content_type="text/event-stream", body=events + "data: [DONE]\n\n")

    page.route("**/v1/chat/completions", answer())
    shown = ask(page, "hello", 5)
    shown.locator(".note").wait_for()
    assert shown.locator(".thought").inner_text() == "<b>Hm, so."  # open: there is nothing else to see
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", answer({"content": "Yes."}))
    shown = ask(page, "hello", 5)
    shown.get_by_text("Yes.").wait_for()
    assert not shown.locator(".thought").is_visible()
    shown.get_by_text("Thinking").click()
    assert shown.locator(".thought").is_visible()
    assert shown.locator(".text").inner_text() == "Yes."
    page.unroute("**/v1/chat/completions")


def test_fenced_code_is_a_block_and_stays_text(page: Page, base: str) -> None:
    page.goto(base)
    code = "<b>x</b> = `1`\n\n    ```\n"
    answer = f"Look:\n```python\n{code}```\nand\n\n~~~~\n```\n~~~\n~~~~\n`a` ```b``` end\n```js\nnot yet"
    chunks: list[Any] = [{"choices": [{"delta": {"content": piece}, "finish_reason": None}]} for piece in answer]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=events))
    asked = "```\n<i>mine</i>\n```"
    shown = ask(page, asked, 5).locator(".text")
    until(page, "document.querySelector('#log .assistant .text').textContent.endsWith('not yet')")
    assert shown.locator("pre code").all_text_contents() == [code.removesuffix("\n"), "```\n~~~", "not yet"]
    languages = shown.locator("pre").evaluate_all("blocks => blocks.map(block => block.dataset.language)")
    assert languages == ["python", "", "js"]
    blocks = shown.evaluate("e => [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data).filter(Boolean)")
    assert blocks == ["Look:", "and", "`a` ```b``` end"]
    assert page.locator("#log .user pre code").text_content() == "<i>mine</i>"
    assert page.locator("#log :is(b, i)").count() == 0
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.unroute("**/v1/chat/completions")


def test_the_chat_page_counts_its_own_answer(page: Page, base: str) -> None:
    page.goto(base)
    assert "0 requests running" in page.locator("#state").inner_text()
    ask(page, "a long one", 400)
    until(page, "document.querySelector('#state').textContent.includes('1 request running')", 6)
    page.click("#stop")
    until(page, "document.querySelector('#state').textContent.includes('0 requests running')", 6)


def test_settings_are_kept(page: Page, base: str) -> None:
    page.goto(base)
    page.fill("#system", "Be brief.")
    page.fill("#max-tokens", "7")
    page.reload()
    assert page.input_value("#system") == "Be brief."
    assert page.input_value("#max-tokens") == "7"


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


def test_the_dashboard_says_when_it_stands_still_and_comes_back(page: Page) -> None:
    with server(step_seconds=0.01) as (url, process):
        page.goto(f"{url}/ops")
        until(page, "performance.getEntriesByType('resource').length > 3")
        page.wait_for_timeout(1500)
        assert page.locator("#connection").is_hidden()
        process.send_signal(signal.SIGTERM)
        page.get_by_text("The server is shutting down").wait_for()
        process.wait(15)
        with server(step_seconds=0.01, port=int(url.rsplit(":", 1)[1])) as (again, _):
            assert again == url
            until(page, "document.getElementById('connection')?.hidden === true", 15)


def test_seats_are_changed_told_and_reverted(page: Page) -> None:
    with server() as (url, _):
        page.goto(f"{url}/admin")
        page.fill("#max_num_seqs", "9")
        page.fill("#reason", "for <b>the</b> test")
        page.click("#apply")
        page.get_by_text("Generation 1 holds.").wait_for()
        until(page, "document.querySelector('#live [data-value=max_num_seqs]').textContent === '9'")
        page.get_by_text("“for <b>the</b> test”").wait_for()
        # Out of range: the server's words stand at the field and nothing was changed.
        page.fill("#max_num_seqs", "1000")
        page.press("#max_num_seqs", "Enter")
        page.locator("#max_num_seqs-error").get_by_text("from 1 to 16").wait_for()
        assert page.evaluate("document.activeElement.id") == "max_num_seqs"
        assert page.evaluate("fetch('/admin/config').then(a => a.json())")["effective"]["max_num_seqs"] == 9
        page.fill("#max_num_seqs", "")
        page.click("#apply")
        page.locator("#max_num_seqs-error").get_by_text("A whole number from 1 to 16").wait_for()
        page.click("button[type=reset]")
        assert page.input_value("#max_num_seqs") == "9"
        page.click("#revert-0")
        page.get_by_text("Generation 2 holds.").wait_for()
        page.get_by_text("“back to generation 0”").wait_for()
        assert page.input_value("#max_num_seqs") == "4"
        # A change made elsewhere shows up by itself.
        page.evaluate("fetch('/admin/config', {method: 'PATCH', headers: {'Content-Type': 'application/json'},"
                      " body: '{\"max_num_batched_tokens\": 77, \"ttl_seconds\": 600}'})")  # fmt: skip
        until(page, "document.querySelector('#max_num_batched_tokens').value === '77'")
        page.get_by_text("goes back by itself").wait_for()


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
        page.get_by_text("The table").wait_for()
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
    assert "PATCH /admin/config" in page.inner_text("main")
    assert page.locator("#apply").is_disabled()
    context.close()
