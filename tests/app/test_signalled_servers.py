"""SIGTERM at any moment, with whatever clients are there: the process ends well, and by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUM_SERVERS = 50


@pytest.mark.long
def test_50_servers_that_are_told_to_end_at_a_random_moment() -> None:
    command = [sys.executable, "-m", "tests.app.signalled", str(NUM_SERVERS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    servers = json.loads(done.stdout)
    assert len(servers) == NUM_SERVERS
    assert [server for server in servers if server["code"] != 0] == []
    # While loading, and with clients of every kind.
    assert sum("ready" not in server["log"] for server in servers) >= 5
    assert sum(server["clients"] >= 5 for server in servers) >= 5
    assert not [server["log"] for server in servers if "Traceback" in server["log"]]
