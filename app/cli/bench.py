"""`relevo bench`: how fast this machine and model are, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import OFFLINE_SECTIONS, Parser, add_command, add_settings, count, settings_of
from app.cli.pull import with_model

if TYPE_CHECKING:
    import argparse


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "bench", "measure the speed of this machine and model", run)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    command.add_argument("--batch", type=count, nargs="+", metavar="N", help="sequences at once (default 1 4 16 32)")
    command.add_argument("--context", type=count, nargs="+", metavar="N", help="tokens of each (default 300 1000)")
    add_settings(command, OFFLINE_SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, and write the JSON where asked."""
    settings = with_model(settings_of(options))
    from app.bench import BATCHES, CONTEXTS, run_bench  # imports torch: seconds

    return run_bench(
        settings.engine_config(),
        batches=options.batch or BATCHES,
        contexts=options.context or CONTEXTS,
        json_path=options.json,
    )
