"""What clients, models and operators wrote is text wherever it is shown: pages, fragments, JSON, CSV, metrics, logs."""

from __future__ import annotations

import csv
import io
import json
from contextlib import aclosing, asynccontextmanager
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from app.batch import read_lines, run_batch
from app.key_service import open_keys
from app.logs import FORMATS, open_logs
from app.render.view import PARTS
from tests.app.serving import CHAT, chat_body, make_settings, open_server
from tests.fakes import open_fake_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.app.serving import Server

SHOWN: Final = (
    "<img src=x onerror=alert(1)>",
    '"></script><script>alert(1)</script>',
    "' onload='alert(1)",
    '=HYPERLINK("http://evil.example")',
    "{{7*7}}{% raw %}${7*7}",
    "javascript:alert(1)//--><!--",
)
UNSEEN: Final = ("right\u202eleft", "two\r\nlines\u2028three", "\x1b[31mred\x1b]0;title\x07", "nul\x00nul")
ALL: Final = SHOWN + UNSEEN
MODEL: Final = "".join(SHOWN) + "right\u202eleft\nline\x1b[31m"
HTML: Final = {"Accept": "text/html"}
PAGES: Final = (
    "/", "/ops", "/ops/requests", "/ops/requests/1?tokens=1", "/ops/table", "/ops/history", "/ops/limit", "/admin",
    "/admin/keys", "/docs", "/ops/state", "/login?next=%22%3E%3Cimg%20src=x%20onerror=alert(1)%3E",
)  # fmt: skip


class Page(HTMLParser):
    """What a browser makes of a page: elements with their attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def titles(self) -> list[str]:
        return [attributes["title"] for _, attributes in self.elements if "title" in attributes]

    def check(self) -> None:
        """Nothing of it runs, and nothing of it comes from elsewhere."""
        for tag, attributes in self.elements:
            assert tag not in ("img", "iframe", "object", "embed", "base")
            assert tag != "script" or attributes["src"].startswith("/static/")
            assert not [name for name in attributes if name.startswith("on")]
            for name in ("href", "src", "action", "hx-get", "hx-post", "sse-connect"):
                assert attributes.get(name, "/").startswith(("/", "#", "?")), attributes


def echo(prompt: list[int]) -> bytes:
    """What was asked is answered."""
    return bytes([token_id for token_id in prompt if token_id < 256])


@asynccontextmanager
async def hostile(folder: Path) -> AsyncIterator[Server]:
    """A server whose every name is hostile, after a request under each key and a change for each reason."""
    settings = make_settings(server={"state_dir": str(folder)})
    limits = {"served_model_name": MODEL, "keep_request_texts": True}
    async with (
        open_keys(settings, folder) as keys,
        open_server(settings, keys=keys, limits=limits, answer=echo) as server,
    ):
        client = server.client
        for number, text in enumerate(ALL):
            body = {"max_num_seqs": 5 + number % 2, "reason": text}
            assert (await client.patch("/admin/config", json=body)).status_code == 200
        for text in SHOWN:
            made = await client.post("/admin/keys", json={"name": text})
            assert made.status_code == 201, made.text
            asked = chat_body(text, model=MODEL, max_tokens=60, stop=[text + "?"], user=text)
            headers = {"Authorization": f"Bearer {made.json()['key']}", "X-Request-Id": text}
            answer = await client.post(CHAT, json=asked, headers=headers)
            assert answer.json()["choices"][0]["message"]["content"] == text
            assert answer.json()["model"] == MODEL
        await server.settle()
        server.context.telemetry.tick(trio.current_time())
        # Chat and API want a key from now on.
        await client.post("/login", data={"token": made.json()["key"]})
        yield server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    async with hostile(tmp_path) as served:
        yield served


async def test_no_page_runs_what_somebody_wrote(server: Server) -> None:
    pages = {}
    for path in PAGES:
        answer = await server.client.get(path, headers=HTML)
        assert answer.status_code == 200, path
        pages[path] = Page(answer.text)
        pages[path].check()
    for path in ("/", "/ops", "/admin", "/docs", "/ops/state"):
        assert " ".join(MODEL.split()) in " ".join(pages[path].text.split()), path
    for text in SHOWN:
        for path in ("/ops", "/ops/requests"):
            assert text in pages[path].titles(), "the key's name"
        assert text in pages["/admin/keys"].text
        for path in ("/admin", "/ops/history"):
            assert text in pages[path].text, "the reason of a change"
    shown = pages["/ops/requests/1?tokens=1"].text
    assert shown.count(SHOWN[0]) == 4, "the model, the key, the prompt, the answer"
    marks = [attributes for tag, attributes in pages["/ops"].elements if tag == "path" and "mark" in str(attributes)]
    assert marks
    assert SHOWN[-1] in pages["/ops"].text, "on the charts, as a mark's title"


async def test_the_live_stream_is_lines_of_the_same_text(server: Server) -> None:
    async with aclosing(server.context.telemetry.stream()) as stream:
        assert (await anext(stream)).startswith(b"retry: ")
        text = (await anext(stream)).decode()
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    assert {name for name, *_ in events} == {f"event: {name}" for name in PARTS}
    for _, *lines in events:
        assert all(line.startswith("data:") for line in lines)
        Page("\n".join(line.removeprefix("data: ") for line in lines)).check()
    assert "\r" not in text


async def test_json_csv_and_metrics_give_it_back_as_it_is(server: Server) -> None:
    async def read(path: str) -> Any:
        answer = await server.client.get(path)
        assert answer.headers["content-type"] == "application/json", path
        return answer.json()

    entries = await read("/admin/audit")
    assert {entry["reason"] for entry in entries if entry["changes"]} == set(ALL)
    deeds = [entry["deed"] for entry in entries if entry["deed"] is not None]
    assert all(any(text in deed for deed in deeds) for text in SHOWN)
    stats = await read("/ops/stats.json")
    assert set(SHOWN) == set(stats["requests"]["by_key"])
    assert all(any(text in event["text"] for event in stats["events"]) for text in ALL)
    assert set(SHOWN) <= {line["key"] for line in (await read("/ops/requests.json"))["finished"]}
    assert (await read("/v1/models"))["data"][0]["id"] == MODEL
    assert any(SHOWN[0] in event["text"] for event in (await read("/ops/history.json"))["events"])
    life = await read("/ops/requests/1.json?tokens=1")
    assert "".join(life["tokens"]["output_pieces"]).startswith(SHOWN[0])

    table = await server.client.get("/ops/history.csv")
    assert table.headers["content-type"].startswith("text/csv")
    assert "attachment" in table.headers["content-disposition"]
    rows = list(csv.reader(io.StringIO(table.text)))
    assert len({len(row) for row in rows}) == 1
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "+", "-", "@"))]

    families = [*text_string_to_metric_families((await server.client.get("/metrics")).text)]
    labels = [sample.labels for family in families for sample in family.samples]
    assert {each["model_name"] for each in labels if "model_name" in each} == {MODEL}
    assert not [each for each in labels if set(each.values()) & set(ALL)], "labels come from closed sets"


async def test_errors_that_repeat_it_are_json_or_escaped() -> None:
    change = {"action": "apply", "if_generation": "0"}
    async with open_server() as server:
        client = server.client
        for text in ALL:
            for body in wrong_bodies(text):
                answer = await client.post(CHAT, json=chat_body() | body)
                assert answer.status_code in (400, 404), body
                assert answer.headers["content-type"] == "application/json"
                assert answer.json()["error"]["message"].isprintable(), body
            for answer in (
                await client.post("/admin/keys", data={"name": text, "max_concurrent": text}, headers=HTML),
                await client.post("/admin", data=change | {"max_num_seqs": text, "reason": text}, headers=HTML),
                await client.post("/admin", data={"action": text}, headers=HTML),
                await client.post("/login", data={"token": text, "next": text}, headers=HTML),
                await client.get(f"/nothing/{quote(text)}", headers=HTML),
                await client.get("/ops/requests", params={"id": text}, headers=HTML),
                await client.get("/ops", params={"window": text}, headers=HTML),
                await client.get("/ops/history", params={"from": text}, headers=HTML),
            ):
                assert "text/html" in answer.headers["content-type"], answer.request.url
                assert answer.status_code < 500
                Page(answer.text).check()


def wrong_bodies(text: str) -> list[dict[str, Any]]:
    """What is refused, most of it in words that name what was sent."""
    tool = {"type": "function", "function": {"name": text}}
    return [
        {"model": text}, {"tools": [tool]}, {"tools": [{"type": text}]}, {"stop": [text * 999]},
        {"messages": [{"role": text, "content": text}]}, {"messages": [{"role": "user", "content": [{"type": text}]}]},
        {"response_format": {"type": text}}, {"n": text}, {"logit_bias": {text: 1}}, {"service_tier": text},
    ]  # fmt: skip


async def test_an_id_that_is_not_harmless_is_replaced() -> None:
    async with open_server() as server:
        for text in ALL:
            # HTTP itself refuses line ends and NUL in a header.
            header = text.encode().translate(None, b"\r\n\0")
            if header == b"nulnul":
                continue
            answer = await server.client.get("/v1/models", headers=[(b"X-Request-Id", header)])
            assert len(answer.headers["x-request-id"]) == 32
            assert answer.headers["x-request-id"].isalnum()


@pytest.mark.parametrize("text", UNSEEN)
def test_a_key_is_called_what_can_be_shown(text: str) -> None:
    with pytest.raises(ValidationError, match="name=key"):
        make_settings(security={"api_keys": [f"{text}=k"]})


@pytest.mark.parametrize("form", FORMATS)
async def test_the_log_has_a_line_for_each_thing_that_happened(tmp_path: Path, form: str) -> None:
    lines = io.StringIO()
    with open_logs(form, "info", lines):
        async with hostile(tmp_path) as server:
            await server.client.post("/admin/keys", json={"name": "\x1b[31m\nred"})
            await server.client.get("/ops/" + SHOWN[0], headers={"X-Request-Id": SHOWN[0]})
    told = lines.getvalue().split("\n")[:-1]
    assert len(told) > len(ALL)
    for line in told:
        assert line.isprintable()
        assert line.startswith("20") if form == "human" else json.loads(line)["time"]
    assert any("onerror" in line for line in told), "the name of a key"


@pytest.mark.parametrize("text", ALL)
async def test_a_batch_has_one_line_of_json_for_each_request_whatever_it_is_called(text: str) -> None:
    request = {"custom_id": text, "method": "POST", "url": CHAT, "body": chat_body(text, max_tokens=99)}
    wrong = request | {"custom_id": text + "2", "body": text}
    source = io.BytesIO("".join(json.dumps(entry) + "\n" for entry in (request, wrong, request)).encode())
    target = io.StringIO()
    async with open_fake_engine(answer=lambda _: text.encode(), step_seconds=0.001) as engine:
        await run_batch(engine, read_lines(source), target)
    results = [json.loads(line) for line in target.getvalue().split("\n")[:-1]]
    assert sorted(result["custom_id"] for result in results) == sorted([text, text, text + "2"])
    (answered,) = [result for result in results if result["response"]]
    assert answered["response"]["body"]["choices"][0]["message"]["content"] == text
