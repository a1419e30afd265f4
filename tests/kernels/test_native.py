"""The native kernels against their plain versions: products, attention, and the library's making."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.precision import kernels_dir
from kernels import build as building
from kernels import reference
from kernels.blocks import Blocks, as_blocks, quantize, stack
from kernels.build import BuildError
from kernels.byte_lines import from_lines, to_lines, without_nan
from kernels.gguf_blocks import FORMATS, read_blocks
from kernels.native import Arena, Library, PackedMatrix, load
from tests.kernels.library import kernels_or_skip
from tests.kernels.test_paged_attention import make_case

if TYPE_CHECKING:
    from kernels.paged_attention import AttentionRows


@pytest.fixture(scope="module")
def library() -> Library:
    return kernels_or_skip()


BITS = (4, 5, 6, 8)


def random_blocks(rows: int, cols: int, *, bits: int, seed: int = 0) -> Blocks:
    rng = np.random.default_rng(seed)
    with_minima, groups = bits < 6, cols // (16 if bits == 6 else 32)
    codes = rng.integers(0, 1 << bits, (rows, cols)) - (0 if with_minima else 1 << (bits - 1))
    scales = rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16)
    minima = rng.uniform(-0.2, 0.05, scales.shape).astype(np.float16) if with_minima else None
    return Blocks(bits, codes.astype(np.uint8 if with_minima else np.int8), scales, minima)


# Where the float16 of a block lie.
FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def random_data(kind: str, rows: int, blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Any bits, but those of useless numbers."""
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (rows, blocks, FORMATS[kind].num_bytes), dtype=np.uint8)
    for start in FLOATS.get(kind, (0,)):
        data[:, :, start : start + 2] = rng.uniform(-2, 2, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_read_as_the_files_own_package_reads_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    assert FORMATS[kind].num_bytes == num_bytes
    data = random_data(kind, 7, 5)
    blocks = read_blocks(kind, data, 5 * size)
    expected = torch.from_numpy(dequantize(data, GGMLQuantizationType[kind]))
    found = blocks.dequantize()
    if size == 32:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    else:  # scales and minima became float16: each moves by 2^-11 of itself at most
        minima = 0 if blocks.minima is None else np.abs(blocks.minima.astype(np.float32))[:, :, None]
        steps = blocks.codes.reshape(*blocks.scales.shape, -1) * blocks.scales.astype(np.float32)[:, :, None]
        bound = torch.from_numpy((np.abs(steps) + minima).reshape(blocks.shape)) * 2.0**-11
        assert bool(((found - expected).abs() <= bound * 1.001 + 1e-6).all())
    order = np.array([3, 0, 6])
    assert torch.equal(stack([blocks.take(order), blocks]).dequantize()[:3], found[order])
    monkeypatch.setattr("kernels.gguf_blocks.AT_ONCE", 2 * 5 * size)
    assert torch.equal(read_blocks(kind, data, 5 * size).dequantize(), found)


def test_a_scale_beyond_float16_is_seen() -> None:
    data = random_data("Q6_K", 1, 1)
    data[0, 192:] = [127] * 16 + [0xFF, 0x7B]  # sixteen scales of 127 times the largest float16
    assert np.isinf(read_blocks("Q6_K", data, 256).scales).all()


def test_floats_become_bytes_within_half_a_step() -> None:
    weight = torch.randn(6, 96)
    weight[2, :32] = 0
    steps = weight.view(6, 3, 32).abs().amax(-1, keepdim=True) / 127
    error = (quantize(weight).dequantize() - weight).view(6, 3, 32).abs()
    assert bool((error <= steps * 0.57).all())  # the scale itself is rounded to float16
    assert torch.equal(quantize(weight).dequantize()[2, :32], torch.zeros(32))
    for bits in BITS:
        blocks = random_blocks(4, 64, bits=bits)
        assert as_blocks(blocks) is blocks
        made = as_blocks(blocks, eight_bits=True)
        assert (made.bits, made.minima) == (8, None)
        assert (made is blocks) == (bits == 8)
    assert as_blocks(weight).shape == (6, 96)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 19) | st.sampled_from([63, 64, 65, 73, 90]),
    rows=st.integers(1, 100),
    groups=st.integers(1, 20),
    bits=st.sampled_from(BITS),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_those_of_the_reference_and_of_each_row_alone(
    library: Library, count: int, rows: int, groups: int, bits: int, seed: int
) -> None:
    blocks = random_blocks(rows, 32 * groups, bits=bits, seed=seed)
    x = torch.randn(count, 32 * groups, generator=torch.Generator().manual_seed(seed))
    matrix = library.pack(blocks)
    result, expected = library.multiply(x, matrix), reference.multiply_blocks(x, blocks)
    torch.testing.assert_close(result, expected, rtol=0, atol=3e-6 * float(x.abs().max()) * groups * 32)
    alone = torch.cat([library.multiply(x[i : i + 1], matrix) for i in range(count)])
    assert torch.equal(result, alone)
    for row in (0, rows - 1):
        torch.testing.assert_close(library.read_row(matrix, row), blocks.dequantize()[row], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_codes_that_overflow_are_summed_as_they_are_stored(library: Library, bits: int) -> None:
    """Of a group so small that nothing is its inverse: then a product is no larger than its codes allow."""
    blocks = random_blocks(40, 64, bits=bits)
    x = torch.zeros(1, 64)
    x[0, 3:60] = 1e-37
    weights = np.abs(blocks.codes.reshape(*blocks.scales.shape, -1) * blocks.scales.astype(np.float64)[:, :, None])
    minima = 0.0 if blocks.minima is None else np.abs(blocks.minima.astype(np.float64))[:, :, None]
    most = torch.from_numpy((weights + minima).sum((1, 2)) * 1e-37 * 128 / 127)
    assert bool((library.multiply(x, library.pack(blocks))[0].abs() <= 1.01 * most).all())


@pytest.mark.parametrize("spoiler", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_that_is_no_number_is_seen_and_alone(library: Library, spoiler: float, bits: int) -> None:
    matrix = library.pack(random_blocks(40, 96, bits=bits))
    x = torch.randn(20, 96)
    before = library.multiply(x, matrix)
    x[2, 70] = spoiler
    after = library.multiply(x, matrix)
    assert bool(after[2].isnan().all())
    others = [row for row in range(20) if row != 2]
    assert torch.equal(after[others], before[others])


def test_zeros_give_zeros(library: Library) -> None:
    matrix = library.pack(random_blocks(33, 64, bits=8))
    assert torch.equal(library.multiply(torch.zeros(3, 64), matrix), torch.zeros(3, 33))


def cached_case(
    rows: list[tuple[int, int]], *, dtype: torch.dtype, **shape: int
) -> tuple[torch.Tensor, torch.Tensor, AttentionRows]:
    """As `make_case`, with a cache of float16 or of bytes."""
    if dtype != torch.int8:
        return make_case(rows, dtype=dtype, **shape)
    query, kv_cache, table = make_case(rows, dtype=torch.float32, **shape)
    return query, to_lines(kv_cache), table


CACHES = pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)


def test_lines_of_bytes_are_within_half_a_step_and_show_what_is_no_number() -> None:
    values = torch.randn(3, 5, 48)
    values[1, 2], values[2, 0, 7], values[2, 1, 8] = 0, float("nan"), -float("inf")
    lines = to_lines(values)
    assert lines.shape == (3, 5, 52)
    assert lines.dtype == torch.int8
    assert bool(from_lines(lines)[2, :2].isnan().all())
    steps = values[:2].abs().amax(-1, keepdim=True) / 127
    assert bool(((from_lines(lines) - values)[:2].abs() <= steps * 0.501).all())
    assert torch.equal(from_lines(without_nan(lines))[2, :2], torch.zeros(2, 48))
    assert torch.equal(without_nan(lines)[:2], lines[:2])
    halves = values.half()
    assert torch.equal(without_nan(halves)[:2], halves[:2])
    assert bool(without_nan(halves).isfinite().all())


@CACHES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "block_size"),
    [(9, 3, 64, 16), (4, 1, 32, 4), (4, 2, 16, 8), (8, 1, 128, 16), (2, 2, 96, 32), (32, 1, 64, 16), (3, 1, 80, 5)],
)
@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1)],
        [(299, 1), (0, 1), (127, 1), (128, 1), (15, 1)],
        [(0, 16), (0, 17), (5, 3), (120, 20)],
        [(400, 1), (7, 1), (0, 33), (31, 2), (250, 16)],
    ],
    ids=["first token", "decode", "prefill", "mixed"],
)
def test_attention_is_that_of_the_reference(
    library: Library,
    rows: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    query, kv_cache, table = cached_case(
        rows, heads=heads, kv_heads=kv_heads, size=size, block_size=block_size, dtype=dtype
    )
    expected = reference.paged_attention(query, kv_cache, table)
    # Slots of a block behind the last token are the reference's zeros; here nobody may look at them.
    nothing = torch.full((size,), torch.nan)
    for row, seq_len in enumerate(table.seq_lens.tolist()):
        kv_cache[table.block_tables[row, (seq_len - 1) // block_size], :, :, (seq_len - 1) % block_size + 1 :] = (
            to_lines(nothing) if dtype == torch.int8 else nothing.to(dtype)
        )
    torch.testing.assert_close(library.paged_attention(query, kv_cache, table), expected, rtol=1e-5, atol=1e-5)


@CACHES
@pytest.mark.parametrize("cut", [1, 3, 16, 30])
def test_a_chunk_in_parts_gives_the_same_bits(library: Library, cut: int, dtype: torch.dtype) -> None:
    query, kv_cache, rows = cached_case([(240, 37)], heads=6, kv_heads=2, size=64, block_size=16, dtype=dtype)
    whole = library.paged_attention(query, kv_cache, rows)
    for first in range(0, 37, cut):
        count = min(cut, 37 - first)
        part = rows._replace(query_start_loc=torch.tensor([0, count]), seq_lens=torch.tensor([240 + first + count]))
        assert torch.equal(
            library.paged_attention(query[first : first + count], kv_cache, part), whole[first : first + count]
        )


def test_wrong_shapes_are_refused_before_the_pointer_is_given(library: Library) -> None:
    matrix = library.pack(random_blocks(8, 64, bits=4))
    with pytest.raises(ValueError, match="multiple of 32"):
        library.pack(Blocks(8, np.zeros((2, 40), np.int8), np.zeros((2, 1), np.float16)))
    with pytest.raises(ValueError, match=r"6 bits want scales \[2, 4\], not \[2, 2\]"):
        library.pack(Blocks(6, np.zeros((2, 64), np.int8), np.zeros((2, 2), np.float16)))
    for x in (torch.zeros(1, 32), torch.zeros(1, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"expected float32 \[N, 64\]"):
            library.multiply(x, matrix)
    with pytest.raises(IndexError):
        library.read_row(matrix, 8)
    query, kv_cache, rows = cached_case([(3, 1)], heads=2, kv_heads=1, size=32, block_size=4, dtype=torch.int8)
    with pytest.raises(ValueError, match="lines of 32 elements do not go with heads of 32"):
        library.paged_attention(query, kv_cache[..., :32].contiguous(), rows)
    with pytest.raises(ValueError, match="a contiguous cache of float16 or int8"):
        library.paged_attention(query, kv_cache.float(), rows)


def test_weights_lie_apart_and_aligned() -> None:
    arena = Arena()
    taken = [arena.take(size) for size in (1, 100, 64, Arena.PIECE_BYTES + 1, 5)]
    for index, memory in enumerate(taken):
        assert memory.data_ptr() % 64 == 0
        memory.fill_(index)
    assert [set(memory.tolist()) for memory in taken[:3]] == [{0}, {1}, {2}]
    assert int(taken[3][-1]) == 3


def test_the_plain_form_gives_the_same_bits(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a processor without vector instructions computes."""
    monkeypatch.setattr(
        building, "FLAGS", tuple(flag.replace("-O3", "-O1") for flag in building.FLAGS if "march" not in flag)
    )
    plain = load(kernels_dir())
    assert plain.instructions == ("plain C++" if library.instructions != "plain C++" else library.instructions)
    x = torch.randn(21, 192)
    for bits in BITS:
        blocks = random_blocks(70, 192, bits=bits)
        assert torch.equal(plain.multiply(x, plain.pack(blocks)), library.multiply(x, library.pack(blocks)))
    for dtype in (torch.float16, torch.int8):
        case = cached_case([(200, 1), (3, 7)], heads=6, kv_heads=2, size=32, block_size=8, dtype=dtype)
        torch.testing.assert_close(plain.paged_attention(*case), library.paged_attention(*case), rtol=1e-5, atol=1e-6)


def test_without_a_compiler_the_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(BuildError, match="no such compiler"):
        building.build(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="false could not compile them: exit 1"):
        building.build(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        building.build(tmp_path)


@pytest.mark.parametrize("command", [" ", 'g++ "-O1'])
def test_a_compiler_that_is_no_command_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CXX", command)
    with pytest.raises(BuildError, match=r"\$CXX is"):
        building.build(tmp_path)


def test_a_compiler_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setenv("CXX", str(hanging))
    monkeypatch.setattr(building, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(BuildError, match=r"hanging took longer than 0.2 s"):
        building.build(tmp_path / "kernels")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    (tmp_path / "file").write_text("")
    with pytest.raises(building.UnwritableError, match="below cannot be written: not a directory"):
        building.build(tmp_path / "file" / "below")


def test_where_the_folder_takes_nothing_they_are_compiled_for_this_process_alone(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose file system is read-only. Instead of compiling, what was compiled before is copied."""
    source = next(path for path in kernels_dir().glob("kernels-*.so") if library.calls._name == str(path))
    made: list[Path] = []

    def copy(command: list[str]) -> None:
        made.append(Path(command[command.index("-o") + 1]))
        shutil.copy(source, made[-1])

    monkeypatch.setattr(building, "_compile", copy)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "file").write_text("")
    reasons: list[str] = []
    found = load(tmp_path / "file" / "kernels", cannot_keep=reasons.append)
    assert found.instructions == library.instructions
    assert reasons == [f"{tmp_path}/file/kernels cannot be written: not a directory"]
    assert made[0].is_relative_to(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "nothing is left behind"
    monkeypatch.setattr(tempfile, "mkdtemp", _refuse)
    with pytest.raises(BuildError, match="not a directory, nor is there a folder for temporary files"):
        load(tmp_path / "file" / "kernels")


def _refuse(*_: object, **__: object) -> None:
    raise FileNotFoundError("No usable temporary directory found")


def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file where a library would lie; nothing is compiled."""
    monkeypatch.setattr(building, "_compile", lambda command: Path(command[command.index("-o") + 1]).write_text("none"))
    monkeypatch.setenv("CXX", "true")
    return building.build(folder)


def test_what_others_may_write_to_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled(tmp_path / "own", monkeypatch)
    assert building.build(path.parent) == path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    for mine in (path, path.parent):
        mode = mine.stat().st_mode
        mine.chmod(mode | 0o002)
        with pytest.raises(BuildError, match="others may write to it"):
            building.build(path.parent)
        mine.chmod(mode)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(BuildError, match="belongs to somebody else"):
        building.build(path.parent)


def test_a_damaged_library_is_made_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    path = compiled(tmp_path / "own", monkeypatch)
    with pytest.raises(BuildError, match="cannot be loaded"):
        load(path.parent, announce=lambda: made.append("again"))
    assert made == ["again"]


def test_a_library_that_is_none_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "kernels.so"
    broken.write_bytes(b"not a library")
    with pytest.raises(BuildError, match="cannot be loaded"):
        Library(broken)


def test_a_library_that_computes_wrongly_is_not_used(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Library.multiply

    def wrong(self: Library, x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
        return right(self, x, matrix) * 1.2

    def never(command: list[str]) -> None:
        raise AssertionError("the same would come out again")

    monkeypatch.setattr(Library, "multiply", wrong)
    monkeypatch.setattr(building, "_compile", never)
    with pytest.raises(BuildError, match="wrong on this processor"):
        load(kernels_dir())


def test_a_compiled_library_is_used_again(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(command: list[str]) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(building, "_compile", never)
    assert load(kernels_dir()).instructions == library.instructions


@pytest.mark.long
def test_the_whole_of_it_runs_without_undefined_behaviour(library: Library, tmp_path: Path) -> None:
    """Products and attention in a library that checks its arithmetic."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from kernels import build\n"
        "build.FLAGS = (*build.FLAGS, '-fsanitize=undefined', '-fno-sanitize-recover', '-O1')\n"
        "from kernels.native import load\n"
        "from tests.kernels.test_native import cached_case, random_blocks\n"
        "library = load(Path(sys.argv[1]))\n"
        "for bits in (4, 5, 6, 8):\n"
        "    matrix = library.pack(random_blocks(50, 96, bits=bits))\n"
        "    library.multiply(torch.randn(11, 96), matrix)\n"
        "    library.read_row(matrix, 49)\n"
        "for dtype in (torch.float16, torch.int8):\n"
        "    case = cached_case([(200, 1), (3, 7)], heads=6, kv_heads=2, size=80, block_size=5, dtype=dtype)\n"
        "    library.paged_attention(*case)\n"
        "print('done')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(program), str(kernels_dir())], capture_output=True, text=True, env=environment, timeout=300
    )
    if "sanitize" in done.stderr or "ubsan" in done.stderr:
        pytest.skip("this compiler has no sanitizer")
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr
