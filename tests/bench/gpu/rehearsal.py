"""The processor in a GPU's place, under Triton's interpreter; what it measures means nothing."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import triton

from engine.config import EngineConfig
from engine.gpu.gpus import MIB, Gpus, HostClock
from engine.gpu.runner import GpuRunner, Sizes
from kernels.bench.timing import Device, Rates
from tests.quick_interpreter import stay_dressed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.gpu.gpus import Clock, GpuRunnerLike
    from engine.loading.checkpoint import Checkpoint

ROUNDS = 3
# Room for few seats and short steps: the interpreter takes milliseconds for a program.
TINY = EngineConfig(
    device="cuda", dtype="float32", cache_memory_bytes=MIB, max_num_seqs=2, max_num_batched_tokens=4,
    capacity_num_seqs=2, capacity_num_batched_tokens=4,
)  # fmt: skip


class Interpreter(Device):
    """Cases are timed by this machine's clock, with one set of operands each."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        stay_dressed()

    def describe(self) -> str:
        return f"Triton's interpreter, torch {torch.__version__}, triton {triton.__version__}"

    def has_what_it_takes(self, case: object) -> bool:
        return True

    def cache_bytes(self) -> int:
        return 0

    def time(self, launches: Sequence[Callable[[], object]]) -> float:
        return median([_seconds(launches) for _ in range(ROUNDS)]) / len(launches)

    def rates(self) -> Rates:
        source, square = torch.zeros(2**22), torch.zeros(256, 256)
        copied = self.time([partial(torch.empty_like(source).copy_, source)])
        multiplied = self.time([partial(torch.mm, square, square)])
        return Rates(2 * source.nbytes / copied, 2 * 256**3 / multiplied)

    def allocated_bytes(self) -> int:
        return 0

    def release(self) -> None:
        pass


class Rehearsal(Gpus):
    """One, whose runner computes at once and has no graphs."""

    def obstacle(self, index: int) -> None:
        return None

    def count(self) -> int:
        return 1

    def describe(self, index: int) -> str:
        return "none: a rehearsal in Triton's interpreter"

    def multiplies_bfloat16(self, index: int) -> bool:
        return False

    def has_float8(self, index: int) -> bool:
        return False

    def make_runner(self, checkpoint: Checkpoint, index: int, **options: Any) -> GpuRunnerLike:
        names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size")
        sizes = Sizes(*[options.pop(name) for name in names])
        stay_dressed()
        return GpuRunner(checkpoint, sizes, device=torch.device("cpu"), **options)

    def torch_device(self, index: int | None) -> torch.device:
        return torch.device("cpu")

    def clock(self, index: int) -> Clock:
        return HostClock()

    def rates(self, index: int) -> tuple[float, float]:
        rates = Interpreter().rates()
        return rates.copy, rates.multiply

    def free_bytes(self, index: int) -> int:
        return 256 * MIB

    def peak_bytes(self, index: int, run: Callable[[], object]) -> int:
        run()
        return MIB

    def capture(self, runner: GpuRunnerLike, report: Callable[[int, int], object]) -> None:
        pass


def _seconds(launches: Sequence[Callable[[], object]]) -> float:
    began = time.perf_counter()
    for launch in launches:
        launch()
    return time.perf_counter() - began
