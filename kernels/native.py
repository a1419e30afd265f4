"""The native kernels as Python calls them: shapes are checked here, raw pointers go there.

Every call drops the interpreter's lock. The source is kernels/native; `build` compiles it.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from contextlib import suppress
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.blocks import GROUP, Blocks
from kernels.build import BuildError, DamagedError, UnwritableError, build, writing
from kernels.byte_lines import line_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.paged_attention import AttentionRows

CACHE_KINDS = {torch.float16: 0, torch.int8: 1}  # as `CacheKind` in kv_cache.h
PARTS = ("glue", "products", "attention", "head")  # as `Part` in step.h


class MatrixStruct(Structure):
    """`Matrix` in matrix.h."""

    _fields_ = [("tiles", c_void_p), ("kind", c_int32), ("rows", c_int32), ("cols", c_int32)]


class LayerStruct(Structure):
    """`Layer` in step.h."""

    _fields_ = [
        ("input_norm", c_void_p),
        ("feed_forward_norm", c_void_p),
        *[(name, MatrixStruct) for name in ("query", "key", "value", "output", "gate_up", "down")],
    ]


class ModelStruct(Structure):
    """`Model` in step.h."""

    _fields_ = [
        ("layers", POINTER(LayerStruct)),
        ("norm", c_void_p),
        ("rotations", c_void_p),
        ("embedding", MatrixStruct),
        ("head", MatrixStruct),
        *[
            (name, c_int32)
            for name in (
                "num_layers",
                "hidden_size",
                "inner_size",
                "num_heads",
                "num_kv_heads",
                "head_size",
                "block_size",
                "num_positions",
                "cache_kind",
            )
        ],
        ("eps", c_float),
    ]


class SeatsStruct(Structure):
    """`Seats` in sampling.h."""

    _fields_ = [(name, c_void_p) for name in ("temperature", "top_k", "top_p", "min_p", "key")]


class CacheShape(Structure):
    """`CacheShape` in kv_cache.h."""

    _fields_ = [(name, c_int32) for name in ("kind", "kv_heads", "block_size", "head_size")]


class StepStruct(Structure):
    """`Step` in step.h."""

    _fields_ = [
        *[(name, c_int32) for name in ("num_tokens", "num_rows", "table_width", "num_blocks")],
        *[(name, c_void_p) for name in ("token_ids", "positions", "block_ids", "offsets")],
        *[(name, c_void_p) for name in ("row_starts", "seq_lens", "block_tables", "caches", "hidden")],
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Weights in the order in which the kernels walk them.

    Attributes:
        tiles: the memory, aligned to a cache line.
        kind: as `Kind` in matrix.h.
    """

    tiles: torch.Tensor
    kind: int
    rows: int
    cols: int

    @property
    def struct(self) -> MatrixStruct:
        """For the kernels; valid as long as this object."""
        return MatrixStruct(self.tiles.data_ptr(), self.kind, self.rows, self.cols)


class Arena:
    """Memory for weights in large pieces, on huge pages where the system has them: a step walks through all of it."""

    PIECE_BYTES = 32 << 20

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uninitialized [num_bytes] uint8, aligned to a cache line; lives as long as the tensor does."""
        padded = -(-num_bytes // 64) * 64
        if padded > len(self._piece):
            # Private: huge pages of shared memory are another setting of the system, and off by default.
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
            memory = mmap.mmap(-1, max(padded, self.PIECE_BYTES), **private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # a kernel without them
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self._piece = torch.frombuffer(memory, dtype=torch.uint8)
        taken, self._piece = self._piece[:num_bytes], self._piece[padded:]
        return taken


class Library:
    """The loaded kernels.

    Args:
        path: what `build` gave.

    Raises:
        BuildError: it cannot be loaded, or computes something else than it should on this processor.
    """

    def __init__(self, path: Path) -> None:
        self._arena = Arena()
        try:
            self.calls = ctypes.CDLL(str(path))
            _declare(self.calls)
        except (OSError, AttributeError) as error:
            raise DamagedError(f"they cannot be loaded: {error}") from error
        self.instructions: str = self.calls.relevo_instructions().decode()
        self.piece: int = self.calls.relevo_piece()
        self._try()

    @property
    def has_vectors(self) -> bool:
        """Whether they use vector instructions; without, torch's own float products are faster."""
        return self.instructions != "plain C++"

    def pack(self, blocks: Blocks) -> PackedMatrix:
        """Arrange a matrix for the kernels; its columns must be a multiple of 32."""
        rows, cols = blocks.shape
        if cols % GROUP:
            raise ValueError(f"{cols} columns are no multiple of {GROUP}")
        wanted = (rows, cols // blocks.group)
        for of_groups in (blocks.scales, *([] if blocks.minima is None else [blocks.minima])):
            if of_groups.shape != wanted:
                raise ValueError(f"{blocks.bits} bits want scales {list(wanted)}, not {list(of_groups.shape)}")
        tiles = self._arena.take(self.calls.relevo_packed_bytes(blocks.bits, rows, cols))
        codes, scales = np.ascontiguousarray(blocks.codes), np.ascontiguousarray(blocks.scales)
        minima = None if blocks.minima is None else np.ascontiguousarray(blocks.minima)
        self.calls.relevo_pack(
            blocks.bits,
            codes.ctypes.data,
            scales.ctypes.data,
            None if minima is None else minima.ctypes.data,
            rows,
            cols,
            tiles.data_ptr(),
        )
        return PackedMatrix(tiles, blocks.bits, rows, cols)

    def multiply(self, x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
        """As `kernels.reference.multiply_blocks`: x [N, cols] float32 → [N, rows] float32."""
        if x.dtype != torch.float32 or x.shape[1] != matrix.cols:
            raise ValueError(f"expected float32 [N, {matrix.cols}], not {x.dtype} {list(x.shape)}")
        x, out = x.contiguous(), torch.empty(x.shape[0], matrix.rows)
        check(self.calls.relevo_multiply(byref(matrix.struct), x.data_ptr(), x.shape[0], out.data_ptr()))
        return out

    def read_row(self, matrix: PackedMatrix, row: int) -> torch.Tensor:
        """One row of the matrix, dequantized: [cols] float32."""
        if not 0 <= row < matrix.rows:
            raise IndexError(f"row {row} of {matrix.rows}")
        out = torch.empty(matrix.cols)
        self.calls.relevo_read_row(byref(matrix.struct), row, out.data_ptr())
        return out

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        rows: AttentionRows,
    ) -> torch.Tensor:
        """As `kernels.reference.paged_attention`, of a cache of float16 or int8."""
        block_tables, query_start_loc, seq_lens = rows
        _, _, kv_heads, block_size, size = kv_cache.shape
        kind, head_size = CACHE_KINDS.get(kv_cache.dtype, -1), query.shape[2]
        if kind < 0 or query.dtype != torch.float32 or not kv_cache.is_contiguous():
            raise ValueError("expected float32 queries and a contiguous cache of float16 or int8")
        if size != line_size(head_size, kv_cache.dtype):
            raise ValueError(f"lines of {size} elements do not go with heads of {head_size}")
        query, tables = query.contiguous(), block_tables.contiguous()
        out = torch.empty(query.shape)
        check(
            self.calls.relevo_attention(
                query.data_ptr(),
                kv_cache.data_ptr(),
                byref(CacheShape(kind, kv_heads, block_size, head_size)),
                tables.data_ptr(),
                tables.shape[1],
                query_start_loc.data_ptr(),
                seq_lens.data_ptr(),
                len(seq_lens),
                query.shape[1],
                out.data_ptr(),
            )
        )
        return out

    def _try(self) -> None:
        """Hold the products against numpy once: a compiler or a processor may be broken.

        Raises:
            BuildError: they differ.
        """
        rng = np.random.default_rng(0)
        x = rng.standard_normal((21, 64), dtype=np.float32)  # some processors have an instruction for sixteen rows
        for bits, low, high in ((4, 0, 16), (5, 0, 32), (6, -32, 32), (8, -127, 128)):
            codes = rng.integers(low, high, (40, 64)).astype(np.int8 if low else np.uint8)
            scales = rng.uniform(0.01, 0.02, (40, 4 if bits == 6 else 2)).astype(np.float16)
            blocks = Blocks(bits, codes, scales, None if low else -scales * np.float16(7))
            wanted = x @ blocks.dequantize().numpy().T
            got = self.multiply(torch.from_numpy(x), self.pack(blocks)).numpy()
            # Activations have 8 bits: a hundredth is usual, a tenth is not.
            if not np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max():
                raise BuildError(f"their products are wrong on this processor ({self.instructions})")


def load(
    folder: Path, *, announce: Callable[[], None] = lambda: None, cannot_keep: Callable[[str], None] = lambda _why: None
) -> Library:
    """The kernels, compiled into `folder` if they are not yet, or if what lies there cannot be loaded.

    Where the folder cannot be written they are compiled for this process alone.

    Args:
        announce: called before something is compiled.
        cannot_keep: called in that case, with the reason.

    Raises:
        BuildError: this machine has to do without.
    """
    try:
        return _load(folder, announce)
    except UnwritableError as error:
        try:
            scratch = tempfile.TemporaryDirectory(prefix="relevo-kernels-")
        except OSError:
            raise BuildError(f"{error}, nor is there a folder for temporary files") from error
        cannot_keep(str(error))
    with scratch:
        return _load(Path(scratch.name), announce)  # what is loaded stays when its file has gone


def _load(folder: Path, announce: Callable[[], None]) -> Library:
    path = build(folder, announce=announce)
    try:
        return Library(path)
    except DamagedError:
        with writing(folder):
            path.unlink(missing_ok=True)
        return Library(build(folder, announce=announce))


def check(status: int) -> None:
    """Raise what a call of a step could not.

    Raises:
        IndexError: the step was not begun, for it names what is not there.
        MemoryError: the call broke off.
    """
    if status == 2:
        raise IndexError("the step names a token, a block or a position that does not exist")
    if status != 0:
        raise MemoryError("the native kernels lack memory for this step")


def _declare(calls: ctypes.CDLL) -> None:
    """Types of arguments and results."""
    pointer, number = c_void_p, c_int32
    signatures = {
        "relevo_instructions": (c_char_p, []),
        "relevo_piece": (number, []),
        "relevo_packed_bytes": (c_size_t, [number, number, number]),
        "relevo_pack": (None, [number, pointer, pointer, pointer, number, number, pointer]),
        "relevo_read_row": (None, [pointer, number, pointer]),
        "relevo_multiply": (c_int, [pointer, pointer, number, pointer]),
        "relevo_attention": (c_int, [*[pointer] * 4, number, pointer, pointer, number, number, pointer]),
        "relevo_open": (pointer, [pointer, number, number]),
        "relevo_close": (None, [pointer]),
        "relevo_forward": (c_int, [pointer, pointer, POINTER(c_double)]),
        "relevo_dot_rate": (c_double, [pointer]),
        "relevo_logits": (c_int, [pointer, pointer, number, pointer, POINTER(c_double)]),
        "relevo_draw": (c_int, [pointer, pointer, number, number, pointer, *[pointer] * 3]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(calls, name)
        function.restype, function.argtypes = result, arguments
