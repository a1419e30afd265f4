"""`relevo bench`: how fast this machine and model are, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import OFFLINE_SECTIONS, Parser, add_command, add_settings, settings_of
from app.cli.pull import fetch

if TYPE_CHECKING:
    import argparse


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "bench", "measure the speed of this machine and model", run)
    command.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    add_settings(command, OFFLINE_SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Measure, print a table, and write the JSON where asked."""
    settings = settings_of(options)
    fetch(settings.model.name)
    from app.bench import run_bench  # imports torch: seconds

    return run_bench(settings.engine_config(), json_path=options.json)
