"""The installed command with the real model, as a person and a program meet it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow
READY = re.compile(r"ready on (http://127\.0\.0\.1:\d+)")


@pytest.fixture(scope="module")
def server_url(model_path: Path) -> Iterator[str]:
    """A served model; ends with exit code 0 after SIGTERM."""
    words = ["serve", "--model", str(model_path), "--dtype", "float32", "--port", "0", "--served-model-name", "real"]
    process = subprocess.Popen([sys.executable, "-m", "app.cli", *words], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if found := READY.search(line):
            break
    else:
        pytest.fail("the server did not start:\n" + "".join(lines))
    yield found[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    process.stderr.close()


def test_twelve_at_once_through_the_openai_client(server_url: str, reference: dict[str, Any]) -> None:
    chats = {tuple(chat["ids"]): chat["messages"] for chat in reference["chat"]}
    # Half of the longest answers say what all of them would, in half the time.
    cases = [(case, min(len(case["output_ids"]), 24)) for case in reference["greedy"]]

    def answer(case: dict[str, Any], max_tokens: int) -> str:
        with openai.OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            messages = chats.get(tuple(case["prompt_ids"]))
            if messages is None:
                completion = client.completions.create(
                    model="real", prompt=case["prompt_ids"], max_tokens=max_tokens, temperature=0
                )
                return completion.choices[0].text
            with client.chat.completions.create(
                model="real", messages=messages, max_tokens=max_tokens, temperature=0, stream=True
            ) as stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(len(cases)) as pool:
        texts = list(pool.map(lambda pair: answer(*pair), cases))
    for (case, max_tokens), text in zip(cases, texts, strict=True):
        if max_tokens == len(case["output_ids"]):
            assert text == case["text"], case["name"]
        else:
            assert len(text) > 20
            assert case["text"].startswith(text.rstrip("\ufffd")), case["name"]
    assert len([case for case, _ in cases if tuple(case["prompt_ids"]) in chats]) >= 4


def test_afterwards_nothing_runs_and_the_books_are_right(server_url: str) -> None:
    stats = httpx.get(f"{server_url}/ops/stats.json").json()
    kv = stats["kv"]
    assert kv["used"] == 0
    assert kv["free"] + kv["cached"] == kv["total"]
    assert stats["requests"]["running"] == stats["requests"]["waiting"] == 0
    assert sum(stats["requests"]["finished_by_reason"].values()) == 12
    assert max(len(step["rows"]) for step in stats["table"]["steps"]) > 4  # they shared steps
