"""What a tick of the dashboard costs the server: milliseconds of each partial, and of looking at the engine.

    python -m tests.bench.ops_tick [--seats 256] [--blocks 100000] [--minutes 15]

The engine is made up; what is drawn is not: every seat taken, a queue, and windows full of samples. Medians.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, Any

import trio

from app.render.view import PARTS
from tests.fake_snapshot import FakeEngine, watched

if TYPE_CHECKING:
    from collections.abc import Callable

WARM_SECONDS = 120
TOKENS = 200_000


def fill(engine: FakeEngine, seconds: int) -> None:
    """An hour's worth of gaps between tokens, as a fast machine would have."""
    source, window = random.Random(5), engine.stats.interactive.windows["itl"]
    for number in range(TOKENS):
        window.add(seconds * number / TOKENS, source.lognormvariate(-3, 0.6))
    engine.now = float(seconds)


async def measure(options: argparse.Namespace) -> None:
    """Print the table."""
    engine = FakeEngine("overloaded", seats=options.seats, budget=1024, total_blocks=options.blocks, rate=60.0)
    fill(engine, options.minutes * 60)
    telemetry = watched(engine, WARM_SECONDS)
    seconds: defaultdict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        answer = call(*arguments)
        seconds[name].append(time.perf_counter() - began)
        return answer

    window = options.window * 60
    for _ in range(options.ticks):
        engine.advance()
        telemetry.tick(engine.now)
        snapshot = engine.snapshot()
        scene = timed("(numbers of the window)", telemetry._scene, snapshot, window)
        for name in PARTS:
            timed(name, telemetry._render, name, scene)
    taken_seats, waiting = len(engine.running), len(engine.waiting)
    print(f"{taken_seats} of {engine.seats} seats taken, {waiting} wait, {engine.total_blocks:,} blocks")
    total = 0.0
    for name, taken in seconds.items():
        total += median(taken)
        print(f"{name:26} {median(taken) * 1e3:8.2f} ms")
    print(f"{'all':26} {total * 1e3:8.2f} ms")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--minutes", type=int, default=15, help="that the samples are spread over")
    parser.add_argument("--window", type=int, default=5, choices=(1, 5, 15, 60), help="that is watched, in minutes")
    parser.add_argument("--ticks", type=int, default=15)
    trio.run(measure, parser.parse_args())


if __name__ == "__main__":
    main()
