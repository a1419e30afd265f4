"""Single requests over a fake model, without a server."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from app import offline
from app.api.planning import COMPLETION_URL
from engine.errors import InvalidRequestError, RelevoError
from tests.fakes import expected_output, fake_config, open_fake_engine


async def test_a_prompt_is_streamed_as_it_comes(autojump_clock: object) -> None:
    pieces: list[str] = []
    body = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
    async with open_fake_engine() as engine:
        await offline.stream(engine, offline.plan_whole(engine, COMPLETION_URL, body), pieces.append)
        whole = await offline.answer(engine, offline.plan_whole(engine, COMPLETION_URL, body))
        with pytest.raises(InvalidRequestError, match="temperature"):
            offline.plan_whole(engine, COMPLETION_URL, body | {"temperature": 9})
    assert "".join(pieces) == whole["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "cause"), [({"prompt": ["a", "x" * 600]}, "error"), ({"prompt": ["a"] * 2, "timeout": 0.5}, "timeout")]
)
async def test_what_is_given_up_with_a_failed_request_is_counted_as_such(
    autojump_clock: object, fields: dict[str, Any], cause: str
) -> None:
    async with open_fake_engine() as engine:
        job = offline.plan_whole(engine, COMPLETION_URL, {"max_tokens": 400, **fields})
        with pytest.raises(RelevoError):
            await offline.answer(engine, job)
        await engine.wait_idle()
        assert set(engine.snapshot()["requests"]["aborted_by_cause_and_phase"]) == {cause}


async def test_choices_wait_for_room_and_those_that_have_some_are_read(autojump_clock: object) -> None:
    """The queue holds three, four requests of three choices want in, and a reader may be slow for half a second."""
    config = fake_config(max_num_seqs=1, max_waiting=3, slow_client_seconds=0.5)
    body = {"prompt": ["abc"], "n": 3, "max_tokens": 100}
    answers: list[dict[str, Any]] = []
    async with open_fake_engine(config) as engine:

        async def ask() -> None:
            answers.append(await offline.answer(engine, offline.plan_whole(engine, COMPLETION_URL, body)))

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        assert engine.num_open == 0
    text = bytes(expected_output(b"abc", 100)).decode()
    assert [[choice["text"] for choice in answer["choices"]] for answer in answers] == [[text] * 3] * 4
