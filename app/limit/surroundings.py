"""What a result was measured on: the settings of the server, as far as it shows them, and where requests came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.limit.asking import as_object
from app.render import numbers
from engine.processors import available_cores, processor_name

if TYPE_CHECKING:
    from app.limit.endpoint import Endpoint

SETTINGS_URL: Final = "/admin/config"
MAX_SETTINGS: Final = 100  # it may be anybody's server
MAX_CHARS: Final = 100


def settings_of(endpoint: Endpoint) -> dict[str, Any] | None:
    """The live settings of a Relevo; `None` of another server, and where it shows them to nobody."""
    status, body = endpoint.get(SETTINGS_URL, endpoint.metrics_keys)
    effective = as_object(body).get("effective") if status == 200 else None
    if not isinstance(effective, dict):
        return None
    told = list(effective.items())[:MAX_SETTINGS]
    return {
        name[:MAX_CHARS]: value[:MAX_CHARS] if isinstance(value, str) else value
        for name, value in told
        if isinstance(value, (str, int, float, bool))
    }


def machine_words() -> str:
    """The machine that sends: its processor, and how much of it there is to take."""
    return f"{processor_name()}, {numbers.plural(available_cores(), 'core')}"
