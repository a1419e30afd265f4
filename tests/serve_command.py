"""`relevo serve` over the fake model, as a process: command line, exit codes, log, signals and disk are the real ones.

    python -m tests.serve_command BROKEN_FLAG [flags of relevo serve]

While the file BROKEN_FLAG exists each step of the model fails.
"""

from __future__ import annotations

import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import app.start
from app.cli import main
from app.cli import serve as serve_command
from app.journal import journal
from tests.fakes import FakeRunner, fake_config, open_fake_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.config import Settings
    from engine.config import EngineConfig
    from engine.engine import Engine

# A sick disk is asked again sooner, so that tests need not wait for it.
journal.RETRY_SECONDS = 0.2  # type: ignore[misc]
journal.FLUSH_SECONDS = 0.2  # type: ignore[misc]


@asynccontextmanager
async def _open_engine(config: EngineConfig) -> AsyncIterator[Engine]:
    def before_step(_batch: object) -> None:
        if Path(sys.argv[1]).exists():
            raise RuntimeError("the device is lost")

    fake = fake_config(first_generation=config.first_generation)
    runner = FakeRunner(256, fake.block_size, before_step=before_step)
    async with open_fake_engine(fake, step_seconds=0.005, runner=runner) as engine:
        yield engine


def _same(settings: Settings) -> Settings:
    return settings


if __name__ == "__main__":
    serve_command.with_model = _same
    app.start.open_engine = _open_engine  # type: ignore[assignment]
    sys.modules["engine.startup"] = ModuleType("engine.startup")  # torch, which takes seconds to come in
    sys.exit(main(["serve", "--port", "0", "--log-format", "json", *sys.argv[2:]]))
