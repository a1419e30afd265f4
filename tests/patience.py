"""How long tests wait for what must come. However busy the machine is, no test fails because of it before that."""

from __future__ import annotations

from typing import Final

PATIENCE_SECONDS: Final = 60.0
