"""Jinja for the pages: one set of filters, and addresses of static files that change with their content."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from app.assets import static_dir, templates_dir
from app.render import numbers
from app.render.glossary import ABOUT

if TYPE_CHECKING:
    from pathlib import Path


@cache  # to compile a template takes a hundredth of a second and more, and there are dozens
def make_environment() -> Environment:
    """The environment of all pages and partials; everything is escaped unless it is Markup."""
    environment = Environment(
        loader=FileSystemLoader(templates_dir()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["asset"] = asset
    environment.globals["about"] = ABOUT
    environment.filters["count"] = numbers.count
    environment.filters["setting"] = numbers.setting
    environment.filters["plural"] = numbers.plural
    environment.filters["code"] = code
    return environment


def code(text: str) -> Markup:
    """A text in which what stands between backticks is code."""
    pieces = [
        Markup("<code>{}</code>").format(piece) if n % 2 else escape(piece) for n, piece in enumerate(text.split("`"))
    ]
    return Markup("").join(pieces)


def asset(name: str) -> str:
    """The address of a file in `static/`, with a mark of its content, so that it can be cached for ever."""
    path = static_dir() / name
    return f"/static/{name}?v={_digest(path, path.stat().st_mtime_ns)}"


@cache
def _digest(path: Path, _modified: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
