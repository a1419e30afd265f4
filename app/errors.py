"""The error that the HTTP side raises. It stands apart from the routes, which take long to import."""

from __future__ import annotations

from typing import Any

from engine.errors import RelevoError


class ApiError(RelevoError):
    """An error with a status of its own, raised by the HTTP side."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.extra: dict[str, Any] = {}
        self.headers: dict[str, str] = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
