"""The Triton kernels compiled for devices that are not there, and what is said where none is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel here")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: the driver that stands for a device is Triton's for good."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_no_kernel_spills_on_a_hopper() -> None:
    """The first two of each: decode and prefill, draws that look at top-p and those that do not."""
    made = run("kernels.gpu.targets", "--target", "sm_90", "--first", "2", "--json")
    assert made.returncode == 0, made.stderr
    rows = json.loads(made.stdout)
    names = {row["compiled"]["name"] for row in rows}
    wide = {"paged_attention_kernel", "quantized_linear_kernel"}
    assert {*wide, "combine_segments_kernel", "rms_norm_kernel", "find_bars_kernel"} <= names
    spilling = [(row["kernel"], row["shape"]) for row in rows if row["compiled"]["spills"]]
    assert not spilling
    reading = [row["compiled"] for row in rows if row["compiled"]["name"] in wide]
    assert all(made["wide_loads"] for made in reading), "keys, values or weights come in small pieces"


def test_a_table_goes_where_its_kernels_are_named(tmp_path: Path) -> None:
    from kernels.gpu.targets import END, update

    results = tmp_path / "results.md"
    text = "head\n<!-- kernels.gpu.targets a -->\n{}\n{end}\n<!-- kernels.gpu.targets a b -->\n{}\n{end}\nfoot\n"
    results.write_text(text.format("one", "two", end=END), encoding="utf-8")
    update(results, ["a", "b"], "three")
    assert results.read_text(encoding="utf-8") == text.format("one", "three", end=END)
    with pytest.raises(SystemExit, match=r"put the lines <!-- kernels\.gpu\.targets b -->"):
        update(results, ["b"], "four")


@pytest.mark.slow
def test_without_a_gpu_the_bench_says_so_in_one_line() -> None:
    told = run("kernels.bench")
    assert told.returncode == 1
    assert told.stdout == ""
    assert told.stderr.splitlines() == ["No GPU that torch can use: `--interpret` checks the kernels without one."]
