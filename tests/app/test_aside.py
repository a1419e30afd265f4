"""What takes long is done beside the event loop, so that everybody else's streams go on."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api import aside
from app.api.aside import dump_in_pieces
from app.api.envelope import ChatEnvelope
from tests.app.serving import CHAT, chat_body, events, open_server
from tests.fakes import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4))
VALUES = st.recursive(LEAVES, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=4), one))


@settings(max_examples=50)
@given(VALUES)
def test_pieces_are_what_json_writes_at_once(value: Any) -> None:
    assert dump_in_pieces(value) == json.dumps(value)


def test_other_threads_run_while_a_long_answer_is_written_down() -> None:
    entry = {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -2.5}] * 20}
    answer = {"choices": [{"index": 0, "logprobs": {"content": [entry] * 5_000}}]}
    assert beats_during(lambda: dump_in_pieces(answer)) >= 5


def beats_during(work: Callable[[], object]) -> int:
    """How often this thread can go on for a moment while another one works."""
    worker = threading.Thread(target=work)
    worker.start()
    beats = -1  # one more comes when it is over
    while worker.is_alive():
        time.sleep(0.001)
        beats += 1
    return beats


async def test_many_log_probabilities_are_told_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    whole = ChatEnvelope.whole

    def watched(self: ChatEnvelope, *args: Any) -> dict[str, Any]:
        threads.append(threading.current_thread() is threading.main_thread())
        return whole(self, *args)

    monkeypatch.setattr(ChatEnvelope, "whole", watched)
    async with open_server() as server:
        for fields, count in (({}, None), ({"logprobs": True, "top_logprobs": 20}, 20)):
            response = await server.client.post(CHAT, json=chat_body(max_tokens=20, **fields))
            logprobs = response.json()["choices"][0]["logprobs"]
            assert (logprobs and len(logprobs["content"])) == count
    assert threads == [True, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_long_thinking_is_counted_beside_the_loop(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    num_thoughts = 200
    threads = []
    encode = FakeTokenizer.encode

    def watched(self: FakeTokenizer, text: str, **flags: Any) -> list[int]:
        if len(text) == num_thoughts:
            threads.append(threading.current_thread() is threading.main_thread())
        return encode(self, text, **flags)

    monkeypatch.setattr(FakeTokenizer, "encode", watched)
    monkeypatch.setattr(aside, "INLINE_SIZE", 100)
    answer = f"<think>{'x' * num_thoughts}</think>y".encode()
    async with open_server(answer=lambda prompt: answer) as server:
        response = await server.client.post("/v1/responses", json={"input": "hi", "stream": stream})
        final = events(response.text)[-1]["response"] if stream else response.json()
    assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": num_thoughts}
    assert threads == [False]
