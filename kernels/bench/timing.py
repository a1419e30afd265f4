"""How long a launch takes on a device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.bench.cases import Case

REPLAYS = 10
# Launches in a graph: enough that its own start does not count.
LAUNCHES = 20
# So many times the second-level cache are the operands that take turns.
CACHE_TURNS = 4
MAX_COPIES = 64
# They take so much memory together, or are one set: there is room for it on a card of 16 GB.
MAX_COPIES_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best, measured now.

    Attributes:
        copy: bytes a second, read and written, of a copy.
        multiply: floating-point operations a second of a large bfloat16 product.
    """

    copy: float
    multiply: float


@dataclass(frozen=True, slots=True)
class Timing:
    """A case on the clock.

    Attributes:
        seconds: of one launch.
        rival_seconds: of torch's own way, where there is one and it works.
        num_bytes, flops: as in `Work`.
        rival_failed: why there is no time of torch's own way, which there is.
    """

    seconds: float
    rival_seconds: float | None
    num_bytes: int
    flops: int
    rival_failed: str = ""


def time_launches(launches: Sequence[Callable[[], object]]) -> float:
    """Seconds of one launch, the median of `REPLAYS` replays of a graph in which all take turns.

    A graph, because Python takes longer to launch a small kernel than the device to run it.
    """
    rounds = -(-LAUNCHES // len(launches))
    for launch in launches:  # compiles, and takes what memory it wants
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    seconds: list[float] = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / (rounds * len(launches)))
    return median(seconds)


def measure_rates(device: torch.device) -> Rates:
    """A copy of 2 GiB, and a product of two matrices of 8192 × 8192."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device)
    copied = time_launches([partial(torch.empty_like(source).copy_, source)])
    left, right = torch.randn((2, 8192, 8192), dtype=torch.bfloat16, device=device)
    multiplied = time_launches([partial(torch.mm, left, right, out=torch.empty_like(left))])
    return Rates(2 * source.nbytes / copied, 2 * 8192**3 / multiplied)


class Device:
    """A GPU that cases are timed on; in tests a made up one stands in its place.

    Args:
        torch_device: where operands are made; the current one.
    """

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device

    def describe(self) -> str:
        """Its name and size, and the versions of what computes."""
        import triton

        properties = torch.cuda.get_device_properties(self.torch_device)
        versions = f"torch {torch.__version__}, triton {triton.__version__}"
        return f"{properties.name}, {properties.multi_processor_count} multiprocessors, {versions}"

    def has_what_it_takes(self, case: Case) -> bool:
        """Whether it is of the case's architecture or a later one; of AMD's everything is asked."""
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        return torch.version.hip is not None or 10 * major + minor >= case.least_arch

    def cache_bytes(self) -> int:
        """Of its second-level cache."""
        return int(torch.cuda.get_device_properties(self.torch_device).L2_cache_size)

    def time(self, launches: Sequence[Callable[[], object]]) -> float:
        """As `time_launches`."""
        return time_launches(launches)

    def rates(self) -> Rates:
        """As `measure_rates`."""
        return measure_rates(self.torch_device)

    def allocated_bytes(self) -> int:
        """Of all tensors that there are."""
        return torch.cuda.memory_allocated(self.torch_device)

    def release(self) -> None:
        """Give back memory that nothing lies in any more.

        Raises:
            RuntimeError: what was launched before broke the device for this process.
        """
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()


def time_case(case: Case, device: Device) -> Timing:
    """Check it, then time it, on so many sets of operands that none is still in a cache when its turn comes.

    Of small ones, and of those that are a small part of what is read from, there are fewer, and the cache has them.

    Raises:
        AssertionError: it is not what the plain version gives.
    """
    before = device.allocated_bytes()
    first = case.make(device.torch_device)
    room = max(1, device.allocated_bytes() - before)
    first.check()
    device.release()  # of the plain version's large intermediate results
    wanted = -(-CACHE_TURNS * device.cache_bytes() // max(1, first.num_bytes))
    copies = max(1, min(MAX_COPIES, wanted, MAX_COPIES_BYTES // room))
    works = [first, *(case.make(device.torch_device) for _ in range(copies - 1))]
    seconds = device.time([work.run for work in works])
    rivals = [work.rival for work in works if work.rival]
    try:
        rival_seconds, why = device.time(rivals) if rivals else None, ""
    except Exception as error:  # whatever it is, our own figure is none the worse for it
        rival_seconds, why = None, told(error)
    return Timing(seconds, rival_seconds, first.num_bytes, first.flops, why)


def told(error: Exception) -> str:
    """An error in one line."""
    why = "WRONG" if isinstance(error, AssertionError) else type(error).__name__
    return f"{why}: {' '.join(str(error).split())}"
