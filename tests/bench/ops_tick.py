"""What a tick of the dashboard costs the server: milliseconds of CPU of each partial, and of looking at the engine.

    python -m tests.bench.ops_tick [--seats 256] [--blocks 100000] [--minutes 15]

What is drawn comes from a made-up engine: every seat taken, a queue, and windows full of samples. The engine's own
numbers are asked of a real one over the fake model, with as many on its seats. Medians, and the least of all ticks,
which is what counts where others use the machine.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import trio

from app.render.view import PARTS
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.fake_snapshot import FakeEngine, watched
from tests.fakes import fake_config, open_fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.engine import Engine

WARM_SECONDS = 120
TOKENS = 200_000
STEPS_A_TICK = 10
WAITING = 40


class Watch:
    """CPU seconds of this thread by what they went into, a figure a tick."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Do it and note what it took."""
        began = time.thread_time()
        answer = call(*arguments)
        self.seconds[name].append(time.thread_time() - began)
        return answer


def fill(engine: FakeEngine, seconds: int) -> None:
    """An hour's worth of gaps between tokens, as a fast machine would have."""
    source, window = random.Random(5), engine.stats.interactive.windows["itl"]
    for number in range(TOKENS):
        window.add(seconds * number / TOKENS, source.lognormvariate(-3, 0.6))
    engine.now = float(seconds)


async def run_steps(engine: Engine, number: int) -> None:
    """Let the engine go on by so many."""
    until = engine.snapshot()["step"]["count"] + number
    while engine.snapshot()["step"]["count"] < until:
        await trio.sleep(0.01)


async def watch_engine(options: argparse.Namespace, watch: Watch) -> None:
    """The numbers of an engine whose seats are all taken."""
    limits = {"max_num_seqs": options.seats, "max_num_batched_tokens": 4 * options.seats, "block_size": 16}
    config = fake_config(**limits, capacity_num_seqs=options.seats, capacity_num_batched_tokens=4 * options.seats)
    async with open_fake_engine(config, num_blocks=options.blocks, max_model_len=2048, step_seconds=0.0) as engine:
        for number in range(options.seats + WAITING):
            prompt = TextPrompt("hello " * (number % 30 + 1))
            params = SamplingParams(max_tokens=1000)
            engine.submit(GenerationRequest(f"chatcmpl-{number:024x}", prompt, params, ignore_eos=True))
            await trio.lowlevel.checkpoint()
        await run_steps(engine, WARM_SECONDS)
        for _ in range(options.ticks):
            await run_steps(engine, STEPS_A_TICK)
            watch("(the engine's numbers)", engine.snapshot)


async def watch_pages(options: argparse.Namespace, watch: Watch) -> None:
    """Everything that is done with such numbers."""
    engine = FakeEngine("overloaded", seats=options.seats, budget=1024, total_blocks=options.blocks, rate=60.0)
    fill(engine, options.minutes * 60)
    telemetry = watched(engine, WARM_SECONDS)
    window = options.window * 60
    for _ in range(options.ticks):
        engine.advance()
        snapshot = engine.snapshot()
        with patch.object(engine, "snapshot", partial(dict, snapshot)):
            watch("(kept and written down)", telemetry.tick, engine.now)
        scene = watch("(numbers of the window)", telemetry._scene, snapshot, window)
        for name in PARTS:
            watch(name, telemetry._render, name, scene)
    print(f"{len(engine.running)} of {engine.seats} seats taken, {len(engine.waiting)} wait, {options.blocks:,} blocks")


async def measure(options: argparse.Namespace) -> None:
    """Print the table."""
    watch = Watch()
    await watch_engine(options, watch)
    await watch_pages(options, watch)
    totals = [0.0, 0.0]
    for name, taken in watch.seconds.items():
        middle, least = median(taken) * 1e3, min(taken) * 1e3
        totals = [totals[0] + middle, totals[1] + least]
        print(f"{name:26} {middle:8.2f} {least:8.2f} ms")
    print(f"{'all':26} {totals[0]:8.2f} {totals[1]:8.2f} ms")


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
