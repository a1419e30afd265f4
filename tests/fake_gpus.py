"""GPUs that are made up: what is decided about real ones is tested with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine.batch import StepOutput
from engine.gpu.gpus import MIB, Gpus
from tests.fakes import FakeRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.batch import ScheduledBatch
    from engine.gpu.gpus import GpuRunnerLike
    from engine.loading.checkpoint import Checkpoint

KV_BYTES = 1024


class FakeGpuRunner(FakeRunner):
    """Notes what it is asked for; its weights take what it is told they do."""

    def __init__(self, gpus: FakeGpus) -> None:
        super().__init__(1, 16)
        self.gpus = gpus
        self.calls: list[tuple[Any, ...]] = []
        self.kv_bytes_per_token = KV_BYTES

    def load(self) -> None:
        self.calls.append(("load",))
        self.gpus.take(self.gpus.weight_bytes)

    def allocate_cache(self, num_blocks: int) -> None:
        self.calls.append(("allocate_cache", num_blocks))
        self.gpus.take(num_blocks * 16 * KV_BYTES if num_blocks > 1 else 0)

    def run_empty(self, num_rows: int, num_tokens: int, *, filtered: bool = True, params: Any = None) -> None:
        name = "run_empty" + " with all" * (params is not None) if filtered else "warm_up"
        self.calls.append((name, num_rows, num_tokens))

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        self.calls.append(("execute", batch.starts[0], batch.counts[0]))
        return StepOutput(batch.step, (0,))

    def reset(self) -> None:
        self.calls.append(("reset",))


class FakeGpus(Gpus):
    """Two GPUs of so many bytes; a step takes a mebibyte a token."""

    def __init__(self, size: int = 4096 * MIB, *, weight_bytes: int = 1024 * MIB, why: str | None = None) -> None:
        self.free, self.weight_bytes, self.why = size, weight_bytes, why
        self.has_bfloat16 = self.makes_float8 = True
        self.graph_bytes = 8 * MIB
        self.runner = FakeGpuRunner(self)
        self.made: dict[str, Any] = {}

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")
        self.free -= num_bytes

    def obstacle(self, index: int) -> str | None:
        return self.why

    def count(self) -> int:
        return 2

    def describe(self, index: int) -> str:
        return f"Imaginary {index}"

    def multiplies_bfloat16(self, index: int) -> bool:
        return self.has_bfloat16

    def has_float8(self, index: int) -> bool:
        return self.makes_float8

    def make_runner(self, checkpoint: Checkpoint, index: int, **sizes: Any) -> GpuRunnerLike:
        self.made = {"index": index, "layers": checkpoint.config.num_layers, **sizes}
        return self.runner

    def free_bytes(self, index: int) -> int:
        return self.free

    def peak_bytes(self, index: int, run: Callable[[], object]) -> int:
        run()
        num_bytes: int = self.runner.calls[-1][2] * MIB
        self.take(num_bytes)
        self.free += num_bytes
        return num_bytes

    def capture(self, runner: GpuRunnerLike, report: Callable[[int, int], object]) -> None:
        assert runner is self.runner
        self.take(self.graph_bytes)
        for done in range(1, 9):
            report(done, 8)
