"""What the chat page asks for beside the API: several chats over one stream, and where its own requests sit."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import trio
from quart import Blueprint, request

from app.api.many import MANY_URL, MAX_CHATS, answer_many
from app.render import words
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quart import Response

    from app.http import Context
    from engine.engine import Engine
    from engine.place import Place

NUM_STEPS: Final = 60
# However many pages ask, the steps are looked up this seldom.
LOOK_SECONDS: Final = 0.25
MAX_ID_LENGTH: Final = 64


def chat_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    chat = Blueprint("chat", __name__)
    table = _Table(context.engine)

    @chat.post(MANY_URL)
    async def many() -> Response:
        return await answer_many(context)

    @chat.get("/chat/seats")
    async def seats() -> dict[str, Any]:
        """Who an id belongs to is not asked: it is too long to be guessed, and only its owner was told."""
        ids = list(dict.fromkeys(request.args.getlist("id")))
        if len(ids) > MAX_CHATS or any(len(name) > MAX_ID_LENGTH for name in ids):
            message = f"Ask for at most {MAX_CHATS} ids of at most {MAX_ID_LENGTH} characters."
            raise InvalidRequestError(message, param="id")
        return {
            **seen_by(ids, table.look(trio.current_time()), context.engine.places(ids)),
            "running": context.engine.num_running,
            "waiting": context.engine.num_waiting,
        }

    return chat


class _Table:
    """The last steps, of a moment ago."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._looked = -math.inf
        self._table: dict[str, Any] = {}

    def look(self, now: float) -> Mapping[str, Any]:
        if now - self._looked >= LOOK_SECONDS:
            self._looked, self._table = now, self._engine.table(NUM_STEPS)
        return self._table


def seen_by(ids: Sequence[str], table: Mapping[str, Any], places: Mapping[str, Place]) -> dict[str, Any]:
    """The table as somebody may see it who has these requests.

    Returns:
        `mine`: the place of each, and `why` it waits in words; `None` where it is not open. `steps`: of each its number
        and rows of seat, whose, and what was done there. Whose is a place in `ids`; the others are told apart by
        greater numbers and are nobody.
    """
    whose = {name: number for number, name in enumerate(ids)}
    steps = [
        {
            "step": step["step"],
            "rows": [[seat, whose.setdefault(name, len(whose)), phase] for seat, name, phase, _ in step["rows"]],
        }
        for step in table["steps"]
    ]
    return {"seats": table["seats"], "mine": [_shown(places.get(name)) for name in ids], "steps": steps}


def _shown(place: Place | None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {**asdict(place), "why": words.word(words.WAITING, place.reason) if place.reason else None}
