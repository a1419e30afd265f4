"""A real Chromium turns each control of the tuning page, with a script and without one."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from tests.fixtures_browser import IN_A_BROWSER, server, until
from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER

CONTROLS: dict[str, tuple[str, Any]] = {
    "policy": ("static", "static"),
    "admission": ("reserve", "reserve"),
    "max_num_seqs": ("9", 9),
    "max_num_batched_tokens": ("100", 100),
    "long_prefill_token_threshold": ("10", 10),
    "dynamic_preferred_size": ("2", 2),
    "dynamic_max_queue_delay_seconds": ("0.5", 0.5),
    "num_speculative_tokens": ("4", 4),
    "max_waiting": ("5", 5),
    "max_waiting_tokens": ("500", 500),
    "slo_admission": ("on", True),
    "enable_prefix_caching": ("off", False),
    "ttft_p95_seconds": ("1.25", 1.25),
    "itl_p95_seconds": ("0.003", 0.003),
    "e2e_p95_seconds": ("30", 30.0),
    "background_ttft_p95_seconds": ("600", 600.0),
    "background_itl_p95_seconds": ("5", 5.0),
    "background_e2e_p95_seconds": ("86400", 86400.0),
}
HEADERS = {"Content-Type": "application/json"}


@pytest.fixture(params=[True, False], ids=["script", "no script"])
def admin(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Page]:
    """The tuning page of a server of its own."""
    context = browser.new_context(java_script_enabled=request.param, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(1000 * PATIENCE_SECONDS)
    with server() as (url, _):
        page.goto(f"{url}/admin")
        yield page
    context.close()


def call(page: Page, path: str, method: str = "GET", **body: Any) -> Any:
    """Ask the page's server, as another program would."""
    url = page.url.split("/admin")[0] + path
    data = json.dumps(body) if body else None
    return page.request.fetch(url, method=method, data=data, headers=HEADERS).json()


def effective(page: Page) -> dict[str, Any]:
    values: dict[str, Any] = call(page, "/admin/config")["effective"]
    return values


def batched(keys: Iterable[str], size: int) -> Iterator[list[str]]:
    source = iter(keys)
    while group := list(islice(source, size)):
        yield group


def fill(page: Page, key: str, text: str) -> None:
    field = page.locator(f"#{key}")
    if field.evaluate("field => field.tagName") == "SELECT":
        field.select_option(text)
    else:
        field.fill(text)


@pytest.mark.long
def test_each_control_is_turned_and_all_go_back(admin: Page) -> None:
    """Some at a time."""
    start = expected = effective(admin)
    for number, keys in enumerate(batched(CONTROLS, 6), 1):
        for key in keys:
            if not admin.locator(f"#{key}").is_visible():
                admin.get_by_text("Finer controls").click()
            fill(admin, key, CONTROLS[key][0])
        admin.fill("#tuning-reason", f"try <b>{keys[0]}</b>")
        admin.click("#apply")
        admin.get_by_text(f"Generation {number} holds.").wait_for()
        expected = expected | {key: CONTROLS[key][1] for key in keys}
        assert effective(admin) == expected
        assert admin.get_by_text(f"“try <b>{keys[0]}</b>”").count() == 1
    admin.click("#undo")
    admin.get_by_text(f"Generation {number + 1} holds.").wait_for()
    assert effective(admin)["background_e2e_p95_seconds"] == 0.0
    admin.click("#start")
    admin.get_by_text(f"Generation {number + 2} holds.").wait_for()
    assert effective(admin) == start
    assert admin.locator("#start").is_disabled()
    admin.click("#revert-1")
    admin.get_by_text("“back to generation 1”").wait_for()
    assert (effective(admin)["max_num_seqs"], effective(admin)["max_waiting"]) == (9, 256)


def test_drain_resume_and_flush(admin: Page) -> None:
    admin.click("#deeds summary")
    admin.fill("#deeds-reason", "a new machine")
    admin.select_option("#deeds-ttl", "300")
    admin.click("#drain")
    admin.get_by_text("Draining: nothing new is taken, 0 requests inside.").wait_for()
    assert call(admin, "/readyz")["reason"].startswith("draining")
    assert admin.get_by_text("Draining goes back by itself to off").count() == 1
    admin.click("#resume")
    admin.locator("#drain").wait_for()
    assert call(admin, "/readyz") == {"ready": True}
    call(admin, "/v1/completions", "POST", prompt="a prompt of some blocks, more than one of them", max_tokens=2)
    admin.click("#flush")
    admin.get_by_text("Generation 3 holds.").wait_for()
    assert "flush_prefix_cache" in call(admin, "/admin/audit")[-1]["changes"]


def test_what_cannot_be_is_told_at_its_field_and_what_was_typed_stays(admin: Page) -> None:
    admin.fill("#max_num_seqs", "1000")
    admin.fill("#max_waiting", "7")
    admin.click("#apply")
    admin.locator("#max_num_seqs-error").get_by_text("from 1 to 16").wait_for()
    assert (admin.input_value("#max_num_seqs"), admin.input_value("#max_waiting")) == ("1000", "7")
    assert effective(admin)["max_waiting"] == 256
    # Somebody else is quicker.
    call(admin, "/admin/config", "PATCH", max_num_batched_tokens=77, reason="<i>quicker</i>")
    admin.fill("#max_num_seqs", "8")
    admin.click("#apply")
    admin.get_by_text("generation 1 holds, not 0").wait_for()
    assert "<i>quicker</i>" in admin.locator("#failed").inner_text()
    assert (admin.input_value("#max_num_seqs"), admin.input_value("#max_num_batched_tokens")) == ("8", "77")
    admin.click("#apply")
    admin.get_by_text("Generation 2 holds.").wait_for()
    values = effective(admin)
    assert (values["max_num_seqs"], values["max_waiting"], values["max_num_batched_tokens"]) == (8, 7, 77)


def test_a_preview_is_asked_for_without_a_script(admin: Page) -> None:
    admin.fill("#max_waiting", "7")
    admin.click("#try")
    admin.locator("#preview").get_by_text("0 waiting now: room for 7 more.").wait_for()
    assert admin.input_value("#max_waiting") == "7"
    assert effective(admin)["max_waiting"] == 256


@pytest.mark.long
def test_the_script_shows_what_a_change_would_do_and_follows_what_others_do(page: Page) -> None:
    with server() as (url, _):
        page.goto(f"{url}/admin")
        page.fill("#max_num_seqs", "2")
        page.locator("#preview").get_by_text("nobody is above the new seats").wait_for()
        assert page.input_value("#max_num_seqs-range") == "2"
        page.fill("#max_num_seqs", "99")
        page.locator("#preview").get_by_text("from 1 to 16").wait_for()
        page.locator("#max_num_seqs-range").fill("4")
        assert page.input_value("#max_num_seqs") == "4"
        until(page, "document.querySelector('#preview').textContent.trim() === ''")
        call(page, "/admin/config", "PATCH", max_num_batched_tokens=77, ttl_seconds=600)
        until(page, "document.querySelector('#max_num_batched_tokens').value === '77'")
        assert page.get_by_text("Token budget goes back by itself").count() == 1
        call(page, "/admin/config", "PATCH", max_num_batched_tokens=77, ttl_seconds=300)
        page.locator("#history").get_by_text("the same for a while").wait_for()
        lefts = "[...document.querySelectorAll('#history li > p:not(.effect)')].map(p => p.offsetLeft)"
        assert len(set(page.evaluate(lefts))) == 1, "each line of an entry is below the one before"
        # What somebody has begun to change stays, and so does the generation it was built on.
        page.fill("#max_num_batched_tokens", "50")
        call(page, "/admin/config", "PATCH", max_num_seqs=6)
        until(page, "document.querySelector('#max_num_seqs').value === '6'")
        assert page.input_value("#max_num_batched_tokens") == "50"
        page.focus("#undo")
        call(page, "/admin/config", "PATCH", max_num_seqs=7)
        until(page, "document.querySelector('#live').dataset.generation === '3'")
        assert page.evaluate("document.activeElement.id") == "undo"
        page.click("#apply")
        page.get_by_text("generation 3 holds, not 1").wait_for()
        page.click("#apply")
        page.get_by_text("Generation 4 holds.").wait_for()
        assert effective(page)["max_num_seqs"] == 7


def test_what_came_of_a_change_is_shown_when_it_is_known(page: Page) -> None:
    with server() as (url, _):
        page.goto(f"{url}/admin")
        page.fill("#max_num_seqs", "2")
        page.click("#apply")
        page.get_by_text("Too early to tell what came of it").wait_for()
        (entry,) = call(page, "/admin/audit")
        assert (entry["effect"]["state"], entry["effect"]["after"]) == ("early", None)
