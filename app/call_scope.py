"""Under what names the guard around the application keeps things in the scope of an ASGI call."""

from __future__ import annotations

from typing import Final

HANDLES: Final = "relevo.handles"
PERMITS: Final = "relevo.permits"
