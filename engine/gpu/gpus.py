"""The GPUs that torch reaches. What only they can answer or do is asked here and nowhere else in the start."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import torch

from engine.gpu.graphs import Graphs
from engine.stepper import Runner
from kernels.build import what_triton_lacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.gpu.graphs import Replay
    from engine.gpu.runner import GpuRunner
    from engine.loading.checkpoint import Checkpoint
    from engine.sequence import SamplingParams

T = TypeVar("T")
MIB: Final = 1 << 20
# The kernels compile for NVIDIA's GPUs from here on; torch's own builds begin earlier.
LEAST_CAPABILITY: Final = (8, 0)


class GpuRunnerLike(Runner, Protocol):
    """A runner on a GPU, as the start sees it."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the cache."""
        ...

    def load(self) -> None:
        """Read the weights."""
        ...

    def allocate_cache(self, num_blocks: int) -> None:
        """Make room for so many blocks."""
        ...

    def run_empty(
        self, num_rows: int, num_tokens: int, *, filtered: bool = True, params: SamplingParams | None = None
    ) -> None:
        """Compute a step of rows that stand for nothing; as in `engine.gpu.runner`."""
        ...


class Clock(Protocol):
    """Tells when the device has come to a place in what was asked of it."""

    def mark(self) -> Any:
        """That place is here, behind everything that was launched; does not wait."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks; waits for the second."""
        ...


class HostClock:
    """Of a device that computes at once."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Between two marks."""
        return end - begin


class GpuClock:
    """Of the device that the calling thread launches on."""

    def mark(self) -> torch.cuda.Event:
        """An event that the device passes."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Between two events."""
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class CudaRecorder:
    """CUDA's graphs, and HIP's, which torch calls by the same name."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], T]) -> tuple[Replay, T]:
        """See `engine.gpu.graphs.Recorder`. Waits for the device."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = call()
        return graph.replay, result


class Gpus:
    """NVIDIA's, and AMD's, which go by the same name in torch."""

    def obstacle(self, index: int) -> str | None:
        """What stands in the way of computing on a GPU, or `None`; of one that is not there what goes for all."""
        if not torch.cuda.is_available():
            built_for = torch.version.cuda or torch.version.hip
            return f"torch {torch.__version__} " + (
                "finds no GPU" if built_for else "is built for CPUs alone (the README tells of the one for GPUs)"
            )
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        if torch.version.hip is None and index < torch.cuda.device_count():
            capability = torch.cuda.get_device_capability(index)
            if unfit := unfit_architecture(capability, torch.cuda.get_arch_list()):
                return f"cuda:{index} is {unfit}"
        return what_triton_lacks()

    def count(self) -> int:
        """How many there are."""
        return torch.cuda.device_count()

    def describe(self, index: int) -> str:
        """A GPU in words: its name, memory and architecture."""
        properties = torch.cuda.get_device_properties(index)
        what = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        arch = properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        return f"{properties.name}, {properties.total_memory // MIB} MiB, {arch}, torch built for {what}"

    def multiplies_bfloat16(self, index: int) -> bool:
        """Whether it has such products of its own."""
        with torch.cuda.device(index):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def has_float8(self, index: int) -> bool:
        """Whether it makes eight-bit floats (e4m3): NVIDIA's do from sm_89 on, AMD's have others by that name."""
        return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 9)

    def make_runner(
        self,
        checkpoint: Checkpoint,
        index: int,
        *,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        blocks: str | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        silent_ids: tuple[int, ...],
    ) -> GpuRunnerLike:
        """A runner that has not loaded its model yet; as in `engine.gpu.runner`."""
        from engine.gpu.runner import GpuRunner, Sizes  # needs triton

        torch.cuda.set_device(index)  # Triton launches on the current one; the calling thread makes all steps
        sizes = Sizes(max_num_seqs, max_num_batched_tokens, max_model_len, block_size)
        device = torch.device("cuda", index)
        return GpuRunner(
            checkpoint,
            sizes,
            device=device,
            dtype=dtype,
            cache_dtype=cache_dtype,
            blocks=blocks,
            silent_ids=silent_ids,
            make_event=torch.cuda.Event,
            num_multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        )

    def torch_device(self, index: int | None) -> torch.device:
        """As torch has it; `None` is the processor."""
        return torch.device("cpu") if index is None else torch.device("cuda", index)

    def clock(self, index: int) -> Clock:
        """Tells the time on it."""
        torch.cuda.set_device(index)
        return GpuClock()

    def rates(self, index: int) -> tuple[float, float]:
        """Bytes a second of a copy, read and written, and operations a second of a large product; measured."""
        from kernels.bench.timing import measure_rates

        torch.cuda.set_device(index)
        rates = measure_rates(torch.device("cuda", index))
        torch.cuda.empty_cache()
        return rates.copy, rates.multiply

    def free_bytes(self, index: int) -> int:
        """Memory that nobody has, after what torch keeps in reserve was given back."""
        torch.cuda.synchronize(index)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(index)
        return free

    def peak_bytes(self, index: int, run: Callable[[], object]) -> int:
        """The most memory that a call takes beside what is taken already."""
        torch.cuda.synchronize(index)
        torch.cuda.reset_peak_memory_stats(index)
        before = torch.cuda.memory_allocated(index)
        run()
        torch.cuda.synchronize(index)
        return torch.cuda.max_memory_allocated(index) - before

    def capture(self, runner: GpuRunnerLike, report: Callable[[int, int], object]) -> None:
        """Have decode steps captured as graphs; `report` is told (sizes done, sizes)."""
        mine, graphs = cast("GpuRunner", runner), Graphs(CudaRecorder())  # by `make_runner`
        graphs.capture(mine, report)
        mine.graphs = graphs


def unfit_architecture(capability: tuple[int, int], built_for: Sequence[str]) -> str | None:
    """Of an NVIDIA GPU for which there are no kernels, or no binary in torch: which it is and why not, in words.

    Args:
        built_for: as torch tells it. A binary (`sm_86`) runs on later ones of its generation (8.9), and what is not
            compiled to the end (`compute_90`) on all later ones.
    """
    major, minor = capability
    if capability < LEAST_CAPABILITY:
        return f"sm_{major}{minor}, and the kernels are for sm_80 and later"
    if not built_for:
        return None
    for kind, number in [name.split("_") for name in built_for if name.startswith(("sm_", "compute_"))]:
        own = divmod(int(number.rstrip("af")), 10)
        if own <= capability and (kind == "compute" or own[0] == major):
            return None
    return f"sm_{major}{minor}, and torch {torch.__version__} is built for {', '.join(built_for)}"
