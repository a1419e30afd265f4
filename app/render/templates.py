"""Jinja for the pages: one set of filters, and addresses of static files that change with their content."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from app.assets import asset, templates_dir
from app.render import numbers
from app.render.glossary import ABOUT


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
