"""Text that would run if it were not text, on every page, in a real Chromium that has no other guard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import httpx
import pytest

from tests.app.serving import CHAT, chat_body
from tests.fixtures_browser import IN_A_BROWSER, ask, server, streamed, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER

PICTURE: Final = "<img src=x onerror=window.hacked=1>"
SCRIPT: Final = '"></script><script>window.hacked=1</script>'
HANDLER: Final = "\"' autofocus onfocus='window.hacked=1' x='"
EXPRESSION: Final = "{{7*7}} javascript:window.hacked=1"
TEXTS: Final = (PICTURE, SCRIPT, HANDLER, EXPRESSION)
MODEL: Final = "".join(TEXTS)
PAGES: Final = ("/ops", "/ops/requests", "/ops/requests/1?tokens=1", "/ops/history", "/admin", "/admin/keys", "/docs")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with such names, after a request of each and a change for each such reason; one request goes on."""
    settings = {"server": {"state_dir": str(tmp_path_factory.mktemp("state"))}}
    limits = {"served_model_name": MODEL, "keep_request_texts": True}
    with server(settings=settings, limits=limits) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        for number, text in enumerate(TEXTS):
            assert client.patch("/admin/config", json={"max_num_seqs": 5 + number, "reason": text}).status_code == 200
            made = client.post("/admin/keys", json={"name": text})
            headers = {"Authorization": f"Bearer {made.json()['key']}", "X-Request-Id": text}
            body = chat_body(text, model=MODEL, max_tokens=3)
            assert client.post(CHAT, json=body, headers=headers).status_code == 200
        with client.stream("POST", CHAT, json=body | {"max_tokens": 450, "stream": True}, headers=headers):
            yield url + "#" + made.json()["key"]


@pytest.fixture
def page(browser: Browser, base: str) -> Iterator[Page]:
    """A signed-in page without the Content-Security-Policy, which would stop what got through."""
    context = browser.new_context(bypass_csp=True, extra_http_headers={"Authorization": f"Bearer {base.split('#')[1]}"})
    page = context.new_page()
    page.set_default_timeout(30_000)
    opened: list[str] = []
    page.on("request", lambda request: opened.append(request.url))
    yield page
    hacked = page.evaluate("window.hacked")
    made = page.evaluate("document.querySelectorAll('[src=x], [onfocus], [onerror]').length")
    context.close()
    assert hacked is None
    assert made == 0
    assert all(url.startswith(base.split("#")[0]) and not url.endswith("/x") for url in opened)


def test_the_flag_would_be_seen(browser: Browser, base: str) -> None:
    with browser.new_context(bypass_csp=True) as context:
        page = context.new_page()
        page.goto(base.split("#")[0] + "/login")
        page.evaluate(f"document.body.innerHTML = {PICTURE!r}")
        until(page, "window.hacked === 1")


@pytest.mark.parametrize("path", PAGES)
def test_nothing_runs_on_the_operators_pages(page: Page, base: str, path: str) -> None:
    page.goto(base.split("#")[0] + path)
    assert MODEL in page.locator("#state").inner_text()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390, "however long a name is"
    page.set_viewport_size({"width": 1280, "height": 900})
    if path == "/ops":
        before = page.locator("#state").inner_text()
        until(page, f"document.getElementById('state').innerText !== {before!r}")  # what the stream brought is drawn
        page.locator("#picture").press("ArrowUp")
        assert page.locator("#cell").inner_text().startswith("Seat 1")
    elif path == "/ops/history":
        until(page, "document.querySelectorAll('.uplot canvas').length > 0")
        page.locator(".uplot .u-over").first.hover()
        assert PICTURE in page.locator("#events").inner_text()
    elif path == "/admin":
        page.fill("#tuning-reason", PICTURE)
        page.fill("#max_num_seqs", "4")
        page.click("#try")
        page.locator("#preview li").first.wait_for()


def test_nothing_runs_in_the_chat(page: Page, base: str) -> None:
    page.goto(base.split("#")[0])
    for text in (*TEXTS, f"```{PICTURE}\n{SCRIPT}\n```", f"[a](javascript:window.hacked=1) ![{PICTURE}](x)"):
        page.route("**/v1/chat/completions", streamed({"role": "assistant"}, {"content": text}))
        ask(page, text, 5)
        until(page, "!document.querySelector('.chat').classList.contains('busy')")
        page.unroute("**/v1/chat/completions")
    assert PICTURE in page.locator("#log .user").first.inner_text()
    assert PICTURE in page.locator("#log .assistant").first.inner_text()
    told = {"error": {"message": f"no {PICTURE}", "type": "x", "param": None, "code": "y"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=told))
    ask(page, "x", 5)
    page.get_by_text(f"no {PICTURE}").wait_for()
    page.click("#new")  # the first one is in the list, under its first words
    assert PICTURE in page.locator("#chats").inner_text()
