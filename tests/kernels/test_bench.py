"""The way from a case to a figure, on a device that is made up; and the whole run, rehearsed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.bench.__main__ import write_figures
from kernels.bench.cases import Case, Work
from kernels.bench.running import HEAD, row_of, run_on_device, settle
from kernels.bench.timing import MAX_COPIES, MAX_COPIES_BYTES, Device, Rates, Timing, time_case
from tests.bench.gpu.__main__ import Results, main
from tests.bench.gpu.generate import Missing, compare, table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CACHE_BYTES = 1000
RATES = Rates(copy=4e12, multiply=8e14)


class MadeUp(Device):
    """Launches on the processor, and tells times that are made up: a microsecond for each launch.

    It breaks for the rest of the process when a case has failed so.
    """

    def __init__(self, arch: int = 90) -> None:
        super().__init__(torch.device("cpu"))
        self.arch = arch
        self.timed: list[int] = []
        self.num_released = self.allocated = 0
        self.broken = False

    def describe(self) -> str:
        return "Imaginary 1"

    def has_what_it_takes(self, case: Case) -> bool:
        return self.arch >= case.least_arch

    def cache_bytes(self) -> int:
        return CACHE_BYTES

    def time(self, launches: Sequence[Callable[[], object]]) -> float:
        for launch in launches:
            launch()
        self.timed.append(len(launches))
        return len(launches) * 1e-6

    def rates(self) -> Rates:
        return RATES

    def allocated_bytes(self) -> int:
        return self.allocated

    def release(self) -> None:
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.num_released += 1


class Adder:
    """A kernel that counts. `why` is `wrong` where its results are, `fails` where its launch does.

    Args:
        breaks: the device that is broken for the process when it was launched.
        takes: a device on which its operands take so many bytes.
    """

    def __init__(
        self, num_bytes: int, *, flops: int = 0, rival: bool = False, why: str = "", breaks: MadeUp | None = None,
        takes: tuple[MadeUp, int] | None = None,
    ) -> None:  # fmt: skip
        self.num_bytes, self.flops, self.rival, self.why, self.breaks = num_bytes, flops, rival, why, breaks
        self.takes = takes
        self.made = self.checked = 0

    def make(self, device: torch.device) -> Work:
        assert device.type == "cpu"
        self.made += 1
        if self.takes is not None:
            self.takes[0].allocated += self.takes[1]
        total = torch.zeros(1)

        def check() -> None:
            self.checked += 1
            if self.why == "wrong":
                raise AssertionError("1 is not\n  2")

        def run() -> torch.Tensor:
            if self.breaks is not None:
                self.breaks.broken = True
            if self.why == "fails":
                raise RuntimeError("an illegal\nmemory access")
            return total.add_(1)

        def rival() -> torch.Tensor:
            if self.why == "rival fails":
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried")
            return total.clone()

        return Work(run, check, self.num_bytes, self.flops, rival if self.rival else None)

    def case(self, kernel: str, least_arch: int = 80) -> Case:
        return Case(kernel, f"{self.num_bytes} bytes", self.make, least_arch)


def test_a_row_tells_shares_of_what_the_device_can_do() -> None:
    case = Adder(2_000_000).case("add")
    timing = Timing(1e-6, 2.5e-6, 2_000_000, 400_000_000)
    assert row_of(case, timing, RATES) == "| add | 2000000 bytes | 1.0 | 2.0 | 50% | 400.0 | 50% | 2.5 |"
    bare = Timing(1e-6, None, 2_000_000, 0)
    assert row_of(case, bare, RATES) == "| add | 2000000 bytes | 1.0 | 2.0 | 50% |  |  |  |"
    assert row_of(case, bare, RATES).count("|") == HEAD.count("|")


@pytest.mark.parametrize(("num_bytes", "copies"), [(1000, 4), (1300, 4), (4000, 1), (10**9, 1), (1, MAX_COPIES)])
def test_operands_take_turns_until_they_are_four_times_the_cache(num_bytes: int, copies: int) -> None:
    adder, device = Adder(num_bytes, flops=7, rival=True), MadeUp()
    timing = time_case(adder.case("add"), device)
    assert (adder.made, adder.checked, device.timed) == (copies, 1, [copies, copies])
    assert timing == Timing(copies * 1e-6, copies * 1e-6, num_bytes, 7)
    assert device.num_released, "the plain version's memory was kept"


def test_operands_that_lie_in_much_more_than_they_read_are_fewer() -> None:
    device = MadeUp()
    adder = Adder(1, takes=(device, MAX_COPIES_BYTES // 3))
    time_case(adder.case("rows"), device)
    assert adder.made == 3
    vast = Adder(1, takes=(device, 2 * MAX_COPIES_BYTES))
    time_case(vast.case("rows"), device)
    assert vast.made == 1


def test_what_torch_cannot_do_costs_no_figure_of_our_own(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[dict[str, Any]] = []
    assert run_on_device([Adder(4000, rival=True, why="rival fails").case("add")], MadeUp(), kept.append) == 0
    (row,) = kept[-1]["rows"]
    why = "OutOfMemoryError: CUDA out of memory. Tried"
    assert (row["seconds"], row["rival_seconds"], row["rival_failed"]) == (1e-6, None, why)
    assert capsys.readouterr().out.splitlines()[-1] == f"| add | 4000 bytes | 1.0 | 0.0 | 0% |  |  | {why} |"


def test_what_breaks_the_device_costs_its_own_figure_alone(capsys: pytest.CaptureFixture[str]) -> None:
    first, last, device = Adder(4000), Adder(4000), MadeUp()
    cases = [
        first.case("add"), Adder(8000, why="fails", breaks=device).case("add"),
        Adder(4000, breaks=device).case("mul"), last.case("pow"),
    ]  # fmt: skip
    kept: list[dict[str, Any]] = []

    def run(device: MadeUp) -> int:
        before = deepcopy(kept[-1]) if kept else None
        return run_on_device(cases, device, lambda figures: kept.append(deepcopy(figures)), before)

    assert run(device) == 1
    assert (len(kept[-1]["rows"]), kept[-1]["under_way"]["shape"]) == (1, "8000 bytes")
    assert settle(kept[-1], "nothing to tell"), "there is more to do"
    assert "The device computes nothing more in this process" in capsys.readouterr().out
    device.broken = False  # as in a new process
    assert run(device) == 1
    assert [row["kernel"] for row in kept[-1]["rows"]] == ["add", "mul"], "a figure was lost with the device"
    assert run(MadeUp()) == 1
    assert not settle(kept[-1], "nothing to tell")
    assert [row["kernel"] for row in kept[-1]["rows"]] == ["add", "mul", "pow"]
    assert [failure["why"] for failure in kept[-1]["failed"]] == ["RuntimeError: an illegal memory access"]
    assert (first.checked, last.checked) == (1, 1), "what was done is not done again"


def test_the_case_that_a_process_ended_in_has_failed() -> None:
    figures = {"rows": [{"kernel": "add", "shape": "1", "seconds": 1.0}], "failed": [], "under_way": {}}
    figures["under_way"] = {"kernel": "add", "shape": "2"}
    assert settle(figures, "failed, exit code -11")
    assert figures["failed"] == [{"kernel": "add", "shape": "2", "why": "failed, exit code -11"}]


def test_what_is_wrong_or_fails_is_told_and_the_others_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    late = Adder(4000)
    cases = [
        Adder(4000, rival=True).case("add"),
        Adder(4000, why="wrong").case("add"),
        Adder(8000, why="fails").case("mul"),
        late.case("new", least_arch=100),
        Adder(4000).case("mul"),
    ]
    kept: list[dict[str, Any]] = []
    assert run_on_device(cases, MadeUp(), lambda figures: kept.append(deepcopy(figures))) == 2
    assert not late.made, "what the device lacks was asked for"
    counts = [(len(each["rows"]), len(each["failed"])) for each in kept]
    assert list(dict.fromkeys(counts)) == [(0, 0), (1, 0), (1, 1), (1, 2), (2, 2)]
    assert [each["under_way"]["shape"] for each in kept[:-1:2]] == [
        "4000 bytes", "4000 bytes", "8000 bytes", "4000 bytes",
    ]  # fmt: skip
    assert "under_way" not in kept[-1], "all is done"
    assert [failure["why"] for failure in kept[-1]["failed"]] == [
        "WRONG: 1 is not 2", "RuntimeError: an illegal memory access",
    ]  # fmt: skip
    assert kept[-1]["rows"][1] == {
        "kernel": "mul", "shape": "4000 bytes", "seconds": 1e-6, "rival_seconds": None, "num_bytes": 4000, "flops": 0,
        "rival_failed": "",
    }  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Imaginary 1"
    assert lines[1] == "copy 4.00 TB/s, bf16 product 800 TFLOP/s"
    assert "| mul | 8000 bytes | RuntimeError: an illegal memory access |" in lines
    assert lines[-1] == "Torch has nothing to be timed beside mul (1 of 1)."


def test_figures_take_the_place_of_those_before_them(tmp_path: Path) -> None:
    target = tmp_path / "kernels.json"
    write_figures(target, {"rows": [1]})
    with pytest.raises(TypeError):
        write_figures(target, {"rows": {1}})  # no JSON: as if cut short
    assert json.loads(target.read_text()) == {"rows": [1]}
    write_figures(target, {"rows": [1, 2]})
    assert json.loads(target.read_text()) == {"rows": [1, 2]}
    assert [path.name for path in tmp_path.iterdir()] == ["kernels.json"]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel here")
def test_the_way_to_the_figures_of_a_gpu_can_be_rehearsed(tmp_path: Path) -> None:
    target, parts = tmp_path / "gpu.json", ("kernels", "steps")
    for name in ("gguf", "hypercorn", "pydantic", "quart", "safetensors", "tokenizers", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not to be carried to a device')")
    command = [sys.executable, "-m", "tests.bench.gpu", "--json", str(target), "--rehearse", "--kernel", "silu_mul"]
    command += ["--first", "1", "--only", *parts]
    told = subprocess.run(
        command, cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True,
        text=True, timeout=600,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    results = json.loads(target.read_text())
    assert [word[:7] for word in results["ended"].values()] == ["done in"] * len(parts)
    kernels, steps = (results["parts"][part] for part in parts)
    assert ([row["kernel"] for row in kernels["rows"]], kernels["failed"]) == (["silu_mul"], [])
    assert steps["device"] == "cuda:0"
    assert [(row["batch"], row["context"]) for row in steps["rows"]] == [(1, 6), (2, 6)]
    for row in steps["rows"]:
        assert 0 < row["host_seconds"]["p50"] <= row["host_seconds"]["p99"] <= row["host_seconds"]["max"]
    assert steps["workload"]["requests"] == 3
    assert "| silu_mul |" in told.stdout
    assert any(line.startswith("Not compared: prefill beside decode") for line in told.stdout.splitlines())


def test_without_a_gpu_nothing_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "gpu.json"
    assert main(["--json", str(target)]) == 1
    told = capsys.readouterr()
    assert (told.out, target.exists()) == ("", False)
    assert told.err.endswith(": --rehearse goes the whole way without a GPU.\n")


@pytest.mark.slow
def test_what_takes_too_long_or_fails_is_told_and_costs_no_figures(tmp_path: Path) -> None:
    target = tmp_path / "gpu.json"
    results = Results(target)
    results.begin()
    results.keep("parts", "kernels", {"rows": [1]})
    assert main(["--json", str(target), "--rehearse", "--only", "steps", "--limit", "0.01"]) == 1
    assert json.loads(target.read_text())["ended"] == {"steps": "cut short after 0.01 s"}
    results.keep("parts", "kernels", {"rows": [1]})
    results.keep("ended", "kernels", "done in 1 s")
    assert results.read()["parts"] == {"kernels": {"rows": [1]}}
    assert results.read()["ended"] == {"steps": "cut short after 0.01 s", "kernels": "done in 1 s"}


def test_behind_a_process_that_a_kernel_broke_goes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "gpu.json"
    results, ran = Results(target), list[str]()

    def run(command: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
        part = command[-1]
        ran.append(part)
        if len(ran) == 3:  # all is done
            figures = results.of("kernels")
            del figures["under_way"]
            results.keep("parts", "kernels", figures)
            return subprocess.CompletedProcess(command, 1)
        before = results.of("kernels") or {"rows": [], "failed": []}
        results.keep("parts", "kernels", before | {"under_way": {"kernel": "add", "shape": str(len(ran))}})
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr("tests.bench.gpu.__main__.subprocess.run", run)
    assert main(["--json", str(target), "--rehearse", "--only", "first-kernels"]) == 1
    assert ran == ["first-kernels"] * 3
    assert [failure["shape"] for failure in results.of("kernels")["failed"]] == ["1", "2"]
    assert results.read()["ended"] == {"first-kernels": "failed, exit code 1"}


@pytest.mark.slow
def test_generate_takes_steps_beside_ours() -> None:
    kept: list[dict[str, Any]] = []
    ours = {(1, 6): {"step_seconds": 0.25}}
    compare("tiny", [(1, 6), (2, 9)], "cpu", 2, ours, lambda figures: kept.append(deepcopy(figures)))
    assert [len(figures["rows"]) for figures in kept] == [1, 2]
    own, other = kept[-1]["rows"]
    assert (own["batch"], own["context"], own["own_step_seconds"]) == (1, 6, 0.25)
    assert "own_step_seconds" not in other
    failed = {"batch": 2, "context": 9, "why": "out of memory"}
    told = {**kept[-1], "rows": [{**own, "step_seconds": 0.5}, failed]}
    lines = [line.split() for line in table(told)]
    assert lines[2:] == [["1", "6", "500.00", "250.00", "2.0"], ["2", "9", "out", "of", "memory"]]


def test_without_transformers_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Missing, match="transformers is not installed here"):
        compare("tiny", [(1, 6)], "cpu", 2, {}, lambda _: None)
    assert table({"missing": "it"}) == ["Not compared: it"]
