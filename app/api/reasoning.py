"""Models that think aloud: where an answer's thinking begins and ends, and how a request switches it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from app.api.parts import Text, Thinking, begun_suffix
from engine.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.api.parts import Part
    from engine.loaded import ChatTemplateLike

# How models mark their thinking: at the beginning of an answer, and once.
PAIRS: Final = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
# What a request may hand to the chat template, and what it may be there.
_SWITCHES: Final = ("enable_thinking", "thinking", "preserve_thinking")
_BUDGET: Final = "thinking_budget"
EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh")
MAX_BUDGET: Final = 2**31 - 1


class ThinkingReader:
    """Tells the thinking at the beginning of an answer from the text after it. White space around both is dropped.

    Args:
        closing: the mark that ends the thinking, where the prompt has begun it already.
    """

    def __init__(self, closing: str | None = None) -> None:
        self._held = ""
        self._closing = closing
        self._fresh = True  # nothing but white space came since the last mark
        self._thought = closing is not None

    def push(self, text: str) -> list[Part]:
        """Take text; give the parts that are certain now."""
        if self._closing is None and not self._fresh:
            return [Text(text)] if text else []
        self._held += text
        if self._closing is None and not self._thought:
            return self._begin(final=False)
        return self._think() if self._closing is not None else self._answer()

    def finish(self) -> list[Part]:
        """The answer is over: give what was held back."""
        if self._closing is not None:
            rest, self._held = self._held.strip() if self._fresh else self._held.rstrip(), ""
            return [Thinking(rest)] if rest else []
        if self._fresh and not self._thought:
            return self._begin(final=True)
        return []

    def reason(self, reason: str) -> str:
        """Thinking changes nothing about how it ended."""
        return reason

    def _begin(self, *, final: bool) -> list[Part]:
        """Whether the answer begins with a mark."""
        start = self._held.lstrip()
        for opening, closing in PAIRS.items():
            if start.startswith(opening):
                self._held, self._closing, self._thought = start[len(opening) :], closing, True
                return self._think()
        if not final and any(opening.startswith(start) for opening in PAIRS):
            return []
        self._fresh = False
        text, self._held = self._held, ""
        return [Text(text)] if text else []

    def _think(self) -> list[Part]:
        closing = self._closing or ""
        if self._fresh:
            self._held = self._held.lstrip()
        thought, found, after = self._held.partition(closing)
        if found:
            self._held, self._closing, self._fresh = after, None, True
            thought = thought.rstrip()
            return [*([Thinking(thought)] if thought else []), *self._answer()]
        # White space before the mark does not count, so it waits with what may be the mark.
        sure = thought[: len(thought) - begun_suffix(thought, closing)].rstrip()
        self._held = thought[len(sure) :]
        if not sure:
            return []
        self._fresh = False
        return [Thinking(sure)]

    def _answer(self) -> list[Part]:
        text, self._held = self._held.lstrip(), ""
        if not text:
            return []
        self._fresh = False
        return [Text(text)]


def parse_template_options(value: object, effort: str | None, template: ChatTemplateLike) -> dict[str, Any]:
    """What a request hands to the chat template by `chat_template_kwargs` and `reasoning_effort`.

    Raises:
        InvalidRequestError: it is not one of the few, or this model's template does not look at it.
    """
    options = _parse_kwargs(value, template)
    if effort is None:
        return options
    if "reasoning_effort" in template.variables:
        return {"reasoning_effort": effort, **options}
    for switch in _SWITCHES[:2]:
        if switch in template.variables:
            return {switch: effort not in ("none", "minimal"), **options}
    if effort != "none":
        message = "'reasoning_effort' is not supported by this model; leave it out or set it to 'none'."
        raise InvalidRequestError(message, param="reasoning_effort", code="unsupported_parameter")
    return options


def _parse_kwargs(value: object, template: ChatTemplateLike) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequestError("'chat_template_kwargs' must be an object.", param="chat_template_kwargs")
    for name, setting in value.items():
        param = f"chat_template_kwargs.{name[:64]}"
        if name in _SWITCHES:
            fits, what = isinstance(setting, bool), "true or false"
        elif name == _BUDGET:
            fits, what = type(setting) is int and 0 <= setting <= MAX_BUDGET, "a number of tokens"
        elif name == "reasoning_effort":
            fits, what = setting in EFFORTS, f"one of {', '.join(EFFORTS)}"
        else:
            known = ", ".join((*_SWITCHES, _BUDGET, "reasoning_effort"))
            message = f"'{param}' is not supported here; {known} are."
            raise InvalidRequestError(message, param=param, code="unsupported_parameter")
        if not fits:
            raise InvalidRequestError(f"'{param}' must be {what}.", param=param)
        if name not in template.variables and setting is not False:
            message = f"'{param}' means nothing to this model's chat template; leave it out."
            raise InvalidRequestError(message, param=param, code="unsupported_parameter")
    return {name: setting for name, setting in value.items() if name in template.variables}


def thinking_before(template: ChatTemplateLike, options: Mapping[str, Any]) -> tuple[str, str] | None:
    """The marks of the thinking that may come before an answer; the first is empty where the prompt itself begins it.

    `None` where none may: the model was not taught to, or this request has switched it off.
    """
    taught = [pair for pair in PAIRS.items() if pair[0] in template.source]
    if not taught:
        return None
    try:
        prompt = template.render([{"role": "user", "content": "hello"}], **options).rstrip()
    except InvalidRequestError:
        return None  # this template wants another conversation; it will speak about the real one
    for opening, closing in taught:
        if prompt.endswith(opening):
            return "", closing
        if prompt.endswith(closing):
            return None
    return taught[0]
