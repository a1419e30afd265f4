"""Bodies that nobody would send: each is answered in a known shape, and whoever is served beside it notices nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api import answers
from app.api.bodies import ChatBody, CompletionBody
from app.api.openapi import OPERATIONS
from app.api.unsupported import CHAT as REFUSED_CHAT
from app.api.unsupported import COMPLETION as REFUSED_COMPLETION
from tests.app.serving import CHAT, COMPLETIONS, chat_body, events, open_server
from tests.app.strict import parse
from tests.fakes import expected_output

NAMES = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *REFUSED_CHAT, *REFUSED_COMPLETION, "surprise"})
numbers = st.one_of(st.integers(-3, 70), st.integers(-(2**80), 2**80), st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=20), st.sampled_from(["", "auto", "a" * 5000])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(
                st.text(max_size=5), st.sampled_from(["role", "content", "type", "text", "function", "name", "schema"])
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)
bodies = st.tuples(
    st.sampled_from([CHAT, COMPLETIONS]),
    st.booleans(),
    st.dictionaries(st.sampled_from(NAMES), values, max_size=6),
)


def body_of(path: str, sound: bool, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields alone, or on top of a body that would be served."""
    if not sound:
        return fields
    return (chat_body("hi", max_tokens=3) if path == CHAT else {"prompt": "hi", "max_tokens": 3}) | fields


@pytest.mark.long
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(bodies, min_size=10, max_size=40))
async def test_nobody_else_notices(drawn: list[tuple[str, bool, dict[str, Any]]]) -> None:
    async with open_server(max_model_len=400) as server, trio.open_nursery() as nursery:
        neighbour: list[str] = []

        async def listen() -> None:
            body = {"prompt": "neighbour", "max_tokens": 300, "stream": True}
            response = await server.client.post(COMPLETIONS, json=body)
            neighbour.append("".join(chunk["choices"][0]["text"] for chunk in events(response.text)[:-1]))

        nursery.start_soon(listen)
        with trio.fail_after(60):
            for path, sound, fields in drawn:
                content = json.dumps(body_of(path, sound, fields))
                response = await server.client.post(path, content=content, headers={"content-type": "application/json"})
                assert response.status_code in (200, 400, 404, 408), (content, response.text)
                if response.status_code != 200:
                    parse(answers.Error, response.text)
            assert (await server.client.get("/healthz")).status_code == 200
            while not neighbour:
                await trio.sleep(0.001)
        assert neighbour == [bytes(expected_output(b"neighbour", 300)).decode()]
        await server.settle()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"n": 16, "best_of": 10**9},
        {"stop": ["x" * 256] * 4_000},
        {"stop_token_ids": [1] * 30_000},
        {"logit_bias": {str(token_id): 1 for token_id in range(30_000)}},
        {"logprobs": True, "top_logprobs": 10**9},
        {"logprobs": 10**9},
        {"prompt": ["x"] * 30_000, "n": 16},
        {"metadata": {"a": [[[[[{}]]]]]}, "temperature": 10**400},
    ],
    ids=lambda fields: ",".join(fields),
)
async def test_what_would_be_huge_is_refused_before_it_costs_anything(fields: dict[str, Any]) -> None:
    async with open_server() as server:
        for path in (CHAT, COMPLETIONS):
            content = json.dumps(body_of(path, True, fields)).encode()
            before = time.process_time()
            response = await server.client.post(path, content=content, headers={"content-type": "application/json"})
            error = response.json()["error"] if response.status_code != 200 else None
            assert time.process_time() - before < 2
            if error is None:
                # What this route does not know it ignores.
                assert path == CHAT
                assert set(fields) <= {"prompt", "n"}
            else:
                assert response.status_code == 400
                assert error["param"].partition("[")[0] in {*fields, None} or error["code"] == "invalid_json"
        assert server.engine.num_open == 0


@pytest.mark.long
async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    """Over a socket, from a process of its own, every route of the document: no 5xx, no shape but those promised."""
    program = shutil.which("st", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("schemathesis is not installed; it comes with the extra 'test'")
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
        "response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance"
    )
    # A request that asks to wait for no time is told by 503 that it waited too long, as the document says.
    (tmp_path / "schemathesis.toml").write_text(
        '[checks.not_a_server_error]\nexpected-statuses = ["2xx", "3xx", "4xx", "503"]\n', encoding="utf-8"
    )
    async with open_server(max_model_len=64, step_seconds=0.0005) as server:
        command = [
            program, "run", f"{server.url}/openapi.json", "--checks", checks, "--phases", "coverage,fuzzing",
            "--max-examples", "4", "--seed", "1", "--generation-database", "none", "--request-timeout", "30",
            "--warnings", "off", "--no-color",
        ]  # fmt: skip
        with trio.fail_after(300):
            done = await trio.run_process(
                command, cwd=tmp_path, capture_stdout=True, stderr=subprocess.STDOUT, check=False
            )
        report = done.stdout.decode()
        assert done.returncode == 0, report[-4000:]
        assert f"Tested: {len(OPERATIONS)}" in report
        await server.settle()
