"""The pages for people: chat, dashboard and tuning, rendered here; and the dashboard's stream and its JSON twin."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from quart import Blueprint, Response, jsonify, request

from app.assets import static_dir
from app.errors import ApiError
from app.live_config import ABSENT
from app.render import words
from app.render.glossary import TERMS
from app.render.templates import make_environment
from app.request_pages import LARGEST_NUMBER, whole_argument
from engine.samples import MAX_SAMPLES
from engine.timeline import DEFAULT_WINDOW, WINDOWS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quart.typing import ResponseReturnValue

    from app.audit import AuditEntry
    from app.http import Context

STREAM_HEADERS: Final = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
EFFECTS: Final = {
    "policy": "Continuous: whoever comes takes the first free seat. Static, dynamic: whole batches, to compare with. "
    "A change waits until those who run have ended.",
    "admission": "What a newcomer must find free. On demand: what it needs now. Reserve: its longest answer; nobody is "
    "ever preempted. Predicted: an answer of usual length.",
    "max_num_seqs": "More: more requests at once, each a little slower. Fewer: each is faster, others wait longer.",
    "max_num_batched_tokens": "Lower: steadier tokens for those being answered. Higher: sooner first tokens.",
    "long_prefill_token_threshold": "Of one prompt in one step; 0 is no limit of its own.",
    "dynamic_preferred_size": "Requests that make a batch; 0 is as many as there are seats.",
    "dynamic_max_queue_delay_seconds": "The first waits so long for the others, in seconds.",
    "num_speculative_tokens": "Tokens guessed from what a text repeats, of one request in one step; 0 is none.",
}
RARE: Final = (
    "long_prefill_token_threshold",
    "dynamic_preferred_size",
    "dynamic_max_queue_delay_seconds",
    "num_speculative_tokens",
)


def pages_blueprint(context: Context) -> Blueprint:
    """The routes, bound to `context`."""
    pages = Blueprint(
        "pages",
        __name__,
        static_folder=str(static_dir()),
        static_url_path="/static",
    )
    pages.after_request(set_cache_control)
    templates = make_environment()
    telemetry, model = context.telemetry, context.engine.model

    def page(name: str, **variables: Any) -> Response:
        html = templates.get_template(f"{name}.html").render(page=name, **variables)
        return Response(html, content_type="text/html; charset=utf-8")

    @pages.get("/")
    async def chat() -> Response:
        state = telemetry.draw_part("state")
        return page("chat", state_html=state, model=model.name, context_length=model.context_length)

    @pages.get("/ops")
    async def ops() -> Response:
        seconds = parse_window(request.args)
        parts = telemetry.frame(seconds).parts
        if "to" in request.args:
            parts = {**parts, "table": telemetry.draw_table(whole_argument("to", LARGEST_NUMBER))}
        windows = {"window": seconds // 60, "windows": [window // 60 for window in WINDOWS]}
        return page("ops", state_html=parts["state"], parts=parts, terms=TERMS, max_samples=MAX_SAMPLES, **windows)

    @pages.get("/ops/events")
    async def events() -> Response:
        frames = telemetry.stream(parse_window(request.args))
        response = Response(frames, content_type="text/event-stream; charset=utf-8", headers=STREAM_HEADERS)
        # Quart would cut the stream after its own response timeout.
        response.timeout = None
        return response

    @pages.get("/ops/stats.json")
    async def stats() -> ResponseReturnValue:
        return jsonify(context.stats(parse_window(request.args)))

    @pages.get("/admin")
    async def admin() -> Response:
        variables = admin_variables(context.live.view(), context.journal.audit.entries)
        variables |= {"running": context.engine.num_running, "waiting": context.engine.num_waiting}
        variables["history_problem"] = context.journal.problem
        return page("admin", state_html=telemetry.draw_part("state"), **variables)

    return pages


def parse_window(args: Mapping[str, str]) -> int:
    """The seconds of the window that a request asks for in minutes; five minutes where it does not.

    Raises:
        ApiError: 400, there is no such window.
    """
    given = args.get("window", str(DEFAULT_WINDOW // 60))
    minutes = {str(seconds // 60): seconds for seconds in WINDOWS}
    if given not in minutes:
        raise ApiError(400, f"'window' must be one of {', '.join(minutes)}, in minutes.", param="window")
    return minutes[given]


async def set_cache_control(response: Response) -> Response:
    """Nothing is kept but static files."""
    if request.path.startswith("/static/") and request.args.get("v"):
        # The address changes with the content, so what lies under it never does.
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    elif request.path.startswith("/static/"):
        response.headers["Cache-Control"] = "no-cache"
    elif "Cache-Control" not in response.headers:
        response.headers["Cache-Control"] = "no-store"
    return response


def admin_variables(config: Mapping[str, Any], entries: Sequence[AuditEntry]) -> dict[str, Any]:
    """What the tuning page shows of the live settings (`GET /admin/config`) and their history, oldest entry first."""
    effective = config["effective"]
    return {
        "generation": config["generation"],
        "draining": config["pending_drain"].get("max_num_seqs", 0),
        "switching": config["pending_drain"].get("policy", 0),
        "reverts": [
            {"title": words.word(words.SETTINGS, key), "to": _shown(key, revert["to"]), "at": _clock(revert["at"])}
            for key, revert in config["reverts"].items()
        ],
        "fields": [_field(key, effective[key], config) for key in effective],
        "history": list_history(effective, config["generation"], entries),
    }


def _field(key: str, value: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of a live setting: `choices` where it is a word, else the range of a number."""
    choices = config["choices"].get(key, ())
    least, most = (0, 0) if choices else config["ranges"][key]
    return {
        "key": key,
        "title": words.word(words.SETTINGS, key),
        "value": value,
        "shown": _shown(key, value),
        "choices": [(choice, words.word({}, choice)) for choice in choices],
        "least": least,
        "most": int(most),
        "step": "0.01" if key.endswith("_seconds") else "1",
        "effect": EFFECTS.get(key, ""),
        "rare": key in RARE,
    }


def list_history(effective: Mapping[str, Any], generation: int, entries: Sequence[AuditEntry]) -> list[dict[str, Any]]:
    """The generations, newest first, each with the values that held then: worked out backwards from what holds now."""
    values = dict(effective)
    rows: list[dict[str, Any]] = []
    for entry in reversed(entries):
        values = dict(entry.effective) or values
        rows.append({
            "generation": entry.generation,
            "current": not rows,
            "time": _clock(entry.time),
            "time_iso": entry.time,
            "who": entry.who,
            "reason": entry.reason,
            "expires": _clock(entry.expires) if entry.expires else None,
            "reverted": _clock(entry.reverted) if entry.reverted else None,
            "changes": [
                {"title": words.word(words.SETTINGS, key), "old": _shown(key, old), "new": _shown(key, new)}
                for key, (old, new) in entry.changes.items()
            ],
            "values_json": json.dumps(values),
        })  # fmt: skip
        values.update((key, old) for key, (old, _) in entry.changes.items())
    rows.append({
        "generation": entries[0].generation - 1 if entries else generation,
        "current": not entries,
        "time": None,
        "time_iso": None,
        "who": "at the start",
        "reason": None,
        "expires": None,
        "reverted": None,
        "changes": [
            {"title": words.word(words.SETTINGS, key), "old": None, "new": _shown(key, value)}
            for key, value in values.items()
        ],
        "values_json": json.dumps(values),
    })  # fmt: skip
    return rows


def _shown(key: str, value: Any) -> Any:
    """A setting's value, or the word for it."""
    return ABSENT.get(key, value) if value == 0 else value


def _clock(iso: str) -> str:
    moment = datetime.fromisoformat(iso).astimezone(UTC)
    return f"{moment.day} {moment:%b %H:%M:%S} UTC"
