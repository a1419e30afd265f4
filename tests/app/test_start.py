"""What a start does first, and what beside each other."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from app.interpreter import nothing_collected

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = textwrap.dedent(
    """
    import contextlib, gc, sys
    import trio
    import app.start
    from app.config_schema import Settings
    from app.interpreter import nothing_collected, tune_interpreter

    print("at first:", [name for name in ("quart", "hypercorn", "torch") if name in sys.modules])

    async def serve_engine(*_):
        tune_interpreter()
        print("collected when serving:", gc.isenabled(), gc.get_freeze_count() > 10_000)

    @contextlib.asynccontextmanager
    async def open_engine(_):
        # A load that lasts until the HTTP side has come in.
        with trio.fail_after(60):
            while not hasattr(sys.modules.get("app.server"), "banner"):
                await trio.sleep(0.01)
        print("collected while loading:", gc.isenabled())
        sys.modules["app.server"].serve_engine = serve_engine
        yield None

    app.start.open_engine = open_engine
    with nothing_collected():
        settings = Settings.model_validate({"server": {"port": 0, "state_dir": sys.argv[1]}})
        print("code:", trio.run(app.start.serve, settings))
    """
)


@pytest.mark.slow
def test_the_http_side_is_imported_while_the_model_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines() == [
        "at first: []",
        "collected while loading: False",
        "collected when serving: True True",
        "code: 0",
    ]


def test_the_collector_comes_back_whatever_happens() -> None:
    interval = sys.getswitchinterval()

    @nothing_collected()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        fail()
    assert gc.isenabled()
    assert sys.getswitchinterval() == interval
