"""The process that tries a grammar: what comes back from it, and what is said when there is none."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import llguidance
import pytest
import trio

from engine.errors import InvalidRequestError, UnavailableError
from engine.grammar import probe, trial
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.spec import MAX_GRAMMAR_LENGTH, lark_spec, regex_spec
from engine.grammar.trial import TOO_LARGE, Verdict, try_it
from engine.handle import GenerationRequest, TextPrompt
from engine.sequence import SamplingParams
from tests.fakes import FakeTokenizer, open_fake_engine

OBJECT = '{"grammars": [{"json_schema": {"type": "object"}}]}'
BLANK_LINES = 'root ::= "a"' + "\n" * (MAX_GRAMMAR_LENGTH - 100)
# One rule more is known to be a terminal in each pass over all of them.
BACKWARDS = "root ::= a0 b\nb ::= b\n" + "\n".join([f"a{i} ::= a{i + 1}" for i in range(1900)]) + '\na1900 ::= "x"'
NESTED = "root ::= " + "(" * 16_000 + '"x"' + ")" * 16_000


def source(grammar: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


async def test_it_says_what_is_wrong_with_a_grammar() -> None:
    assert await try_it(OBJECT) == Verdict("", OBJECT)
    assert "Invalid type" in (await try_it(OBJECT.replace("object", "strin"))).fault


async def test_gbnf_comes_back_as_lark_and_lark_as_it_was() -> None:
    fault, lark = await try_it(source('root ::= "日" digit+\ndigit ::= [0-9]'))
    assert not fault
    assert json.loads(lark)["grammars"][0]["lark_grammar"].split() == [
        "%llguidance", "{}", "start:", '"日"', "DIGIT+", "DIGIT:", "/[0-9]/"]  # fmt: skip
    assert await try_it(source('start: "::="')) == Verdict("", source('start: "::="'))
    assert "GBNF: Rule 'foo' not found" in (await try_it(source("root ::= foo"))).fault


async def test_what_gbnf_becomes_is_bounded() -> None:
    grammar = 'root ::= "' + "𝒳" * (probe.MAX_SOURCE_LENGTH // 12) + '"'  # twelve characters each in JSON
    assert "too long" in (await try_it(source(grammar))).fault


@pytest.mark.slow
@pytest.mark.parametrize("grammar", [BLANK_LINES, BACKWARDS, NESTED], ids=["blank lines", "backwards", "nested"])
async def test_hostile_gbnf_costs_this_process_nothing(grammar: str) -> None:
    """Neither the loop nor a worker thread converts it: the time of all threads of the process is counted."""
    compiler = GrammarCompiler(FakeTokenizer())
    begin = time.process_time()
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        await compiler.compile(lark_spec(grammar, "p"))
    assert time.process_time() - begin < 0.3


async def test_it_finds_llguidance_wherever_it_was_installed_and_nothing_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `pip install --user`: in a directory that Python itself does not look into when it is isolated."""
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "llguidance").symlink_to(Path(llguidance.__file__).parent)
    for info in Path(llguidance.__file__).parents[1].glob("llguidance-*.dist-info"):
        (place / info.name).symlink_to(info)
    (tmp_path / "json.py").write_text("raise ImportError('from the working directory')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(llguidance, "__file__", str(place / "llguidance" / "__init__.py"))
    assert await try_it(OBJECT) == Verdict("", OBJECT)


def break_executable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))


def break_start(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)


def break_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llguidance, "__file__", str(tmp_path / "llguidance" / "__init__.py"))


def break_time(monkeypatch: pytest.MonkeyPatch, _: Path) -> None:
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (break_executable, "No such file"),
        (break_start, "temporarily unavailable"),
        (break_library, "No module named 'llguidance'"),
        (break_time, "did not end"),
    ],
)
async def test_where_none_can_be_tried_the_request_may_come_back(
    spoil: object, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not the grammar's fault: nothing is remembered of it, the operator is told why, and others are served."""
    caplog.set_level(logging.ERROR)
    async with open_fake_engine() as engine:
        request = GenerationRequest("r", TextPrompt("hi"), SamplingParams(max_tokens=2), grammar=regex_spec("a+", "p"))
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch, tmp_path)  # type: ignore[operator]
            with pytest.raises(UnavailableError, match="Try again in 5 s"):
                await engine.submit(request).accepted()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert why in caplog.text
        assert await engine.submit(request).accepted() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the address space is not bounded")
async def test_a_machine_that_bounds_processes_more_tightly_is_obeyed() -> None:
    code = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_CPU, (1, 1));"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29)); sys.argv = sys.argv[1:];"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, probe.__file__, str(Path(llguidance.__file__).parents[1])]
    done = await trio.run_process(command, stdin=OBJECT.encode(), capture_stdout=True)
    assert done.stdout.decode().splitlines() == [probe.READY, '{"fault": "", "source": ""}']


async def test_what_ends_while_it_compiles_was_too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(f"print({probe.READY!r}, flush=True)\nraise SystemExit(3)")
    monkeypatch.setattr(probe, "__file__", str(script))
    assert await try_it(OBJECT) == Verdict(TOO_LARGE, OBJECT)
