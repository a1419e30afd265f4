"""A conversation as the text a model was trained on, with contents that stay contents."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidRequestError, ModelFileError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.tokenizer import Tokenizer


class ChatTemplate:
    """A model's jinja2 template, in a sandbox.

    Args:
        source: the template.
        special_tokens: what the template may refer to by name (`bos_token`, `eos_token`, ...).

    Raises:
        ModelFileError: the template does not parse.

    Attributes:
        variables: the names that the template looks at; whether it knows tools, for one.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelFileError(f"The model's chat template does not parse: {_one_line(error)}") from error
        self.variables = _names_in(environment, source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as text, control tokens spelled out.

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        names = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **names)
        except Exception as error:  # the template is the model's program: whatever it raises is about these messages
            raise InvalidRequestError(
                f"The model's chat template refuses these messages: {_one_line(error)}", param="messages"
            ) from error

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the conversation; a BOS comes from the template alone.

        Only what the template itself writes can become a control token: spellings inside the messages, and inside what
        else it is given (definitions of tools), are broken before rendering and mended after the rendered text was
        split at those that are left.

        Raises:
            InvalidRequestError: the template refuses the messages.
        """
        (guarded, options), back = tokenizer.guard.protect([list(messages), kwargs])
        rendered = self.render(guarded, add_generation_prompt=add_generation_prompt, **options)
        pieces = tokenizer.split_control(rendered)
        try:
            return tokenizer.encode_pieces(
                piece.translate(back) if isinstance(piece, str) else piece for piece in pieces
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), param="messages") from error


def _names_in(environment: jinja2.Environment, source: str) -> frozenset[str]:
    """All names in a template's code but attributes: also those it gives a value first, where it got none."""
    names, before = set(), ""
    for _, kind, value in environment.lex(source):
        if kind == "name" and before != ".":
            names.add(value)
        if kind != "whitespace":
            before = value
    return frozenset(names)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja's own filter: that one escapes <, > and & for HTML, which a model was not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
