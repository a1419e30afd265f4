"""Errors of a request that was translated to a chat, in the words of the route that it came by.

The chat's own checks name the chat's fields; a client of another route has never sent those.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from app.errors import ApiError
from engine.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from app.api.planning import Plan

_STEP = re.compile(r"[.\[][^.\[]*$")


class OwnNames:
    """What a route calls the fields of the chat that it makes.

    Args:
        fields: from a chat's field, as a regular expression, to the route's; the first that matches counts.
        members: from what stands in a chat's message, behind its place, to what stands in the route's.
        phrases: of the chat's messages, and what they are in this route's words.
    """

    def __init__(self, fields: Mapping[str, str], *, members: Mapping[str, str], phrases: Mapping[str, str]) -> None:
        self._fields = fields
        self._members = members
        self._phrases = phrases
        self._places: dict[str, str] = {}

    def add(self, place: str, own: str) -> None:
        """A message of the chat, or a call in one, is what the client sent at `own`."""
        self._places[place] = own

    def of(self, param: str) -> str:
        """The route's name for a field of the chat."""
        place = param
        while place:
            if place in self._places:
                rest = param[len(place) :]
                return self._places[place] + self._members.get(rest, rest)
            place = _STEP.sub("", place) if _STEP.search(place) else ""
        for pattern, own in self._fields.items():
            if found := re.match(rf"{pattern}(?!\w)", param):
                return found.expand(own) + param[found.end() :]
        return param

    @contextmanager
    def told(self) -> Iterator[None]:
        """What is raised inside names the route's fields."""
        try:
            yield
        except (RequestError, ApiError) as error:
            message = str(error)
            if error.param is not None:
                own = self.of(error.param)
                message, error.param = message.replace(f"'{error.param}'", f"'{own}'"), own
            for phrase, words in self._phrases.items():
                message = message.replace(phrase, words)
            error.args = (message,)
            raise

    def put_into(self, plan: Plan) -> Plan:
        """The plan, in which the engine's errors will name the route's fields, too."""
        requests = []
        for request in plan.requests:
            prompt = replace(request.prompt, param=self.of(request.prompt.param))
            grammar = request.grammar
            if grammar is not None:
                grammar = replace(grammar, param=self.of(grammar.param))
            requests.append(replace(request, prompt=prompt, grammar=grammar))
        return replace(plan, requests=tuple(requests))
