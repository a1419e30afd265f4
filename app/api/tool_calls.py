"""Calls of tools in what a model writes: found by what they look like, as each family of models was taught.

    <tool_call>{"name": …, "arguments": {…}}</tool_call>      Hermes, Qwen
    <|python_tag|>{"name": …, "parameters": {…}}; {…}         Llama 3, also without the tag
    [TOOL_CALLS][{"name": …, "arguments": {…}}, …]            Mistral; newer ones: [TOOL_CALLS]name[ARGS]{…}
    {"name": …, "arguments": {…}}, or a list of such          others, at the beginning of an answer

A call must name a tool that was offered and have an object for arguments; all else stays text, to the letter. Where the
model chose freely, a call is told when it is complete, since half of it may still turn out to be text. Where a grammar
holds the model to it, the arguments are passed on as they come.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from app.api.parts import CallArguments, CallBegun, Text, begun_suffix

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from app.api.parts import Part

# What begins a call, and what ends it. All of these marks are control tokens to some tokenizers, and must be shown.
_CLOSINGS: Final = {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": "", "<|python_tag|>": ""}
_OPENINGS: Final = tuple(_CLOSINGS)
MARKS: Final = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>")
_LISTED: Final = "[TOOL_CALLS]"
# Keys that a call's object may begin with. The others tell early that a JSON answer is an answer.
_KEYS: Final = ("name", "arguments", "parameters", "type", "function", "id")
_OPEN: Final = re.compile(r"\s*(?:\[\s*)?(?:\{\s*)?")
_NAMED: Final = re.compile(r"\s{0,8}([\w.-]{1,64})(?:\[CALL_ID\]\w{1,64})?(?:\[ARGS\])?\s{0,8}")
_NAMED_LENGTH: Final = 256  # longer than any match
_BEGUN: Final = re.compile(r'[\s\[\]{},]*"name"\s*:\s*("(?:[^"\\]|\\.)*")', re.ASCII)
_HEAD: Final = re.compile(_BEGUN.pattern + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.ASCII)


class JsonEnd:
    """Finds where an object or a list ends, a piece of text at a time. Whether it is valid is for others to say."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, start: int = 0) -> int | None:
        """The index after the last character of the value, or `None` when it goes on beyond `text`."""
        for index in range(start, len(text)):
            character = text[index]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class CallReader:
    """Finds calls in an answer that the model wrote freely.

    Args:
        names: of the tools that were offered.
        make_id: a fresh id for a call.
        parallel: whether there may be several; if not, the answer is over with the first.
    """

    def __init__(self, names: Collection[str], *, make_id: Callable[[], str], parallel: bool = True) -> None:
        self._names = names
        self._make_id = make_id
        self._parallel = parallel
        self._count = 0
        self._held = ""
        self._step: Callable[[bool], list[Part] | None] = self._look
        self._blank = True  # nothing but white space so far
        # Of the call that is being read: its mark, where its JSON starts, and how far it was searched.
        self._mark = ""
        self._start = 0
        self._searched = 0
        self._end = JsonEnd()
        self._closing = ""

    def push(self, text: str) -> list[Part]:
        """Take text; give the parts that are certain now."""
        self._held += text
        return self._run(final=False)

    def finish(self) -> list[Part]:
        """The answer is over: what is no call by now is text."""
        return self._run(final=True)

    def reason(self, reason: str) -> str:
        """An answer that called and came to its own end ended with the calls."""
        return "tool_calls" if self._count and reason == "stop" else reason

    def _run(self, *, final: bool) -> list[Part]:
        """Go from state to state until one of them needs more text."""
        parts: list[Part] = []
        while self._held and (found := self._step(final)) is not None:
            parts += found
        return parts

    def _release(self, length: int) -> list[Part]:
        """The first characters of what is held are text."""
        text, self._held = self._held[:length], self._held[length:]
        return [Text(text)] if text else []

    def _look(self, final: bool) -> list[Part] | None:
        """Between calls: text up to the next mark. White space before a call does not count, so it waits."""
        text = self._held
        if self._blank:
            core = text.lstrip()
            if core and not any(mark.startswith(core) or core.startswith(mark) for mark in _OPENINGS):
                self._blank = False
                if core[0] in "{[":
                    return self._begin("", len(text) - len(core))
        found = [(index, mark) for mark in _OPENINGS if (index := text.find(mark)) >= 0]
        if found:
            self._blank = False
            index, mark = min(found)
            keep = len(text[:index].rstrip())
            return self._release(keep) + self._begin(mark, index - keep + len(mark))
        if final:
            return self._release(len(text))
        held = max(begun_suffix(text, mark) for mark in _OPENINGS)
        return self._release(len(text[: len(text) - held].rstrip())) or None

    def _begin(self, mark: str, start: int) -> list[Part]:
        """What is held may be a call, from `start` on; before that are white space and its mark."""
        self._mark, self._start, self._searched = mark, start, start
        self._end = JsonEnd()
        self._step = self._open
        return []

    def _fail(self, length: int) -> list[Part]:
        """It was no call: its first characters are text, and the rest is looked at again."""
        self._step = self._look
        return self._release(length)

    def _open(self, final: bool) -> list[Part] | None:
        """The beginning of a call: enough of it to tell that it may be one."""
        head = self._held[self._start :]
        first = head.lstrip()[:1]
        if self._mark == _LISTED and first and first not in "{[":
            named = _NAMED.match(head)
            rest = head[named.end() :] if named else ""
            if named and rest.startswith("{"):
                self._searched += named.end()
                self._step = self._read
                return []
            may_go_on = not final and len(head) < _NAMED_LENGTH and "{" not in head
            return None if may_go_on else self._fail(self._start)
        opened = _OPEN.match(head)
        key = head[opened.end() :] if opened else ""
        if not key or (key[0] == '"' and any(f'"{name}"'.startswith(key) for name in _KEYS)):
            return self._fail(len(self._held)) if final else None
        if first in "{[" and any(key.startswith(f'"{name}"') for name in _KEYS):
            self._searched += len(head) - len(head.lstrip())
            self._step = self._read
            return []
        return self._fail(max(self._start, 1))

    def _read(self, final: bool) -> list[Part] | None:
        """The inside of a call, to its end."""
        end = self._end.feed(self._held, self._searched)
        if end is None:
            self._searched = len(self._held)
            return self._fail(len(self._held)) if final else None
        calls = self._parse(self._held[self._start : end])
        if calls is None:
            return self._fail(end)
        self._held = self._held[end:]
        self._step, self._closing = self._close, _CLOSINGS.get(self._mark, "")
        parts: list[Part] = []
        for name, arguments in calls if self._parallel else calls[:1]:
            parts += [CallBegun(self._count, self._make_id(), name), CallArguments(self._count, arguments)]
            self._count += 1
        if not self._parallel:
            self._step = self._drop
        return parts

    def _parse(self, text: str) -> list[tuple[str, str]] | None:
        named = _NAMED.match(text) if self._mark == _LISTED and text.lstrip()[:1] not in "{[" else None
        if named:
            call = _as_call({"name": named[1], "arguments": _load(text[named.end() :])}, self._names)
            return None if call is None else [call]
        value = _load(text)
        entries = value if isinstance(value, list) else [value]
        calls = [_as_call(entry, self._names) for entry in entries]
        return [call for call in calls if call] if calls and None not in calls else None

    def _close(self, final: bool) -> list[Part] | None:
        """After a call: its closing mark, and what leads to the next. White space here does not count."""
        rest = self._held.lstrip()
        if rest and self._closing and rest.startswith(self._closing):
            self._held, self._closing = rest[len(self._closing) :], ""
            return []
        if not rest or (self._closing and self._closing.startswith(rest) and not final):
            if final:
                self._held = ""
            return None
        bare = self._mark in ("", "<|python_tag|>")
        if bare and rest[0] == ";":
            self._held = rest[1:]
            return []
        self._held = rest
        self._step = self._look
        return self._begin(self._mark, 0) if bare and rest[0] == "{" else []

    def _drop(self, _final: bool) -> list[Part] | None:
        """Only one call was wanted, and it has been told."""
        self._held = ""
        return None


class HeldReader:
    """Reads an answer that a grammar holds to calls, so that arguments can be passed on as they come.

    Args:
        make_id: a fresh id for a call.
    """

    def __init__(self, *, make_id: Callable[[], str]) -> None:
        self._make_id = make_id
        self._count = 0
        self._held = ""
        self._end: JsonEnd | None = None

    def push(self, text: str) -> list[Part]:
        """Take text; give the parts that are certain now."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            if self._end is None:
                head = _HEAD.match(self._held)
                if head is None:
                    break
                parts.append(CallBegun(self._count, self._make_id(), _load(head[1])))
                self._count += 1
                self._held, self._end = self._held[head.end() :], JsonEnd()
            end = self._end.feed(self._held)
            arguments, self._held = self._held[:end], self._held[len(self._held) if end is None else end :]
            parts.append(CallArguments(self._count - 1, arguments))
            if end is not None:
                self._end = None
        return parts

    def finish(self) -> list[Part]:
        """A first call that was cut off behind its name has no arguments; a scrap from before a name is nothing."""
        text, self._held = self._held, ""
        if self._count or text.lstrip()[:1] in ("{", "["):
            named = None if self._count else _BEGUN.match(text)
            if named is None:
                return []
            self._count, self._end = 1, JsonEnd()
            return [CallBegun(0, self._make_id(), _load(named[1]))]
        return [Text(text)] if text else []

    def reason(self, reason: str) -> str:
        """As for other calls; but one that a stop string has cut off is not to be carried out."""
        return "tool_calls" if self._count and self._end is None and reason == "stop" else reason


def _load(text: str) -> Any:
    """The JSON value, or `None` for what is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _as_call(entry: Any, names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments, where `entry` is a call of one of `names`."""
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = entry["function"]
    if not isinstance(entry, dict):
        return None
    name = entry.get("name")
    arguments = entry.get("arguments", entry.get("parameters"))
    if isinstance(arguments, str):  # some models write JSON in JSON, as OpenAI's API does
        arguments = _load(arguments)
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()  # half of a surrogate pair is no text, and no client could read it
    except (ValueError, RecursionError):
        return None
    return name, text
