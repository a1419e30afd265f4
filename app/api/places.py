"""A request's place among those of the same API key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from quart import g, request

from app.call_scope import PERMITS
from app.limits import RateLimitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from app.http import Context
    from app.limits import Permit
    from engine.handle import Handle


def take_place(context: Context, handles: Sequence[Handle]) -> Permit | None:
    """Take one for a request that will have these handles; the guard around the app gives it back.

    Returns:
        The permit, for who gives it back earlier; `None` where the key has no limits.

    Raises:
        RateLimitError: the key has had what it may have.
    """
    g.metered = True
    try:
        permit = context.limits.admit(g.who, handles, trio.current_time())
    except RateLimitError:
        context.engine.count_refusal("rate_limited")
        raise
    scope: dict[str, Any] = request.scope  # type: ignore[assignment]
    if permit is not None:
        scope[PERMITS].append(permit)
    return permit
