"""The chat page in a real Chromium: each control, every error in words, and text that stays text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures_browser import IN_A_BROWSER, ask, server, streamed, until

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, Locator, Page

pytestmark = IN_A_BROWSER

CHAT = "**/v1/chat/completions"
NAME_OF_FOCUS = (
    "(() => { const e = document.activeElement;"
    " return e.id || e.getAttribute('aria-label') || e.textContent.trim(); })()"
)
HOSTILE = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"


def told(answer: Locator, fact: str) -> str:
    """Wait for a fact below an answer; gives all of them."""
    answer.locator(".facts").get_by_text(fact, exact=True).wait_for()
    return answer.locator(".facts").inner_text()


def show(page: Page, text: str, **more: Any) -> Locator:
    """An answer of this text."""
    page.unroute(CHAT)
    page.route(CHAT, streamed(*[{"content": piece} for piece in re.findall(r"(?s).{1,7}", text)], **more))
    answer = ask(page, "say it", 5)
    until(page, "!document.querySelector('.chat').classList.contains('busy')")
    return answer.locator(".text")


def asked(page: Page) -> list[dict[str, Any]]:
    """The bodies of what the page asks from now on, which the server does not get."""
    bodies: list[dict[str, Any]] = []

    def answer(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        streamed({"content": f"answer {len(bodies)}"})(route)

    page.unroute(CHAT)
    page.route(CHAT, answer)
    return bodies


def refuse(page: Page, status: int, code: str, message: str = "no", *, wait: int | None = None, **more: Any) -> None:
    error = {"error": {"code": code, "message": message, **more}}
    headers = {} if wait is None else {"Retry-After": str(wait)}
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.fulfill(
        status=status, headers=headers, content_type="application/json", body=json.dumps(error)
    ))  # fmt: skip


# ---- one answer -----------------------------------------------------------------------------------------------------


def test_an_answer_streams_and_is_counted(page: Page, base: str) -> None:
    page.goto(base)
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    answer = ask(page, "hello", 30)
    facts = told(answer, "30 tokens")
    assert len(answer.locator(".text").inner_text().strip()) > 20
    assert "to first token" in facts
    assert re.search(r"[\d.]+ tokens/s", facts)
    assert "cut at its limit" in facts
    assert page.locator("#send").is_visible()
    # The second turn carries the first: its prompt is longer than both messages alone.
    prompt = int(re.search(r"(\d+) prompt tokens", facts)[1])  # type: ignore[index]
    facts = told(ask(page, "and again", 5), "5 tokens")
    assert int(re.search(r"(\d+) prompt tokens", facts)[1]) > prompt + 30  # type: ignore[index]
    page.click("#new")
    assert page.locator("#log li").count() == 0
    assert page.evaluate("document.activeElement.id") == "message"


def test_an_answer_is_seen_while_it_is_written_and_stops_at_once(page: Page, base: str) -> None:
    page.goto(base)
    answer = ask(page, "a long one", 400)
    until(page, "document.querySelector('#log .assistant .text').textContent.length > 5")
    assert "writing" in (answer.get_attribute("class") or "")
    assert page.locator("#live").get_attribute("aria-busy") == "true"
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
    assert "4 prompt tokens" in told(ask(page, "hi", 2), "2 tokens")
    # Escape stops from the keyboard.
    second = ask(page, "another", 400)
    until(page, "document.querySelectorAll('#log .assistant .text')[1].textContent.length > 5")
    page.keyboard.press("Escape")
    second.locator(".facts").get_by_text("stopped after").wait_for()


def test_thinking_is_shown_apart_and_folded_away(page: Page, base: str) -> None:
    page.goto(base)
    thoughts = [{"role": "assistant", "content": ""}, {"reasoning_content": "<b>Hm"}, {"reasoning_content": ", so."}]
    page.route(CHAT, streamed(*thoughts))
    shown = ask(page, "hello", 5)
    shown.locator(".note").wait_for()
    assert shown.locator(".thought").inner_text() == "<b>Hm, so."  # open: there is nothing else to see
    page.unroute(CHAT)
    page.route(CHAT, streamed(*thoughts, {"content": "Yes."}))
    shown = ask(page, "hello", 5)
    shown.get_by_text("Yes.").wait_for()
    assert not shown.locator(".thought").is_visible()
    shown.get_by_text("Thinking").click()
    assert shown.locator(".thought").is_visible()
    assert shown.locator(".text").inner_text() == "Yes."


def test_the_page_counts_its_own_answer(page: Page, base: str) -> None:
    page.goto(base)
    assert "0 requests running" in page.locator("#state").inner_text()
    ask(page, "a long one", 400)
    until(page, "document.querySelector('#state').textContent.includes('1 request running')")
    page.click("#stop")
    until(page, "document.querySelector('#state').textContent.includes('0 requests running')")


# ---- text -----------------------------------------------------------------------------------------------------------


def test_markdown_becomes_elements(page: Page, base: str) -> None:
    page.goto(base)
    text = show(
        page,
        "# Head\nA **bold** and *slanted* `word`,\nnext line.\n\n3. three\n4. four\n   - inner\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quoted\n\n---\nhttps://example.org/a?b=1&c and example.py\n",
    )
    for selector, words in {
        "h3": "Head", "strong": "bold", "em": "slanted", "p > code": "word", "ol > li > ul > li": "inner",
        "th.right": "b", "td.right": "2", "blockquote p": "quoted",
    }.items():  # fmt: skip
        assert text.locator(selector).text_content() == words, selector
    assert text.locator("ol").get_attribute("start") == "3"
    assert text.locator("hr").count() == 1
    assert "A bold and slanted word,\nnext line." in text.inner_text()
    (link,) = text.locator("a").all()
    assert link.get_attribute("href") == "https://example.org/a?b=1&c"
    assert link.get_attribute("target") == "_blank"
    assert link.get_attribute("rel") == "noopener noreferrer nofollow"


def test_code_is_a_block_that_can_be_copied(page: Page, base: str) -> None:
    page.goto(base)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    code = "<b>x</b> = `1`\n\n    ```\n"
    text = show(page, f"Look:\n```python\n{code}```\nand\n\n~~~~\n```\n~~~\n~~~~\n`a` end\n```js\nnot yet")
    assert text.locator("pre code").all_text_contents() == [code.removesuffix("\n"), "```\n~~~", "not yet"]
    languages = text.locator("pre").evaluate_all("blocks => blocks.map(block => block.dataset.language)")
    assert languages == ["python", "", "js"]
    text.locator(".code").first.get_by_role("button", name="Copy").click()
    text.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == code.removesuffix("\n")
    page.locator("#log .assistant .facts").get_by_role("button", name="Copy").click()
    page.locator("#log .assistant .facts").get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("Look:\n```python\n")
    # What a person wrote is shown as it was written, but for fenced code.
    ask(page, "# not a head\n  two  *stars*\n```\n<i>mine</i>\n```", 5)
    own = page.locator("#log .user .text").last
    assert own.locator("pre code").text_content() == "<i>mine</i>"
    assert own.evaluate("one => one.firstChild.data") == "# not a head\n  two  *stars*"
    assert page.locator("#log :is(b, i, em)").count() == 0
    for width in (1280, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    "text",
    [
        HOSTILE,
        "</script><script>document.title='hacked'</script>",
        "<svg/onload=document.title='hacked'> <iframe srcdoc='<script>parent.document.title=1</script>'></iframe>",
        "<style>*{display:none}</style><form action=https://evil.example><input></form>",
        "```<img src=x onerror=document.title='hacked'>\n</code></pre><img src=x>\n```",
        "`<img src=x>` **<b onclick=x>** | <img src=x> |\n|---|\n| <img src=x> |",
        "&lt;img src=x onerror=document.title='hacked'&gt;",
    ],
)
def test_raw_html_stays_text(page: Page, base: str, text: str) -> None:
    page.goto(base)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    before = page.evaluate("document.querySelectorAll('script, style, iframe, svg, form, input').length")
    body = show(page, text)
    assert page.locator("#log :is(img, script, style, iframe, svg, form, input)").count() == 0
    assert page.evaluate("document.querySelectorAll('script, style, iframe, svg, form, input').length") == before
    assert page.evaluate(
        "[...document.querySelectorAll('#log *')].every(e => e.getAttributeNames().every(n => !/^on/.test(n)))"
    )
    assert "<" in body.inner_text()
    ask(page, text, 5)
    until(page, "!document.querySelector('.chat').classList.contains('busy')")
    assert page.locator("#log :is(img, script, style, iframe, svg, form, input)").count() == 0
    assert page.title() == "Chat · Relevo"
    assert all(url.startswith(base) for url in requests)


def test_links_lead_to_the_web_or_nowhere_and_pictures_are_not_loaded(page: Page, base: str) -> None:
    page.goto(base)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    text = show(
        page,
        "[a](javascript:document.title=1) [b](JaVaScRiPt&colon;alert(1)) [c](data:text/html,x) [d](vbscript:x) "
        "[e](/logout) [f](//evil.example) [g](file:///etc/passwd) <javascript:alert(1)> [h](java\tscript:x) "
        "[ok](https://example.org) ![photo](https://evil.example/x.png) ![](/static/icon.svg) "
        "[m](mailto:a@example.org)",
    )
    links = text.locator("a").evaluate_all("links => links.map(link => [link.textContent, link.href])")
    assert links == [
        ["ok", "https://example.org/"],
        ["picture: photo", "https://evil.example/x.png"],
        ["m", "mailto:a@example.org"],
    ]
    assert "picture: /static/icon.svg" in text.inner_text()
    assert page.locator("#log img").count() == 0
    assert all(url.startswith(base) for url in requests)


def test_a_hostile_model_name_stays_text(page: Page) -> None:
    with server(limits={"served_model_name": HOSTILE}) as (url, _):
        page.goto(url)
        assert HOSTILE in page.locator("#welcome").inner_text()
        assert told(ask(page, "hi", 2), "2 tokens")
        assert page.locator("main img").count() == 0
        assert page.title() == "Chat · Relevo"


def test_what_has_been_written_does_not_flicker(page: Page, base: str) -> None:
    """A block that has come to its end is the same element to the end of the answer."""
    page.goto(base)
    page.evaluate(
        "import('/static/chat/markdown.js').then(({Markdown}) => {"
        " window.body = document.createElement('div'); window.writer = new Markdown(window.body); })"
    )
    until(page, "window.writer !== undefined")
    text = "One.\n\n```py\nx = 1\ny = 2\n```\n\nSome\n- a\n- b\n\nlast **bold**"
    page.evaluate("text => { window.kinds = new Set(); for (let n = 1; n <= text.length; n += 1) {"
                  "  window.writer.show(text.slice(0, n), true);"
                  "  window.kinds.add([...window.body.children].map(e => e.localName).join(' '));"
                  "  window.first ??= window.body.firstChild; window.code ??= window.body.querySelector('pre');"
                  " } window.writer.show(text, false); }", text)  # fmt: skip
    assert page.evaluate("window.body.firstChild === window.first")
    assert page.evaluate("window.body.querySelector('pre') === window.code")
    # `Some` above a `-` would be a heading for a moment.
    assert not any("h" in kinds.split() or "h4" in kinds for kinds in page.evaluate("[...window.kinds]"))
    assert page.evaluate("window.body.lastChild.textContent") == "last bold"
    assert page.evaluate("window.body.querySelectorAll('li').length") == 2


# ---- again and otherwise --------------------------------------------------------------------------------------------


def test_a_message_is_edited_and_asked_again_and_what_stood_there_comes_back(page: Page, base: str) -> None:
    page.goto(base)
    bodies = asked(page)
    for text in ("one", "two"):
        ask(page, text, 5).get_by_role("button", name="Again").wait_for()
    page.locator("#log .user").first.get_by_role("button", name="Edit").click()
    field = page.locator(".edit textarea")
    assert field.input_value() == "one"
    field.press("Escape")
    assert page.locator(".edit").count() == 0
    assert page.locator("#log .user .text").all_inner_texts() == ["one", "two"]
    page.locator("#log .user").first.get_by_role("button", name="Edit").click()
    field.fill("uno")
    field.press("Shift+Enter")
    assert field.input_value() == "uno\n"
    field.press("Enter")
    page.get_by_text("answer 3").wait_for()
    assert [body["messages"] for body in bodies] == [
        [{"role": "user", "content": "one"}],
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "answer 1"},
            {"role": "user", "content": "two"},
        ],
        [{"role": "user", "content": "uno"}],
    ]
    assert page.locator("#log .user .text").all_inner_texts() == ["uno"]
    page.get_by_role("button", name="Put back").click()
    assert page.locator("#log .user .text").all_inner_texts() == ["one", "two"]
    assert page.locator("#log .assistant .text").all_inner_texts() == ["answer 1", "answer 2"]


def test_an_answer_is_given_again_and_a_refusal_loses_nothing(page: Page, base: str) -> None:
    page.goto(base)
    bodies = asked(page)
    for text in ("one", "two"):
        ask(page, text, 5).get_by_role("button", name="Again").wait_for()
    page.locator("#log .assistant").last.get_by_role("button", name="Again").click()
    page.get_by_text("answer 3").wait_for()
    assert bodies[2] == bodies[1]
    refuse(page, 503, "queue_full", depth=9, wait=3)
    page.locator("#log .assistant").last.get_by_role("button", name="Again").click()
    page.get_by_text("The server is full and takes no more for now").wait_for()
    page.reload()  # it is kept, too
    page.locator("#chats .title").first.click()
    page.get_by_role("button", name="Put back").click()
    assert page.locator("#log .assistant .text").all_inner_texts() == ["answer 1", "answer 3"]


def test_settings_are_kept_sent_and_checked(page: Page, base: str) -> None:
    page.goto(base)
    page.fill("#system", "Be brief.")
    page.fill("#max-tokens", "7")
    page.fill("#seed", "42")
    page.fill("#temperature", "0.2")
    page.fill("#top-p", "0.5")
    page.reload()
    bodies = asked(page)
    page.fill("#message", "hi")
    page.press("#message", "Enter")
    page.get_by_text("answer 1").wait_for()
    sent = bodies[0]
    assert [sent[name] for name in ("max_tokens", "seed", "temperature", "top_p")] == [7, 42, 0.2, 0.5]
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    page.fill("#max-tokens", "0")
    page.fill("#message", "kept")
    page.press("#message", "Enter")
    page.locator("#max-tokens-error").get_by_text("A whole number from 1 to 512").wait_for()
    assert page.evaluate("document.activeElement.id") == "max-tokens"
    assert page.input_value("#message") == "kept"
    assert len(bodies) == 1
    page.click("#defaults")
    assert [page.input_value(f"#{name}") for name in ("system", "max-tokens", "seed")] == ["", "512", ""]
    page.focus("#message")
    page.press("#message", "Enter")
    page.get_by_text("answer 2").wait_for()
    assert "seed" not in bodies[1]


# ---- what can go wrong ----------------------------------------------------------------------------------------------


def test_errors_are_told_in_words_and_nothing_is_lost(page: Page, base: str) -> None:
    page.goto(base)
    failure = ask(page, "x" * 600, 5).locator(".failure")
    failure.wait_for()
    assert "This message is longer than the model can read" in failure.inner_text()
    assert "Edit it and make it shorter." in failure.inner_text()
    for status, code, wait, words in (
        (503, "queue_full", 12, "The server is full and takes no more.*try again in about 12 s"),
        (503, "draining", 5, "no.*try again later"),
        (429, "rate_limit_exceeded", 7, "has had what it may have.*in about 7 s"),
        (401, "invalid_api_key", None, "A key is needed.*sign in"),
        (413, None, None, "larger than the server takes.*make it shorter"),
        (500, "internal_error", None, "no"),
    ):
        page.click("#new")
        refuse(page, status, str(code), wait=wait, depth=256)
        failure = ask(page, f"status {status}", 5).locator(".failure")
        failure.wait_for()
        assert re.search(words, failure.inner_text()), failure.inner_text()
        assert failure.get_attribute("role") == "alert"
        assert failure.get_by_role("button", name="Try again").count() == (status != 413)
        assert failure.get_by_role("link", name="Sign in").count() == (status == 401)
        assert page.locator("#log .user .text").inner_text() == f"status {status}"
    # Asking again after all of that works, and what was not answered is not told to the model.
    page.unroute(CHAT)
    failure.get_by_role("button", name="Try again").click()
    assert "12 prompt tokens" in told(page.locator("#log .assistant").last, "5 tokens")


def test_a_server_that_is_gone_is_told_of_at_the_top_until_it_is_back(page: Page) -> None:
    with server() as (url, process):
        page.goto(url)
        until(page, "document.querySelector('#state .word').textContent === 'ready'")
        process.kill()
        process.wait()
        ask(page, "hello", 5).locator(".failure").get_by_text("cannot be reached").wait_for()
        until(page, "document.querySelector('#state').textContent.includes('unreachable')")
        with server(port=int(url.rsplit(":", 1)[1])):
            page.evaluate("document.body.dispatchEvent(new Event('chat-changed'))")
            until(page, "document.querySelector('#state .word').textContent === 'ready'")


def test_half_an_answer_is_not_taken_for_a_whole_one(page: Page, base: str) -> None:
    page.goto(base)
    page.route(CHAT, streamed({"content": "half an ans"}, end=None))
    answer = ask(page, "hello", 5)
    failure = answer.locator(".failure")
    failure.wait_for()
    assert "interrupted" in failure.inner_text()
    assert answer.locator(".text").inner_text() == "half an ans"
    page.unroute(CHAT)
    error = {"error": {"message": "A step failed.", "code": "engine_error"}}
    events = f'data: {{"id": "x", "choices": [{{"delta": {{"content": "ha"}}}}]}}\n\ndata: {json.dumps(error)}\n\n'
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=events))
    failure.get_by_role("button").click()
    page.get_by_text("The answer broke off: A step failed.").wait_for()
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.abort())
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("The server cannot be reached.").wait_for()
    bodies = asked(page)
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("answer 1").wait_for()
    assert bodies[0]["messages"] == [{"role": "user", "content": "hello"}]


def test_a_finish_that_is_no_stop_is_told(page: Page, base: str) -> None:
    page.goto(base)
    show(page, "call", end="tool_calls")
    page.get_by_text("ended by tool_calls").wait_for()


# ---- conversations --------------------------------------------------------------------------------------------------


def test_conversations_are_kept_named_exported_and_deleted(page: Page, base: str, tmp_path: Path) -> None:
    page.goto(base)
    asked(page)
    for text in ("<b>first</b> question\nwith more", "second"):
        page.click("#new")
        ask(page, text, 5).get_by_role("button", name="Again").wait_for()
    titles = page.locator("#chats .title")
    assert titles.all_inner_texts() == ["second", "<b>first</b> question"]
    page.reload()
    assert page.locator("#log li").count() == 0
    titles.nth(1).click()
    assert page.locator("#log .user .text").inner_text() == "<b>first</b> question\nwith more"
    assert page.locator("#log .assistant .text").inner_text() == "answer 1"
    assert page.locator("#chats [aria-current]").inner_text() == "<b>first</b> question"
    item = page.locator("#chats li").nth(1)
    item.locator("summary").click()
    item.get_by_role("button", name="Rename").click()
    page.keyboard.type("<i>Rivers</i>")
    page.keyboard.press("Enter")
    assert titles.all_inner_texts() == ["second", "<i>Rivers</i>"]
    # Going on with it keeps the name.
    ask(page, "more", 5).get_by_role("button", name="Again").wait_for()
    assert titles.all_inner_texts() == ["<i>Rivers</i>", "second"]
    item = page.locator("#chats li").first
    item.locator("summary").click()
    with page.expect_download() as download:
        item.get_by_role("button", name="Export").click()
    assert download.value.suggested_filename == "i-Rivers-i.md"
    download.value.save_as(tmp_path / "kept.md")
    text = (tmp_path / "kept.md").read_text()
    assert text.startswith("# <i>Rivers</i>\n\n**You**\n\n<b>first</b> question\nwith more\n\n**Model**\n\nanswer 1\n")
    item.locator("summary").click()
    item.get_by_role("button", name="Delete").click()
    assert titles.all_inner_texts() == ["second"]
    assert page.locator("#log li").count() == 0
    page.get_by_role("button", name="Put it back").click()
    assert titles.all_inner_texts() == ["<i>Rivers</i>", "second"]
    assert page.locator("#chats :is(b, i)").count() == 0


def test_an_answer_that_is_left_is_kept_as_far_as_it_came(page: Page, base: str) -> None:
    page.goto(base)
    ask(page, "a long one", 400)
    until(page, "document.querySelector('#log .assistant .text').textContent.length > 20")
    page.reload()
    page.locator("#chats .title").first.click()
    answer = page.locator("#log .assistant")
    assert len(answer.locator(".text").inner_text()) > 10
    assert "the page was left before it ended" in answer.locator(".facts").inner_text()
    until(page, "fetch('/ops/stats.json').then(a => a.json()).then(s => s.requests.running === 0)")


def test_conversations_are_bounded_and_damage_is_overlooked(page: Page, base: str) -> None:
    page.goto(base)
    page.evaluate(
        "text => { for (let n = 0; n < 60; n += 1) localStorage.setItem(`relevo.chat.${n}`, JSON.stringify({id: `${n}`,"
        " title: `old ${n}`, time: n, exchanges: [{user: text, answer: null}], earlier: null}));"
        " for (const bad of ['{', 'null', '{\"id\": 1}',"
        " JSON.stringify({id: 'a', title: '', time: 1, exchanges: [{}]})])"
        " localStorage.setItem(`relevo.chat.bad${bad.length}`, bad); }",
        "x" * 40_000,
    )
    page.reload()
    assert page.locator("#chats li").count() == 60
    asked(page)
    ask(page, "new", 5).get_by_role("button", name="Again").wait_for()
    assert page.locator("#chats li").count() == 50
    assert page.locator("#chats .title").all_inner_texts()[:2] == ["new", "old 59"]


def test_a_browser_that_keeps_nothing_still_chats(page: Page, base: str) -> None:
    page.add_init_script("Object.defineProperty(window, 'localStorage', {get() { throw new Error('no'); }})")
    page.goto(base)
    bodies = asked(page)
    for text in ("one", "two"):
        ask(page, text, 5).get_by_role("button", name="Again").wait_for()
    assert len(bodies[1]["messages"]) == 3
    assert page.locator("#not-kept").is_visible()


# ---- the seat -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ones_seat_is_shown_beside_the_others(page: Page, browser: Browser, base: str) -> None:
    other = browser.new_context().new_page()
    other.goto(base)
    ask(other, "somebody else", 400)
    until(other, "document.querySelector('#log .assistant .text').textContent.length > 5")
    page.goto(base)
    seen: list[str] = []
    page.on("response", lambda answer: seen.append(answer.text()) if "/chat/seats" in answer.url else None)
    answer = ask(page, "me", 400)
    answer.locator(".facts").get_by_text("seat 2 of 4").wait_for()
    until(page, "document.querySelector('.strip .mine') && document.querySelector('.strip .other')")
    facts = page.locator("#seat-facts").inner_text()
    assert re.search(r"this answer\s+seat 2 of 4, token \d+", facts)
    assert re.search(r"sharing with\s+1 request\b", facts)
    assert re.search(r"waited for a seat\s+\d+ ms", facts)
    label = page.locator(".strip").get_attribute("aria-label") or ""
    assert re.search(r"You sit on seat 2 of 4, with 1 other\. The last \d+ steps\.", label)
    # The other one's name is not told.
    ids = [entry["request_id"] for entry in page.evaluate("fetch('/ops/stats.json').then(a => a.json())")["active"]]
    assert len(ids) == 2
    assert seen
    assert not any(name in text for text in seen for name in ids)
    page.click("#stop")
    page.wait_for_timeout(300)
    polls = len(seen)
    page.wait_for_timeout(1500)
    assert len(seen) <= polls + 1
    assert re.fullmatch(r"this answer\s+left its seat after about \d+ tokens", page.locator("#seat-facts").inner_text())
    ask(page, "to the end", 40).get_by_role("button", name="Again").wait_for()
    assert re.fullmatch(r"this answer\s+left its seat after 40 tokens", page.locator("#seat-facts").inner_text())
    other.context.close()


# ---- ten at once ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ten_at_once_fill_side_by_side_over_one_stream(page: Page) -> None:
    with server(limits={"max_num_seqs": 12}, num_blocks=1024) as (url, _):
        page.goto(url)
        page.fill("#max-tokens", "60")
        posts: list[str] = []
        page.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
        page.click("#open-many")
        assert page.evaluate("document.activeElement.id") == "ask-many"
        page.keyboard.press("Enter")
        until(page, "[...document.querySelectorAll('.pane .text')].filter(e => e.textContent.length > 3).length === 10")
        assert page.evaluate("fetch('/ops/stats.json').then(a => a.json())")["requests"]["running"] == 10
        until(page, "new Set([...document.querySelectorAll('.strip .own')].map(e => e.classList[1])).size === 10")
        page.get_by_text("10 of 10 answers done").wait_for()
        assert posts == [f"{url}/chat/many"]
        for facts in page.locator(".pane .facts").all_inner_texts():
            assert re.search(r"seat \d+ of 12", facts), facts
            assert re.search(r"[\d.]+ tokens/s", facts)
            assert "60 tokens" in facts
        page.set_viewport_size({"width": 1440, "height": 900})
        stays_inside = """line => {
            line.lastChild.textContent = "1036 prompt tokens, 1016 from the cache";
            return line.lastChild.getBoundingClientRect().right <= line.getBoundingClientRect().right;
        }"""
        assert page.locator(".pane .facts").first.evaluate(stays_inside)
        assert re.search(r"600 tokens\s+[\d.]+ tokens/s together", page.locator("#many-facts").inner_text())
        assert page.locator("#ask-many").inner_text() == "Ask again"
        assert page.evaluate("document.activeElement.id") == "ask-many"
        # A conversation goes on where it was.
        page.click("#new")
        told(ask(page, "hi", 2), "2 tokens")


def test_ten_at_once_stop_and_are_refused_each_for_itself(page: Page) -> None:
    security = {"api_keys": ["me=secret"]}
    settings = {"security": security, "security_limits": {"me": {"max_concurrent": 2}}}
    with server(settings=settings) as (url, _):
        page.goto(url)
        page.fill("#token", "secret")
        page.press("#token", "Enter")
        page.wait_for_url(f"{url}/")
        page.click("#open-many")
        page.click(".questions summary")
        page.fill("#questions", f"one\n\n{HOSTILE}\nthree")
        page.get_by_role("button", name="Ask 3 questions").click()
        until(page, "[...document.querySelectorAll('.pane .text')].filter(e => e.textContent.length > 3).length === 2")
        assert "has had what it may have for now" in page.locator(".pane .failure").inner_text()
        assert page.locator(".pane h3").nth(1).inner_text() == HOSTILE
        assert page.locator("#panes img").count() == 0
        page.keyboard.press("Escape")
        page.locator(".pane .facts").first.get_by_text("stopped after").wait_for()
        until(page, "fetch('/load').then(a => a.json()).then(s => s.server_load === 0)")
        page.fill("#questions", "\n".join(["q"] * 17))
        assert page.locator("#ask-many").is_disabled()
        assert "At most 16" in page.locator("#questions-error").inner_text()
        page.reload()
        page.click("#open-many")
        assert page.input_value("#questions").count("q") == 17  # kept


# ---- keyboard, width, colour ----------------------------------------------------------------------------------------


def test_the_order_of_focus_and_names_for_everything(page: Page, base: str) -> None:
    page.goto(base)
    show(page, "An answer.\n```\ncode\n```")
    page.focus(".skip")
    order = ["Skip to the content"]
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(page.evaluate(NAME_OF_FOCUS))
        if order[-1] == "defaults":
            break
    wanted = ["Skip to the content", "Chat", "say it", "new", "open-many", "Edit this message and ask again", "Copy",
              "code", "Copy", "Answer again from here", "message", "send", "temperature", "top-p", "max-tokens", "seed",
              "system", "defaults"]  # fmt: skip
    found = iter(order)
    assert all(name in found for name in wanted), order
    nameless = page.evaluate(
        "[...document.querySelectorAll('main :is(button, input, textarea, summary, a)')].filter(e => e.offsetParent &&"
        " !e.textContent.trim() && !e.getAttribute('aria-label') && !e.labels?.length).map(e => e.outerHTML)"
    )
    assert nameless == []


def test_shift_and_enter_break_the_line(page: Page, base: str) -> None:
    page.goto(base)
    asked(page)
    page.fill("#message", "one")
    page.press("#message", "Shift+Enter")
    page.keyboard.type("two")
    assert page.input_value("#message") == "one\ntwo"
    page.keyboard.press("Enter")
    page.get_by_text("answer 1").wait_for()
    assert page.locator("#log .user .text").inner_text() == "one\ntwo"
    assert page.input_value("#message") == ""


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_of_it_fits_from_360_to_1920_pixels(browser: Browser, base: str, scheme: Any) -> None:
    context = browser.new_context(color_scheme=scheme, reduced_motion="reduce", viewport={"width": 1920, "height": 900})
    page = context.new_page()
    page.set_default_timeout(30_000)
    page.goto(base)
    show(
        page,
        f"{'long' * 60}\n\n```\n{'wide ' * 60}\n```\n\n|{'a|' * 30}\n|{'-|' * 30}\n|{'cell|' * 30}\n\n# Head\n- a\n- b",
    )
    for view in ("chat", "many"):
        if view == "many":
            page.set_viewport_size({"width": 1920, "height": 900})
            page.click("#open-many")
            page.click("#ask-many")
            until(page, "document.querySelectorAll('.pane').length === 10")
            page.keyboard.press("Escape")
        for width in (1920, 1440, 1280, 1087, 1024, 768, 390, 360):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (view, width)
            if width < 1088:
                for name in ("conversations", "seat", "settings"):
                    page.click(f"#{name} > summary")
                    assert page.locator(f"#{name} .drop").is_visible()
                    assert page.evaluate("document.querySelectorAll('.panel[open]').length") == 1
                    box = page.locator(f"#{name} .drop").bounding_box()
                    assert box is not None
                    assert box["x"] >= 0
                    assert box["x"] + box["width"] <= width
                page.keyboard.press("Escape")
                assert page.evaluate("document.querySelectorAll('.panel[open]').length") == 0
            else:
                assert page.locator("#settings .drop").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {
        "light": "rgb(247, 247, 244)", "dark": "rgb(18, 20, 22)",
    }[scheme]  # fmt: skip
    context.close()
