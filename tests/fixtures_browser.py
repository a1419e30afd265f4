"""A real Chromium over the whole server with the fake model, and what its tests share.

Playwright and the server are imported where they are used: only tests with a browser wait for them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parents[1]
FLAGS = [
    f"--{flag}"
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync",
    )
]  # fmt: skip

# Servers are forked from a process that has imported what they need: that takes each of them a second otherwise.
APART = multiprocessing.get_context("forkserver")
APART.set_forkserver_preload(["tests.serve_fake"])

IN_A_BROWSER = [
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
    from playwright import sync_api as playwright_api

    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Served:
    """The process of a server, with what is wanted of `subprocess.Popen`."""

    def __init__(self, options: dict[str, Any]) -> None:
        from tests.serve_fake import serve_apart

        reader, writer = APART.Pipe(duplex=False)
        self._process = APART.Process(target=serve_apart, args=(options, writer), daemon=True)
        self._process.start()
        writer.close()
        with reader:
            self.url: str = reader.recv()

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            assert self._process.pid is not None
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, seconds: float | None = None) -> int:
        """Its exit code."""
        self._process.join(seconds)
        code = self._process.exitcode
        if code is None:
            raise TimeoutError(f"the server goes on after {seconds} s")
        return code


@contextmanager
def server(**options: Any) -> Iterator[tuple[str, Served]]:
    """The address and the process of a server of one's own."""
    process = Served({"step_seconds": 0.02, **options})
    try:
        wait_for_port(int(process.url.rsplit(":", 1)[1]))
        yield process.url, process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE_SECONDS)
        except TimeoutError:
            process.kill()
            process.wait()


def wait_for_port(port: int, seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def until(page: Page, condition: str, seconds: float = PATIENCE_SECONDS) -> None:
    """Wait for a JavaScript condition. Playwright's own waiting needs `eval`, which the pages forbid."""
    from playwright import sync_api as playwright_api

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
    page.set_default_timeout(1000 * PATIENCE_SECONDS)
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


def streamed(
    *deltas: dict[str, Any], end: str | None = "stop", usage: dict[str, Any] | None = None
) -> Callable[[Any], Any]:
    """A route's answer: a chat of these pieces; with `end` a whole one."""
    chunks: list[Any] = [{"id": "x", "choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    if end is not None:
        chunks.append({"id": "x", "choices": [{"delta": {}, "finish_reason": end}]})
    if usage is not None:
        chunks.append({"id": "x", "choices": [], "usage": usage})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + ("data: [DONE]\n\n" if end else "")
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)
