"""Single requests over a fake model, without a server."""

from __future__ import annotations

import pytest

from app import offline
from app.api.planning import COMPLETION_URL
from engine.errors import InvalidRequestError
from tests.fakes import open_fake_engine


async def test_a_prompt_is_streamed_as_it_comes(autojump_clock: object) -> None:
    pieces: list[str] = []
    body = {"prompt": "abc", "max_tokens": 6, "temperature": 0}
    async with open_fake_engine() as engine:
        await offline.stream(engine, offline.plan_whole(engine, COMPLETION_URL, body), pieces.append)
        whole = await offline.answer(engine, offline.plan_whole(engine, COMPLETION_URL, body))
        with pytest.raises(InvalidRequestError, match="temperature"):
            offline.plan_whole(engine, COMPLETION_URL, body | {"temperature": 9})
    assert "".join(pieces) == whole["choices"][0]["text"]
