"""The HTTP server around a running engine, until a signal ends it."""

from __future__ import annotations

import faulthandler
import logging
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

import trio
from hypercorn.trio import serve as serve_asgi

from app.callers import Callers
from app.connections import ConnectionConfig, use_connections
from app.effects import EffectWatch
from app.endings import Endings
from app.http import Context, create_app
from app.interpreter import tune_interpreter
from app.journal.journal import Journal
from app.key_service import KeyService
from app.keys import Keyring
from app.lifecycle import FAREWELL_SECONDS, Lifecycle
from app.limit_page.service import LimitSearches
from app.limits import Limits
from app.listening import cannot_listen
from app.live_config import LiveConfig
from app.logs import FIELDS
from app.recording.recorder import TrafficRecorder
from app.services import keep_notices, watch_stalls, watching_loop
from app.telemetry import Telemetry
from app.turnstile import Turnstile

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from app.config import Settings
    from app.room import Room
    from app.tracing import Tracing
    from engine.engine import Engine

    MakeSearches = Callable[[Engine, Keyring, Journal], LimitSearches]

log = logging.getLogger("relevo.server")

BACKLOG: Final = 1024
GRACEFUL_SECONDS: Final = 5.0
# The address and the headers of a request, on HTTP/1.1 and HTTP/2.
MAX_HEADER_BYTES: Final = 1 << 15
# Of one HTTP/2 connection: no fewer, says RFC 9113, as clients count on it. What they hold is bounded in sum.
MAX_STREAMS: Final = 100
# For the whole head of a request, too, however slowly it comes.
IDLE_SECONDS: Final = 75.0


async def serve_engine(
    settings: Settings,
    engine: Engine,
    listener: socket.socket,
    keys: KeyService | None = None,
    journal: Journal | None = None,
    tracing: Tracing | None = None,
    recorder: TrafficRecorder | None = None,
    make_searches: MakeSearches = LimitSearches,
) -> None:
    """Serve a running engine on a bound socket until a signal; the socket is closed at the end."""
    lifecycle = Lifecycle()
    context = make_context(settings, engine, lifecycle, keys, journal, tracing, recorder, make_searches)
    tell_if_narrow(context.room, engine)
    drain_seconds = settings.server.drain_timeout_seconds
    async with trio.open_nursery() as nursery:
        nursery.start_soon(context.telemetry.run)
        nursery.start_soon(lifecycle.lag.run)
        services: dict[str, Callable[[], Awaitable[None]]] = {
            "live_config": context.live.run,
            "effects": context.effects.run,
            "keys": context.keys.run,
            "journal": context.journal.run,
            "refusals": context.refusals.run,
            "deadlines": context.deadlines.run,
            "recorder": context.recorder.run,
            "limit_search": context.searches.run,
            "notices": partial(keep_notices, engine, context.journal, context.live),
            "stall_watch": partial(watch_stalls, engine),
        }
        for name, service in services.items():
            nursery.start_soon(context.services.run, name, service)

        def drain() -> None:
            # If even the drain hangs, say where, and go.
            limit = drain_seconds + FAREWELL_SECONDS + GRACEFUL_SECONDS + 10
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
            context.searches.stop("shutdown", "It was asked to end.")
            nursery.start_soon(lifecycle.drain, engine, context.telemetry, drain_seconds)

        await nursery.start(lifecycle.watch_signals, drain)
        await nursery.start(partial(run_http, context, listener))
        tune_interpreter()
        if settings.server.log_format == "human":
            sys.stderr.write(banner(engine, listener))
            sys.stderr.flush()
        else:
            log.info("ready", extra={FIELDS: {"model": engine.model.name, "url": address_of(listener)}})
        with watching_loop(lambda: lifecycle.lag.num_beats):
            await lifecycle.finished.wait()
        nursery.cancel_scope.cancel()


def make_context(
    settings: Settings,
    engine: Engine,
    lifecycle: Lifecycle,
    keys: KeyService | None = None,
    journal: Journal | None = None,
    tracing: Tracing | None = None,
    recorder: TrafficRecorder | None = None,
    make_searches: MakeSearches = LimitSearches,
) -> Context:
    """What the routes work with, around a running engine.

    Args:
        keys: without, those of the settings are all there are.
        journal: without, nothing outlives the process.
        tracing: without, there are no traces.
        recorder: without, nothing can be recorded.
        make_searches: makes what looks for the limit.
    """
    journal = Journal() if journal is None else journal
    recorder = TrafficRecorder(None, journal) if recorder is None else recorder
    keys = KeyService(Keyring(settings)) if keys is None else keys
    effects = EffectWatch(engine, journal)
    searches = make_searches(engine, keys.keyring, journal)
    recorder.is_own = keys.keyring.is_own
    return Context(
        settings=settings,
        engine=engine,
        telemetry=Telemetry(engine, process=lambda: lifecycle.stats() | searches.stats(), journal=journal),
        lifecycle=lifecycle,
        journal=journal,
        live=LiveConfig(engine, journal, effects),
        effects=effects,
        callers=Callers(settings, keys.keyring),
        keys=keys,
        limits=Limits(keys.keyring.get),
        endings=Endings(engine, tracing, recorder),
        recorder=recorder,
        searches=searches,
    )


async def run_http(
    context: Context,
    listener: socket.socket,
    *,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve HTTP/1.1 and HTTP/2 (by prior knowledge) until `lifecycle.stopped`; then set `lifecycle.finished`.

    Raises:
        RelevoError: another process took the port since it was bound.
    """
    app = create_app(context)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise cannot_listen(error, *listener.getsockname()[:2]) from None
    use_connections()
    config = hypercorn_config(listener, context)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cut_what_is_left, context.lifecycle, config)
        await serve_asgi(app, config, shutdown_trigger=context.lifecycle.stopped.wait, task_status=task_status)
        nursery.cancel_scope.cancel()
    context.lifecycle.finished.set()


async def cut_what_is_left(lifecycle: Lifecycle, config: ConnectionConfig) -> None:
    """End the connections that the end of the server does not end: their clients do not read what is sent to them."""
    try:
        await lifecycle.stopped.wait()
        await trio.sleep(GRACEFUL_SECONDS)
    finally:  # at once where the engine has broken down
        with trio.CancelScope(shield=True):
            for connection in list(config.connections):
                await connection.cut()


def tell_if_narrow(room: Room, engine: Engine) -> None:
    """Say that there are seats, or places in the queue, which nobody can come to."""
    limits = engine.limits
    if room.most < limits.max_num_seqs + limits.max_waiting:
        words = "there are files for %g connections (LimitNOFILE, ulimit -n), fewer than %d seats and %d who may wait"
        log.warning(words, room.most, limits.max_num_seqs, limits.max_waiting)


def hypercorn_config(listener: socket.socket, context: Context) -> ConnectionConfig:
    """Hypercorn's settings. The socket is handed over: hypercorn owns a duplicate of it."""
    config = ConnectionConfig(context.room, context.unread, Turnstile(lambda: context.engine.num_open > 0))
    # Longer than a slow reader may keep its seat, so that the seat is what it loses first.
    config.stall_seconds = 2 * context.settings.server.slow_client_seconds
    config.bind = [f"fd://{socket.dup(listener.fileno())}"]
    config.backlog = BACKLOG
    config.graceful_timeout = GRACEFUL_SECONDS
    config.keep_alive_timeout = IDLE_SECONDS
    config.h11_max_incomplete_size = config.h2_max_header_list_size = MAX_HEADER_BYTES
    config.h2_max_concurrent_streams = MAX_STREAMS
    # On HTTP/2 the request past the limit silently freezes the other streams of its connection.
    config.keep_alive_max_requests = 10**9
    # On trio this would end healthy streams.
    config.read_timeout = None
    config.include_server_header = False
    config.accesslog = None
    config.errorlog = logging.getLogger("relevo.hypercorn")
    config.errorlog.setLevel(logging.WARNING)
    return config


def banner(engine: Engine, listener: socket.socket) -> str:
    """What a person wants to know at start-up, the address last."""
    model, limits, capacity = engine.model, engine.limits, engine.capacity
    lines = [
        f"model      {model.name} ({model.weights_kind} weights, computing in {model.dtype})",
        f"device     {model.device.name}: {model.device.reason}",
        f"context    {model.context_length} tokens a request (usable capacity)",
        f"seats      {limits.max_num_seqs} of at most {capacity.max_num_seqs}",
        f"budget     {limits.max_num_batched_tokens} tokens a step of at most {capacity.max_num_batched_tokens}",
        f"KV cache   {model.num_blocks} blocks of {model.block_size} tokens",
        *(f"note       {remark}" for remark in model.remarks),
        f"Relevo is ready on {address_of(listener)}  (dashboard /ops, tuning /admin, API /v1)",
    ]
    return "\n".join(lines) + "\n"


def address_of(listener: socket.socket) -> str:
    """What a browser is pointed at."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
