"""What is told of each request: a line of the log and a trace when it has ended, a line where it was refused.

Nothing of prompts and answers is in either, nor any text that a client chose, but for ids of harmless characters.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import g, request

from app.call_scope import HANDLES
from app.logs import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from opentelemetry.context import Context

    from app.recording.recorder import TrafficRecorder
    from app.tracing import Tracing
    from engine.engine import Engine
    from engine.handle import Handle
    from engine.request_log import RequestRecord

log = logging.getLogger("relevo.requests")

MAX_REFUSALS_A_SECOND: Final = 10


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from.

    Attributes:
        request_id: what the answer has as `X-Request-Id`.
        parent: the trace that it belongs to; `None` where nothing is traced.
    """

    request_id: str
    parent: Context | None


@dataclass(frozen=True, slots=True)
class Ending:
    """A request that has ended. Times are seconds on trio's clock, `None` for what it did not come to.

    Attributes:
        answer_id: its name on the pages and in the answer.
        preempted: from when to when it had lost its seat.
    """

    request_id: str
    answer_id: str
    key_name: str
    class_name: str
    reason: str
    cause: str | None
    arrival: float
    ended: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    seated: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preempted: tuple[tuple[float, float], ...] = field(default=())

    @classmethod
    def of(cls, handle: Handle, record: RequestRecord | None, request_id: str, now: float) -> Ending:
        """Of a handle, with what the engine wrote down of it; `None` where it came no further than the door."""
        request = handle.request
        if record is None:
            return cls(
                request_id, handle.request_id, request.key_name, "background" if request.background else "interactive",
                "error" if handle.abort_cause is None else "abort", handle.abort_cause, handle.arrival_time, now,
                handle.num_prompt_tokens,
            )  # fmt: skip
        ended = now if record.closed is None else record.closed
        lost = [(span.began, span.ended or ended) for span in record.spans if span.phase == "preempted"]
        return cls(
            request_id, record.request_id, record.key_name, record.class_name, record.reason or "error", record.cause,
            record.arrival, ended, record.num_prompt_tokens, record.num_cached_tokens, record.num_output_tokens,
            record.num_preemptions, record.first_seated, record.first_token, record.last_token, tuple(lost),
        )  # fmt: skip

    def as_fields(self, model: str) -> dict[str, Any]:
        """What the line of the log has."""
        seated = self.ended if self.seated is None else self.seated
        first = None if self.first_token is None else round(self.first_token - self.arrival, 4)
        return {
            "request_id": self.request_id,
            "id": self.answer_id,
            "key": self.key_name or None,
            "model": model,
            "class": self.class_name,
            "finish_reason": self.reason,
            "abort_cause": self.cause,
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens,
            "queue_seconds": round(seated - self.arrival, 4),
            "ttft_seconds": first,
            "e2e_seconds": round(self.ended - self.arrival, 4),
            "preemptions": self.num_preemptions,
        }


class Endings:
    """Told by the engine of each request that ended.

    Args:
        tracing: makes the traces; without, there are none.
        recorder: writes down lengths and times where somebody wants it; without, nobody can.
    """

    def __init__(self, engine: Engine, tracing: Tracing | None = None, recorder: TrafficRecorder | None = None) -> None:
        self._model = engine.model.name
        self._tracing = tracing
        self._recorder = recorder
        self._origins: dict[int, Origin] = {}
        engine.on_closed = self._tell

    def opening(self) -> Callable[[Handle], None]:
        """What is called with each handle that this HTTP request opens: it ends with that call at the latest."""
        handles: list[Handle] = request.scope[HANDLES]  # type: ignore[typeddict-item]
        origin = Origin(g.request_id, None if self._tracing is None else self._tracing.parent_of(request.headers))

        def opened(handle: Handle) -> None:
            handles.append(handle)
            self._origins[handle.sequence_id] = origin
            if self._recorder is not None:
                self._recorder.opened(handle)

        return opened

    def _tell(self, handle: Handle, record: RequestRecord | None) -> None:
        """Called by the engine's task, which must go on whatever happens here."""
        origin = self._origins.pop(handle.sequence_id, None)
        is_refused = handle.sequence is None and handle.abort_cause is None
        try:
            ending = Ending.of(handle, record, "" if origin is None else origin.request_id, trio.current_time())
            if self._recorder is not None:
                self._recorder.ended(handle.sequence_id, None if is_refused else ending)
            if is_refused:
                return  # whoever answers tells of it
            log.info("finished", extra={FIELDS: ending.as_fields(self._model)})
            if self._tracing is not None:
                self._tracing.add(ending, self._model, None if origin is None else origin.parent)
        except Exception:
            log.exception("the end of a request could not be told")


def this_request() -> dict[str, Any]:
    """Which HTTP request is answered, for the log. The route and not the path, which may say anything."""
    rule = request.url_rule
    route = None if rule is None else rule.rule
    return {"request_id": g.get("request_id"), "who": g.get("who"), "method": request.method, "route": route}


class Refusals:
    """A line for each refusal, up to so many a second; those beyond are counted and told together."""

    def __init__(self) -> None:
        self._since = -1.0
        self._num_told = 0
        self._untold: Counter[str] = Counter()

    def note(self, status: int, code: str, about: Mapping[str, Any]) -> None:
        """An error is answered.

        Args:
            status: of HTTP.
            code: from a closed set, as `about` is from what clients cannot choose freely.
        """
        self._turn(trio.current_time())
        if self._num_told < MAX_REFUSALS_A_SECOND:
            self._num_told += 1
            log.info("refused", extra={FIELDS: {"status": status, "code": code, **about}})
        else:
            self._untold[f"{status} {code}"] += 1

    async def run(self) -> None:
        """Tell of those beyond, for ever."""
        while True:
            await trio.sleep(1)
            self._turn(trio.current_time())

    def _turn(self, now: float) -> None:
        if now - self._since < 1:
            return
        self._since, self._num_told = now, 0
        if self._untold:
            log.info("refused more", extra={FIELDS: {"number": self._untold.total(), "by_code": dict(self._untold)}})
            self._untold.clear()
