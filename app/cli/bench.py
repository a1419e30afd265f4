"""`relevo bench`: how fast this machine and model are, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import OFFLINE_SECTIONS, Parser, add_command, add_settings, count, count_or_zero, settings_of
from app.cli.pull import with_model

if TYPE_CHECKING:
    import argparse


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "bench", "measure the speed of this machine and model", run)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    command.add_argument("--batch", type=count, nargs="+", metavar="N", help="sequences at once (default 1 4 16 32)")
    command.add_argument("--context", type=count, nargs="+", metavar="N", help="tokens of each (default 300 1000)")
    command.add_argument(
        "--quality-tokens",
        type=count_or_zero,
        metavar="N",
        help="tokens of text over which it is compared with float32; 0 skips that (default 20000)",
    )
    command.add_argument(
        "--random-weights",
        metavar="SHAPE",
        help="whole steps of a model that need not be fetched: qwen3-0.6b, llama-3.2-1b, llama-3.1-8b or tiny",
    )
    command.add_argument(
        "--workload",
        metavar="W",
        help="answer so many requests as fast as can be: nano-vllm (256, of 100 to 1024 tokens in and out)",
    )
    command.add_argument("--requests", type=count, metavar="N", help="of the workload (default as its name says)")
    add_settings(command, OFFLINE_SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, and write the JSON where asked."""
    settings = settings_of(options)
    if options.random_weights is None:
        settings = with_model(settings)
    from app.bench import BATCHES, CONTEXTS, QUALITY_TOKENS, run_bench  # imports torch: seconds
    from app.bench_device import crowd_of, measures_device, run_device_bench

    crowd = crowd_of(options.workload, options.requests)
    if options.random_weights or crowd or measures_device(settings.engine_config()):
        return run_device_bench(
            settings.engine_config(),
            shape=options.random_weights,
            batches=options.batch,
            contexts=options.context,
            crowd=crowd,
            json_path=options.json,
        )
    return run_bench(
        settings.engine_config(),
        batches=options.batch or BATCHES,
        contexts=options.context or CONTEXTS,
        quality_tokens=QUALITY_TOKENS if options.quality_tokens is None else options.quality_tokens,
        json_path=options.json,
    )
