"""The machine as a bench sees it: its processor, and how fast it reads memory and multiplies matrices."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Protocol

import torch

from engine.gpu.device import CPU
from engine.processors import available_cores, processor_name

if TYPE_CHECKING:
    from engine.gpu.device import Device
    from engine.models.config import ModelConfig
    from engine.precision import Model

READ_BYTES = 256 << 20  # larger than any processor's cache


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model runs on.

    Attributes:
        memory_bytes_per_second: reading memory in one long run, measured.
        product_flops_per_second: the most that the kind of product the model uses reaches here, measured.
    """

    processor: str
    vector_extension: str
    threads: int
    torch: str
    memory_bytes_per_second: float
    product_flops_per_second: float


@torch.inference_mode()
def measure_machine(model: Model) -> Machine:
    """Name the processor and measure how fast it reads and multiplies."""
    memory = torch.ones(READ_BYTES // 4)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - begin)
    return Machine(
        processor=processor_name(),
        vector_extension=torch.backends.cpu.get_cpu_capability(),
        threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        memory_bytes_per_second=READ_BYTES / median(times),
        product_flops_per_second=model.product_rate(),
    )


def machine_facts(num_threads: int = 0, device: Device = CPU) -> dict[str, str]:
    """What computes, in words, without measuring it; 0 threads are as many as there are cores to take."""
    if device.gpu is not None:
        return {"device": device.name, "processor": device.reason, "torch": f"torch {torch.__version__}"}
    return {
        "processor": processor_name(),
        "vector_extension": torch.backends.cpu.get_cpu_capability(),
        "threads": f"{num_threads or available_cores()} threads",
        "torch": f"torch {torch.__version__}",
    }


class Readable(Protocol):
    """A model as far as its weights are read."""

    config: ModelConfig

    @property
    def read_bytes(self) -> int:
        """Weights that a step reads."""
        ...


def work_of(model: Readable, kv_bytes_per_token: int, batch: int, context: int, new_tokens: int) -> tuple[int, int]:
    """What a step cannot do without: bytes of weights and cache read, arithmetic operations.

    Args:
        batch: sequences, of `context` tokens with the `new_tokens` of the step, behind which one is drawn.
    """
    config = model.config
    head = config.vocab_size * config.hidden_size
    products = batch * (new_tokens * (config.num_products - head) + head)
    pairs = batch * sum(range(context - new_tokens + 1, context + 1))
    attended = config.num_heads * config.head_size * config.num_layers
    return model.read_bytes + batch * context * kv_bytes_per_token, 2 * products + 4 * pairs * attended
