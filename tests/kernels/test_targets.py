"""The Triton kernels compiled for devices that are not there, and what is said where none is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90")
KERNELS = {
    "paged_attention", "quantized_linear", "quantized_rows", "sample", "apply_token_mask", "add_biases", "penalize",
    "top_logprobs", "rms_norm", "add_rms_norm", "silu_mul", "rope_kv_write", "gather_inputs", "apply_changes",
    "append_tokens", "copy_blocks",
}  # fmt: skip
# What matters beside the first two cases of each kernel, which are of the attention rows split into segments and
# prefill beside decode: decode of many rows, by heads, blocks and dtypes.
MAIN_SHAPES = tuple(
    f"64 × 1 after 4095; {kind}"
    for kind in (
        "16/8 × 128, blocks of 16, bf16",
        "16/8 × 128, blocks of 16, fp16",
        "16/8 × 128, blocks of 32, bf16",
        "16/8 × 128, blocks of 16, bf16, fp8 cache",
        "32/8 × 96, blocks of 16, bf16, fp8 cache",
        "32/8 × 64, blocks of 16, bf16",
        "8/4 × 256, blocks of 16, bf16",
    )
)
# And the products with quantized matrices, of few tokens, with every kind of code and of float that a user can have.
KINDS = tuple(f"16 × 4096 × 4096, {bits} bits, {dtype}" for bits in (4, 5, 6, 8) for dtype in ("bf16", "fp16"))
# What wants the most of what others have less of: shared memory, and eight-bit floats of Ada's own.
ADA = (
    "16 × 4096 × 4096, 5 bits, bf16",
    "32 × 4096 × 4096, 8 bits, bf16",
    "64 × 1 after 4095; 16/8 × 128, blocks of 16, bf16, fp8 cache",
    "64 × 1 after 1999 + 1 × 1024 after 0 + 1 × 512 after 512; 16/8 × 128, blocks of 16, bf16",
)
OTHERS = {"sm_89": ("--first", "0", "--shape", *ADA), "gfx942": ("--first", "1")}
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheel here")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: the driver that stands for a device is Triton's for good."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def compiled() -> dict[str, list[dict[str, Any]]]:
    """The first two cases of each kernel and the other main shapes by target, all targets at the same time."""

    def rows(target: str) -> list[dict[str, Any]]:
        made = run("kernels.gpu.targets", "--target", target, "--first", "2", "--shape", *MAIN_SHAPES, *KINDS, "--json")
        assert made.returncode == 0, made.stderr
        return [row | row.pop("compiled") for row in json.loads(made.stdout)]

    with ThreadPoolExecutor() as pool:
        return dict(zip(TARGETS, pool.map(rows, TARGETS), strict=True))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_none_spills(target: str, compiled: dict[str, list[dict[str, Any]]]) -> None:
    rows = compiled[target]
    assert {row["kernel"] for row in rows} == KERNELS
    assert {*MAIN_SHAPES, *KINDS} <= {row["shape"] for row in rows}
    assert {"combine_segments_kernel", "find_bars_kernel", "drawn_logprobs_kernel"} <= {row["name"] for row in rows}
    assert not [(row["name"], row["shape"]) for row in rows if row["spills"]]
    reading = [row for row in rows if row["name"] in ("paged_attention_kernel", "quantized_linear_kernel")]
    assert all(row["wide_loads"] for row in reading), "keys, values or weights come in small pieces"


@pytest.mark.long
@pytest.mark.parametrize("target", OTHERS)
def test_what_has_less_shared_memory_has_enough_of_it(target: str) -> None:
    made = run("kernels.gpu.targets", "--target", target, *OTHERS[target], "--json")
    assert made.returncode == 0, made.stderr
    rows = json.loads(made.stdout)
    assert len({row["shape"] for row in rows}) >= len(ADA)
    assert not [(row["kernel"], row["shape"]) for row in rows if row["compiled"]["spills"]]


@pytest.mark.slow
def test_a_shape_that_no_case_has_is_one_clear_line() -> None:
    made = run("kernels.gpu.targets", "--kernel", "silu_mul", "--shape", "1 × 2")
    assert made.returncode == 1
    assert made.stderr == "no case has the shape 1 × 2\n"


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
