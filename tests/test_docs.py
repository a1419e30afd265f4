"""The README says what there is: every setting, command, flag and route. What it links to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.cli import main
from app.config import Key, keys, load_settings, named_keys
from app.http import create_app
from app.lifecycle import Lifecycle
from app.server import make_context
from tests.fakes import open_fake_engine

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = ("serve", "pull", "generate", "bench", "compare", "limit")


def row_of(key: Key) -> str:
    """A setting's row of the table. To update the README, print these."""
    return f"| `[{key.section}] {key.name}` | {key.default_text} | {key.unit} | {key.range} | {key.reason} |"


@pytest.mark.parametrize("key", [*keys(), *named_keys()], ids=lambda key: key.dotted)
def test_every_setting_stands_in_the_table(key: Key) -> None:
    assert row_of(key) in README.splitlines()


def test_the_table_has_no_other_settings() -> None:
    named = re.findall(r"^\| `\[([\w.]+)\] (\w+)` \|", README, re.MULTILINE)
    assert [f"{section}.{name}" for section, name in named] == [key.dotted for key in (*keys(), *named_keys())]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_stands_in_the_readme(command: str) -> None:
    assert f"`relevo {command}" in README


def test_there_are_no_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = re.findall(r"^ {4}(\w+)  ", capsys.readouterr().out, re.MULTILINE)
    assert tuple(listed) == COMMANDS


def test_every_flag_in_the_readme_exists(capsys: pytest.CaptureFixture[str]) -> None:
    known = "--debug --help"
    for command in COMMANDS:
        main([command, "--help"])
        known += capsys.readouterr().out
    # Flags of other programs are named where a container is made and run.
    own = re.sub(r"```dockerfile.*?```|^docker .*?```", "", README, flags=re.DOTALL | re.MULTILINE)
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", own)):
        assert flag in known.split() or re.search(rf"{flag}\b", known), flag


async def test_every_route_stands_in_the_readme_and_no_other() -> None:
    async with open_fake_engine() as engine:
        app = create_app(make_context(load_settings(), engine, Lifecycle()))
    registered = {
        f"{method} {rule.rule}"
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    section = README.partition("### Routes")[2].partition("###")[0]
    documented = set(re.findall(r"`((?:GET|POST|PATCH|PUT|DELETE) [^`]+)`", section))
    assert documented == {re.sub(r"<path:name>", "<name>", route) for route in registered}


def test_every_test_that_proves_a_promise_exists() -> None:
    named = re.findall(r"`(\w+/\w+)::(\w+)`", README.partition("## What is promised")[2].partition("\n## ")[0])
    assert len(named) > 40
    for module, name in named:
        text = (ROOT / "tests" / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), (module, name)


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
