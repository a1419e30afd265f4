"""The live view: one look at the engine a second, drawn once for everybody who watches.

A watcher holds no queue. It asks for a frame newer than the last one it sent, so a slow one skips frames and can never
make the server keep anything for it. Nothing is drawn while nobody watches; the history is kept all the same.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any, Protocol

import trio

from app.history import History, make_point
from app.journal.journal import Journal
from app.journal.recorder import Recorder
from app.render.palette import Palette
from app.render.scene import Scene
from app.render.table import NUM_STEPS
from app.render.templates import make_environment
from app.render.view import PARTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from engine.config import EngineConfig
    from engine.engine import Health, ModelInfo

HEARTBEAT_SECONDS = 15.0
_log = logging.getLogger(__name__)


class Watched(Protocol):
    """What telemetry asks of an engine."""

    config: EngineConfig
    model: ModelInfo

    def snapshot(self) -> dict[str, Any]:
        """The object of `/ops/stats.json`."""

    def health(self) -> Health:
        """Whether new requests are served, and why not."""


class Frame:
    """The partials of one tick.

    Attributes:
        number: grows by one with each frame.
        parts: HTML by the partial's name. A part that did not change is the same object as in the frame before.
    """

    __slots__ = ("number", "parts")

    def __init__(self, number: int, parts: Mapping[str, str]) -> None:
        self.number = number
        self.parts = parts


class Telemetry:
    """Looks at the engine once a tick, remembers ten minutes, draws frames for those who watch.

    Args:
        engine: asked for its snapshot; never awaited.
        tick_seconds: time between two looks.
        process: what the process adds to the engine's snapshot, such as `loop_lag_seconds`.
        journal: keeps what was seen, and has the events; without one a journal in memory is made.
    """

    def __init__(
        self,
        engine: Watched,
        tick_seconds: float = 1.0,
        *,
        process: Callable[[], Mapping[str, Any]] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.engine = engine
        self._process = process
        self.journal = Journal() if journal is None else journal
        self._recorder = Recorder(self.journal)
        self.tick_seconds = tick_seconds
        self.history = History()
        self.num_watchers = 0
        self.num_renders = 0
        self._palette = Palette()
        self._environment = make_environment()
        self._snapshot: dict[str, Any] | None = None
        self._frame: Frame | None = None
        self._drawn = False
        self._closed = False
        self._changed = trio.Event()

    async def run(self) -> None:
        """Tick until cancelled. A fault while looking or drawing is logged and costs one frame, not the server."""
        while True:
            try:
                self.tick(trio.current_time())
            except Exception:
                _log.exception("The live view could not be drawn.")
            await trio.sleep(self.tick_seconds)

    def tick(self, now: float) -> None:
        """Look at the engine at time `now` (seconds, never decreasing) and wake the watchers."""
        snapshot = self.engine.snapshot()
        if self._process is not None:
            snapshot |= self._process()
        self.history.add(make_point(now, snapshot))
        self._palette.update(_in_sight(snapshot), _seated(snapshot))
        self._snapshot = snapshot
        self._drawn = False
        self._recorder.look(now, snapshot, self.engine.health())
        if self.num_watchers:
            self._draw()
        self._wake()

    @property
    def latest(self) -> Frame:
        """The frame of the last tick; drawn now if nobody watched then."""
        self._look()
        return self._frame if self._frame and self._drawn else self._draw()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one watcher: the parts that changed, a comment when there was nothing to say.

        Ends with `event: bye` after `close()`. The reconnection delay is spread, so that a restart is not met by all
        dashboards at the same moment.
        """
        self.num_watchers += 1
        try:
            yield f"retry: {random.randint(1500, 5000)}\n\n".encode()  # noqa: S311 - spreads load, guards nothing
            sent: dict[str, str] = {}
            number = -1
            while not self._closed:
                frame = self.latest
                if frame.number == number:
                    if await self._wait_in_silence():
                        yield b": still here\n\n"
                    continue
                number = frame.number
                fresh = {name: html for name, html in frame.parts.items() if sent.get(name) is not html}
                sent.update(fresh)
                yield "".join(encode_event(name, html) for name, html in fresh.items()).encode() or b": same\n\n"
            yield encode_event("bye", "The server is shutting down.").encode()
        finally:
            self.num_watchers -= 1

    def close(self) -> None:
        """Let all watchers go; used when the server shuts down."""
        self._closed = True
        self._wake()

    async def _wait_in_silence(self) -> bool:
        """Wait for the next tick; true where none came for so long that the connection needs a sign of life."""
        with trio.move_on_after(HEARTBEAT_SECONDS) as scope:
            await self._changed.wait()
        return scope.cancelled_caught

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def draw_part(self, name: str) -> str:
        """One part alone, from the last look; for pages that show no more than the state."""
        return self._environment.get_template(f"_{name}.html").render(PARTS[name](self._scene(self._look())))

    def _look(self) -> dict[str, Any]:
        if self._snapshot is None:
            self.tick(trio.current_time())
        assert self._snapshot is not None
        return self._snapshot

    def _draw(self) -> Frame:
        before = self._frame.parts if self._frame else {}
        parts: dict[str, str] = {}
        for name in PARTS:
            html = self.draw_part(name)
            parts[name] = before[name] if before.get(name) == html else html
        self._frame = Frame(self._frame.number + 1 if self._frame else 0, parts)
        self._drawn = True
        self.num_renders += 1
        return self._frame

    def _scene(self, snapshot: Mapping[str, Any]) -> Scene:
        health, model = self.engine.health(), self.engine.model
        return Scene(
            snapshot=snapshot,
            history=self.history,
            palette=self._palette,
            targets=self.engine.config.slo,
            ready=health.ready,
            reason=health.reason,
            model=model.name,
            details=(model.dtype,),
            events=self.journal.events,
            problem=self.journal.problem,
            wall=self.journal.wall(),
        )


def encode_event(name: str, text: str) -> str:
    """One server-sent event; each line of the text gets its own `data:` line."""
    lines = "".join(f"data: {line}\n" for line in text.splitlines())
    return f"event: {name}\n{lines or 'data:' + chr(10)}\n"


def _in_sight(snapshot: Mapping[str, Any]) -> list[str]:
    """Requests that are drawn: at the table, and running ones that have not been in a step yet."""
    seen = [row[1] for step in snapshot["table"]["steps"][-NUM_STEPS:] for row in step["rows"]]
    return seen + _seated(snapshot)


def _seated(snapshot: Mapping[str, Any]) -> list[str]:
    return [entry["request_id"] for entry in snapshot["active"] if entry["seat"] is not None]
