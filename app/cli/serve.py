"""`relevo serve`: the server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import trio

from app.cli.options import ALL_SECTIONS, Parser, add_command, add_settings, settings_of
from app.cli.pull import with_model
from app.config import environment, is_loopback, state_dir
from app.interpreter import nothing_collected
from app.key_store import has_keys
from app.lifecycle import ending_at_once
from app.listening import open_listening_socket
from app.open_files import raise_open_files
from app.parent import end_with_input

if TYPE_CHECKING:
    import argparse


def register(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command."""
    command = add_command(commands, "serve", "serve a model over HTTP", run)
    command.add_argument("--insecure", action="store_true", help="listen beyond loopback without keys and admin token")
    command.add_argument("--end-with-input", action="store_true", help="end when standard input does, as after SIGTERM")
    add_settings(command, ALL_SECTIONS)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal ends it."""
    settings = settings_of(options)
    exposed = not options.insecure and not is_loopback(settings.server.host)
    made_before = exposed and has_keys(state_dir(settings, environment()))
    settings.check_exposure(insecure=options.insecure, has_keys=made_before)
    name, settings = settings.model.name, with_model(settings)
    # The address is bound again when it is needed; here it only has to be free.
    open_listening_socket(settings.server.host, settings.server.port).close()
    raise_open_files()
    with ending_at_once(), nothing_collected():
        if options.end_with_input:
            end_with_input()
        if settings.server.log_format == "human":
            print(f"Loading {name} ...", file=sys.stderr, flush=True)
        import engine.startup  # noqa: F401  torch takes seconds to import; wrong use is answered before
        from app.start import serve

        return trio.run(serve, settings)
