"""`relevo bench` on a GPU, or with random weights: whole steps and a crowd of requests, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.cli.progress import Progress
from app.files import write_json
from engine.bench_device import GPU_BATCHES, GPU_CONTEXTS, measure_device, with_gpu_sizes
from engine.bench_offline import CROWDS
from engine.errors import ConfigError
from engine.gpu.device import choose_device
from engine.gpu.gpus import Gpus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engine.bench_offline import Crowd
    from engine.config import EngineConfig

CPU_BATCHES, CPU_CONTEXTS = (1, 4, 16), (300,)
HEADER = ("batch", "context", "new", "step ms", "tokens/s", "of the floor", "host ms p50/p99/max")


def measures_device(config: EngineConfig, gpus: Gpus | None = None) -> bool:
    """Whether a GPU computes, of which parts of a step cannot be told apart from outside."""
    return choose_device(config, gpus or Gpus()).gpu is not None


def run_device_bench(
    config: EngineConfig,
    *,
    shape: str | None = None,
    batches: Sequence[int] | None = None,
    contexts: Sequence[int] | None = None,
    crowd: Crowd | None = None,
    seconds_per_row: float = 3.0,
    json_path: Path | None = None,
    echo: Callable[[str], None] = print,
    gpus: Gpus | None = None,
) -> int:
    """Measure, show the table, and write the JSON where asked; gives the exit code.

    Args:
        shape: of a model with random weights; `None` is the configured model.
        batches, contexts: `None` is what suits the device.
        crowd: requests to answer as fast as can be.
        seconds_per_row: time to spend on each row of the table, about.
        echo: takes each line of the table.
        gpus: those that torch reaches, unless others are given.

    Raises:
        ConfigError: there is no such shape, or the settings do not fit the model or the device.
        OSError: the JSON file cannot be written; nothing was measured then.
        ModelError: the model cannot be loaded.
    """
    on_gpu = measures_device(config, gpus)
    if json_path is not None:
        json_path.touch()
    with Progress("Measuring", unit="parts") as progress:
        result = measure_device(
            with_gpu_sizes(config) if on_gpu else config,
            shape=shape,
            batches=batches or (GPU_BATCHES if on_gpu else CPU_BATCHES),
            contexts=contexts or (GPU_CONTEXTS if on_gpu else CPU_CONTEXTS),
            seconds_per_row=seconds_per_row,
            crowd=crowd,
            report=progress,
            gpus=gpus,
        )
    for line in device_table(result):
        echo(line)
    if json_path is not None:
        write_json(json_path, result)
    return 0


def crowd_of(workload: str | None, num_requests: int | None) -> Crowd | None:
    """The requests of a name of `engine.bench_offline.CROWDS`; their number is its own where none is given.

    Raises:
        ConfigError: there is no such name, or a number without one.
    """
    if workload is None:
        if num_requests is not None:
            raise ConfigError("--requests is the number of requests of a workload: give --workload nano-vllm, too.")
        return None
    if workload not in CROWDS:
        raise ConfigError(f"There is no workload {workload!r} for bench; there is {', '.join(CROWDS)}.")
    crowd = CROWDS[workload]
    return crowd if num_requests is None else crowd._replace(num_requests=num_requests)


def device_table(result: dict[str, Any]) -> list[str]:
    """The lines of the terminal's table."""
    machine = result["machine"]
    what = "copies" if result["device"] != "cpu" else "reads"
    lines = [
        f"{result['model']} in {result['dtype']} on {result['device']}: {machine['processor']}",
        f"it {what} {machine['memory_bytes_per_second'] / 1e9:,.1f} GB/s, "
        f"products at best {machine['product_flops_per_second'] / 1e12:,.3f} TFLOP/s",
        *[f"note: {remark}" for remark in result["remarks"]],
        "",
        "  ".join(HEADER),
    ]
    for row in (*result["rows"], *result["prefill"]):
        cells = (
            f"{row['batch']}",
            f"{row['context']}",
            f"{row['new_tokens']}",
            f"{row['step_seconds'] * 1e3:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['share_of_floor']:.0%}",
            _spread_ms(row["host_seconds"]),
        )
        lines.append("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, HEADER, strict=True)))
    if result["workload"] is not None:
        lines += ["", *workload_lines(result["workload"])]
    return lines


def _spread_ms(spread: dict[str, float] | None) -> str:
    """Median, 99th percentile and longest, in milliseconds; nothing of nothing."""
    return "" if spread is None else "/".join([f"{spread[name] * 1e3:.2f}" for name in ("p50", "p99", "max")])


def workload_lines(workload: dict[str, Any]) -> list[str]:
    """What came of the crowd."""
    beside = ""
    if workload["launch_seconds"] is not None:
        beside = f", launching it {workload['launch_seconds'] * 1e3:.2f} ms; all that Python does of one, "
        beside += f"p50/p99/max: {_spread_ms(workload['host_seconds'])} ms"
    return [
        f"{workload['requests']} requests, {workload['prompt_tokens']:,} tokens in and "
        f"{workload['output_tokens']:,} out in {workload['seconds']:.1f} s: "
        f"{workload['output_tokens_per_second']:,.0f} output tokens/s",
        f"{workload['steps']:,} steps with {workload['seats']} seats and a budget of {workload['budget']} tokens, "
        f"{workload['preemptions']} preemptions; planning a step takes {workload['planning_seconds'] * 1e3:.2f} ms"
        + beside,
    ]
