"""Clients that users bring, unchanged, each in a process of its own: openai-js, LangChain and LiteLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import trio

from tests.app.serving import open_server
from tests.fakes import expected_output

CLIENTS = Path(__file__).resolve().parents[1] / "clients"
OPENAI_JS = "openai@7.59.0"
ANSWER = bytes(expected_output([257, *b"hi", 258], 6)).decode()

pytestmark = pytest.mark.slow


async def run(command: list[str]) -> str:
    """What a program prints; a failing one fails the test with its words."""
    done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


@pytest.fixture
def openai_js(request: pytest.FixtureRequest) -> Path:
    """A folder with the package, which is fetched once."""
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node and npm")
    assert request.config.cache is not None
    folder = request.config.cache.mkdir("openai-js")
    if not (folder / "node_modules" / "openai").exists():
        command = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", OPENAI_JS]
        try:
            subprocess.run(command, capture_output=True, timeout=120, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            pytest.skip(f"{OPENAI_JS} could not be fetched from npm's registry")
    return folder


@pytest.mark.long
async def test_openai_js(openai_js: Path) -> None:
    script = openai_js / "with_openai.mjs"  # its imports are looked for beside it
    script.write_text((CLIENTS / script.name).read_text(encoding="utf-8"), encoding="utf-8")
    async with open_server() as server:
        with trio.fail_after(60):
            seen = json.loads(await run(["node", str(script), server.url]))
    assert seen == {
        "models": ["fake"],
        "whole": [ANSWER, ANSWER],
        "logprobs": 6,
        "usage": 12,
        "streamed": ANSWER,
        "streamedUsage": 6,
        "helper": ANSWER,
        "completions": [bytes(expected_output(prompt, 4)).decode() for prompt in (b"hi", b"ho")],
        "error": {"status": 400, "param": "temperature", "bad": True},
    }


def installed(package: str) -> pytest.MarkDecorator:
    reason = f"{package} is not installed; it comes with the extra 'clients'"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("with_langchain.py", marks=installed("langchain_openai")),
        pytest.param("with_litellm.py", marks=installed("litellm")),
    ],
)
async def test_python_clients(script: str) -> None:
    async with open_server() as server:
        with trio.fail_after(120):
            printed = await run([sys.executable, str(CLIENTS / script), server.url])
    seen = json.loads(printed.strip().splitlines()[-1])
    assert seen == {"whole": ANSWER, "streamed": ANSWER, "reason": "length", "usage": 6}
