"""The `gguf` package's reader, without its cost for long arrays and with errors that name the file."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from engine.errors import ModelFileError, UnsupportedModelError
from engine.loading.checks import check_is_data

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import ReaderField

MAGIC = b"GGUF"
TENSOR_TYPES = frozenset(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
)


class MetadataReader(GGUFReader):
    """Reads arrays in one go.

    The package makes two numpy views for each element, which takes four seconds for a vocabulary of 49,152; walking
    the lengths takes a fiftieth of that. Should the package ever stop calling these methods, its own way still works.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrays: dict[str, list[Any]] = {}
        self._last_array: list[Any] | None = None
        super().__init__(path)

    def value(self, key: str) -> Any:
        """The value of a metadata key (number, string or list), or `None` where it is absent."""
        field = self.fields.get(key)
        if field is None:
            return None
        try:
            return self._arrays[key] if key in self._arrays else field.contents()
        except (ValueError, IndexError) as error:
            raise ModelFileError(f"{self._path}: metadata {key} is damaged. Fetch the file again.") from error

    def text(self, key: str) -> str | None:
        """A metadata string, or `None` where it is absent."""
        value: str | None = self._typed(key, (str,))
        return value

    def integer(self, key: str) -> int | None:
        """A metadata integer, or `None` where it is absent."""
        value: int | None = self._typed(key, (int,))
        return value

    def number(self, key: str) -> float | None:
        """A metadata number, or `None` where it is absent."""
        value: float | None = self._typed(key, (int, float))
        return value

    def strings(self, key: str) -> list[str] | None:
        """A metadata list of strings, or `None` where it is absent."""
        value: list[str] | None = self._typed(key, (list,), GGUFValueType.STRING)
        return value

    def integers(self, key: str) -> list[int] | None:
        """A metadata list of 32-bit integers, or `None` where it is absent."""
        value: list[int] | None = self._typed(key, (list,), GGUFValueType.INT32, GGUFValueType.UINT32)
        return value

    def _typed(self, key: str, kinds: tuple[type, ...], *items: GGUFValueType) -> Any:
        value = self.value(key)
        if value is None or (isinstance(value, kinds) and (not items or self.fields[key].types[-1] in items)):
            return value
        raise ModelFileError(f"{self._path}: metadata {key} has an unexpected type. Fetch the file again.")

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        if self._last_array is not None:
            self._arrays[field.name], self._last_array = self._last_array, None
        return super()._push_field(field, skip_sum)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        item_type = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            values, end = _read_strings(self.data, start, count)
        elif item_type in self.gguf_scalar_to_np:
            items = self._get(start, self.gguf_scalar_to_np[item_type], count)
            if len(items) < count:
                raise IndexError("array ends early")
            values, end = items.tolist(), start + items.nbytes
        else:
            raise UnsupportedModelError(f"{self._path}: metadata with nested arrays is not supported.")
        self._last_array = values
        # No parts: the values are kept beside the field.
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, item_type]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            name, raw_type = field.name, int(field.parts[4][0])
            if raw_type not in TENSOR_TYPES:
                known = {kind.value: kind.name for kind in GGMLQuantizationType}
                kind = known.get(raw_type, f"number {raw_type}")
                raise UnsupportedModelError(f"{self._path}: tensor {name} has type {kind}, which is not supported.")
        super()._build_tensors(start_offs, fields)


def _read_strings(data: Any, offset: int, count: int) -> tuple[list[str], int]:
    """`count` strings, each after its length (uint64), and the offset behind them."""
    view = memoryview(data)
    length_at = struct.Struct("<Q").unpack_from
    strings = []
    for _ in range(count):
        start = offset + 8
        offset = start + length_at(view, offset)[0]
        if offset > len(view):
            raise IndexError("string ends early")
        # Old vocabularies hold tokens that are no UTF-8; they must not keep the others from being read.
        strings.append(str(view[start:offset], "utf-8", "replace"))
    return strings, offset


def open_gguf(path: Path) -> MetadataReader:
    """Read the metadata of a GGUF file; tensor data stays on disk, mapped.

    Raises:
        ModelFileError: not a GGUF file, or truncated.
        UnsupportedModelError: a tensor has a type that is not known here.
    """
    check_is_data(path)
    with path.open("rb") as file:
        head = file.read(4)
    if head != MAGIC:
        raise ModelFileError(f"{path} is not a GGUF file: it begins with {head!r}.")
    try:
        return MetadataReader(path)
    except UnsupportedModelError:
        raise
    except (IndexError, ValueError, KeyError, OverflowError, struct.error, MemoryError) as error:
        raise ModelFileError(
            f"{path} is truncated or damaged ({path.stat().st_size:,} bytes). Fetch it again."
        ) from error
