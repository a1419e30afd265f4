"""Answers read strictly: by the `openai` package's own types, and by the schemas of `/openapi.json`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from app.api import answers
from tests.app.serving import CHAT, COMPLETIONS, events

if TYPE_CHECKING:
    from tests.app.serving import Server

M = TypeVar("M", bound=BaseModel)

WHOLE: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    CHAT: (ChatCompletion, answers.ChatCompletion),
    COMPLETIONS: (Completion, answers.Completion),
}
# OpenAI's type of a completion's chunk is that of a whole one.
CHUNK: dict[str, tuple[type[BaseModel], type[BaseModel]]] = {
    CHAT: (ChatCompletionChunk, answers.ChatChunk),
    COMPLETIONS: (Completion, answers.CompletionChunk),
}


def parse(kind: type[M], data: str) -> M:
    """Read JSON without any conversion."""
    return kind.model_validate_json(data, strict=True)


def extras(value: Any, where: str = "") -> set[str]:
    """The fields, by their path, that a type of the `openai` package does not know."""
    found: set[str] = set()
    if isinstance(value, BaseModel):
        found |= {f"{where}{name}" for name in value.model_extra or ()}
        for name in type(value).model_fields:
            found |= extras(getattr(value, name), f"{where}{name}.")
    elif isinstance(value, list):
        for entry in value:
            found |= extras(entry, where)
    return found


def check_whole(path: str, text: str) -> dict[str, Any]:
    """A whole answer, held to both kinds of types."""
    theirs, ours = WHOLE[path]
    assert extras(parse(theirs, text)) <= {"relevo"}
    parse(ours, text)
    answer: dict[str, Any] = json.loads(text)
    return answer


class StreamedChoice:
    """What the chunks of one choice add up to."""

    def __init__(self) -> None:
        self.text = ""
        self.reason: str | None = None
        self.logprobs: dict[str, list[Any]] = {}

    def add(self, choice: dict[str, Any]) -> None:
        assert self.reason is None, "nothing comes after the terminal chunk"
        self.text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        self.reason = choice["finish_reason"]
        for name, entries in (choice["logprobs"] or {}).items():
            if entries is not None:
                self.logprobs.setdefault(name, []).extend(entries)


class Streamed:
    """A stream, held to both kinds of types and to the order of its chunks."""

    def __init__(self, path: str, text: str, *, with_usage: bool) -> None:
        theirs, ours = CHUNK[path]
        *chunks, done = events(text)
        assert done == "[DONE]"
        for chunk in chunks:
            parse(ours, json.dumps(chunk))
            assert extras(parse(theirs, json.dumps(_ended(chunk) if path == COMPLETIONS else chunk))) <= {"relevo"}
        self.usage: dict[str, Any] | None = None
        if with_usage:
            self.usage, self.relevo = chunks[-1]["usage"], chunks[-1]["relevo"]
            assert chunks.pop()["choices"] == []
        assert all(("usage" in chunk) == with_usage and chunk.get("usage") is None for chunk in chunks)
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        self.choices: dict[int, StreamedChoice] = {}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            first = choice["index"] not in self.choices
            if path == CHAT:
                assert (choice["delta"].get("role") == "assistant") == first, "the first chunk carries the role"
            self.choices.setdefault(choice["index"], StreamedChoice()).add(choice)
        assert all(choice.reason is not None for choice in self.choices.values())


def _ended(chunk: dict[str, Any]) -> dict[str, Any]:
    """A completion's chunk with every choice ended: OpenAI's type has no `null` there, its server sends it."""
    return chunk | {
        "choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in chunk["choices"]]
    }


def text_of(choice: dict[str, Any]) -> str:
    """The text of a whole choice of either route."""
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


async def ask_both(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], Streamed]:
    """The same request whole and streamed, and that both say the same."""
    whole_response = await server.client.post(path, json=body)
    assert whole_response.status_code == 200, whole_response.text
    whole = check_whole(path, whole_response.text)
    streaming = body | {"stream": True, "stream_options": {"include_usage": True}}
    response = await server.client.post(path, json=streaming)
    assert response.status_code == 200, response.text
    streamed = Streamed(path, response.text, with_usage=True)
    assert sorted(streamed.choices) == [choice["index"] for choice in whole["choices"]]
    for choice in whole["choices"]:
        other = streamed.choices[choice["index"]]
        assert (other.text, other.reason) == (text_of(choice), choice["finish_reason"])
        told = {name: entries for name, entries in (choice["logprobs"] or {}).items() if entries}
        assert other.logprobs == told
    # The second of the two may find the first one's prompt in the cache.
    apart = {"prompt_tokens_details": None}
    assert streamed.usage is not None
    assert streamed.usage | apart == whole["usage"] | apart
    return whole, streamed
