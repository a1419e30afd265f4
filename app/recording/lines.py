"""One line of a recording: what a request asked for and what became of it, in lengths and times alone.

No text, key, name, id or hash is in it, only numbers and words of closed sets. The first three fields are those of
Mooncake's traces, so that whatever reads those reads a recording, but for the order: a line is written when its request
has ended, and so they lie in the order of their ends.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from app.endings import Ending

# The field that tells a recording from Mooncake's own traces.
CACHED: Final = "cached_length"
CLASSES: Final = ("interactive", "background")


def line_of(ending: Ending, began: float) -> bytes:
    """A request that has ended, as a line.

    Args:
        began: when the recording did, on the clock of `ending`.
    """
    entry = {
        "timestamp": round(1000 * (ending.arrival - began), 1),  # milliseconds
        "input_length": ending.num_prompt_tokens,
        "output_length": ending.num_output_tokens,
        CACHED: ending.num_cached_tokens,
        "class": ending.class_name,
        "end": ending.cause or ending.reason,
    }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"
