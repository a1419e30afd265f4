"""`GET /v1/models` and `GET /v1/models/NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.api.errors import ModelNameError

if TYPE_CHECKING:
    from app.http import Context


def list_models(context: Context) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model(context)]}


def retrieve_model(context: Context, name: str) -> dict[str, Any]:
    """The served model by its name, or `ModelNameError`."""
    if name != context.engine.model.name:
        raise ModelNameError(name, context.engine.model.name)
    return _model(context)


def _model(context: Context) -> dict[str, Any]:
    model = context.engine.model
    return {
        "id": model.name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "relevo",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context_length,
    }
