"""Which kernels a GPU's compiler is asked for once a server has started; there are to be none.

To be started in a process of its own: no kernel is compiled or launched in it, the compiler only notes what it is asked
for. Everything else is what a server does, from its start on, with one of each thing that a request may ask for.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import triton

from engine.config import EngineConfig, Limits
from engine.gpu.gpus import MIB, Gpus
from engine.gpu.graphs import Graphs
from engine.gpu.runner import GpuRunner, Sizes
from engine.gpu.startup import Anything, prepare_on_gpu
from engine.kv_cache import KVCache
from engine.scheduler import Scheduler
from engine.sequence import SamplingParams, Sequence
from kernels.gpu.targets import DEVICES, TargetDriver
from kernels.gpu.traits import Traits
from tests.fake_checkpoint import make_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.batch import ScheduledBatch
    from engine.gpu.gpus import GpuRunnerLike
    from engine.loading.checkpoint import Checkpoint

# The longest row of a step of all seats is of a smaller kind than that of one sequence alone.
CONTEXT, BLOCK_SIZE, SEATS, TOKENS, NUM_BLOCKS = 512, 16, 40, 290, 200
# As of an H200.
ARCH, NUM_MULTIPROCESSORS = 90, 132
# What is computed in, and what the cache is of.
DTYPES = (("bfloat16", "auto"), ("native", "auto"), ("bfloat16", "fp8"))
STEPS = 50
ASKS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.9, "top_k": 7, "min_p": 0.1},
    {"temperature": 0.0, "num_logprobs": 3},
    {"min_tokens": 5, "stop_token_ids": frozenset({3, 4})},
    {"frequency_penalty": 0.5, "num_logprobs": 0},
    {"logit_bias": tuple((token_id, 1.0) for token_id in range(17)), "presence_penalty": 0.1},
    {"repetition_penalty": 1.2, "logit_bias": ((7, 1.0),)},
)


class Recorder:
    """Makes graphs of nothing."""

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return (lambda: None), call()


class NoGpus(Gpus):
    """A GPU whose memory is the machine's, and which computes nothing."""

    def make_runner(self, checkpoint: Checkpoint, index: int, **options: Any) -> GpuRunnerLike:
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
        sizes = Sizes(*[options.pop(name) for name in names])
        options["num_multiprocessors"] = NUM_MULTIPROCESSORS
        return GpuRunner(checkpoint, sizes, device=torch.device("cpu"), **options)

    def has_float8(self, index: int) -> bool:
        return True

    def multiplies_bfloat16(self, index: int) -> bool:
        return True

    def free_bytes(self, index: int) -> int:
        return 256 * MIB

    def peak_bytes(self, index: int, run: Callable[[], object]) -> int:
        run()
        return MIB

    def capture(self, runner: GpuRunnerLike, report: Callable[[int, int], object]) -> None:
        assert isinstance(runner, GpuRunner)
        graphs = Graphs(Recorder())
        graphs.capture(runner, report)
        runner.graphs = graphs


def start(dtype: str, cache_dtype: str) -> tuple[GpuRunner, int]:
    """A runner as it is when the server is ready, and how many blocks it has."""
    checkpoint = replace(
        make_checkpoint(context_length=CONTEXT, vocab_size=264, hidden_size=96, head_size=32),
        tokenizer=SimpleNamespace(silent_ids=(9,)),
    )
    config = EngineConfig(
        model="tiny", dtype=dtype, kv_cache_dtype=cache_dtype, device="cuda", block_size=BLOCK_SIZE,
        capacity_num_seqs=SEATS, capacity_num_batched_tokens=TOKENS, cache_memory_bytes=None,
    )  # fmt: skip
    prepared = prepare_on_gpu(config, checkpoint, 0, CONTEXT, NoGpus())
    assert isinstance(prepared.runner, GpuRunner)
    return prepared.runner, min(NUM_BLOCKS, prepared.num_blocks)


def serve(runner: GpuRunner, num_blocks: int, policy: str) -> int:
    """Answer a crowd of requests; gives the number of steps."""
    limits = Limits(SEATS, TOKENS, policy=policy)
    cache = KVCache(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(cache, limits=limits, num_seats=SEATS, max_model_len=CONTEXT, may_draft=False)
    order = random.Random(policy)
    for number in range(120):
        length = order.choice((1, 2, 16, 17, 31, 64, 100, 333)) if number else 333
        asks = order.choice((*ASKS, {"constraint": Anything(300)}))
        params = SamplingParams(**{"max_tokens": order.randrange(1, 40), "seed": number, **asks})
        prompt = tuple(order.randrange(5, 250) for _ in range(length))
        scheduler.add(Sequence(number, f"r{number}", prompt, params, arrival_time=0.0))
    under_way: deque[tuple[ScheduledBatch, Any]] = deque()
    steps = 0
    while scheduler.num_running + scheduler.num_waiting and steps < STEPS:
        batch = scheduler.schedule(0.0)
        if not batch.is_empty:
            steps += 1
            if scheduler.may_overlap:
                scheduler.launched(batch)
            under_way.append((batch, runner.launch(batch)))
        if batch.is_empty or len(under_way) > int(scheduler.may_overlap):
            older, ticket = under_way.popleft()
            scheduler.update(older, runner.collect(ticket), 0.0)
    return steps


def main() -> None:
    """Print what is compiled late, and how much was compiled and computed."""
    asked: set[tuple[str, str]] = set()  # since the last start
    names: set[str] = set()
    late: list[str] = []
    state = {"is_ready": False}

    def hook(*, key: object, fn: Any, **_: Any) -> bool:
        name = str(fn.name)
        if (name, str(key)) not in asked:
            asked.add((name, str(key)))
            if state["is_ready"]:
                late.append(f"{name}: {key}")
        return True  # nothing is compiled, nor launched

    triton.runtime.driver.set_active(TargetDriver(DEVICES["sm_90"], 0))
    triton.knobs.runtime.jit_cache_hook = hook
    steps = num_asked = 0
    with patch("kernels.gpu.traits.INTERPRETER", Traits(ARCH, DEVICES["sm_90"].shared_bytes)):
        for dtypes in DTYPES:
            state["is_ready"] = False
            asked.clear()
            runner, num_blocks = start(*dtypes)
            state["is_ready"] = True
            steps += sum(map(partial(serve, runner, num_blocks), ("continuous", "static")))
            num_asked += len(asked)
            names |= {name.rpartition(".")[2] for name, _ in asked}
    print(f"{len(late)} late of {num_asked}, {len(names)} kernels, {steps} steps")
    print("\n".join(sorted(late)))
    print(" ".join(sorted(names)))


if __name__ == "__main__":
    main()
