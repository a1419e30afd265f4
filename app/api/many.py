"""Several chats over one stream: a browser opens six connections to a host, and who looks on wants to see ten at once.

Each of them is a request like any other, to the engine, the metrics and the limits of its key: one that is refused or
fails ends alone. Until the body was read nobody knows how many they are: the call counts as one, which is then the
first. The stream's events are those of a streamed chat with the number of the chat as their type, from 0:

    event: 3
    data: {"id": "chatcmpl-…", "object": "chat.completion.chunk", …}

A chat ends with its own `[DONE]`, or with an error, which then has the `status` and `retry_after` (seconds) that the
chat would have had as a response. Behind the last one comes a `[DONE]` without a type.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import g, request

from app import sse
from app.api.deadlines import deadlines_of
from app.api.errors import describe
from app.api.gathering import Choices, Gathering, submit_choices
from app.api.generation import HEARTBEAT_SECONDS, failure_of
from app.api.places import take_place
from app.api.planning import plan_chat
from app.api.requests import read_json
from app.call_scope import PERMITS
from app.endings import this_request
from app.limits import RateLimitError
from app.logs import FIELDS
from engine.errors import InvalidRequestError, RelevoError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quart import Response

    from app.api.deadlines import Deadlines
    from app.api.planning import Plan
    from app.callers import Caller
    from app.http import Context
    from app.limits import Permit
    from engine.engine import Engine
    from engine.handle import Handle
    from engine.outbox import Delta

log = logging.getLogger("relevo.http")

MANY_URL: Final = "/chat/many"
MAX_CHATS: Final = 16


async def answer_many(context: Context) -> Response:
    """Answer the `requests` of a body, each the body of a chat, over one stream.

    Raises:
        RelevoError: one of them can never be served as it stands, then none is; or the first finds no room, then the
            body is not even read.
    """
    caller = context.callers.of(g.who)
    context.engine.check_open(background=caller.background, key=caller.key_identity)
    plans = plan_many(context.engine, await read_json(), caller)
    chats = []
    for index, plan in enumerate(plans):
        deadlines = deadlines_of(plan.body, context.settings.server, g.arrived)
        retry_after = partial(context.engine.retry_after, background=plan.requests[0].background)
        chats.append(_Chat(index, plan, deadlines, retry_after))
    places: list[Permit] = [*request.scope[PERMITS]]  # type: ignore[typeddict-item]
    for chat in chats:
        chat.submit(context, places.pop() if places else None)
    return sse.response(_stream(chats))


def plan_many(engine: Engine, data: dict[str, Any], caller: Caller) -> list[Plan]:
    """Check a body.

    Raises:
        RelevoError: naming the chat and the field at fault.
    """
    bodies = data.get("requests")
    if not isinstance(bodies, list) or not 1 <= len(bodies) <= MAX_CHATS:
        message = f"'requests' must be a list of 1 to {MAX_CHATS} bodies of '/v1/chat/completions'."
        raise InvalidRequestError(message, param="requests")
    return [_plan(engine, body, caller, f"requests[{index}]") for index, body in enumerate(bodies)]


def _plan(engine: Engine, body: object, caller: Caller, where: str) -> Plan:
    if not isinstance(body, dict):
        raise InvalidRequestError(f"'{where}' must be an object.", param=where)
    try:
        plan = plan_chat(engine, {**body, "stream": True, "stream_options": {"include_usage": True}}, caller)
    except InvalidRequestError as error:
        param = f"{where}.{error.param}" if error.param else where
        raise InvalidRequestError(f"In '{where}': {error}", param=param, code=error.code) from None
    if plan.body.n != 1:
        raise InvalidRequestError(f"'{where}.n' must be 1: each chat has one answer here.", param=f"{where}.n")
    return plan


class _Chat:
    """One of the chats.

    Attributes:
        handle: what it has in the engine; `None` where it was refused at once.
        opening: its first event.
        is_over: whether nothing will come any more.
    """

    def __init__(self, index: int, plan: Plan, deadlines: Deadlines, retry_after: Callable[[], int]) -> None:
        self.handle: Handle | None = None
        self.opening = b""
        self.is_over = False
        self._index = index
        self._plan = plan
        self._deadlines = deadlines
        self._retry_after = retry_after
        self._choices = Choices(plan)
        self._permit: Permit | None = None
        self._about: dict[str, Any] = {}
        self._tell: Callable[[int, str], object] = lambda _status, _code: None

    def submit(self, context: Context, place: Permit | None) -> None:
        """Hand it to the engine. Never waits.

        Args:
            place: the one that it has among the requests of its key; `None`: it takes one.
        """
        self._about = this_request()
        self._tell = partial(context.refusals.note, about=self._about)
        own: list[Handle] = []
        try:
            if place is None:
                self._permit = take_place(context, own)
            else:
                self._permit, place.handles = place, own
            # From here on the guard around the app ends it with the ASGI call, however that ends.
            own[:] = submit_choices(context.engine, self._plan, self._deadlines, context.endings.opening())
            (self.handle,) = own
            context.deadlines.add(self._deadlines, self._handles)
            self.opening = self._tagged(self._plan.envelope.opening([0]))
        except (RateLimitError, UnavailableError) as error:
            self.opening = self._fail(error)
        except Exception as error:
            self.opening = self._break_off(error)

    async def take(self, delta: Delta) -> bytes:
        """What a piece of the answer becomes in the stream; nothing where it is over."""
        if self.is_over:
            return b""
        try:
            return await self._take(delta)
        except Exception as error:
            return self._break_off(error)

    async def _take(self, delta: Delta) -> bytes:
        envelope = self._plan.envelope
        data = envelope.piece(0, *self._choices.take(0, delta))
        error = failure_of(delta, self._retry_after)
        if error is not None:
            return self._tagged(data) + self._fail(await self._refusal() or error)
        if delta.finish_reason is not None:
            data += envelope.finish(0, self._choices.ending(0, delta)) + envelope.closing(self._choices.usage())
            self._end()
        return self._tagged(data)

    @property
    def _handles(self) -> list[Handle]:
        return [] if self.handle is None else [self.handle]

    async def _refusal(self) -> RelevoError | None:
        """Why the engine would not take it; `None` where it did."""
        try:
            if self.handle is not None:
                await self.handle.accepted()
        except RelevoError as error:
            return error
        return None

    def _break_off(self, error: Exception) -> bytes:
        """A fault of the server's own: the log has it, the client is told that there was one, the others go on."""
        log.error("an answer failed", extra={FIELDS: self._about}, exc_info=error)
        for handle in self._handles:
            handle.abort("error")
        return self._fail(error)

    def _fail(self, error: Exception) -> bytes:
        if self._permit is not None and isinstance(error, UnavailableError):
            self._permit.give_back(trio.current_time())
        self._end()
        answer = describe(error)
        self._tell(answer.status, answer.code or answer.kind)
        wait = answer.headers.get("Retry-After")
        about = {"status": answer.status, "retry_after": None if wait is None else int(wait)}
        return self._tagged(sse.event({**answer.body, **about}))

    def _end(self) -> None:
        """Its place among the requests of its key is free, however long the others go on."""
        self.is_over = True
        if self._permit is not None:
            self._permit.close(trio.current_time())

    def _tagged(self, data: bytes) -> bytes:
        """Events with the chat's number; JSON has no empty line, so an empty line ends an event."""
        return b"".join([b"event: %d\n%b\n\n" % (self._index, one) for one in data.split(b"\n\n") if one])


async def _stream(chats: list[_Chat]) -> AsyncIterator[bytes]:
    """All events, in the order in which they come up."""
    taken = [(chat, chat.handle) for chat in chats if chat.handle is not None]
    gathering = Gathering([handle for _, handle in taken])
    yield b"".join([chat.opening for chat in chats])
    sent = trio.current_time()
    while not all([chat.is_over for chat in chats]):
        news = await gathering.take(sent + HEARTBEAT_SECONDS)
        data = b"".join([await taken[index][0].take(delta) for index, delta in news])
        if data or trio.current_time() >= sent + HEARTBEAT_SECONDS:
            yield data or sse.HEARTBEAT
            sent = trio.current_time()
    yield sse.DONE
