"""The wheel as a user gets it: built, installed into an environment of its own, used from another folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def call(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return next(folder.glob("relevo-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment that has the wheel, and borrows the dependencies of this one."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=folder,
    )
    site = next((folder / "lib").glob("python*/site-packages"))
    # Only the path: .pth files over there, such as that of an editable install, are not followed.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_everything_is_inside(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for name in ("templates", "static"):
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and not path.name.startswith("readme-"):
                assert f"app/_web/{path.relative_to(ROOT).as_posix()}" in inside
    for package in ("app", "engine", "kernels"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in inside


def test_nothing_else_is_inside(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"app", "engine", "kernels"}


def test_the_command_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    shown = call(installed / "relevo", "--help", cwd=tmp_path)
    assert "serve a model over HTTP" in shown


def test_pages_and_data_are_found(installed: Path, tmp_path: Path) -> None:
    code = (
        "from app.assets import static_dir, templates_dir; import engine, pathlib\n"
        "for path in (templates_dir(), static_dir(), pathlib.Path(engine.__file__).parent / 'data'):\n"
        "    assert list(path.iterdir()), path\n"
        "    print(path)"
    )
    for line in call(installed / "python", "-c", code, cwd=tmp_path).splitlines():
        assert Path(line).is_relative_to(installed.parent.resolve())


def test_the_web_application_is_importable(installed: Path, tmp_path: Path) -> None:
    """What `relevo serve` imports is in the wheel and in the declared dependencies."""
    assert call(installed / "python", "-c", "import app.server; print(app.server.__file__)", cwd=tmp_path)
