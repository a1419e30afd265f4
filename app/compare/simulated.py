"""The same comparison in virtual time: the server's own scheduler, and a cost model in place of the model."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.resource_tracker import ensure_running
from typing import TYPE_CHECKING, Any, Final

from app.compare.load import Source
from app.compare.measure import NUM_PICTURED_STEPS
from app.compare.rounds import Compared, check_seats
from app.compare.runs import POLICIES, Answer, Counts, Run
from app.compare.summary import Setting, summarize
from engine.cost_model import CostModel, read_cost_model
from engine.errors import EngineError
from engine.simulator import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from app.compare.options import Options
    from engine.config import EngineConfig
    from engine.simulation_result import SimulationResult
    from engine.workload import Workload

DEFAULT_REQUESTS: Final = 2_000
MAX_TRACE_REQUESTS: Final = 1_000_000
# Starting a process takes about as long as simulating a few hundred requests.
MIN_REQUESTS_FOR_PROCESSES: Final = 5_000
LONGEST_FIRST: Final = ("static", "dynamic", "static_dropped", "continuous")
CONTEXT_LENGTH: Final = 8192  # SmolLM2's
UNCOUNTED: Final = (
    "Of the described machine attention's arithmetic and the server's own time are not counted: a real one serves less."
)
KILLED: Final = "A process of the simulation was killed, perhaps for want of memory; simulate fewer --requests."


@dataclass(frozen=True, slots=True)
class Machine:
    """What is simulated.

    Attributes:
        described: facts about it, for the reader.
        context_length: of the model, in tokens.
        num_blocks: of KV memory.
        caveat: what its cost model leaves out, a sentence; empty where it was measured.
    """

    cost_model: CostModel
    described: Mapping[str, Any]
    model: str
    dtype: str
    context_length: int
    num_blocks: int
    caveat: str = ""


def measured_machine(path: Path, config: EngineConfig, *, kv_bytes_per_token: float) -> Machine:
    """The machine and model that `relevo bench` measured.

    Raises:
        ConfigError: the file holds no cost model, or the memory no block.
    """
    cost_model = read_cost_model(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    bench = data if isinstance(data.get("machine"), dict) else {}
    return _machine(
        config,
        cost_model,
        described={"cost_model": path.name, "processor": bench.get("machine", {}).get("processor", "a machine")},
        model=str(bench.get("model", "a model")),
        dtype=str(bench.get("dtype", "an unknown dtype")),
        kv_bytes_per_token=kv_bytes_per_token,
    )


def described_machine(
    config: EngineConfig,
    *,
    memory_gb_per_second: float,
    tflops: float,
    num_parameters: float,
    bytes_per_weight: float,
    kv_bytes_per_token: float,
) -> Machine:
    """A machine by the two rates that bound it, and a model by its size.

    Raises:
        ConfigError: the memory holds no block.
    """
    cost_model = CostModel.of_machine(
        memory_gb_per_second=memory_gb_per_second,
        tflops=tflops,
        num_parameters=num_parameters,
        bytes_per_weight=bytes_per_weight,
        kv_bytes_per_token=kv_bytes_per_token,
    )
    machine = _machine(
        config,
        cost_model,
        described={"memory": f"memory {memory_gb_per_second:g} GB/s", "arithmetic": f"{tflops:g} TFLOP/s"},
        model=f"{num_parameters / 1e9:.3g} billion weights",
        dtype=f"{bytes_per_weight:g} bytes each",
        kv_bytes_per_token=kv_bytes_per_token,
    )
    return replace(machine, caveat=UNCOUNTED)


def _machine(
    config: EngineConfig,
    cost_model: CostModel,
    *,
    described: Mapping[str, Any],
    model: str,
    dtype: str,
    kv_bytes_per_token: float,
) -> Machine:
    """With the blocks of the memory that was given, or as many as all seats can ever use."""
    context = config.max_model_len or CONTEXT_LENGTH
    num_blocks = config.max_num_seqs * -(-context // config.block_size)
    if config.cache_memory_bytes is not None:
        num_blocks = int(config.cache_memory_bytes / (kv_bytes_per_token * config.block_size))
    check_seats(config.max_num_seqs, num_blocks)
    return Machine(cost_model, described, model, dtype, context, num_blocks)


def compare_simulated(
    machine: Machine,
    config: EngineConfig,
    options: Options,
    *,
    report: Callable[[int, int], object] = lambda _done, _total: None,
) -> tuple[dict[str, Any], Compared]:
    """Play the workload through under each policy, once: it would come out the same every time.

    Args:
        report: told (answers done, answers planned).

    Returns:
        The figures, and the runs they come from.

    Raises:
        ConfigError: workload, trace or settings cannot be used.
        EngineError: a process that simulates was killed.
    """
    started = time.monotonic()
    default = DEFAULT_REQUESTS if options.trace is None else MAX_TRACE_REQUESTS
    source = Source(options, max_requests=options.requests or default)
    context = min(machine.context_length, machine.num_blocks * config.block_size)
    factor = options.factor or source.least_factor(context)
    workload = source.take(source.max_requests, factor, context)
    job = partial(
        _run, workload=workload, machine=machine, config=config, context=context, open_loop=options.rate is not None
    )
    done: dict[str, Run] = {}
    with closing(_run_all(job, len(workload.items))) as finished:
        for run in finished:
            done[run.policy] = run
            report(len(done) * len(workload.items), len(POLICIES) * len(workload.items))
    runs = [done[policy] for policy in POLICIES]
    compared = Compared(runs, workload, time.monotonic() - started)
    setting = Setting(
        machine=machine.described,
        model=machine.model,
        dtype=machine.dtype,
        context_length=context,
        num_blocks=machine.num_blocks,
        config=config,
        simulated=True,
        seconds=compared.seconds,
        caveat=machine.caveat,
    )
    return summarize(runs, workload, options, setting), compared


def _run_all(job: Callable[[str], Run], num_requests: int) -> Generator[Run, None, None]:
    """Each policy's run; long ones on several cores at once, those that take longest first.

    Raises:
        EngineError: one of the processes was killed.
    """
    order = sorted(POLICIES, key=LONGEST_FIRST.index)
    num_processes = min(len(order), os.cpu_count() or 1)
    if num_requests < MIN_REQUESTS_FOR_PROCESSES or num_processes == 1:
        yield from map(job, order)
        return
    waiting = deque(order)
    running: dict[Connection, BaseProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                reader, process = _begin(job, waiting.popleft())
                running[reader] = process
            ready = wait(list(running))
            for reader in [reader for reader in running if reader in ready]:
                yield _outcome(reader)
                running.pop(reader).join()
    finally:
        # Whatever ends this, what is not finished is of no use and not waited for.
        for process in running.values():
            process.terminate()
            process.join()


def _begin(job: Callable[[str], Run], policy: str) -> tuple[Connection, BaseProcess]:
    """A process that runs one policy, and the pipe through which its outcome comes.

    A key that interrupts goes to every process of the terminal. It is held back in this one for good: it is for the
    one that began it, which ends the others.

    Raises:
        EngineError: the process was killed before it had read its job.
    """
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(writer, job, policy), daemon=True)
    ensure_running()  # the first process would start it, and let the key through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    except BrokenPipeError as error:
        raise EngineError(KILLED) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        writer.close()
    return reader, process


def _work(writer: Connection, job: Callable[[str], Run], policy: str) -> None:
    """In the process: run, and send what came of it, an error too."""
    outcome: Run | Exception
    try:
        outcome = job(policy)
    except Exception as error:
        outcome = error
    writer.send(outcome)


def _outcome(reader: Connection) -> Run:
    """What a process sent."""
    with reader:
        try:
            outcome: Run | Exception = reader.recv()
        except (EOFError, OSError) as error:
            raise EngineError(KILLED) from error
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _run(
    policy: str, *, workload: Workload, machine: Machine, config: EngineConfig, context: int, open_loop: bool
) -> Run:
    result = simulate(
        workload,
        limits=replace(config.limits, policy=policy),
        num_blocks=machine.num_blocks,
        block_size=config.block_size,
        max_model_len=context,
        cost_model=machine.cost_model,
        open_loop=open_loop,
        # Prompts without named blocks have nothing in common: looking them up would only take time.
        enable_prefix_caching=config.enable_prefix_caching and workload.prefix_block_tokens > 0,
        record_gaps=config.slo.itl_p95_seconds is not None,
        num_recorded_steps=NUM_PICTURED_STEPS,
    )
    counters = result.counters
    return Run(
        policy=policy,
        round=0,
        seconds=result.makespan,
        answers=_answers(result, config.slo.itl_p95_seconds),
        counts=Counts(
            steps=result.num_steps,
            rows=counters.num_rows,
            padded_rows=counters.num_padding_rows,
            padding_tokens=counters.num_padding_tokens,
            preemptions=counters.num_preemptions,
            recomputed_tokens=counters.num_recomputed_tokens,
            set_aside_slots=counters.num_set_aside_slots,
            unwritten_slots=counters.num_unwritten_slots,
        ),
        table=[step.as_json() for step in result.steps],
    )


def _answers(result: SimulationResult, slow_gap_seconds: float | None) -> tuple[Answer, ...]:
    """What each request saw."""
    slow = math.inf if slow_gap_seconds is None else slow_gap_seconds
    return tuple(
        [
            Answer(
                scheduled=request.arrival,
                submitted=request.arrival,
                first_token=request.first_token,
                finished=request.finished,
                num_output_tokens=request.num_output_tokens,
                num_slow_gaps=sum([gap > slow for gap in request.gaps]),
            )
            for request in sorted(result.requests)
        ]
    )
