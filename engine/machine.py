"""The machine as a bench sees it: its processor, and how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.models.llama import LlamaModel

READ_BYTES = 256 << 20  # larger than any processor's cache
PRODUCT_ROWS = 256  # enough for a product to be bound by arithmetic


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model runs on.

    Attributes:
        memory_bytes_per_second: reading memory in one long run, measured.
        product_flops_per_second: the model's own matrix products at `PRODUCT_ROWS` rows, measured.
    """

    processor: str
    vector_extension: str
    threads: int
    torch: str
    memory_bytes_per_second: float
    product_flops_per_second: float


@torch.inference_mode()
def measure_machine(model: LlamaModel) -> Machine:
    """Name the processor and measure how fast it reads and multiplies."""
    memory = torch.ones(READ_BYTES // 4)
    read_seconds = median(seconds_of(memory.sum) for _ in range(7))
    layers, config = model.layers[:8], model.config
    x = torch.randn(PRODUCT_ROWS, config.hidden_size)

    def multiply() -> None:
        for layer in layers:
            layer.gate_up(x)

    flops = 2 * PRODUCT_ROWS * config.hidden_size * 2 * config.intermediate_size * len(layers)
    return Machine(
        processor=processor_name(),
        vector_extension=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        memory_bytes_per_second=READ_BYTES / read_seconds,
        product_flops_per_second=flops / median(seconds_of(multiply) for _ in range(7)),
    )


def seconds_of(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def machine_facts(num_threads: int = 0) -> dict[str, str]:
    """What the machine is, in words, without measuring it; 0 threads are as many as torch takes by itself."""
    return {
        "processor": processor_name(),
        "vector_extension": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{num_threads or torch.get_num_threads()} threads",
        "torch": f"torch {torch.__version__}",
    }


def processor_name() -> str:
    """The processor's own name."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
