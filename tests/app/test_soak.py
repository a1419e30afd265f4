"""Everything at once, for long: every request ends once and nothing is left of it.

The suite runs a twentieth; the whole with `SOAK_REQUESTS=20000 pytest tests/app/test_soak.py -s`, which takes minutes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from engine.samples import MAX_SAMPLES
from tests.app.serving import Server, make_settings, open_server
from tests.app.soak import LIMITS, SETTINGS
from tests.app.test_loop_held import LongestTurn
from tests.app.wire import count_tasks, wait_for

if TYPE_CHECKING:
    from engine.handle import GenerationRequest, Handle

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "1000"))
NUM_PARTS = 10
# What is remembered of requests, steps, samples and changes is bounded, and fills in the first half.
WARM_UP = NUM_PARTS // 2 - 1
LAG_SLEEP_SECONDS = 0.01
MIB = 1 << 20


@dataclass
class Left:
    """What the process holds."""

    tasks: int
    threads: int = field(default_factory=lambda: sum(not is_spare(thread) for thread in threading.enumerate()))
    files: int = field(default_factory=lambda: len(os.listdir("/proc/self/fd")))


def is_spare(thread: threading.Thread) -> bool:
    """One that trio keeps for the next who needs one, for ten seconds."""
    return thread.name.startswith("Trio thread")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def count_own_tasks(server: Server) -> int:
    """Without those that go on looking what came of a change for minutes, of which there are few."""
    return count_tasks() - len(server.context.effects.followed)


async def measure_lag(overshoots: list[float]) -> None:
    while True:
        due = trio.current_time() + LAG_SLEEP_SECONDS
        await trio.sleep_until(due)
        overshoots.append(trio.current_time() - due)


async def play(server: Server, first: int, number: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.app.soak", "--port", str(server.port), "--first", str(first)]
    done = await trio.run_process([*command, "--requests", str(number)], capture_stdout=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@dataclass
class Told:
    """What was found out, part by part.

    Attributes:
        answers: by how they ended for the client.
        choices: of those that were served, and of those that may have been.
        overshoots: of short sleeps while requests were served, in seconds.
        turn: the longest that one task had the loop, in time of its thread.
    """

    answers: Counter[str] = field(default_factory=Counter)
    choices: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    overshoots: list[float] = field(default_factory=list)
    turn: LongestTurn = field(default_factory=LongestTurn)
    resident_bytes: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        lags = sorted(self.overshoots)
        return {
            "answers": self.answers,
            "changes": self.changes,
            "seconds": round(self.seconds, 1),
            "loop_lag_ms": {share: round(1000 * lags[int(share * (len(lags) - 1))], 2) for share in (0.5, 0.99, 1)},
            "longest_turn_ms": round(1000 * self.turn.seconds, 2),
            "resident_mib": [round(size / MIB, 1) for size in self.resident_bytes],
        }


def fill_windows(server: Server) -> None:
    """Give the windows of latencies all the samples that they keep: they grow until then, and are no leak."""
    stats, now = server.engine._stats, trio.current_time()
    for samples in (*stats.interactive.windows.values(), *stats.background.windows.values(), stats.step_seconds):
        for _ in range(MAX_SAMPLES):
            samples.add(now, 0.01)


async def play_part(server: Server, first: int, number: int, told: Told) -> None:
    """Have so many requests made, and let the server become idle."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(measure_lag, told.overshoots)
        trio.lowlevel.add_instrument(told.turn)
        result = await play(server, first, number)
        trio.lowlevel.remove_instrument(told.turn)
        nursery.cancel_scope.cancel()
    assert not result["faults"]
    told.answers.update(result["told"])
    told.choices.update(result["choices"])
    told.changes.update(result["changes"])
    told.seconds += result["seconds"]
    await server.settle()


@pytest.fixture
def _tests_objects_apart() -> None:
    """They are not the server's to look through."""
    gc.collect()
    gc.freeze()


@pytest.mark.long
@pytest.mark.usefixtures("_tests_objects_apart")
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
async def test_everything_at_once_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told, size = Told(), NUM_REQUESTS // NUM_PARTS
    async with open_server(make_settings(**SETTINGS), limits=LIMITS, num_blocks=160) as server:
        handles: list[Handle] = []
        submit, ended = server.engine.submit, Counter[str]()

        def keep(request: GenerationRequest, after: Handle | None = None) -> Handle:
            handles.append(submit(request, after))
            return handles[-1]

        monkeypatch.setattr(server.engine, "submit", keep)
        await trio.testing.wait_all_tasks_blocked(0.01)  # the listener's own task comes a moment after the server
        before = Left(count_own_tasks(server))
        fill_windows(server)
        for part in range(NUM_PARTS):
            await play_part(server, part * size, size, told)
            await wait_for(lambda: count_own_tasks(server) == before.tasks)
            ended.update([how_it_ended(handle) for handle in handles])
            handles.clear()
            gc.collect()
            told.resident_bytes.append(resident_bytes())
        after = Left(count_own_tasks(server))
        snapshot = server.engine.snapshot()
        print(json.dumps({**told.figures(), "ended": ended, "requests": snapshot["requests"]}))
    assert told.answers.total() == NUM_PARTS * size
    assert after == before
    assert told.resident_bytes[-1] <= 1.05 * told.resident_bytes[WARM_UP]
    assert snapshot["preemptions"] > 0
    check_counts(snapshot["requests"], ended, told.choices)
    assert not caplog.records


def how_it_ended(handle: Handle) -> str:
    """In which count it must be, by what its caller was told."""
    assert handle.outbox.last is not None, "a request that is open though the engine is idle"
    if handle.sequence is None:
        return "refused" if handle.abort_cause is None else "door"
    assert handle.outbox.last.finish_reason is not None
    return handle.outbox.last.finish_reason.value


def check_counts(requests: dict[str, Any], ended: Counter[str], choices: Counter[str]) -> None:
    """Every request that came in is in the one count of how it ended, and in no other."""
    finished, aborted = requests["finished_by_reason"], requests["aborted_by_cause_and_phase"]
    assert finished == {reason: ended[reason] for reason in finished}
    # Who left, who had no time, and choices of answers of which another was refused.
    assert {"client", "timeout"} <= set(aborted) <= {"client", "timeout", "error"}
    assert sum([phases.get("door", 0) for phases in aborted.values()]) == ended["door"]
    assert sum([sum(phases.values()) for phases in aborted.values()]) == ended["abort"] + ended["door"]
    assert set(ended) <= {"length", "stop", "abort", "door", "refused"}
    assert ended["refused"] <= sum(requests["rejected_by_reason"].values())
    assert ended["stop"]
    # Who left may have had the answer already.
    assert choices["served"] <= ended["length"] + ended["stop"] <= choices["served"] + choices["open"]
