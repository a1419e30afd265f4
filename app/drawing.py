"""Pages and JSON that take longer to make than the streams should wait: made on one thread beside the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import trio
from quart import Response

from app.api.aside import dump_in_pieces
from app.errors import ApiError
from app.services import tell_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jinja2 import Template

T = TypeVar("T")
# Far longer than anything here takes, and about as long as anybody waits for a page.
LIMIT_SECONDS: Final = 30.0
# Of a table of steps, of settings' changes, of requests: one of them is written at a time.
LEVELS = 3


class Drawing:
    """One thread for all that is drawn: however many ask, the event loop shares the interpreter with it alone.

    What is handed over must be nobody else's to change.
    """

    def __init__(self) -> None:
        self._one_at_a_time = trio.CapacityLimiter(1)
        self._hangs = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` gives; who leaves does not wait for it.

        Raises:
            ApiError: 503, it is not there in time: it hangs, or what is before it does, which the log tells once.
        """
        with trio.move_on_after(LIMIT_SECONDS):
            drawn = await trio.to_thread.run_sync(work, limiter=self._one_at_a_time, abandon_on_cancel=True)
            self._hangs = False
            return drawn
        if not self._hangs:
            tell_stacks(f"something was not drawn within {LIMIT_SECONDS:g} s")
        self._hangs = True
        message = f"This was not drawn within {LIMIT_SECONDS:g} s; the server's log says more."
        raise ApiError(503, message, code="not_drawn")

    async def json(self, make: Callable[[], Any], levels: int = LEVELS) -> Response:
        """JSON of what `make` gives; `levels` as in `dump_in_pieces`."""
        text = await self.run(lambda: dump_in_pieces(make(), levels))
        return Response(text, content_type="application/json")

    async def page(self, template: Template, make: Callable[[], Mapping[str, Any]], status: int = 200) -> Response:
        """A page of the variables that `make` gives."""
        html = await self.run(lambda: template.render(make()))
        return html_response(html, status)


def html_response(html: str, status: int = 200) -> Response:
    """A page, or a part of one."""
    return Response(html, status, content_type="text/html; charset=utf-8")
