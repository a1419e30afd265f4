"""The parts of the page that move, drawn once for all who look on, and the stream that brings them."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import trio

from app.limit_page.wish import (
    ARRIVALS,
    DEFAULT_SECONDS,
    MAX_MIX,
    MAX_NOTE,
    MIX,
    NONE,
    RECORDING,
    SWITCHES,
    TARGETS,
    WORKLOADS,
)
from app.render import limit, numbers
from app.render.plain import plain_of
from app.render.templates import make_environment
from app.sse import BYE, text_event

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

    from app.limit_page.service import LimitSearches
    from app.telemetry import Telemetry
    from engine.engine import Engine

log = logging.getLogger("relevo.limit")

BROKEN: Final = '<p class="error">This could not be drawn; the log of the server says more.</p>'
TICK_SECONDS: Final = 1.0
RUNS: Final = ("curve", "tried", "capacity", "single_user")
# Whoever looks on is brought news no more often.
LEAST_SECONDS: Final = 0.25
TARGET_TITLES: Final = dict(zip(TARGETS, ("First token", "Each gap", "Whole answer"), strict=True))
NUMBERS: Final = (
    ("gap_cv", "Bursts: CV of the gaps", "only for bursts"),
    ("duration", limit.FIELDS["--duration"], f"{DEFAULT_SECONDS:g}"),
    ("repeats", limit.FIELDS["--repeats"], "3"),
    ("factor", limit.FIELDS["--factor"], "what fits"),
    ("think_time", "A user thinks, s", "unknown"),
    ("price_per_hour", "Price an hour", "unknown"),
)
# As they stand in the form.
IN_ORDER: Final = ("workload", "arrivals", "mix", *TARGETS, *[name for name, _, _ in NUMBERS], "note", *SWITCHES)
MIX_EXAMPLE: Final = '[[class]]\nname = "assistant"\nshare = 3\nworkload = "azure-conversation"\nttft_p95_seconds = 1.0'


class LimitView:
    """What the page shows.

    Attributes:
        recordings: names of the recordings that can be replayed, the newest first.
    """

    def __init__(self, searches: LimitSearches, engine: Engine, telemetry: Telemetry) -> None:
        self._searches, self._engine, self._telemetry = searches, engine, telemetry
        self.recordings: Sequence[str] = ()
        environment = make_environment()
        self._templates = {
            name: environment.get_template(f"_limit_{name}.html")
            for name in ("ask", "control", "progress", "outcome", "curve", "runs", "kept")
        }
        self._known: dict[str, tuple[Any, str]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether a search runs."""
        return self._searches.running is not None

    def parts(self) -> dict[str, str]:
        """All of them; one that has not changed is the same object as before."""
        search, archive = self._searches.search, self._searches.archive
        told = None if search is None else search.as_json()
        which = () if told is None else (told["id"], told["end"])
        num_runs = () if told is None else tuple(len(told[name] or ()) for name in RUNS)
        tried = () if told is None else (told["trying"]["rate"],)
        now = () if told is None else (told["what"], int(told["seconds"]), *told["trying"].values())
        stopping = told is not None and told["stopping"]
        is_chosen = told is not None and told["single_user"] is not None  # by what lengths are divided

        @cache
        def shown() -> Any:
            return plain_of(told)

        return {
            "state": self._telemetry.draw_part("state"),
            "clock": numbers.clock(self._searches.wall()),
            "control": self._part("control", (which, stopping, is_chosen), lambda: limit.control_variables(shown())),
            "progress": self._part("progress", (which, now), lambda: limit.progress_variables(shown())),
            "outcome": self._part(
                "outcome",
                (which, self._engine.limits.generation),
                lambda: limit.outcome_variables(shown(), self._engine.limits),
            ),
            "curve": self._part("curve", (which, num_runs, tried), lambda: limit.curve_variables(shown())),
            "runs": self._part("runs", (which, num_runs), lambda: limit.run_variables(shown())),
            "kept": self._part(
                "kept",
                (archive.briefs, archive.problem),
                lambda: limit.kept_variables(plain_of(archive.briefs), archive.problem),
            ),
            "ask": self._part("ask", (self.is_busy, self.recordings, self._engine.limits.slo), self._ask_variables),
        }

    def draw_ask(self, form: Mapping[str, str], error: Mapping[str, Any]) -> str:
        """The form with what somebody typed, and what is wrong beside each field; the first of those has the focus.

        Args:
            error: by field, what is wrong as JSON is told it, and the same as one text.
        """
        fields = {name: _beside(name, message) for name, message in error["fields"].items()}
        first = next((name for name in IN_ORDER if name in fields), None)
        error = {**error, "fields": fields, "first": first}
        typed = {name: form.get(name, "") for name in self._typed()} | {name: name in form for name in SWITCHES}
        return self._templates["ask"].render(self._ask_variables() | {"typed": typed, "error": error})

    def draw_again(self, asked: Mapping[str, Any]) -> str:
        """The form with what an earlier search was asked."""
        typed = {name: _as_typed(asked.get(name, now)) for name, now in self._typed().items()}
        variables, error = self._ask_variables(), None
        if typed["workload"] not in dict(variables["workloads"]):
            gone = f"{typed['workload']} is not there any more; choose another."
            error = {"fields": {"workload": gone}, "first": "workload"}
        return self._templates["ask"].render(variables | {"typed": typed, "error": error})

    async def stream(self, busy: bool, closed: trio.Event) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one who looks on: the parts that have changed.

        Args:
            busy: how the form is drawn on the page: it is sent when that is no longer so, and then only, for somebody
                may be typing in it.
            closed: set when the server ends.
        """
        yield b"retry: 2000\n\n"
        seen: dict[str, str] = {}
        while not closed.is_set():
            changed, parts = self._searches.changed, self.parts()
            moved = [(name, html) for name, html in parts.items() if name != "ask" and seen.get(name) != html]
            events = [text_event(name, html) for name, html in moved]
            if busy != self.is_busy:
                busy = self.is_busy
                events.append(b"id: %d\n" % busy + text_event("ask", parts["ask"]))
            if events:
                yield b"".join(events)
            seen = parts
            await trio.sleep(LEAST_SECONDS)
            with trio.move_on_after(TICK_SECONDS - LEAST_SECONDS):
                await changed.wait()
        yield BYE

    def _part(self, name: str, key: Any, make: Callable[[], Mapping[str, Any]]) -> str:
        """A part; a fault while drawing it is logged, and costs that part alone."""
        known = self._known.get(name)
        if known is None or known[0] != key:
            try:
                html = self._templates[name].render(make())
            except Exception:
                log.exception("a part of the page of the limit could not be drawn: %s", name)
                html = BROKEN
            known = self._known[name] = (key, html)
        return known[1]

    def _ask_variables(self) -> dict[str, Any]:
        recorded = [(RECORDING + name, f"recorded here: {name}") for name in self.recordings]
        return {
            "busy": self.is_busy,
            "workloads": [*recorded, *WORKLOADS.items(), (MIX, "a mix of classes of work, as below")],
            "arrivals": [("", "as usual: at random, or as recorded"), *ARRIVALS.items()],
            "targets": list(TARGET_TITLES.items()),
            "numbers": NUMBERS,
            "typed": self._typed(),
            "error": None,
            "max_note": MAX_NOTE,
            "max_mix": MAX_MIX,
            "mix_example": MIX_EXAMPLE,
        }

    def _typed(self) -> dict[str, Any]:
        """What stands in the form before anybody has typed: the targets of the server."""
        slo = self._engine.limits.slo
        targets = {name: "" if (value := getattr(slo, name)) is None else f"{value:g}" for name in TARGETS}
        plain = {
            "workload": next(iter(WORKLOADS)),
            "mix": "",
            "note": "",
            "arrivals": "",
            **dict.fromkeys(SWITCHES, False),
        }
        return plain | {name: "" for name, _, _ in NUMBERS} | targets


def _beside(field: str, message: str) -> str:
    """What is wrong with a field, below that field: without its name, and an empty one is no target."""
    message = message.removeprefix(f"'{field}' ").replace(f'; or "{NONE}"', "; or nothing")
    return message[:1].upper() + message[1:]


def _as_typed(value: Any) -> Any:
    """A value as it stands in a field."""
    if value is None or isinstance(value, (bool, str)):
        return value or ""
    return numbers.exact(value)
