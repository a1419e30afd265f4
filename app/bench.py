"""`relevo bench`: measures, and shows the figures as a table."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from app.cli.progress import Progress
from app.files import write_json
from engine.bench import measure_speed
from engine.bench_live import measure_engine_part
from engine.cost_model import CostModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from engine.config import EngineConfig

BATCHES = (1, 4, 16, 32)
CONTEXTS = (300, 1000)
QUALITY_TOKENS = 20_000
PARTS = ("products", "head", "attention", "glue", "sampling", "inputs", "rest")
HEADER = ("batch", "context", "new", "step ms", *PARTS, "tokens/s", "of the floor")


def run_bench(
    config: EngineConfig,
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    seconds_per_row: float = 8.0,
    seconds_for_steps: float = 40.0,
    seconds_in_engine: float = 20.0,
    quality_tokens: int = QUALITY_TOKENS,
    json_path: Path | None = None,
    echo: Callable[[str], None] = print,
) -> int:
    """Measure, show the table, and write the JSON where asked; gives the exit code.

    Args:
        seconds_per_row: time to spend on each row of the table, about.
        seconds_for_steps: time to spend on the steps that the cost model is fitted to, about.
        seconds_in_engine: time to spend on the same inside a running engine, about.
        quality_tokens: tokens of ordinary text to compare with float32 over; 0 skips that.
        echo: takes each line of the table.

    Raises:
        ConfigError: the settings do not fit the model or the machine.
        OSError: the JSON file cannot be written; nothing was measured then.
        ModelError: the model cannot be loaded.
    """
    if json_path is not None:
        json_path.touch()
    with Progress("Measuring", unit="parts") as progress:
        result = measure_speed(
            config,
            batches=batches,
            contexts=contexts,
            seconds_per_row=seconds_per_row,
            seconds_for_steps=seconds_for_steps,
            quality_tokens=quality_tokens,
            report=lambda done, total, note: progress(done, total + 1, note),
        )
        alone = CostModel.from_json(result["cost_model"])
        whole, fit, result["engine"] = trio.run(partial(measure_engine_part, config, alone, seconds_in_engine))
        result["cost_model"] = {**whole.to_json(), "fit": {**result["cost_model"]["fit"], **fit}}
    for line in table_of(result):
        echo(line)
    if json_path is not None:
        write_json(json_path, result)
    return 0


def table_of(result: dict[str, Any]) -> list[str]:
    """The lines of the terminal's table."""
    machine, quality = result["machine"], result["quality"]
    lines = [
        f"{result['model']} in {result['dtype']} on {machine['processor']} ({machine['vector_extension']}), "
        f"{machine['threads']} threads",
        f"memory {machine['memory_bytes_per_second'] / 1e9:.1f} GB/s, "
        f"products at best {machine['product_flops_per_second'] / 1e9:.0f} GFLOP/s",
        "",
        "  ".join(HEADER),
    ]
    for row in (*result["rows"], *result["prefill"]):
        cells = (
            f"{row['batch']}",
            f"{row['context']}",
            f"{row['new_tokens']}",
            f"{row['step_seconds'] * 1e3:.1f}",
            *[f"{row['parts'][part] * 1e3:.1f}" for part in PARTS],
            f"{row['tokens_per_second']:.0f}",
            f"{row['share_of_floor']:.0%}",
        )
        lines.append("  ".join(cell.rjust(len(name)) for cell, name in zip(cells, HEADER, strict=True)))
    reference = quality["reference_mean_nll"]
    against = "" if reference is None else f"; float32 reference {reference:.4f}"
    fit = result["cost_model"]["fit"]
    return [
        *lines,
        "",
        f"mean negative log-likelihood of a short text: {quality['mean_nll']:.4f}{against}",
        quality_line(quality),
        f"cost model: {fit['steps']} steps fitted; error on {fit['held_out_steps']} others "
        f"{fit['held_out_error_median']:.1%} (median), {fit['held_out_error_p95']:.1%} (p95); "
        f"inside the engine {fit['stretch']:.2f} times as long",
        engine_line(result["engine"]),
    ]


def engine_line(engine: dict[str, Any]) -> str:
    """What a step is made of in a running engine."""
    step = engine["step_seconds"]
    parts = [
        f"{word} {engine[key] * 1e3:.2f} ms ({engine[key] / step:.1%})"
        for word, key in (("scheduling", "scheduling_seconds"), ("thread hop", "hop_seconds"), ("text", "text_seconds"))
    ]
    return (
        f"a step with {engine['seats']} seats in a running engine {step * 1e3:.1f} ms: model "
        f"{engine['execute_seconds'] / step:.1%}, {', '.join(parts)}, the last beside the next step; "
        f"loop lag p99 {engine['loop_lag_p99_seconds'] * 1e3:.1f} ms"
    )


def quality_line(quality: dict[str, Any]) -> str:
    """How far the model is from itself in float32, or why that is not told."""
    if "why" in quality:
        return f"divergence from float32: not measured ({quality['why']})"
    return (
        f"divergence from float32 over {quality['tokens']:,} tokens of text: KL mean {quality['kl_mean']:.6f}, "
        f"p99.9 {quality['kl_p999']:.4f} nats; likeliest token another {quality['flipped_share']:.2%}; "
        f"perplexity x {quality['perplexity_ratio']:.4f}"
    )
