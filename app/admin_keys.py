"""`/admin/keys`: makes and revokes API keys. A page whose forms need no script, and the same as JSON for programs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from pydantic import ConfigDict, Field, ValidationError
from quart import Blueprint, Response, g, jsonify, redirect, request

from app.api.requests import FORM_TYPE, read_fields, read_json
from app.audit import timestamp
from app.config_schema import KeyLimits, is_loopback
from app.errors import ApiError
from app.fields import WrongFieldsError, is_whole, whole_or_text
from app.render import numbers
from app.render.keys import LIMIT_TITLES, page_variables
from app.render.templates import make_environment
from app.security import ADMIN_COOKIE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_core import ErrorDetails
    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.http import Context
    from app.key_service import KeyService
    from app.keys import KeyRecord

log = logging.getLogger("relevo.keys")

MAX_NAME_LENGTH: Final = 64
# How a revocation ended that the disk did not take.
NOT_WRITTEN: Final = "refused from then on, but not written down at once"


class NewKey(KeyLimits):
    """Body of `POST /admin/keys`."""

    model_config = ConfigDict(strict=True)

    name: str = Field(min_length=1, max_length=MAX_NAME_LENGTH)

    @property
    def limits(self) -> KeyLimits:
        """The limits alone."""
        return KeyLimits.model_validate(self.model_dump(exclude={"name"}))


def keys_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    blueprint = Blueprint("keys", __name__)
    template = make_environment().get_template("keys.html")
    keys = context.keys
    exposed = not is_loopback(context.settings.server.host)

    async def page(status: int = 200, **variables: Any) -> Response:
        shown = page_variables(keys.keyring, keys.problem, keys.unwritten, exposed=exposed) | variables
        state = context.telemetry.draw_part("state")
        shown |= {"page": "admin", "state_html": state, "signed_in": ADMIN_COOKIE in request.cookies}
        shown["recording"] = context.recorder.now
        return await context.drawing.page(template, lambda: shown, status)

    async def make_from_form() -> Response:
        form = await read_fields()
        try:
            record, secret = await _make(context, parse_form(form))
        except ApiError as error:
            return await page(error.status, typed=form, error={"field": error.param, "message": str(error)})
        return await page(201, made={"name": record.name, "secret": secret})

    @blueprint.get("/admin/keys")
    async def show() -> Response:
        return await page() if "text/html" in request.headers.get("Accept", "") else _as_json(view(keys))

    @blueprint.post("/admin/keys")
    async def make() -> Response:
        if request.mimetype == FORM_TYPE:
            return await make_from_form()
        record, secret = await _make(context, parse_new_key(await read_json()))
        return _as_json({**_entry(keys, record), "key": secret}, 201)

    @blueprint.delete("/admin/keys/<key_id>")
    async def revoke(key_id: str) -> Response:
        await _revoke(context, key_id)
        return _as_json(view(keys))

    @blueprint.post("/admin/keys/<key_id>/revoke")
    async def revoke_from_form(key_id: str) -> Response | WerkzeugResponse:
        try:
            await _revoke(context, key_id)
        except ApiError as error:
            return await page(error.status, error={"field": None, "message": str(error)})
        return redirect("/admin/keys", 303)

    @blueprint.delete("/admin/keys")
    async def forget() -> Response:
        await _forget(context)
        return _as_json(view(keys))

    @blueprint.post("/admin/keys/forget")
    async def forget_from_form() -> Response | WerkzeugResponse:
        try:
            await _forget(context)
        except ApiError as error:
            return await page(error.status, error={"field": None, "message": str(error)})
        return redirect("/admin/keys", 303)

    return blueprint


def view(keys: KeyService) -> dict[str, Any]:
    """The object of `GET /admin/keys`: every key, whether one is needed, why none can be made, and what is not written.

    `unwritten` are the numbers of keys that were revoked, but not on the disk yet.
    """
    entries = [_entry(keys, record) for record in keys.keyring]
    access = {"key_needed": keys.keyring.is_closed, "problem": keys.problem}
    return {"keys": entries, **access, "unwritten": keys.unwritten}


def _entry(keys: KeyService, record: KeyRecord) -> dict[str, Any]:
    times = {"created": record.created, "last_used": record.last_used, "revoked": record.revoked}
    return {
        "id": record.key_id,
        "name": record.name,
        "configured": record.key_id is None,
        "valid": keys.keyring.is_valid(record),
        **{name: None if when is None else timestamp(when) for name, when in times.items()},
        "limits": record.limits.model_dump(),
    }


def _as_json(value: object, status: int = 200) -> Response:
    answer = jsonify(value)
    answer.status_code = status
    return answer


def parse_new_key(data: Mapping[str, Any]) -> NewKey:
    """Check the body of a `POST /admin/keys`; `null` means absent.

    Raises:
        ApiError: 422, naming the field at fault.
    """
    name = data.get("name")
    if isinstance(name, str):
        data = {**data, "name": name.strip()}
        if not name.strip().isprintable():
            raise WrongFieldsError({"name": "has characters that cannot be shown."})
    try:
        return NewKey.model_validate(data)
    except ValidationError as error:
        raise WrongFieldsError.of(error, ("name", *LIMIT_TITLES), _say) from None


def _say(_name: str, error: ErrorDetails) -> str:
    message = error["msg"].replace("Input should ", "must ").replace("String should ", "must ")
    return message.replace("Field required", "is required") + "."


def parse_form(form: Mapping[str, str]) -> NewKey:
    """The same from the page's form, where an empty field is no limit.

    Raises:
        ApiError: 422, naming the field at fault.
    """
    data: dict[str, Any] = {"name": form.get("name", "")}
    return parse_new_key(data | {field: whole_or_text(form.get(field, "")) for field in LIMIT_TITLES})


async def _make(context: Context, wanted: NewKey) -> tuple[KeyRecord, str]:
    record, secret = await context.keys.make(wanted.name, wanted.limits)
    context.journal.begin_deed(f"API key {record.name!r} made", g.who, outcome="done")
    log.info("%s made the API key %r", g.who, record.name)
    return record, secret


async def _revoke(context: Context, key_id: str) -> None:
    if not is_whole(key_id):
        raise ApiError(404, "Keys go by their number; those of the configuration have none.", code="key_not_found")
    valid = [r.name for r in context.keys.keyring if r.key_id == int(key_id) and r.revoked is None]
    outcome = NOT_WRITTEN  # it is refused from now on, whatever comes of the rest
    try:
        await context.keys.revoke(int(key_id))
        outcome = "done"
    finally:
        for name in valid:
            context.journal.begin_deed(f"API key {name!r} revoked", g.who, outcome=outcome)
    log.info("%s revoked the API key %s", g.who, key_id)


async def _forget(context: Context) -> None:
    number = sum(record.revoked is not None for record in context.keys.keyring)
    await context.keys.forget_revoked()
    if number:
        context.journal.begin_deed(f"{numbers.plural(number, 'revoked API key')} forgotten", g.who, outcome="done")
    log.info("%s had the revoked API keys forgotten", g.who)
