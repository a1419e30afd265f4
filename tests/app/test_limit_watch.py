"""`relevo limit --progress-json`: what programs are told while it goes on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.app.test_limit_command import SIMULATE

if TYPE_CHECKING:
    from pathlib import Path

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
