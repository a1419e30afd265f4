"""Which tokens are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.fakes import open_fake_engine, read_deltas

if TYPE_CHECKING:
    from trio.testing import MockClock


@pytest.mark.parametrize(
    ("skips", "shown", "text"),
    [
        (True, frozenset(), "ab"),
        (True, frozenset({258}), "a<|assistant|>b"),
        (False, frozenset(), "<|user|>a<|assistant|>b"),
        (False, frozenset({258}), "<|user|>a<|assistant|>b"),
    ],
)
async def test_control_tokens_are_shown_where_somebody_asks(
    skips: bool, shown: frozenset[int], text: str, autojump_clock: MockClock
) -> None:
    request = GenerationRequest(
        "r", TextPrompt("hi"), SamplingParams(max_tokens=4), skip_special_tokens=skips, shown_token_ids=shown
    )
    async with open_fake_engine(answer=lambda prompt: [257, 97, 258, 98]) as engine:
        got = "".join([delta.text async for delta in read_deltas(engine.submit(request))])
    assert got == text
