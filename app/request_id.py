"""The name that a request has in answers and in the log."""

from __future__ import annotations

import re
import secrets
from typing import Final

HEADER: Final = "X-Request-Id"
_HARMLESS: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


def choose_request_id(given: str | None) -> str:
    """The client's own where it can go into a header and a log as it is; else a fresh one."""
    return given if given and _HARMLESS.fullmatch(given) else secrets.token_hex(16)
