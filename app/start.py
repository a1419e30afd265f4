"""`relevo serve`: the engine outside, the HTTP server inside, so that a crash of the engine ends the process.

What takes long at the start is done side by side.
"""

from __future__ import annotations

import faulthandler
import logging
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import trio

from app.callers import Callers
from app.config import environment, state_dir
from app.journal.journal import open_journal
from app.key_service import open_keys
from app.listening import open_listening_socket
from app.logs import open_logs
from app.recording.recorder import open_recorder
from app.tracing import open_tracing
from engine.engine import open_engine
from engine.errors import EngineError, RelevoError

if TYPE_CHECKING:
    from app.config import Settings
    from app.tracing import Tracing

log = logging.getLogger("relevo.server")


async def serve(settings: Settings) -> int:
    """Load the model and serve until a signal asks for the end.

    Returns:
        The exit code: 0 after a drain.

    Raises:
        RelevoError: a setting is wrong, the port is taken or the model cannot be loaded.
    """
    with open_logs(settings.server.log_format, settings.server.log_level):
        async with open_tracing(wanted=settings.server.tracing) as tracing:
            try:
                await _serve(settings, tracing)
            except BaseException as error:
                if is_fault(error):
                    log.critical("the server ends by a fault of its own", exc_info=error)
                raise
    # Only now: a hung step holds the engine's end, too.
    faulthandler.cancel_dump_traceback_later()
    return 0


def is_fault(error: BaseException) -> bool:
    """Whether an end of the process is to leave its traceback: it was neither wanted nor can a user mend it."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_fault, error.exceptions))
    if isinstance(error, RelevoError):
        return isinstance(error, EngineError)
    return not isinstance(error, (KeyboardInterrupt, SystemExit, trio.Cancelled))


async def _serve(settings: Settings, tracing: Tracing | None) -> None:
    folder = state_dir(settings, environment())
    async with (
        open_keys(settings, folder) as keys,
        open_journal(folder) as journal,
        open_recorder(folder, journal) as recorder,
        trio.open_nursery() as nursery,
    ):
        Callers(settings, keys.keyring)  # unknown names of keys are refused before the model is loaded
        with open_listening_socket(settings.server.host, settings.server.port) as listener:
            # Loading lets go of the interpreter for about half of its time: enough to import Quart and the routes.
            nursery.start_soon(partial(trio.to_thread.run_sync, import_module, "app.server", abandon_on_cancel=True))
            # Changes of the settings are counted on from where the last process came to.
            config = replace(settings.engine_config(), first_generation=journal.audit.generation)
            async with open_engine(config) as engine:
                from app.limit_page.kept import FOLDER as SEARCHES
                from app.limit_page.kept import KeptSearches
                from app.limit_page.service import LimitSearches
                from app.server import serve_engine

                make_searches = partial(LimitSearches, kept=KeptSearches(folder / SEARCHES))
                await serve_engine(settings, engine, listener, keys, journal, tracing, recorder, make_searches)
