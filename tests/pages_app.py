"""The whole server over the fake model after ten minutes of such a load: for looking at every page in every state.

    python -m tests.pages_app busy 8321

The ten minutes pass on a clock that jumps, which takes some seconds; then it is that of the wall.
"""

from __future__ import annotations

import math
import random
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import trio
from trio.testing import MockClock

from app.config import Settings
from app.config_schema import KeyLimits
from app.journal.journal import open_journal
from app.key_service import open_keys
from app.lifecycle import Lifecycle
from app.limit_page.kept import KeptSearches
from app.limit_page.service import LimitSearches
from app.limit_page.wish import Wish
from app.listening import open_listening_socket
from app.recording.recorder import open_recorder
from app.server import make_context, run_http
from engine.errors import UnavailableError
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.app.limit_lines import whole_script, write_script
from tests.fakes import fake_config, open_fake_engine, read_deltas

if TYPE_CHECKING:
    from app.http import Context
    from engine.engine import Engine

# Requests a second, as a rule and in the middle minutes.
LOADS: Final = {
    "idle": (0.0, 0.0), "busy": (0.9, 1.4), "overloaded": (1.0, 3.0), "draining": (1.0, 1.2), "stalled": (0.9, 1.0),
}  # fmt: skip
# Those in which the limit was looked for, and whether it still is.
LOOKED_AT: Final = {"idle": False, "busy": True}
WARM_SECONDS: Final = 600.0
BUSY_FROM, BUSY_TO = 300.0, 480.0
STEP_SECONDS: Final = 0.1
STALL_SECONDS: Final = 40.0
KEYS: Final = ("", "", "support", "search")
WORDS: Final = ("every ", "seat of ", "the table ", "is ", "taken ", "again and again ")


class Crowd:
    """Everybody who asks."""

    def __init__(self, engine: Engine, state: str) -> None:
        self._engine = engine
        self._loads = LOADS[state]
        self._goes_on = state == "overloaded"
        self._source = random.Random(7)
        self.step_seconds = STEP_SECONDS

    async def run(self) -> None:
        """Ask for ever."""
        calm, high = self._loads
        async with trio.open_nursery() as nursery:
            while calm:
                now = trio.current_time()
                is_high = BUSY_FROM < now < BUSY_TO or (self._goes_on and now > BUSY_FROM)
                await trio.sleep(self._source.expovariate(high if is_high else calm))
                nursery.start_soon(self._ask)

    async def _ask(self) -> None:
        source = self._source
        prompt = TextPrompt("".join(source.choices(WORDS, k=int(source.lognormvariate(2.4, 0.8)) + 1)))
        params = SamplingParams(max_tokens=min(400, int(source.lognormvariate(4.0, 0.8)) + 2))
        key, background = source.choice(KEYS), source.random() < 0.1
        name = f"chatcmpl-{source.randbytes(12).hex()}"
        with suppress(UnavailableError):  # which the pages tell of
            request = GenerationRequest(name, prompt, params, key_name=key, background=background)
            async for _ in read_deltas(self._engine.submit(request)):
                pass


def ends_early(prompt: list[int]) -> int | None:
    """Two answers in three come to an end by themselves."""
    return 8 + sum(prompt) % 90 if sum(prompt) % 3 else None


async def serve(state: str, port: int, clock: MockClock) -> None:
    """Serve until interrupted."""
    settings = Settings.model_validate({"server": {"keep_request_texts": True}, "security": {"api_keys": ["me=me"]}})
    began = time.time() - WARM_SECONDS
    slowness = [STEP_SECONDS]
    limits = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "capacity_num_seqs": 48, "block_size": 16}
    config = fake_config(**limits, max_waiting=40, keep_request_texts=True, served_model_name="smollm2-135m")
    with TemporaryDirectory() as temporary, open_listening_socket("127.0.0.1", port) as listener:
        folder = Path(temporary)
        async with (
            open_keys(settings, folder) as keys,
            open_journal(folder) as journal,
            open_recorder(folder, journal) as recorder,
            open_fake_engine(
                config, num_blocks=160, max_model_len=2048, end_after=ends_early, step_seconds=lambda: slowness[0]
            ) as engine,
            trio.open_nursery() as nursery,
        ):
            journal.wall = lambda: began + trio.current_time()
            script = folder / "search.jsonl"
            make_searches = partial(
                LimitSearches, kept=KeptSearches(folder / "limits"), command=write_script(script, whole_script())
            )
            context = make_context(settings, engine, Lifecycle(), keys, journal, None, recorder, make_searches)
            for task in (
                Crowd(engine, state).run,
                context.telemetry.run,
                context.live.run,
                context.effects.run,
                context.deadlines.run,
            ):
                nursery.start_soon(task)
            await trio.sleep(WARM_SECONDS)
            if state == "stalled":
                slowness[0] = 1e6
                await trio.sleep(STALL_SECONDS)
            clock.autojump_threshold, clock.rate = math.inf, 1.0
            for name in KEYS[2:]:
                await keys.make(name, KeyLimits(max_concurrent=4))
            change = {"draining": True} if state == "draining" else {"max_num_seqs": 14}
            await context.live.apply({**change, "reason": "an evening's guests"}, who="admin")
            nursery.start_soon(journal.run)
            nursery.start_soon(context.recorder.run)
            nursery.start_soon(context.searches.run)
            await context.recorder.start(600, 1000, "admin")
            nursery.start_soon(partial(run_http, context, listener))
            if state in LOOKED_AT:
                nursery.start_soon(look_for_limits, context, script, LOOKED_AT[state])
            await trio.sleep_forever()


async def look_for_limits(context: Context, script: Path, goes_on: bool) -> None:
    """Searches for the limit that ended, and one that ends or goes on; of figures that are made up."""
    asked = {"ttft_p95_seconds": 2.0, "itl_p95_seconds": 0.25, "think_time": 20.0, "price_per_hour": 2.0}
    lines = whole_script(think_time=20.0, price_per_hour=2.0)
    for note in ("before", "more seats", "now"):
        is_last = note == "now"
        write_script(script, [*lines[:13], {"wait": "nothing"}] if is_last and goes_on else lines)
        context.searches.start(
            Wish.model_validate({**asked, "note": note, "beside_users": True}), "http://here", "admin"
        )
        while context.searches.running is not None:
            await trio.sleep(0.1)


if __name__ == "__main__":
    the_clock = MockClock(autojump_threshold=0)
    trio.run(serve, sys.argv[1], int(sys.argv[2]), the_clock, clock=the_clock)
