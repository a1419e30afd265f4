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
    add_settings(command, OFFLINE_SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, and write the JSON where asked."""
    settings = with_model(settings_of(options))
    from app.bench import BATCHES, CONTEXTS, QUALITY_TOKENS, run_bench  # imports torch: seconds

    return run_bench(
        settings.engine_config(),
        batches=options.batch or BATCHES,
        contexts=options.context or CONTEXTS,
        quality_tokens=QUALITY_TOKENS if options.quality_tokens is None else options.quality_tokens,
        json_path=options.json,
    )
