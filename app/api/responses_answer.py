"""The shapes of an answer of `/v1/responses`: an object of items, and its stream of events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.api.envelope import Envelope
from app.api.parts import Call, CallArguments, CallBegun, Text, Thinking
from app.sse import named_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from app.api.envelope import Ending, Written
    from app.api.errors import ErrorAnswer
    from app.api.parts import Part
    from engine.batch import TokenLogprobs
    from engine.outbox import Usage

_KINDS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text")}


class _Item:
    """An item that is being written: thinking, text, or a call.

    Attributes:
        place: where it is among the items, as every event about it says.
    """

    def __init__(self, kind: str, answer_id: str, index: int, call: Call | None = None) -> None:
        self.kind = kind
        self.call = call
        self.text = ""
        prefix = "fc" if call is not None else _KINDS[kind][0]
        self.item_id = f"{prefix}_{answer_id}{index}"
        self.place = {"item_id": self.item_id, "output_index": index}

    def show(self, status: str) -> dict[str, Any]:
        """The item as it is now."""
        head = {"id": self.item_id, "type": self.kind, "status": status}
        if self.call is not None:
            call = self.call
            return {**head, "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
        content = [] if status == "in_progress" else [self.show_part()]
        if self.kind == "reasoning":
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}

    def show_part(self) -> dict[str, Any]:
        """Its only part of content."""
        part = {"type": _KINDS[self.kind][1], "text": self.text}
        return part if self.kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


class ResponseEnvelope(Envelope):
    """A response of one choice.

    Args:
        answer_id: without a prefix; every item's id is made of it.
        echo: what the answer repeats of its request.
        count_tokens: of a text; for how many tokens the thinking took.
    """

    def __init__(self, answer_id: str, echo: dict[str, Any], *, count_tokens: Callable[[str], int]) -> None:
        self._answer_id = answer_id
        self._echo = echo
        self._count_tokens = count_tokens
        self._items: list[_Item] = []
        self._open: _Item | None = None
        self._reason = ""
        self._number = 0

    def opening(self, prompt_tokens: Sequence[int]) -> bytes:  # noqa: ARG002
        """The response without items, twice, as OpenAI has it."""
        response = {"response": self._response("in_progress", None)}
        return self._event("response.created", response) + self._event("response.in_progress", response)

    def piece(self, index: int, parts: Sequence[Part], entries: Sequence[TokenLogprobs]) -> bytes:  # noqa: ARG002
        """Items that begin, grow and end."""
        return b"".join([self._write(part) for part in parts])

    def finish(self, index: int, ending: Ending) -> bytes:  # noqa: ARG002
        """The end of the last item. An answer without any has an empty message."""
        self._reason = ending.reason
        begun = b"" if self._items else self._begin(self._make("message"))
        return begun + self._end(self._status)

    def closing(self, usage: Usage) -> bytes:
        """The whole response. There is no `[DONE]` here."""
        return self._event(f"response.{self._status}", {"response": self._response(self._status, usage)})

    def failure(self, error: ErrorAnswer) -> bytes:
        """An event of type `error`, and nothing after it."""
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    def whole(self, choices: Sequence[Written], usage: Usage) -> dict[str, Any]:
        """The response in one object: what the stream would have ended with."""
        choice = choices[0]
        self.piece(0, choice.parts, ())
        self.finish(0, choice.ending)
        return self._response(self._status, usage)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _write(self, part: Part) -> bytes:
        match part:
            case Text(text):
                return self._grow("message", text, "response.output_text.delta", {"logprobs": []})
            case Thinking(text):
                return self._grow("reasoning", text, "response.reasoning_text.delta", {})
            case CallBegun(_, call_id, name):
                return self._end("completed") + self._begin(self._make("function_call", Call(call_id, name)))
            case CallArguments(_, text):
                return self._grow_call(text)

    def _grow_call(self, text: str) -> bytes:
        item = self._open
        if item is None or item.call is None:
            return b""
        item.call.arguments += text
        return self._event("response.function_call_arguments.delta", {**item.place, "delta": text})

    def _grow(self, kind: str, text: str, event: str, members: dict[str, Any]) -> bytes:
        """A piece of an item of this kind, which is begun where none is open."""
        begun = b""
        item = self._open
        if item is None or item.kind != kind:
            item = self._make(kind)
            begun = self._end("completed") + self._begin(item)
        item.text += text
        return begun + self._event(event, {**item.place, "content_index": 0, "delta": text, **members})

    def _make(self, kind: str, call: Call | None = None) -> _Item:
        return _Item(kind, self._answer_id, len(self._items), call)

    def _begin(self, item: _Item) -> bytes:
        self._open = item
        self._items.append(item)
        shown = {"output_index": item.place["output_index"], "item": item.show("in_progress")}
        added = self._event("response.output_item.added", shown)
        if item.call is not None:
            return added
        part = {**item.place, "content_index": 0, "part": item.show_part()}
        return added + self._event("response.content_part.added", part)

    def _end(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        done = b""
        if item.call is not None:
            arguments = {**item.place, "name": item.call.name, "arguments": item.call.arguments}
            done = self._event("response.function_call_arguments.done", arguments)
        else:
            place = {**item.place, "content_index": 0}
            kind = "output_text" if item.kind == "message" else "reasoning_text"
            members: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            done = self._event(f"response.{kind}.done", {**place, "text": item.text, **members})
            done += self._event("response.content_part.done", {**place, "part": item.show_part()})
        item_shown = {"output_index": item.place["output_index"], "item": item.show(status)}
        return done + self._event("response.output_item.done", item_shown)

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        data = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        return named_event(data)

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        last = len(self._items) - 1
        output = [item.show(status if index == last else "completed") for index, item in enumerate(self._items)]
        return {
            "id": f"resp_{self._answer_id}",
            **self._echo,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        thinking = [item.text for item in self._items if item.kind == "reasoning"]
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": sum(map(self._count_tokens, thinking))},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
