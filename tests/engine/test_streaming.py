"""Which tokens are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.fakes import FakeRunner, fake_config, open_fake_engine

if TYPE_CHECKING:
    from trio.testing import MockClock


class Scripted(FakeRunner):
    """Writes these tokens, whatever was asked."""

    def _compute(self, seat: int, sequence_id: int, start: int, count: int, samples: bool) -> int:
        token_id = super()._compute(seat, sequence_id, start, count, samples)
        if not samples:
            return token_id
        row = self._rows[seat]
        row.token_ids[-1] = [257, 97, 258, 98][len(row.token_ids) - 1 - row.num_prompt_tokens]
        return row.token_ids[-1]


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
    async with open_fake_engine(fake_config(), runner=Scripted(64, 4), num_blocks=64) as engine:
        got = "".join([delta.text async for delta in engine.submit(request).deltas()])
    assert got == text
