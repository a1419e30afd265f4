"""axe-core looks at every page, light and dark, and finds nothing that keeps anybody out."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from tests.app.test_compare_command import SIMULATE
from tests.app.test_limit_command import SIMULATE as LIMIT
from tests.fixtures_browser import IN_A_BROWSER, ROOT, ask, server, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

pytestmark = IN_A_BROWSER

PAGES = (
    "/", "/ops", "/ops/history", "/ops/limit", "/ops/requests", "/ops/requests/1", "/admin", "/admin/keys",
    "/admin/recordings", "/docs", "/login", "/missing",
)  # fmt: skip
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def busy(browser: Browser) -> Iterator[str]:
    """A server that answers, with a queue: one seat, three chats."""
    with server(step_seconds=0.05, limits={"max_num_seqs": 1}) as (url, _):
        chats = [browser.new_page() for _ in range(3)]
        for chat in chats:
            chat.goto(url)
            ask(chat, "hello", 2000)
        yield url
        for chat in chats:
            chat.close()


def faults(page: Page) -> list[str]:
    """What axe finds serious or critical: rule, element, and why."""
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found: dict[str, Any] = page.evaluate("() => axe.run(document, {resultTypes: ['violations']})")
    assert found["passes"], "axe looked at nothing"
    return [
        f"{violation['id']} ({violation['impact']}): {node['html'][:150]} {node['failureSummary'][:300]}"
        for violation in found["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that `relevo compare` writes."""
    written = tmp_path_factory.mktemp("compare") / "page.html"
    argv = [*SIMULATE, "--requests", "40", "--seats", "4", "--html", str(written)]
    subprocess.run([sys.executable, "-m", "app.cli", *argv], cwd=ROOT, check=True, capture_output=True)
    return written


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page that `relevo limit` writes."""
    written = tmp_path_factory.mktemp("limit") / "page.html"
    argv = [*LIMIT, "--requests", "40", "--factor", "20", "--repeats", "1", "--html", str(written)]
    subprocess.run([sys.executable, "-m", "app.cli", *argv], cwd=ROOT, check=True, capture_output=True)
    return written


@pytest.fixture(scope="module", params=SCHEMES)
def view(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    context = browser.new_context(color_scheme=request.param, reduced_motion="reduce")
    yield context.new_page()
    context.close()


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_no_serious_fault(view: Page, busy: str, path: str) -> None:
    view.goto(busy + path)
    until(view, "document.readyState === 'complete'")
    view.wait_for_timeout(300)
    assert not faults(view)


def test_axe_finds_no_serious_fault_in_a_comparison(view: Page, comparison: Path) -> None:
    view.goto(comparison.as_uri())
    assert view.locator("svg.steps").count() == 3
    assert not faults(view)


@pytest.mark.long
@pytest.mark.parametrize("width", [360, 1920])
def test_axe_finds_no_serious_fault_in_a_report_of_the_limit(view: Page, report: Path, width: int) -> None:
    view.set_viewport_size({"width": width, "height": 900})
    view.goto(report.as_uri())
    assert view.locator("svg.curve").count() >= 4
    assert view.evaluate("document.scrollingElement.scrollWidth") == width
    assert not faults(view)


def test_axe_finds_what_is_wrong(view: Page, busy: str) -> None:
    view.goto(busy + "/login")
    view.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button><img src=x>')")
    assert {fault.split(" ")[0] for fault in faults(view)} == {"button-name", "image-alt"}
