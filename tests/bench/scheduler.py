"""What planning and applying one step costs, without a model: `python -m tests.bench.scheduler`.

Every sequence decodes; one in sixteen crosses a block border in each step. With the prefix cache, without it and with
overlapping steps in turn, so that all see the same machine.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median

from engine.batch import ScheduledBatch, StepOutput
from engine.config import Limits
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence

STEPS = 200
CASES = ((16, 0), (64, 0), (256, 0), (256, 1_000), (256, 10_000))


def make_scheduler(num_running: int, num_waiting: int, *, enable_prefix_caching: bool) -> Scheduler:
    """Running sequences of unequal length, past their prompts, and a queue."""
    cache = KVCache(100_000, 16, enable_prefix_caching=enable_prefix_caching)
    scheduler = Scheduler(cache, limits=Limits(num_running, 1_000_000), num_seats=num_running, max_model_len=8192)
    for number in range(num_running + num_waiting):
        prompt = tuple((number * 31 + i) % 50_000 for i in range(100 + number % 16))
        params = SamplingParams(stop_token_ids=frozenset({2}))
        scheduler.add(Sequence(number, f"r{number}", prompt, params, arrival_time=0.0))
    run_step(scheduler)
    return scheduler


def run_step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds of `schedule` and of `update`."""
    begin = time.perf_counter()
    batch = scheduler.schedule(0.0)
    planned = time.perf_counter()
    output = StepOutput(batch.step, (7,) * len(batch))
    executed = time.perf_counter()
    scheduler.update(batch, output, 0.0)
    return planned - begin, time.perf_counter() - executed


def run_ahead(scheduler: Scheduler, under_way: deque[ScheduledBatch]) -> float:
    """Seconds of planning a step and launching it, and of applying the one before it."""
    begin = time.perf_counter()
    batch = scheduler.schedule(0.0)
    scheduler.launched(batch)
    planned = time.perf_counter()
    under_way.append(batch)
    last = under_way.popleft()
    output = StepOutput(last.step, (7,) * len(last))
    executed = time.perf_counter()
    scheduler.update(last, output, 0.0)
    return planned - begin + time.perf_counter() - executed


def main() -> None:
    """Print the table."""
    print(
        "running  waiting  schedule us  update us  together us  overlapping us  without prefix cache us  "
        "cost of the cache"
    )
    for num_running, num_waiting in CASES:
        with_cache, without, ahead = (
            make_scheduler(num_running, num_waiting, enable_prefix_caching=enabled) for enabled in (True, False, True)
        )
        under_way = deque([ahead.schedule(0.0)])
        ahead.launched(under_way[0])
        times = [(*run_step(with_cache), *run_step(without), run_ahead(ahead, under_way)) for _ in range(STEPS)]
        schedule, update = (median(row[i] for row in times) * 1e6 for i in (0, 1))
        plain = median(row[2] + row[3] for row in times) * 1e6
        overlapping = median(row[4] for row in times) * 1e6
        mean = [sum(row[0] + row[1] - row[2] - row[3] for row in times) / STEPS * 1e6]
        print(
            f"{num_running:7}  {num_waiting:7}  {schedule:11.0f}  {update:9.0f}  {schedule + update:11.0f}  "
            f"{overlapping:14.0f}  {plain:23.0f}  {mean[0]:+.0f} us a step"
        )


if __name__ == "__main__":
    main()
