"""`relevo limit --progress-json`: what programs are told while it goes on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.app.endpoints import open_endpoint
from tests.app.test_limit_command import SIMULATE, marked  # noqa: F401 - a fixture
from tests.patience import PATIENCE_SECONDS

ASKED = (*SIMULATE, "--requests", "100", "--factor", "20", "--repeats", "2")


def test_each_run_is_a_line_and_the_last_is_what_json_writes(run: Any, tmp_path: Path) -> None:
    code, out, err = run(*ASKED, "--progress-json", "-", "--json", tmp_path / "limit.json")
    assert (code, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    kinds = [line["event"] for line in told]
    assert kinds[-1] == "result"
    assert {*kinds} == {"progress", "run", "result"}
    result = told[-1]["result"]
    assert result == json.loads((tmp_path / "limit.json").read_text())
    runs = [
        {key: value for key, value in line.items() if key not in ("event", "kind")}
        for line in told
        if line["event"] == "run" and line["kind"] == "rate"
    ]
    assert sorted(runs, key=lambda one: (one["rate"], one["seed"])) == result["curve"]
    progress = next(line for line in told if line["event"] == "progress")
    assert progress.keys() == {"event", "seconds", "planned_seconds", "what", "rate", "ended", "total"}
    assert progress["planned_seconds"] == 480


def test_a_file_takes_the_lines_and_the_table_is_printed_all_the_same(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    code, out, err = run(*ASKED, "--progress-json", path)
    assert (code, err) == (0, "")
    assert "The limit is" in out
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "result"
    code, out, err = run(*ASKED, "--progress-json", tmp_path / "nowhere" / "lines.jsonl")
    assert (code, out) == (2, "")
    assert "cannot be written" in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")
def test_it_ends_with_all_it_started_when_nobody_reads_its_lines(marked: dict[str, str]) -> None:  # noqa: F811
    """As where the server that has begun it is killed."""
    with open_endpoint(first_seconds=0.2, context=4096) as (url, _):
        words = [sys.executable, "-m", "app.cli", "limit", "--url", url, "--seats", "2", "--progress-json", "-"]
        process = subprocess.Popen(words, env=marked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["event"] == "progress"
        process.stdout.close()
        assert process.wait(PATIENCE_SECONDS) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""
        process.stderr.close()
