"""What is asked of a server's operator side, `/admin/config` and `/admin/audit`, while it is tuned."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Protocol

from app.limit.asking import as_object, ask, one_line
from app.limit.endpoint import EndpointError
from app.limit.tune_candidates import RefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.limit.endpoint import Endpoint

CONFIG, AUDIT = "/admin/config", "/admin/audit"
TOLD: Final = ("generation", "effective", "ranges", "choices", "reverts", "pending_drain")


class ChangedError(EndpointError):
    """Somebody else has changed the settings while they were tuned."""


class Admin(Protocol):
    """A server's live settings."""

    def show(self) -> dict[str, Any]:
        """What `GET /admin/config` answers."""

    def change(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What a `PATCH` of it answers.

        Raises:
            RefusedError: a value cannot be; nothing was changed.
            ChangedError: another generation holds; nothing was changed.
            EndpointError: nobody answers, or not as they should.
        """

    def history(self) -> list[dict[str, Any]]:
        """What `GET /admin/audit` answers, newest last."""


class HttpAdmin:
    """The same over HTTP."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def show(self) -> dict[str, Any]:
        """Ask, and check that it is a Relevo that answers."""
        answer = self._ask(CONFIG)
        if not isinstance(answer, dict) or not answer.keys() >= set(TOLD):
            raise EndpointError(f"{self._endpoint.url}{CONFIG} is not that of a Relevo: this server cannot be tuned.")
        return answer

    def change(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Have it changed."""
        return dict(self._ask(CONFIG, body))

    def history(self) -> list[dict[str, Any]]:
        """Ask for it."""
        return list(self._ask(AUDIT))

    def _ask(self, route: str, patch: Mapping[str, Any] | None = None) -> Any:
        where = f"{self._endpoint.url}{self._endpoint.path}{route}"
        status, text = ask(where, self._endpoint.metrics_keys, patch=patch)
        if status == HTTPStatus.OK:
            try:
                return json.loads(text)
            except ValueError:
                raise EndpointError(f"{where} answers what is no JSON: this server cannot be tuned.") from None
        if not status:
            raise EndpointError(f"{where} cannot be reached: {one_line(text)}.")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise EndpointError(f"{where} wants the admin token (HTTP {status}); give it with --admin-token.")
        if status == HTTPStatus.NOT_FOUND:
            raise EndpointError(f"{where} is not there: only a Relevo can be tuned; leave --tune out.")
        error = as_object(text).get("error")
        said = one_line(str(error["message"]) if isinstance(error, dict) and "message" in error else text)
        if status == HTTPStatus.CONFLICT:
            raise ChangedError(said)
        if status == HTTPStatus.UNPROCESSABLE_ENTITY:
            raise RefusedError(said)
        raise EndpointError(f"{where} answers HTTP {status}: {said}")
