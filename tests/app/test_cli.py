"""The command line: exit codes, and one line for whatever goes wrong."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import app.cli.pull
import app.start
import engine.engine
import engine.loading.fetch
from app.cli.progress import Progress
from app.cli.pull import with_model
from app.config import KeyLimits, load_settings
from app.key_store import FILE_NAME, open_store
from app.keys import Digests
from engine.errors import EngineError, ModelFileError
from tests.fakes import fake_config, open_fake_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from app.config import Settings
    from engine.engine import Engine


@pytest.fixture
def no_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.cli.pull, "fetch", Path)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch, no_fetch: None) -> None:
    """`open_engine` opens the fake one; the command's own settings of the engine do not matter to it."""

    @asynccontextmanager
    async def open_(_config: object) -> AsyncIterator[Engine]:
        async with open_fake_engine(fake_config(), step_seconds=0) as opened:
            yield opened

    monkeypatch.setattr(engine.engine, "open_engine", open_)


def one_line(text: str) -> str:
    assert text.startswith("relevo: ")
    assert text.count("\n") == 1
    return text


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], "COMMAND"),
        (["serf"], "'serve'"),
        (["serve", "--max-num-seq", "4"], "did you mean --max-num-seqs?"),
        (["serve", "--max-num-seqs", "0"], "1 to 4096"),
        (["serve", "--port", "http"], "0 to 65535"),
        (["serve", "--host", "0.0.0.0"], "--insecure"),
        (["serve", "--config", "/nowhere/relevo.toml"], "no configuration file"),
        (["pull"], "MODEL"),
        (["generate"], "--prompt"),
        (["generate", "-p", "x", "-i", "y"], "--prompt"),
        (["generate", "-i", "y"], "--output"),
        (["generate", "-p", "x", "--restart"], "--restart"),
        (["generate", "-p", "x", "--temperature", "hot"], "--temperature"),
        (["bench", "--dtype", "int3"], "auto, native, int8, bfloat16, float16, float32"),
        (["bench", "--batch", "0"], "argument --batch: must be a whole number of at least 1"),
        (["bench", "--context", "two"], "argument --context: must be a whole number of at least 1"),
        (["bench", "--quality-tokens", "-1"], "argument --quality-tokens: must be a whole number of at least 0"),
        (["bench", "--quality-tokens", "1e4"], "argument --quality-tokens: must be a whole number of at least 0"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(run: Any, argv: list[str], expected: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert expected in one_line(err)


def test_an_unknown_key_in_the_file_is_wrong_use(run: Any, tmp_path: Path) -> None:
    config = tmp_path / "relevo.toml"
    config.write_text("[server]\nprot = 1\n")
    code, _, err = run("serve", "--config", config)
    assert code == 2
    assert "did you mean port?" in one_line(err)


@pytest.mark.parametrize("command", [["serve"], ["generate", "-p", "x"], ["bench"], ["pull"]])
@pytest.mark.parametrize("name", ["missing.gguf", "no such model"])
def test_no_model_file(run: Any, tmp_path: Path, command: list[str], name: str) -> None:
    where = [tmp_path / name] if command == ["pull"] else ["--model", tmp_path / name]
    code, _, err = run(*command, *where)
    assert code == 1
    assert name in one_line(err)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        b"GGUF\x03\x00\x00\x00\xff\xff\xff\xff",
        b"<html>not found</html>",
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_a_file_that_is_no_model(run: Any, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    code, out, err = run("generate", "--model", path, "-p", "hello")
    assert (code, out) == (1, "")
    assert "broken.gguf" in one_line(err)


def test_a_wrong_checksum(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(name: str, **_: object) -> Path:
        raise ModelFileError(f"{name} has the wrong checksum.\nNothing was kept.")

    monkeypatch.setattr(engine.loading.fetch, "resolve_model", resolve)
    code, out, err = run("pull", "smollm2-135m")
    assert (code, out) == (1, "")
    assert "wrong checksum. Nothing was kept." in one_line(err)


def test_pull_prints_where_the_model_is(run: Any, tmp_path: Path) -> None:
    model = tmp_path / "mine.gguf"
    model.write_bytes(b"x")
    assert run("pull", model) == (0, f"{model}\n", "")


@pytest.mark.parametrize(
    ("flags", "served"),
    [(["--model", "org/name"], "org/name"), (["--model", "org/name", "--served-model-name", "mine"], "mine")],
)
def test_a_model_is_looked_up_once_and_keeps_its_name(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], served: str
) -> None:
    asked: list[str] = []
    seen: list[Settings] = []

    def fetch(name: str) -> Path:
        asked.append(name)
        return tmp_path

    async def serve(settings: Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(app.cli.pull, "fetch", fetch)
    monkeypatch.setattr(app.start, "serve", serve)
    assert run("serve", "--port", 0, *flags)[0] == 0
    config = seen[0].engine_config()
    assert (asked, config.model, config.served_model_name) == (["org/name"], str(tmp_path), served)


def test_a_model_of_ones_own_goes_by_its_files_name(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"x")
    settings = with_model(load_settings(flags={"model.name": str(path)}))
    assert (settings.model.name, settings.server.served_model_name) == (str(path), None)


@pytest.mark.usefixtures("no_fetch")
def test_keys_that_were_made_before_count_beyond_loopback(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def serve(_: Settings) -> int:
        return 0

    monkeypatch.setattr(app.start, "serve", serve)
    words = ("serve", "--host", "0.0.0.0", "--port", 0, "--admin-token", "t", "--state-dir", tmp_path)
    assert run(*words)[0] == 2
    store = open_store(tmp_path).store
    assert store is not None
    store.add("alice", Digests.of("secret"), KeyLimits(), 0.0)
    store.close()
    assert run(*words)[0] == 0
    (tmp_path / FILE_NAME).write_bytes(b"no database at all")
    code, _, err = run(*words)
    assert (code, "cannot be read" in one_line(err)) == (2, True)


@pytest.mark.usefixtures("no_fetch")
def test_a_port_in_use(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = run("serve", "--port", port)
    assert code == 1
    assert str(port) in one_line(err)
    assert "--port" in err


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (EngineError("the model is tired"), 1, "relevo: the model is tired\n"),
        (ExceptionGroup("x", [ValueError("y"), ExceptionGroup("z", [EngineError("tired")])]), 1, "relevo: tired\n"),
        (OSError(28, "No space left on device"), 1, "relevo: [Errno 28] No space left on device\n"),
        (ValueError("a\nb"), 1, "relevo: unexpected ValueError: a b (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, ""),
        (BaseExceptionGroup("x", [KeyboardInterrupt()]), 130, ""),
    ],
)
def test_what_an_error_becomes(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, expected: str
) -> None:
    def fetch(_: str) -> Path:
        raise error

    monkeypatch.setattr(app.cli.pull, "fetch", fetch)
    assert run("pull", "x") == (code, "", expected)


def test_debug_shows_where(run: Any, tmp_path: Path) -> None:
    code, _, err = run("pull", tmp_path / "missing.gguf", "--debug")
    assert code == 1
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("relevo: ")


@pytest.mark.usefixtures("fake_engine")
def test_generate_answers_a_prompt_on_stdout(run: Any) -> None:
    code, out, err = run("generate", "-p", "hello", "--max-tokens", 5, "--temperature", 0)
    assert (code, err) == (0, "")
    assert len(out) == 6
    raw = run("generate", "-p", "hello", "--raw", "--max-tokens", 5, "--temperature", 0)
    assert raw[1] != out
    assert run("generate", "-p", "hello", "--system", "be brief", "--max-tokens", 5, "--temperature", 0)[1] != out


@pytest.mark.usefixtures("fake_engine")
def test_generate_refuses_what_the_api_refuses(run: Any) -> None:
    code, out, err = run("generate", "-p", "hello", "--temperature", 9)
    assert (code, out) == (2, "")
    assert "temperature" in one_line(err)
    code, _, err = run("generate", "-p", "hello" * 1000)
    assert code == 1
    assert "5001" in one_line(err) or "5002" in err


@pytest.mark.usefixtures("fake_engine")
def test_generate_answers_a_file(run: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {
            "custom_id": f"{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "abc", "max_tokens": i + 1},
        }
        for i in range(5)
    ]
    source.write_text("\n".join(map(json.dumps, lines)))
    code, out, err = run("generate", "-i", source, "-o", target)
    assert (code, out) == (0, "")
    assert re.fullmatch(rf"5 of 5 lines answered; 15 tokens, [\d.,]+ a second; results in {target}\n", err)
    assert {json.loads(line)["custom_id"] for line in target.read_text().splitlines()} == set("01234")
    # What is there is not answered again, unless that is wanted.
    told, end = run("generate", "-i", source, "-o", target)[2].splitlines()
    assert told == f"going on with {target}: 5 lines answered before (--restart answers all anew)"
    assert end.startswith("5 of 5 lines answered (5 of them before); 0 tokens")
    # What failed is not called answered, and is tried again.
    good = source.read_bytes()
    source.write_bytes(good.replace(b'"4"', b'"\xff"').replace(b'"max_tokens": 4', b'"max_tokens": -4'))
    code, _, err = run("generate", "-i", source, "-o", target, "--restart")
    assert code == 1
    assert err.startswith("3 of 5 lines answered, 2 failed (their 'error' says why); 6 tokens")
    source.write_bytes(good.replace(b'"max_tokens": 1', b'"max_tokens": 2'))
    told, end = run("generate", "-i", source, "-o", target)[2].splitlines()
    assert "2 lines answered before, 2 failed and tried again, 1 changed and answered anew (" in told
    assert end.startswith("5 of 5 lines answered (2 of them before); 11 tokens")
    assert len(target.read_text().splitlines()) == 5
    source.write_text("nonsense\n")
    assert run("generate", "-i", source, "-o", target, "--restart")[0] == 1
    assert run("generate", "-i", source, "-o", source)[0] == 2
    code, _, err = run("generate", "-i", target, "-o", config_file(tmp_path))
    assert (code, "no result of a batch" in one_line(err)) == (2, True)
    assert run("generate", "-i", tmp_path / "none", "-o", target)[0] == 1


def config_file(tmp_path: Path) -> Path:
    """A file of one's own that was named by mistake."""
    path = tmp_path / "precious.txt"
    path.write_text("do not lose this\n")
    return path


@pytest.mark.usefixtures("no_fetch")
def test_a_file_that_cannot_be_opened_is_named(run: Any, tmp_path: Path) -> None:
    source, nowhere = tmp_path / "in.jsonl", tmp_path / "nowhere" / "x.jsonl"
    source.write_text("{}\n")
    words = ("-i", nowhere, "-o", tmp_path / "out")
    assert run("generate", *words) == (1, "", f"relevo: {nowhere}: no such file or directory\n")
    code, _, err = run("generate", "-i", source, "-o", nowhere)
    assert (code, f"There is no folder {nowhere.parent} for --output; make it" in one_line(err)) == (2, True)


def test_the_version(run: Any) -> None:
    assert run("--version") == (0, f"relevo {version('relevo')}\n", "")


def test_a_progress_bar_is_drawn_on_terminals_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Progress("Fetching", unit="bytes") as progress:
        progress(10, 10)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("Fetching", unit="bytes") as progress:
        progress(0, 0)
        progress(98_362_432, 98_362_432)
    drawn = capsys.readouterr().err
    with Progress("Answering", unit="lines") as progress:
        progress(5, 20, "12.5 tokens/s")
    assert " 25%  5 of 20 lines  12.5 tokens/s\n" in capsys.readouterr().err
    assert "100%  98.4 MB of 98.4 MB" in drawn
    assert drawn.endswith("\n")


@pytest.mark.slow
def test_the_process_itself(tmp_path: Path) -> None:
    """Exit code and streams as a shell sees them, and `--help` without a torch import."""
    code = "import sys; from app.cli import main; main(['serve', '--help']); print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-num-batched-tokens" in shown.stdout
    assert shown.stdout.splitlines()[-1] == "False"
    failed = subprocess.run(
        [sys.executable, "-m", "app.cli", "pull", str(tmp_path / "none.gguf")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert failed.returncode == 1
    one_line(failed.stderr)


def test_an_interrupt_while_a_command_is_imported_is_no_traceback() -> None:
    program = """
import sys

class Interrupt:
    def find_spec(name, *_):
        if name == "pydantic":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt)
from app.cli import main
sys.exit(main(["serve"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
