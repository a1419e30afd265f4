"""What the processor does of each step on a GPU, without one: `python -m tests.bench.gpu_host [--rows 256]`.

Every row decodes; one in sixteen crosses a block border in each step, and steps overlap. Kernels are compiled for a GPU
and launched on a driver that does nothing, graphs are replayed by nobody: what is left is planning, the step's inputs,
what rows ask for, Triton's launches, reading what came, and applying it. Copies go from memory to memory, and what
torch computes for log-probabilities it computes here, over a tiny vocabulary.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, cast

import torch
import triton

from engine.config import Limits
from engine.gpu.graphs import Graphs, graph_size, sizes_for
from engine.gpu.runner import GpuRunner, Sizes
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from kernels.gpu.targets import DEVICES, TargetDriver
from tests.gpu_runner import make_gpu_runner

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from engine.gpu.columns import Columns

CONTEXT, BLOCK_SIZE, PROMPT = 1024, 16, 100
STOPS = frozenset({2, 3})
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top-p": {"top_p": 0.95, "top_k": 40},
    "min_tokens": {"min_tokens": CONTEXT},
    "bias of 10": {"logit_bias": tuple((token_id, 1.0) for token_id in range(5, 15))},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "5 log-probabilities": {"num_logprobs": 5},
}


class NoGraphs:
    """Stands where graphs would: a replay does nothing, and draws token 0."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._sizes = sizes_for(max_num_seqs)
        self._logits = torch.zeros(max_num_seqs, vocab_size)

    def size_for(self, columns: Columns) -> int | None:
        """As of real ones."""
        return graph_size(columns, self._sizes)

    def logits(self, size: int) -> torch.Tensor:
        """Zeros, or what was made of them."""
        return self._logits[:size]

    def draw(self, size: int) -> None:
        """Nothing."""


class Crowd:
    """So many rows that decode, all of one kind, one step planned ahead."""

    def __init__(self, num_rows: int, **params: Any) -> None:
        sizes = Sizes(num_rows, num_rows * PROMPT * 2, CONTEXT, BLOCK_SIZE)
        self.runner = make_gpu_runner(GpuRunner, sizes, 1, device=torch.device("cpu"))
        self.runner.graphs = cast("Graphs", NoGraphs(num_rows, self.runner.config.vocab_size))
        cache = KVCache(num_rows * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
        limits = Limits(num_rows, sizes.max_num_batched_tokens)
        self.scheduler = Scheduler(cache, limits=limits, num_seats=num_rows, max_model_len=CONTEXT, may_draft=False)
        for number in range(num_rows):
            prompt = tuple((number * 31 + place) % 200 + 5 for place in range(PROMPT + number % BLOCK_SIZE))
            sampling = SamplingParams(seed=number, stop_token_ids=STOPS, **params)
            self.scheduler.add(Sequence(number, f"r{number}", prompt, sampling, arrival_time=0.0))
        self._batch = self.scheduler.schedule(0.0)
        self.scheduler.launched(self._batch)
        self._ticket = self.runner.launch(self._batch)

    def step(self) -> tuple[float, ...]:
        """CPU seconds of planning a step, of launching it, of reading the one before it, and of applying that."""
        times = [time.thread_time()]
        batch = self.scheduler.schedule(0.0)
        self.scheduler.launched(batch)
        times.append(time.thread_time())
        ticket = self.runner.launch(batch)
        times.append(time.thread_time())
        output = self.runner.collect(self._ticket)
        times.append(time.thread_time())
        self.scheduler.update(self._batch, output, 0.0)
        times.append(time.thread_time())
        self._batch, self._ticket = batch, ticket
        return tuple([after - before for before, after in pairwise(times)])


def main(argv: Ordered[str] | None = None) -> None:
    """Print the table: medians in microseconds of the thread's CPU time."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu_host", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200, help=f"of each kind, at most {CONTEXT - 2 * PROMPT}")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=[*KINDS], help="what rows ask for")
    parser.add_argument("--profile", action="store_true", help="tell where the time of the runner goes instead")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(TargetDriver(DEVICES["sm_90"], 0))
    print(f"{'rows of':20}  plan  launch  read  apply  together", flush=True)
    for kind in options.kind:
        crowd = Crowd(options.rows, **KINDS[kind])
        for _ in range(20):
            crowd.step()  # compiles
        gc.collect()
        gc.freeze()
        profile = cProfile.Profile(builtins=False)
        if options.profile:
            profile.enable()
        times = [crowd.step() for _ in range(options.steps)]
        profile.disable()
        parts = [median(column) * 1e6 for column in zip(*times, strict=True)]
        together = median([sum(each) for each in times]) * 1e6
        print(f"{kind:20}  " + "  ".join(f"{part:5.0f}" for part in parts) + f"  {together:8.0f}", flush=True)
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
