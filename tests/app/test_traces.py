"""Trace files: both formats, with and without a header; what is wrong with a file is told by line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from app.traces import read_trace
from engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"


def write(tmp_path: Path, content: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def mooncake(**changes: Any) -> str:
    record = {"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **changes}
    return json.dumps({key: value for key, value in record.items() if value is not ...}) + "\n"


@pytest.mark.parametrize(
    "content",
    [
        HEADER + AZURE,
        AZURE,
        "\n" + HEADER + "\n" + AZURE,
        "\ufeff" + HEADER + AZURE.replace("\n", "\r\n"),
        "GeneratedTokens,TIMESTAMP,ContextTokens,Model\n44,1700158546.68059,374,a\n109,1700158550.995169,396,b",
    ],
    ids=["header", "no header", "blank lines", "BOM and CRLF", "other order, seconds"],
)
def test_azure_traces(tmp_path: Path, content: str) -> None:
    workload = read_trace(write(tmp_path, content, "azure.csv"))
    assert workload.name == "azure.csv"
    assert [(i.num_prompt_tokens, i.num_output_tokens) for i in workload.items] == [(374, 44), (396, 109)]
    assert workload.items[0].arrival_seconds == 0
    assert workload.items[1].arrival_seconds == pytest.approx(4.314579, abs=1e-5)
    assert (workload.factor, workload.max_output_tokens, workload.num_skipped) == (1.0, 109, 0)
    assert workload.prefix_block_tokens == 0


def test_mooncake_traces(tmp_path: Path) -> None:
    lines = mooncake() + mooncake(timestamp=4500, input_length=1025, hash_ids=[1, 7, 8])
    workload = read_trace(write(tmp_path, lines))
    assert [item.arrival_seconds for item in workload.items] == [0.0, 1.5]
    assert workload.items[1].prefix_ids == (1, 7, 8)
    assert workload.prefix_block_tokens == 512
    first, second = (workload.prompt_token_ids(index, 5000) for index in (0, 1))
    assert first[:512] == second[:512]
    assert first[512:] != second[512:600]
    plain = read_trace(write(tmp_path, mooncake(hash_ids=...) + mooncake(hash_ids=None)))
    assert [(item.num_prompt_tokens, item.prefix_ids) for item in plain.items] == [(600, ()), (600, ())]


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("2023-11-16 18:16:00,374", "2 columns, not 3"),
        ("2023-11-16 18:16:00,374,44,1", "4 columns, not 3"),
        ("2023-11-16 18:16:00,many,44", "ContextTokens is 'many', not a whole number"),
        ("2023-11-16 18:16:00,374,4.5", "GeneratedTokens is '4.5', not a whole number"),
        ("2023-11-16 18:16:00,0,44", "ContextTokens is 0"),
        ("2023-11-16 18:16:00,374,-44", "GeneratedTokens is -44"),
        ("2023-11-16 18:16:00,374,99999999999", "GeneratedTokens is 99999999999"),
        ("yesterday,374,44", "TIMESTAMP is 'yesterday'"),
        ("nan,374,44", "TIMESTAMP is 'nan'"),
        ("2023-11-16 18:15:50,374,44", "0.995169 s earlier than the line before it"),
        (b"2023-11-16 18:16:00,374,\xff", "not UTF-8"),
        (b"2023-11-16 18:16:00,374," + b"4" * 2_000_000, "longer than"),
        (b'2023-11-16 18:16:00,"' + b"4" * 200_000, "not CSV"),
    ],
)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, line: str | bytes, cause: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, (HEADER + AZURE).encode() + raw + b"\n2023-11-16 18:17:00,5,6\n" + b"x\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert str(path) in message
    assert "2 lines are bad, the first is line 4: " in message
    assert cause in message
    assert "\n" not in message
    workload = read_trace(path, skip_bad_lines=True)
    assert (len(workload.items), workload.num_skipped) == (3, 2)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"timestamp": 1', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "not a JSON object"),
        (mooncake(output_length=...), "lacks output_length"),
        (mooncake(input_length=0, hash_ids=[]), "input_length is 0"),
        (mooncake(input_length=True), "input_length is True"),
        (mooncake(input_length="600"), "input_length is '600'"),
        (mooncake(timestamp="now"), "timestamp is 'now'"),
        (mooncake(timestamp=1e300), "timestamp is 1e+300"),
        (mooncake(timestamp=2999), "earlier than the line before it"),
        (mooncake(hash_ids=[1, "2"]), "not a list of whole numbers"),
        (mooncake(hash_ids=[1]), "it has 1 hash_ids; a prompt of 600 tokens has 2"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, cause: str) -> None:
    path = write(tmp_path, mooncake() + line.rstrip("\n") + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert "refused, 1 line is bad, line 2: " in str(caught.value)
    assert cause in str(caught.value)
    assert read_trace(path, skip_bad_lines=True).num_skipped == 1


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"time,in,out\n1,2,3\n", "lacks TIMESTAMP, ContextTokens, GeneratedTokens"),
        (b"TIMESTAMP,ContextTokens,Answers\n1,2,3\n", "lacks GeneratedTokens"),
        (b"\x00\x01\xfe" * 500, "in no known format"),
        (b"[]\n", "in no known format"),
        (HEADER.encode(), "has no request"),
        (HEADER.encode() + b"1,2\n", "1 line is bad"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        read_trace(write(tmp_path, content))


def test_only_bad_lines_leave_no_request(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no request: 2 bad lines, the first is line 2: it has 1 columns"):
        read_trace(write(tmp_path, HEADER + "x\ny\n"), skip_bad_lines=True)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="is a directory"):
        read_trace(tmp_path)


def test_reading_stops_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + AZURE + "bad\n")
    assert len(read_trace(path, max_requests=2).items) == 2
    with pytest.raises(ConfigError, match="at least one request"):
        read_trace(path, max_requests=0)
