"""How fast whole steps are on a device, or with weights that nobody has: decode and prompts, against what they read.

Steps are launched as in service, the next before the one before it is read, and timed by the device's own clock.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

from engine.batch import ScheduledBatch, Seated
from engine.bench_offline import Pool, Spread, run_crowd
from engine.errors import ConfigError
from engine.gpu.device import choose_device
from engine.gpu.gpus import Gpus, HostClock
from engine.loaded import Prepared
from engine.machine import measure_machine, work_of
from engine.random_model import make_random_checkpoint
from engine.sequence import SamplingParams
from engine.startup import load_model, prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.batch import StepOutput
    from engine.bench_offline import Crowd, Measured
    from engine.config import EngineConfig
    from engine.gpu.device import Device
    from engine.gpu.gpus import Clock
    from engine.stepper import Ticket

    Report = Callable[[int, int, str], object]

MIN_STEPS, MAX_STEPS, WARM_STEPS = 5, 200, 3
PREFILL_TOKENS: Final = 2048
GPU_BATCHES: Final = (1, 16, 64, 256)
GPU_CONTEXTS: Final = (800, 4000)
# The defaults of the settings are for a laptop.
GPU_SEATS, GPU_TOKENS = 256, 8192


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Steps of `batch` sequences that have `context` tokens with the step's own.

    Attributes:
        new_tokens: that each sequence adds: 1 for decode.
        step_seconds: from the end of a step to the end of the next, median.
        floor_seconds: what reading weights and cache, or the arithmetic, takes at the measured rates of the machine.
        share_of_floor: floor_seconds / step_seconds; 1 is as good as the machine allows.
        host_seconds: of steps in Python, beside waiting for the device; `None` where there is none to wait for.
    """

    batch: int
    context: int
    new_tokens: int
    step_seconds: float
    tokens_per_second: float
    floor_seconds: float
    share_of_floor: float
    host_seconds: Spread | None
    rounds: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured."""

    name: str
    weights_kind: str
    device: Device
    prepared: Prepared
    pool: Pool
    clock: Clock

    @property
    def runner(self) -> Measured:
        """The runner."""
        return cast("Measured", self.prepared.runner)


def measure_device(
    config: EngineConfig,
    *,
    shape: str | None,
    batches: Sequence[int],
    contexts: Sequence[int],
    seconds_per_row: float,
    crowd: Crowd | None,
    report: Report,
    gpus: Gpus | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda _result: None,
) -> dict[str, Any]:
    """Load or make a model and measure it.

    Args:
        shape: one of `engine.random_model.SHAPES`, with random weights; `None` is the configured model.
        batches, contexts: as in `engine.bench.measure_speed`.
        crowd: requests to answer as fast as can be; `None` leaves that out.
        report: told (done, total) parts of the work, and a word about them.
        keep: told the result so far behind each row.

    Returns:
        `machine`, `device`, `model`, `weights_kind`, `dtype`, `remarks`, `rows`, `prefill`, and `workload` or `None`.

    Raises:
        ConfigError: a setting does not go with the model or the device, or no row fits into the cache.
        ModelError: the model cannot be loaded.
    """
    decode = [(batch, context, 1) for context in contexts for batch in batches]
    prefill = [(1, context, min(PREFILL_TOKENS, context, config.max_num_batched_tokens)) for context in contexts]
    total = len(decode) + len(prefill) + 2
    gpus = Gpus() if gpus is None else gpus
    report(0, total, "the model is loaded")
    device = choose_device(config, gpus)
    # First: it takes memory of which the cache leaves none.
    rates = None if device.gpu is None else gpus.rates(device.gpu)
    subject = open_subject(_with_room(config, shape, batches, contexts, crowd), shape, gpus)
    if crowd is not None:
        subject.pool.check_room(crowd)
    result = _nothing_yet(subject, rates)
    for done, shape_of_step in enumerate((*decode, *prefill), start=1):
        report(done, total, "")
        rows = _measure_if_it_fits(subject, *shape_of_step, result["machine"], seconds_per_row, result["remarks"])
        result["rows" if done <= len(decode) else "prefill"] += [asdict(row) for row in rows]
        keep(result)
    if not result["rows"] and not result["prefill"]:
        raise ConfigError(result["remarks"][-1])
    if crowd is not None:
        result["workload"] = _answer_crowd(subject, config, crowd, lambda word: report(total - 1, total, word))
        keep(result)
    report(total, total, "")
    return result


def _answer_crowd(subject: Subject, config: EngineConfig, crowd: Crowd, say: Callable[[str], object]) -> dict[str, Any]:
    subject.runner.reset()
    sequences = crowd.sequences(subject.runner.model.config.vocab_size)
    return run_crowd(
        subject.runner, subject.pool, config.limits, sequences,
        lambda ended, of: say(f"{ended} of {of} requests answered"),
    )  # fmt: skip


def _measure_if_it_fits(
    subject: Subject,
    batch: int,
    context: int,
    new_tokens: int,
    machine: dict[str, Any],
    seconds: float,
    remarks: list[str],
) -> list[DeviceRow]:
    """A row, or a remark about why there is none."""
    try:
        steps = DeviceSteps(subject, batch, context, new_tokens)
    except ConfigError as error:
        remarks.append(str(error))
        return []
    return [measure_device_row(steps, machine, seconds=seconds)]


def with_gpu_sizes(config: EngineConfig) -> EngineConfig:
    """As many seats and tokens a step as suit a GPU, or more where the settings say so."""
    return replace(
        config,
        max_num_seqs=max(config.max_num_seqs, GPU_SEATS),
        max_num_batched_tokens=max(config.max_num_batched_tokens, GPU_TOKENS),
    )


def _with_room(
    config: EngineConfig, shape: str | None, batches: Sequence[int], contexts: Sequence[int], crowd: Crowd | None
) -> EngineConfig:
    """As many seats as are measured; and of a shape as long a context, and no longer."""
    longest = max([*contexts, 2 * crowd.longest if crowd else 0]) + 1
    return replace(
        config,
        capacity_num_seqs=max([*batches, config.max_num_seqs]),
        capacity_num_batched_tokens=max([*batches, config.max_num_batched_tokens]),
        max_model_len=config.max_model_len or (None if shape is None else longest),
    )


def open_subject(config: EngineConfig, shape: str | None, gpus: Gpus) -> Subject:
    """Load the configured model, or make one."""
    if shape is None:
        model = load_model(config, gpus)
        name, kind, device, max_model_len = model.name, model.weights_kind, model.device, model.max_model_len
        prepared = Prepared(model.runner, model.dtype, model.num_blocks, model.remarks, model.is_batch_invariant)
    else:
        device = choose_device(config, gpus)
        checkpoint = make_random_checkpoint(shape, gpus.torch_device(device.gpu))
        name, kind, max_model_len = checkpoint.name, checkpoint.weights_kind, config.max_model_len or 0
        if max_model_len > checkpoint.config.context_length:
            raise ConfigError(
                f"The shape {shape} has a context of {checkpoint.config.context_length} tokens: ask for less."
            )
        prepared = prepare(config, checkpoint, device, max_model_len, gpus)
    pool = Pool(prepared.num_blocks, config.block_size, config.capacity_num_seqs, max_model_len)
    clock = HostClock() if device.gpu is None else gpus.clock(device.gpu)
    return Subject(name, kind, device, prepared, pool, clock)


def _nothing_yet(subject: Subject, rates: tuple[float, float] | None) -> dict[str, Any]:
    """The result of `measure_device` before any step."""
    return {
        "machine": _machine(subject, rates),
        "device": subject.device.name,
        "model": subject.name,
        "weights_kind": subject.weights_kind,
        "dtype": subject.prepared.dtype,
        "remarks": list(subject.prepared.remarks),
        "rows": [],
        "prefill": [],
        "workload": None,
    }


def _machine(subject: Subject, rates: tuple[float, float] | None) -> dict[str, Any]:
    """The device in words, and its rates; on a GPU of a copy, reads and writes together, and of a bfloat16 product."""
    if rates is None:
        return asdict(measure_machine(subject.runner.model))
    return {
        "processor": subject.device.reason,
        "memory_bytes_per_second": rates[0],
        "product_flops_per_second": rates[1],
    }


def measure_device_row(steps: DeviceSteps, machine: dict[str, Any], *, seconds: float) -> DeviceRow:
    """Time steps for about so long."""
    steps.run(WARM_STEPS)
    subject = steps.subject
    began = time.perf_counter()
    steps.run(MIN_STEPS)
    usual = (time.perf_counter() - began) / MIN_STEPS
    count = max(MIN_STEPS, min(MAX_STEPS, int(seconds / usual)))
    ends, host = steps.run(count)
    step = median([subject.clock.seconds(one, other) for one, other in pairwise(ends)])
    read, operations = steps.bytes_and_operations()
    floor = max(read / machine["memory_bytes_per_second"], operations / machine["product_flops_per_second"])
    return DeviceRow(
        batch=steps.batch,
        context=steps.context,
        new_tokens=steps.new_tokens,
        step_seconds=step,
        tokens_per_second=steps.batch * steps.new_tokens / step,
        floor_seconds=floor,
        share_of_floor=floor / step,
        host_seconds=Spread.of(host[1:]) if subject.runner.overlaps else None,  # the first reads none before it
        rounds=count,
    )


class DeviceSteps:
    """Sequences of one length that take the same step again and again, scattered over the cache that there is.

    What comes before is never computed: it does not matter for the time.

    Raises:
        ConfigError: they do not fit into the cache, or into the model's context.
    """

    def __init__(self, subject: Subject, batch: int, context: int, new_tokens: int) -> None:
        self.subject, self.batch, self.context, self.new_tokens = subject, batch, context, new_tokens
        pool, runner = subject.pool, subject.runner
        per_row = -(-(context + 1) // pool.block_size)
        if context + 1 > pool.max_model_len or batch * per_row > pool.num_blocks:
            raise ConfigError(
                f"{batch} × {context} tokens are left out: the cache has {pool.num_blocks} blocks of {pool.block_size} "
                f"tokens, and the context is {pool.max_model_len}."
            )
        block_ids = random.Random(0).sample(range(pool.num_blocks), batch * per_row)  # noqa: S311 (as after an hour)
        runner.reset()
        vocab_size = runner.model.config.vocab_size
        prompt = tuple([1 + place % (vocab_size - 1) for place in range(context)])
        seats = tuple(range(batch))
        whole = ScheduledBatch(
            step=0,
            seats=seats,
            sequence_ids=seats,
            starts=(context - new_tokens,) * batch,
            counts=(new_tokens,) * batch,
            samples=(True,) * batch,
        )
        params = SamplingParams(temperature=0.0)
        tables = [tuple(block_ids[row * per_row : (row + 1) * per_row]) for row in seats]
        seated = tuple([Seated(row, row, prompt, context, params) for row in seats])
        self._first = replace(whole, seated=seated, new_blocks=tuple(enumerate(tables)))
        self._next = whole

    def run(self, count: int) -> tuple[list[Any], list[float]]:
        """So many steps; gives marks of their ends on the subject's clock, and what each took beside waiting for it.

        Raises:
            RuntimeError: what a step computed is no number.
        """
        runner, ends, host = self.subject.runner, [], list[float]()
        depth = 1 if runner.overlaps else 0
        under_way: deque[Ticket] = deque()
        runner.take_seconds()
        for _ in range(count):
            began = time.perf_counter()
            under_way.append(runner.launch(self._first))
            self._first = self._next
            ends.append(self.subject.clock.mark())
            if len(under_way) > depth:
                _check(runner.collect(under_way.popleft()))
            host.append(time.perf_counter() - began - runner.take_seconds().get("wait", 0.0))
        for ticket in under_way:
            _check(runner.collect(ticket))
        return ends, host

    def bytes_and_operations(self) -> tuple[int, int]:
        """What a step cannot do without: bytes of weights and cache read, arithmetic operations."""
        runner = self.subject.runner
        return work_of(runner.model, runner.kv_bytes_per_token, self.batch, self.context, self.new_tokens)


def _check(output: StepOutput) -> None:
    """A figure of steps that failed would mean nothing."""
    if output.failures:
        raise RuntimeError(f"a step failed: {next(iter(output.failures.values()))}")
