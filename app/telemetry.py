"""The live view: one look at the engine a second, drawn once for everybody who watches the same window.

A watcher holds no queue. It asks for a frame newer than the last one it sent, so a slow one skips frames and can never
make the server keep anything for it. Nothing is drawn while nobody watches; the history is kept all the same.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import trio

from app.diagnosis import diagnose
from app.history import History, make_point
from app.journal.journal import Journal
from app.journal.recorder import Recorder
from app.render.palette import Palette
from app.render.requests import MAX_ENDED_ROWS
from app.render.scene import Scene
from app.render.table_runs import NUM_STEPS, find_names
from app.render.templates import make_environment
from app.render.view import PARTS, WINDOWED
from app.sse import BYE, HEARTBEAT, text_event
from engine.timeline import DEFAULT_WINDOW, WINDOWS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Mapping

    from engine.config import EngineConfig, Limits
    from engine.engine import Health, ModelInfo
    from engine.experience import Course
    from engine.request_view import RequestView

log = logging.getLogger("relevo.telemetry")

# Between two looks.
TICK_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = 15.0


class Watched(Protocol):
    """What telemetry asks of an engine."""

    config: EngineConfig
    model: ModelInfo
    capacity: Limits
    requests: RequestView

    def snapshot(self) -> dict[str, Any]:
        """The object of `/ops/stats.json`."""

    def table(self, num_steps: int, last_step: int | None = None) -> dict[str, Any]:
        """`table` of the snapshot, of other steps."""

    def experience(self, window_seconds: int) -> dict[str, Any]:
        """What the snapshot says of the usual window, of another one instead."""

    def course(self, window_seconds: int) -> Course:
        """A window column by column."""

    def health(self) -> Health:
        """Whether new requests are served, and why not."""


class Frame(NamedTuple):
    """The partials of one tick.

    Attributes:
        number: grows by one with each frame.
        parts: HTML by the partial's name. A part that did not change is the same object as in the frame before.
    """

    number: int
    parts: Mapping[str, str]


class Telemetry:
    """Looks at the engine once a tick, remembers an hour, draws frames for those who watch.

    Args:
        engine: asked for its snapshot; never awaited.
        process: what the process adds to the engine's snapshot, such as `loop_lag_seconds`.
        journal: keeps what was seen, and has the events; without one a journal in memory is made.
    """

    def __init__(
        self,
        engine: Watched,
        *,
        process: Callable[[], Mapping[str, Any]] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.engine = engine
        self._process = process
        self.journal = Journal() if journal is None else journal
        self._recorder = Recorder(self.journal)
        self.histories = {seconds: History(seconds) for seconds in WINDOWS}
        self.num_renders = 0
        self.palette = Palette()
        self._environment = make_environment()
        self._snapshot: dict[str, Any] | None = None
        self._watching: Counter[int] = Counter()  # watchers by the seconds of their window
        self._frames: dict[int, Frame] = {}
        self._drawn: set[int] = set()  # windows whose frame is of this tick
        self._shared: dict[str, str] = {}  # parts that are the same in each window, of this tick
        self._encoded: dict[tuple[int, int, int], bytes] = {}  # what was sent of this tick, for all who need the same
        self._closed = False
        self._changed = trio.Event()

    async def run(self) -> None:
        """Tick until cancelled. A fault while looking or drawing is logged and costs one frame, not the server."""
        while True:
            try:
                self.tick(trio.current_time())
            except Exception:
                log.exception("The live view could not be drawn.")
            await trio.sleep(TICK_SECONDS)

    def tick(self, now: float) -> None:
        """Look at the engine at time `now` (seconds, never decreasing) and wake the watchers."""
        snapshot = self.engine.snapshot()
        if self._process is not None:
            snapshot |= self._process()
        point = make_point(now, snapshot)
        for history in self.histories.values():
            history.add(point)
        self.palette.update(_in_sight(snapshot), _seated(snapshot), _seats(snapshot))
        self._snapshot = snapshot
        self._drawn.clear()
        self._shared.clear()
        self._encoded.clear()
        self._recorder.look(now, snapshot, self.engine.health())
        for seconds in +self._watching:
            self._draw(seconds)
        self._wake()

    @property
    def num_watchers(self) -> int:
        """Open streams."""
        return self._watching.total()

    @property
    def latest(self) -> Frame:
        """The frame of the last tick, of the usual window."""
        return self.frame(DEFAULT_WINDOW)

    def frame(self, window_seconds: int) -> Frame:
        """The frame of the last tick; drawn now if nobody watched that window then."""
        self._look()
        return self._frames[window_seconds] if window_seconds in self._drawn else self._draw(window_seconds)

    def complete(self, snapshot: Mapping[str, Any], window_seconds: int = DEFAULT_WINDOW) -> dict[str, Any]:
        """A snapshot with what it says of a window, what happened within it, and what is wrong."""
        whole = {**snapshot, "recent": self.histories[window_seconds].recent()}
        if window_seconds != DEFAULT_WINDOW:
            whole |= self.engine.experience(window_seconds)
        health, most_seats = self.engine.health(), self.engine.capacity.max_num_seqs
        findings = diagnose(whole, ready=health.ready, reason=health.reason, most_seats=most_seats)
        return whole | {"diagnosis": [finding.as_json() for finding in findings]}

    async def stream(self, window_seconds: int = DEFAULT_WINDOW) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one watcher: the parts that changed, a comment when there was nothing to say.

        Ends with `event: bye` after `close()`. The reconnection delay is spread, so that a restart is not met by all
        dashboards at the same moment.
        """
        self._watching[window_seconds] += 1
        try:
            yield f"retry: {random.randint(1500, 5000)}\n\n".encode()  # noqa: S311 - spreads load, guards nothing
            seen = Frame(-1, {})
            while not self._closed:
                frame = self.frame(window_seconds)
                if frame.number == seen.number:
                    if await self._wait_in_silence():
                        yield HEARTBEAT
                    continue
                yield self._news(window_seconds, seen, frame)
                seen = frame
            yield BYE
        finally:
            self._watching[window_seconds] -= 1

    def _news(self, window_seconds: int, seen: Frame, frame: Frame) -> bytes:
        """The events of what changed since a frame. Nearly all have seen the one before: they get the same bytes."""
        key = (window_seconds, seen.number, frame.number)
        if key not in self._encoded:
            fresh = [(name, html) for name, html in frame.parts.items() if seen.parts.get(name) is not html]
            self._encoded[key] = b"".join([text_event(name, html) for name, html in fresh]) or b": same\n\n"
        return self._encoded[key]

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
        return self._render(name, self._scene(self._look(), DEFAULT_WINDOW))

    def past_table(self, last_step: int) -> Callable[[], str]:
        """Draws the table up to an earlier step; what that takes may be called on another thread."""
        scene = self._scene(self._look(), DEFAULT_WINDOW)
        past = self.engine.table(NUM_STEPS, last_step)
        palette = self.palette.looking_back(row[1] for step in past["steps"] for row in step["rows"])
        return partial(self._render, "table", replace(scene, past=past, palette=palette))

    def _render(self, name: str, scene: Scene) -> str:
        return self._environment.get_template(f"_{name}.html").render(PARTS[name](scene))

    def _look(self) -> dict[str, Any]:
        if self._snapshot is None:
            self.tick(trio.current_time())
        assert self._snapshot is not None
        return self._snapshot

    def _draw(self, seconds: int) -> Frame:
        last = self._frames.get(seconds)
        before = last.parts if last else {}
        scene = self._scene(self._look(), seconds)
        parts: dict[str, str] = {}
        for name in PARTS:
            if name in WINDOWED:
                html = self._render(name, scene)
            elif (html := self._shared.get(name, "")) == "":
                html = self._shared[name] = self._render(name, scene)
            parts[name] = before[name] if before.get(name) == html else html
        self._frames[seconds] = Frame(last.number + 1 if last else 0, parts)
        self._drawn.add(seconds)
        self.num_renders += 1
        return self._frames[seconds]

    def _scene(self, snapshot: Mapping[str, Any], seconds: int) -> Scene:
        health, model = self.engine.health(), self.engine.model
        return Scene(
            snapshot=self.complete(snapshot, seconds),
            history=self.histories[seconds],
            course=partial(self.engine.course, seconds),
            palette=self.palette,
            ready=health.ready,
            reason=health.reason,
            model=model.name,
            details=(model.dtype,),
            events=self.journal.events,
            problem=self.journal.problem,
            wall=self.journal.wall(),
            ended=self.engine.requests.finished(MAX_ENDED_ROWS),
        )


def _in_sight(snapshot: Mapping[str, Any]) -> Iterable[str]:
    """Requests that are drawn: at the table, and running ones that have not been in a step yet."""
    return (*find_names(snapshot["table"]["steps"][-NUM_STEPS:]), *_seated(snapshot))


def _seats(snapshot: Mapping[str, Any]) -> dict[int, str]:
    return {entry["seat"]: entry["request_id"] for entry in snapshot["active"] if entry["seat"] is not None}


def _seated(snapshot: Mapping[str, Any]) -> list[str]:
    return [entry["request_id"] for entry in snapshot["active"] if entry["seat"] is not None]
