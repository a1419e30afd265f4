"""A killed `relevo limit` leaves nothing running."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from tests.patience import PATIENCE_SECONDS

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import sys, time
from app.limit.own_server import open_own_server
with open_own_server([], (sys.executable, "-m", "tests.serve_command", sys.argv[1])) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/healthz", timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_the_server_that_was_started_ends_where_the_command_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "broken")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert answers(url)
        process.kill()
    until = time.monotonic() + PATIENCE_SECONDS
    while answers(url) and time.monotonic() < until:
        time.sleep(0.05)
    assert not answers(url)


@pytest.mark.slow
def test_a_server_that_is_to_end_with_its_input_serves_until_then(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.serve_command", str(tmp_path / "broken"), "--end-with-input"]
    words += ["--state-dir", str(tmp_path), "--port", "0"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        line = next(line for line in process.stderr if "http://" in line)
        url = line[line.index("http://") :].split('"')[0]
        process.stdin.write("words that mean nothing\n")
        process.stdin.flush()
        assert answers(url)
        process.stdin.close()
        assert process.wait(PATIENCE_SECONDS) == 0
        assert not answers(url)
