"""What errors say, and what is taken though it is written differently."""

from __future__ import annotations

from typing import Any

from app.api.messages import parse_messages
from tests.app.serving import CHAT, COMPLETIONS, chat_body, open_server

SAID: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": None}, "'messages' is missing"),
    (COMPLETIONS, {"prompt": None}, "'prompt' is missing"),
    ("/detokenize", {"tokens": None}, "'tokens' is missing"),
    ("/v1/responses", {"input": None, "messages": None}, "'input' is missing"),
    (COMPLETIONS, {"prompt": 5}, "'prompt' must be a string or a list of token ids"),
    (CHAT, {"cache_salt": "x" * 257}, "'cache_salt' must have at most 256 characters"),
    (CHAT, {"cache_salt": 5}, "'cache_salt' must be a string"),
    (CHAT, {"stream": "yes"}, "'stream' must be true or false"),
    (CHAT, {"store": 5}, "'store' must be false"),
    (CHAT, {"metadata": 5}, "'metadata' must be an object"),
    (CHAT, {"max_tokens": 1.5}, "'max_tokens' must be a whole number"),
    (CHAT, {"use_beam_search": True}, "Leave it out or set it to false."),
    (CHAT, {"messages": [{"role": "user", "content": [{}]}]}, "'messages[0].content[0].type' is missing"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": 5}]}]}, "'messages[0].content[0].type' is no text"),
]


async def test_errors_are_in_words_of_json() -> None:
    async with open_server() as server:
        for path, fields, said in SAID:
            answer = await server.client.post(path, json={"messages": [{"role": "user", "content": "a"}], **fields})
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]


async def test_a_whole_number_may_be_written_as_a_float() -> None:
    async with open_server() as server:
        for path, fields in ((CHAT, chat_body()), (COMPLETIONS, {"prompt": "hello", "logprobs": 0.0})):
            answer = await server.client.post(path, json=fields | {"max_tokens": 1.0, "n": 2.0, "seed": 5.0})
            assert answer.status_code == 200, answer.text
            whole = await server.client.post(path, json=fields | {"max_tokens": 1, "n": 2, "seed": 5})
            assert answer.json()["choices"] == whole.json()["choices"]


def test_arguments_with_half_of_a_surrogate_pair_stay_text() -> None:
    """Whoever plans a body that was not read from JSON may have one in it."""
    text = '{"city": "\ud83d"}'
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = parse_messages([asked, {"role": "tool", "tool_call_id": "a", "content": "x"}], 100)
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == text
