"""`/admin`, `/admin/config` and `/admin/audit`: the live settings, as JSON and as a page that needs no script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from quart import Blueprint, Response, g, jsonify, redirect, request

from app.api.requests import read_fields, read_json
from app.effects import tell_effects
from app.errors import ApiError
from app.fields import whole_or_text
from app.live_change import FLUSH, KEYS, parse_change
from app.live_config import STATE, ChangedMeanwhileError
from app.preview import look
from app.render.templates import make_environment
from app.render.tuning import MAX_ROWS, admin_variables, effect_view, list_changes, list_history, read_form
from app.security import ADMIN_COOKIE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quart.typing import ResponseReturnValue
    from werkzeug.wrappers import Response as WerkzeugResponse

    from app.audit import AuditEntry
    from app.http import Context

# What a button of the page asks for, as `PATCH /admin/config` takes it.
DEEDS: Final[dict[str, dict[str, Any]]] = {
    "undo": {"restore": "previous"},
    "start": {"restore": "start"},
    "drain": {STATE: True},
    "resume": {STATE: False},
    "flush": {FLUSH: True},
}
# These depend on what holds; the others mean the same whatever was changed meanwhile.
NEED_GENERATION: Final = ("undo", "start", "restore", "apply", "preview")


def admin_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    admin = Blueprint("admin", __name__)
    page = TuningPage(context)

    @admin.get("/admin")
    async def tuning() -> Response:
        return await page.draw(held=request.args.get("held", ""))

    @admin.post("/admin")
    async def turn() -> ResponseReturnValue:
        return await page.turn(await read_fields())

    @admin.get("/admin/config")
    async def show() -> Response:
        return jsonify(context.live.view())

    @admin.patch("/admin/config")
    async def change() -> Response:
        return jsonify(await context.live.apply(await read_json(), who=g.who))

    @admin.get("/admin/audit")
    async def audit() -> Response:
        entries, followed = context.journal.audit.entries, context.effects.followed

        def make() -> list[dict[str, Any]]:
            told = tell_effects(entries, followed)
            return [entry.as_json() | {"effect": effect} for entry, effect in zip(entries, told, strict=True)]

        return await context.drawing.json(make)

    return admin


class TuningPage:
    """Draws the page, and does what its forms ask for."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._template = make_environment().get_template("admin.html")

    async def draw(self, status: int = 200, *, held: str = "", **variables: Any) -> Response:
        """The page.

        Args:
            held: the generation that a form has just made, as text.
            variables: of the template: `typed`, `error`, `meanwhile`, `preview`.
        """
        context, live = self._context, self._context.live
        config, entries, followed = live.view(), context.journal.audit.entries, context.effects.followed
        now, limits = look(context.engine.snapshot()), context.engine.limits
        shown: dict[str, Any] = {
            "page": "admin",
            "signed_in": ADMIN_COOKIE in request.cookies,
            "state_html": context.telemetry.draw_part("state"),
            "history_problem": context.journal.problem,
            "recording": context.recorder.now,
            "undo": list_changes({name: (config["effective"][name], old) for name, old in live.undo.items()}),
            "off_start": list_changes(_differences(config["effective"], live.start)),
            "held": config["generation"] if held == str(config["generation"]) else None,
            "typed": {},
            "error": None,
            "meanwhile": [],
            "preview": None,
        } | variables

        def make() -> dict[str, Any]:
            return admin_variables(config, limits, now) | self._history(config, entries, followed) | shown

        return await context.drawing.page(self._template, make, status)

    def _history(
        self, config: Mapping[str, Any], entries: Sequence[AuditEntry], followed: Mapping[str, float | None]
    ) -> dict[str, Any]:
        """The changes that the page lists, with what came of each; made on a thread."""
        shown = entries[-MAX_ROWS:]
        rows = list_history(config["effective"], config["generation"], shown)
        for row, told in zip(rows, reversed(tell_effects(shown, followed)), strict=False):
            row["effect"] = effect_view(told)
        return {
            "history": rows if len(shown) == len(entries) else rows[:-1],
            "num_older": len(entries) - len(shown),
        }

    async def turn(self, form: Mapping[str, str]) -> Response | WerkzeugResponse:
        """Do what a form asks for; where that cannot be done, the page says why and keeps what was typed."""
        action = form.get("action", "")
        typed = _touched(form)
        try:
            body = self._body(action, form)
            if isinstance(seen := body.get("if_generation"), int):
                self._context.live.check_generation(seen)  # before what else is wrong with it
            if action == "preview":
                return await self.draw(typed=typed, preview=self._preview(body))
            if action == "apply" and not body.keys() & KEYS:
                raise ApiError(422, "These values hold already.", code="no_change")
            done = await self._context.live.apply(body, who=g.who)
        except ChangedMeanwhileError as error:
            meanwhile = [
                {"generation": entry.generation, "who": entry.who, "reason": entry.reason,
                 "changes": list_changes(entry.changes)}
                for entry in error.entries
            ]  # fmt: skip
            return await self.draw(error.status, typed=typed, error=_told(error), meanwhile=meanwhile)
        except ApiError as error:
            return await self.draw(error.status, typed=typed, error=_told(error))
        return redirect(f"/admin?held={done['generation']}", 303)

    def _body(self, action: str, form: Mapping[str, str]) -> dict[str, Any]:
        """What a form asks for, as `PATCH /admin/config` takes it.

        Raises:
            ApiError: the page has no such button.
        """
        body: dict[str, Any] = {"reason": form.get("reason", "").strip() or None}
        body["ttl_seconds"] = whole_or_text(form.get("ttl_seconds", ""))
        if action in NEED_GENERATION:
            body["if_generation"] = whole_or_text(form.get("if_generation", ""))
        if action in DEEDS:
            return body | DEEDS[action]
        if action in ("apply", "preview"):
            return body | read_form(form)
        if action == "restore":
            return self._restoring(whole_or_text(form.get("generation", ""))) | {
                k: v for k, v in body.items() if v is not None
            }
        raise ApiError(400, "The page has no such button.", param="action", code="unknown_action")

    def _restoring(self, generation: int | str | None) -> dict[str, Any]:
        """The values of a generation, but for whether the server is draining."""
        view = self._context.live.view()
        rows = list_history(view["effective"], view["generation"], self._context.journal.audit.entries)
        for row in rows:
            if row["generation"] == generation:
                values = {name: value for name, value in row["values"].items() if name in KEYS and name != STATE}
                return values | {"reason": f"back to generation {generation}"}
        raise ApiError(409, "That generation is no longer known.", param="generation", code="unknown_generation")

    def _preview(self, body: Mapping[str, Any]) -> dict[str, Any]:
        engine, live = self._context.engine, self._context.live
        found = live.preview(parse_change(body, engine.limits, engine.capacity))
        told = list_changes(found["changes"])
        for change, text in zip(told, found["words"].values(), strict=True):
            change["words"] = text
        return {"changes": told, "running": found["running"], "drains": sum(found["drains"].values())}


def _differences(now: Mapping[str, Any], start: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (now[name], value) for name, value in start.items() if name != STATE and now[name] != value}


def _touched(form: Mapping[str, str]) -> dict[str, str]:
    """What somebody typed, without the fields that were left as they were: those show what holds now."""
    untouched = {key for key in KEYS if form.get(key) == form.get(f"was.{key}")}
    return {key: text for key, text in form.items() if key not in untouched and not key.startswith("was.")}


def _told(error: ApiError) -> dict[str, Any]:
    return {"field": error.param, "message": str(error)}
