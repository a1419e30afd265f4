"""The shape of the house: which way imports point, how large things are, and a few manners."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "engine", "kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
RULES = {
    "sequence", "block_pool",
    "prefix_cache", "plan", "kv_cache", "batch", "cache_spec", "scheduler", "policy",
    "batching", "counters", "drafting", "seats", "work_class", "detokenizer", "stats", "waiting",
    "errors", "constraint", "ordered", "timeline", "samples", "experience", "members", "trials", "faults", "recovery",
    "relief", "outcomes", "pace",
}  # fmt: skip
# Caches have places of their own, named by variables that are not Relevo's.
READS_ENVIRONMENT = {"app/config.py", "engine/loading/fetch.py", "kernels/build.py"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


@cache
def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import in line {node.lineno}"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports_of(path)}


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def sources(package: str) -> list[Path]:
    return [path for path in SOURCES if path.relative_to(ROOT).parts[0] == package]


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


def test_what_is_imported_is_declared() -> None:
    """No package is used that only another one brings, and none is declared in vain."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=]", line)[0] for line in project["dependencies"]}
    # The first two are for those who want traces or have a GPU; of hyperframe there is a type, which nothing imports.
    others = {"opentelemetry", "triton", "hyperframe", *PACKAGES, *sys.stdlib_module_names}
    used = {name for path in SOURCES for name in tops(path)} - others
    assert {name.replace("_", "-") for name in used} == declared


@each(sources("engine"))
def test_engine_knows_nothing_of_http(path: Path) -> None:
    assert not tops(path) & {"app", "quart", "quart_trio", "hypercorn", "werkzeug", "pydantic", "transformers"}


@each(sources("kernels"))
def test_kernels_import_tensors_and_triton_only(path: Path) -> None:
    assert tops(path) <= {"kernels", "numpy", "torch", "triton"} | set(sys.stdlib_module_names)


@each(sources("app"))
def test_app_leaves_tensors_to_the_engine(path: Path) -> None:
    assert not tops(path) & {"transformers", "triton"}


@each([path for path in sources("engine") if path.parent.name == "engine" and path.stem in RULES])
def test_rules_need_only_the_standard_library_and_no_clock(path: Path) -> None:
    imported = imports_of(path)
    assert tops(path) <= {"engine"} | set(sys.stdlib_module_names)
    assert not tops(path) & {"time", "os", "datetime", "random", "threading", "asyncio", "socket"}
    ours = {name.split(".")[1] for name in imported if name.startswith("engine.")}
    assert ours <= RULES | {"config"}, "a rule leans on a higher floor"


@each([path for path in SOURCES if name_of(path) not in READS_ENVIRONMENT])
def test_one_place_reads_the_environment(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\bos\.(environ|getenv|putenv)\b|from os import .*(environ|getenv)", text)


@each(SOURCES)
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES
    for function in [] if path in sources("kernels") else functions_of(path):
        lines = (function.end_lineno or function.lineno) - function.lineno + 1
        assert lines <= MAX_FUNCTION_LINES, f"{function.name} has {lines} lines"


@each(SOURCES)
def test_every_function_says_what_it_returns(path: Path) -> None:
    silent = [f.name for f in functions_of(path) if f.returns is None and f.name != "__init__"]
    assert not silent


@each(SOURCES)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


@each(SOURCES)
def test_modules_hold_no_singletons(path: Path) -> None:
    """No `global` statements: what lives long is made by whoever opens it, and handed down."""
    assert not [node.lineno for node in ast.walk(tree_of(path)) if isinstance(node, ast.Global)]


def test_included_templates_are_partials() -> None:
    """What other templates include begins with `_`; what a route renders does not."""
    templates = ROOT / "templates"
    for page in templates.rglob("*.html"):
        for included in re.findall(r"{%-?\s*include\s+['\"]([^'\"]+)", page.read_text(encoding="utf-8")):
            assert Path(included).name.startswith("_"), f"{page.name} includes {included}"


def test_the_readme_names_the_rules() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = re.search(r"\n  rules +(.*?): standard library only", readme, re.DOTALL)
    assert named
    assert set(re.split(r",\s+", named[1])) == RULES


def test_importing_the_rules_loads_neither_torch_nor_trio() -> None:
    """Nobody who reads or tests the rules needs more than Python."""
    rules = [f"engine.{name}" for name in sorted(RULES) if (ROOT / "engine" / f"{name}.py").exists()]
    code = (
        f"import importlib, sys; [importlib.import_module(name) for name in {rules}]; "
        "print({'torch', 'trio', 'numpy'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_the_top_level_is_the_map() -> None:
    """Python lives in the three packages and in tests, nowhere else."""
    elsewhere = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")} - {*PACKAGES, "tests"}
    assert not elsewhere
    assert not list(ROOT.glob("*.py"))


@pytest.mark.parametrize("path", [*SOURCES, *TESTS], ids=name_of)
def test_nothing_names_a_machine(path: Path) -> None:
    """No absolute path of somebody's machine."""
    if path == Path(__file__):
        return
    assert not re.search(r"(?<![\w.])/(work|root|home|Users|tmp)/\w", path.read_text(encoding="utf-8"))
