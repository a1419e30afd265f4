"""What `relevo limit` tells of a search, made from made-up runs: scripts for `tests.limit_child`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from app.limit.lengths import Ranges
from app.limit.load import Source, WorkClass
from app.limit.options import Options
from app.limit.runs import Promise, Run, Seen
from app.limit.scrapes import Observed
from app.limit.summary import Outcome, figures, summarize
from engine.config import SloTargets

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TARGETS = SloTargets(2.0, 0.25, None)
PROMISE = Promise((TARGETS,), 0.01)
SEATS_TAKEN = Observed(running=3.9, max_num_seqs=4)


def run_at(rate: float, ttft: float, *, lag: float = 0.0, seed: int = 0, promise: Promise = PROMISE) -> Run:
    """All of its 400 requests see the same."""
    seen = [Seen(place / rate, lag, ttft + 1.0, ttft, ttft + 1.0, 20, 11, 10, 0, (0.1,) * 10) for place in range(400)]
    return Run(
        rate, seed, promise, tuple(seen), preemptions=0, cpu_share=0.02, observed=SEATS_TAKEN,
        tokens=(20 * rate, 11 * rate),
    )  # fmt: skip


RUNS = (
    run_at(4.0, 0.5), run_at(5.2, 0.9), run_at(8.0, 9.0), run_at(6.4, 1.1, lag=0.2), run_at(6.4, 2.4),
    run_at(5.8, 1.6), run_at(5.8, 1.4, seed=1),
)  # fmt: skip


def run_line(run: Run, kind: str = "rate") -> dict[str, Any]:
    return {"say": {"event": "run", "kind": kind, **figures(run)}}


def progress_line(rate: float | None, ended: int, seconds: float = 60.0) -> dict[str, Any]:
    times = {"seconds": seconds, "planned_seconds": 480, "what": "it goes on"}
    return {"say": {"event": "progress", **times, "rate": rate, "ended": ended, "total": 400}}


def result_of(runs: Sequence[Run] = RUNS, **options: Any) -> dict[str, Any]:
    classes = (WorkClass("requests", 1.0, Ranges((20, 20), (11, 11)), TARGETS),)
    single = replace(run_at(1.0, 0.2), rate=0.8)
    outcome = Outcome({"model": "fake"}, Source(classes, PROMISE), single, 6.0, runs, 234.5)
    return summarize(outcome, Options(targets=TARGETS, **options))


def whole_script(runs: Sequence[Run] = RUNS, **options: Any) -> list[dict[str, Any]]:
    """A search from beginning to end."""
    return [
        progress_line(None, 12, 10.0),
        run_line(run_at(6.0, 0.4), "capacity"),
        run_line(run_at(0.8, 0.2), "single"),
        *[line for run in runs for line in (progress_line(run.rate, 37), run_line(run))],
        {"say": {"event": "result", "result": result_of(runs, **options)}},
    ]


def write_script(path: Path, lines: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The command that does it."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return (sys.executable, "-m", "tests.limit_child", str(path))


def wish(**fields: Any) -> dict[str, Any]:
    """The body of a `POST /ops/limit`."""
    return {**asdict(TARGETS), "duration": 480, **fields}
