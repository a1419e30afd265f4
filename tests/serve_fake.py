"""The whole server over the fake model, as a process of its own: what browser tests and screenshots talk to.

    python -m tests.serve_fake '{"step_seconds": 0.05, "settings": {"security": {"admin_token": "…"}}}'

Prints its address; ends on SIGTERM like the real one.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import trio

from app.config import Settings
from app.journal.journal import open_journal
from app.key_service import open_keys
from app.limit_page.child import COMMAND
from app.limit_page.kept import KeptSearches
from app.limit_page.service import LimitSearches
from app.listening import open_listening_socket
from app.recording.recorder import open_recorder
from app.server import serve_engine
from tests.fakes import fake_config, open_fake_engine

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


async def serve(options: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Serve on a free port of this machine; keys that are made are gone with the process unless a folder is named.

    Args:
        tell: gets the address.
    """
    settings = Settings.model_validate(options.pop("settings", {}))
    config = fake_config(**options.pop("limits", {}))
    command = options.pop("limit_command", COMMAND)
    with TemporaryDirectory() as temporary, open_listening_socket("127.0.0.1", options.pop("port", 0)) as listener:
        folder = Path(settings.server.state_dir or temporary)
        async with (
            open_keys(settings, folder) as keys,
            open_journal(folder) as journal,
            open_recorder(folder, journal) as recorder,
        ):
            config = replace(config, first_generation=journal.audit.generation)
            async with open_fake_engine(config, **options) as engine:
                listener.listen()  # whoever is told the address may come at once
                tell(f"http://127.0.0.1:{listener.getsockname()[1]}")
                make_searches = partial(LimitSearches, kept=KeptSearches(folder / "limits"), command=command)
                await serve_engine(settings, engine, listener, keys, journal, None, recorder, make_searches)


def serve_apart(options: dict[str, Any], address: Connection) -> None:
    """The whole life of a process that was forked for this; what it writes is read by nobody."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    trio.run(serve, options, address.send)


if __name__ == "__main__":
    trio.run(serve, json.loads(sys.argv[1]), partial(print, flush=True))
