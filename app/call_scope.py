"""Under what names the layers around the application keep things in the scope of an ASGI call."""

from __future__ import annotations

from typing import Final

HANDLES: Final = "relevo.handles"
PERMITS: Final = "relevo.permits"
# A function that takes a piece of the answer's body at once, where the connection has one; see `Connection`.
WRITE_NOW: Final = "relevo.write_now"
# Whether the connection has one of the last places, where the API is not answered; see `Room`.
CROWDED: Final = "relevo.crowded"
# What becomes of the request's body, where the connection tells: an `Http1`.
UPLOAD: Final = "relevo.upload"
