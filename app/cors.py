"""Pages of other sites that may use the API, by `[server] cors_origins` (the CORS protocol of the Fetch standard).

Such a page brings its API key itself, in a header. Cookies are not for it: `Access-Control-Allow-Credentials` is never
sent, and a cookie that came all the same is not looked at. So `*` gives nobody what its visitor has signed in to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quart import Request
    from werkzeug.datastructures import Headers

_PATHS: Final = frozenset({"/tokenize", "/detokenize", "/openapi.json"})
# What a page may read of an answer beside its body.
_EXPOSED: Final = ", ".join((
    "X-Request-Id", "Request-Id", "Retry-After",
    *(f"x-ratelimit-{figure}-{what}" for what in ("requests", "tokens") for figure in ("limit", "remaining", "reset")),
))  # fmt: skip
# Browsers ask again after so long; a list that was changed is in force by then.
MAX_AGE_SECONDS: Final = 600
MAX_REQUESTED_LENGTH: Final = 2048


class Cors:
    """Decides by a page's origin. Without any allowed origin, nothing of this is ever sent."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origins)

    def allows(self, request: Request) -> bool:
        """Whether the request comes from a page that may use the route it asks for."""
        origin = request.headers.get("Origin")
        return origin is not None and _is_api(request.path) and bool({"*", origin.lower()} & self._origins)

    def add_headers(self, request: Request, headers: Headers) -> None:
        """Tell the browser whether the page may read the answer, and caches that another page may not."""
        if not self._origins or not _is_api(request.path):
            return
        headers.add("Vary", "Origin")
        if self.allows(request):
            headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else request.headers["Origin"]
            headers["Access-Control-Expose-Headers"] = _EXPOSED

    def preflight_headers(self, request: Request, methods: Iterable[str]) -> dict[str, str]:
        """What a browser is told that asks before it sends; nothing when the page may not."""
        if "Access-Control-Request-Method" not in request.headers or not self.allows(request):
            return {}
        found = {
            "Access-Control-Allow-Methods": ", ".join(sorted(methods)),
            "Access-Control-Max-Age": str(MAX_AGE_SECONDS),
        }
        requested = request.headers.get("Access-Control-Request-Headers", "")
        if requested and len(requested) <= MAX_REQUESTED_LENGTH and requested.isprintable():
            # Clients bring headers of their own, and none of them does harm here.
            found["Access-Control-Allow-Headers"] = requested
        return found


def _is_api(path: str) -> bool:
    return path.startswith("/v1/") or path in _PATHS
