"""Pictures of every page in every state, narrow and wide, light and dark, and a page that shows them side by side.

    python -m tests.bench.screenshots FOLDER [--page ops …] [--state busy …]

They are there to be looked at: FOLDER/index.html.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from markupsafe import Markup
from playwright.sync_api import sync_playwright

from tests.bench.versus.servers import free_port
from tests.fixtures_browser import CHROMIUM, FLAGS, ROOT, streamed, until, wait_for_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

STATES = ("idle", "busy", "overloaded", "draining", "stalled")
USUAL_STATES = STATES[:-1]
WIDTHS = (390, 1440)
HEIGHT = 900
SCHEMES = ("light", "dark")
START_SECONDS = 180
# Name to address; of a request the newest that ended, where there is one.
PAGES = {
    "chat": "/", "talk": "/", "ops": "/ops", "requests": "/ops/requests", "request": "/ops/requests/{number}?tokens=1",
    "history": "/ops/history?range=900", "limit": "/ops/limit", "admin": "/admin", "keys": "/admin/keys",
    "recordings": "/admin/recordings", "docs": "/docs", "login": "/login", "missing": "/missing",
}  # fmt: skip
ANSWER = """Three things happen in every step:

1. whoever is at the table gets **one more token**,
2. a seat that has become free goes to the next in line,
3. long prompts are read in *chunks*, beside all others.

| seat | who | tokens |
|---|---|--:|
| 1 | `chatcmpl-51b2` | 128 |
| 2 | `chatcmpl-9f04` | 7 |

```python
for sequence in running:
    sequence.catch_up(token_budget)
```
"""


@contextmanager
def pages(state: str) -> Iterator[str]:
    """The address of a server in a state."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.pages_app", state, str(port)], cwd=ROOT)
    try:
        wait_for_port(port, START_SECONDS)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def newest_request(url: str) -> int:
    """The number of the request that ended last, or 0."""
    ended = httpx.get(f"{url}/ops/requests.json").json()["finished"]
    return int(ended[0]["number"]) if ended else 0


def take(browser: Browser, url: str, name: str, path: Path, width: int, scheme: Any, *, fold: bool) -> None:
    """A picture of a page."""
    who = {"Authorization": "Bearer me"}
    view = {"width": width, "height": HEIGHT}
    page = browser.new_page(viewport=view, color_scheme=scheme, extra_http_headers=who)  # type: ignore[arg-type]
    page.goto(url + PAGES[name].format(number=newest_request(url)))
    if name == "talk":
        page.route("**/v1/chat/completions", streamed({"role": "assistant"}, {"content": ANSWER}))
        page.fill("#message", "What happens in a step of continuous batching?")
        page.press("#message", "Enter")
        until(page, "!document.querySelector('.chat').classList.contains('busy')")
    page.wait_for_timeout(600)
    page.screenshot(path=path, full_page=not fold)
    page.close()


def write_index(folder: Path, names: list[str], states: list[str]) -> None:
    """All of them on one page."""
    rows = [
        Markup("<h2>{}, {}</h2><p>{}</p>").format(
            name,
            state,
            Markup("").join(
                Markup('<a href="{0}"><img src="{0}" alt="{0}" height="420" loading="lazy"></a> ').format(
                    file_name(name, state, width, scheme)
                )
                for width in WIDTHS
                for scheme in SCHEMES
            ),
        )
        for name in names
        for state in states
    ]
    head = "<!doctype html><meta charset=utf-8><title>Pages</title><style>img{vertical-align:top}</style>"
    (folder / "index.html").write_text(head + "\n".join(rows), encoding="utf-8")


def file_name(name: str, state: str, width: int, scheme: str) -> str:
    """Of a picture."""
    return f"{name}-{state}-{width}-{scheme}.png"


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", nargs="*", choices=PAGES, default=[*PAGES])
    parser.add_argument("--state", nargs="*", choices=STATES, default=[*USUAL_STATES])
    parser.add_argument("--fold", action="store_true", help="no more than the first screen")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for state in options.state:
            with pages(state) as url:
                for name in options.page:
                    for width in WIDTHS:
                        for scheme in SCHEMES:
                            path = options.folder / file_name(name, state, width, scheme)
                            take(browser, url, name, path, width, scheme, fold=options.fold)
                            print(path)
        browser.close()
    write_index(options.folder, options.page, options.state)


if __name__ == "__main__":
    main()
