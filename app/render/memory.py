"""Whose the KV memory is, what the prefix cache brings, and what is wasted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.render import numbers
from app.render.blocks import Owner, draw_bar, draw_blocks
from app.render.requests import short_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.render.scene import Scene

NUM_LARGEST: Final = 3


def memory_variables(scene: Scene) -> dict[str, Any]:
    """The bar, the grid and what they say in words."""
    kv, cache = scene.snapshot["kv"], scene.snapshot["prefix_cache"]
    owners = [Owner(scene.palette.css(name), name, amount) for name, amount in kv["owners"].items()]
    picture = draw_blocks(kv, owners)
    asked = cache["query_tokens"]
    largest = sorted(owners, key=lambda owner: -owner.num_blocks)[:NUM_LARGEST]
    shown = ("used", "cached", "free", "total", "block_size", "shared")
    return {
        "kv": {name: numbers.count(kv[name]) for name in shown},
        "bar": draw_bar(kv),
        "grid": picture.grid,
        "per_cell": picture.blocks_per_cell,
        "owned": bool(owners),
        "largest": [(owner.css, owner.request_id, short_id(owner.request_id), owner.num_blocks) for owner in largest],
        "hit_rate": numbers.percent(cache["hit_tokens"] / asked) if asked else None,
        "hit_tokens": numbers.count(cache["hit_tokens"]),
        "query_tokens": numbers.count(asked),
        "evictions": numbers.count(cache["evictions"]),
        "waste": numbers.percent(wasted(scene.snapshot)),
    }


def wasted(snapshot: Mapping[str, Any]) -> float | None:
    """The share of the token slots set aside for requests that have ended which was never written."""
    slots = snapshot["kv_waste"]
    return slots["unwritten_slots"] / slots["set_aside_slots"] if slots["set_aside_slots"] else None
