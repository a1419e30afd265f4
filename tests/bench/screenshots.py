"""Pictures of the pages in every state, over a made-up engine: narrow and wide, light and dark.

    python -m tests.bench.screenshots FOLDER [--page /ops] [--state busy …]

They are there to be looked at.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from tests.bench.versus.servers import free_port
from tests.fixtures_browser import CHROMIUM, FLAGS, ROOT, wait_for_port

if TYPE_CHECKING:
    from collections.abc import Iterator

STATES = ("idle", "busy", "overloaded", "draining", "stalled")
WIDTHS = (390, 1440)
HEIGHT = 900
SCHEMES = ("light", "dark")


@contextmanager
def pages(state: str) -> Iterator[str]:
    """The address of pages that show a state."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "tests.pages_app", state, str(port)], cwd=ROOT)
    try:
        wait_for_port(port, 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--page", default="/ops")
    parser.add_argument("--state", nargs="*", choices=STATES, default=STATES)
    parser.add_argument("--fold", action="store_true", help="no more than the first screen")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for state in options.state:
            with pages(state) as url:
                for width in WIDTHS:
                    for scheme in SCHEMES:
                        page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
                        page.goto(url + options.page)
                        page.wait_for_timeout(500)
                        name = f"{state}-{width}-{scheme}.png"
                        page.screenshot(path=options.folder / name, full_page=not options.fold)
                        page.close()
                        print(options.folder / name)
        browser.close()


if __name__ == "__main__":
    main()
