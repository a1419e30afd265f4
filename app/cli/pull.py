"""`relevo pull`: fetch a model into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.options import Parser, add_command
from app.cli.progress import Progress

if TYPE_CHECKING:
    import argparse

    from app.config import Settings


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "pull", "fetch a model into the cache", run)
    command.add_argument("name", metavar="MODEL", help="a built-in name (smollm2-135m) or a hub id (org/name)")


def run(options: argparse.Namespace) -> int:
    """Fetch what is missing and print where the model is."""
    print(fetch(options.name))
    return 0


def fetch(name: str) -> Path:
    """Where the model is, after fetching what is missing; a bar shows how far it is.

    Raises:
        ModelError: it cannot be found, fetched or is not what was expected.
    """
    from engine.loading.fetch import resolve_model  # slow to import, and not needed for --help

    with Progress(f"Fetching {name}", unit="bytes") as progress:
        return resolve_model(name, progress=progress)


def with_model(settings: Settings) -> Settings:
    """The settings with the model's path for its name, fetched: it is looked up once, and served under its name.

    Raises:
        ModelError: it cannot be found, fetched or is not what was expected.
    """
    name = settings.model.name
    path = fetch(name)
    served = settings.server.served_model_name or (None if Path(name).expanduser().exists() else name)
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"name": str(path)}),
            "server": settings.server.model_copy(update={"served_model_name": served}),
        }
    )
