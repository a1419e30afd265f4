"""Compiles every kernel for devices that are not there: `python -m kernels.gpu.targets`.

Triton asks its driver for the device; the driver here answers with a target and, where a kernel would be loaded and
launched, reads what the compiler made of it. So each launcher runs as it does on a device, on tensors without data: the
same specializations, warps and stages.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources

from kernels.bench.cases import choose
from kernels.bench.registry import main_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

END = "<!-- end of kernels.gpu.targets -->"


class Device(NamedTuple):
    """A device to compile for; `shared_bytes` is what one program may have."""

    target: GPUTarget
    shared_bytes: int


DEVICES = {
    "sm_80": Device(GPUTarget("cuda", 80, 32), 166_912),
    "sm_89": Device(GPUTarget("cuda", 89, 32), 101_376),
    "sm_90": Device(GPUTarget("cuda", 90, 32), 232_448),
    "sm_120": Device(GPUTarget("cuda", 120, 32), 101_376),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 65_536),
}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a kernel became.

    Attributes:
        registers: of a thread.
        shared_bytes: of a program.
        spills: instructions that put registers into memory or fetch them.
        loop: instructions of the longest loop.
        wide_loads, loads: instructions that read global memory 16 bytes at a time, and all that read it.
    """

    name: str
    num_warps: int
    num_stages: int
    registers: int
    shared_bytes: int
    spills: int
    loop: int
    wide_loads: int
    loads: int


@dataclass(frozen=True, slots=True)
class Row:
    """A case on a target, and a kernel that it launched."""

    target: str
    kernel: str
    shape: str
    compiled: Compiled


class TargetDriver:
    """Stands where Triton's driver of a real device would: the part of its interface that a launch uses."""

    def __init__(self, device: Device, index: int) -> None:
        self.utils = self
        self.launched: list[Compiled] = []
        self._device, self._index = device, index
        self._metadata: Any = None

    def get_current_device(self) -> int:
        """Triton keeps what it compiled by this number."""
        return self._index

    def get_current_stream(self, device: int) -> int:
        """There is none."""
        return device * 0

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return self._device.target

    def get_device_properties(self, device: int) -> dict[str, int]:
        """The one that Triton looks at: a kernel that wants more shared memory is refused."""
        del device
        return {"max_shared_mem": self._device.shared_bytes}

    def launcher_cls(self, source: object, metadata: Any) -> Any:
        """Gives what Triton calls to launch; notes the metadata for `load_binary`, which comes next."""
        del source
        self._metadata = metadata

        def launch(*args: Any) -> None:
            self.launched.append(args[4])  # grid x, y, z, stream, then what `load_binary` gave

        return launch

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, Compiled, int, int, int]:
        """Module, function, registers, spills and threads that may run: read out of the binary instead of loaded."""
        del device
        metadata = self._metadata
        read = read_cubin if self._device.target.backend == "cuda" else read_code_object
        compiled = Compiled(name, metadata.num_warps, metadata.num_stages, shared_bytes=shared, **read(binary))
        return 1, compiled, compiled.registers, compiled.spills, 1024

    def unload_module(self, module: int) -> None:
        """Nothing was loaded."""


def read_cubin(binary: bytes) -> dict[str, int]:
    """Registers, spills and loads of a kernel for NVIDIA, by the disassembler that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    loads = re.findall(r"\b(?:LDG|LDGSTS)\.E\S*", text)
    return {
        "registers": int(re.findall(r"REG:(\d+)", text)[-1]),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", text)),
        "loop": _longest_loop(text),
        "wide_loads": sum(".128" in load for load in loads),
        "loads": len(loads),
    }


def _longest_loop(text: str) -> int:
    """Instructions from where a branch goes back to, up to the branch."""
    addresses: list[int] = []
    longest = 0
    for address, instruction in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", text, re.MULTILINE):
        addresses.append(int(address, 16))
        target = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)$", instruction)
        if target and int(target[1], 16) < addresses[-1]:
            longest = max(longest, sum(int(target[1], 16) <= each for each in addresses))
    return longest


def read_code_object(binary: bytes) -> dict[str, int]:
    """The same of a kernel for AMD, from its notes; its instructions are not read."""
    spills = _note(binary, ".vgpr_spill_count") + _note(binary, ".sgpr_spill_count")
    return {"registers": _note(binary, ".vgpr_count"), "spills": spills, "loop": 0, "wide_loads": 0, "loads": 0}


def _note(binary: bytes, key: str) -> int:
    """A small number behind its key in MessagePack: itself under 128, else 0xcc and one byte, or 0xcd and two."""
    at = binary.index(key.encode()) + len(key)
    width = {0xCC: 1, 0xCD: 2}.get(binary[at], 0)
    return int.from_bytes(binary[at + 1 : at + 1 + width], "big") if width else binary[at]


def compile_cases(
    names: Sequence[str], kernels: Sequence[str] = (), first: int | None = None, shapes: Sequence[str] = ()
) -> list[Row]:
    """Each kernel's main cases on these targets, or the first of them and those of `shapes`.

    Args:
        kernels: of these alone, if any are named.

    Raises:
        SystemExit: no case has one of the shapes, or some want more shared memory than a target has.
    """
    rows, meta, cases = [], torch.device("meta"), choose(main_cases(), kernels, first, shapes)
    if unknown := {*shapes} - {case.shape for case in cases}:
        raise SystemExit(f"no case has the shape {', '.join(sorted(unknown))}")
    refused: list[str] = []
    for index, name in enumerate(names):
        device = DEVICES[name]
        driver = TargetDriver(device, index)
        triton.runtime.driver.set_active(driver)
        for case in cases:
            if device.target.backend == "cuda" and device.target.arch < case.least_arch:
                continue
            driver.launched.clear()
            try:
                case.make(meta).run()
            except OutOfResources as error:
                refused.append(f"{name}: {case.kernel}, {case.shape}: {error}")
            rows += [Row(name, case.kernel, case.shape, compiled) for compiled in dict.fromkeys(driver.launched)]
    if refused:
        raise SystemExit("\n".join(refused))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown; of those with the same figures the first alone."""
    head = "| target | kernel | shape | warps | stages | registers | shared KB | spills | loop | 16-byte loads |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    first: dict[tuple[str, Compiled], Row] = {}
    for row in rows:
        first.setdefault((row.target, row.compiled), row)
    for row in first.values():
        made = row.compiled
        loads = f"{made.wide_loads} of {made.loads}" if made.loads else "–"
        cut = (made.num_warps, made.num_stages, made.registers, f"{made.shared_bytes / 1024:.1f}")
        figures = (*cut, made.spills, made.loop, loads)
        lines.append(f"| {row.target} | {made.name} | {row.shape} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def update(path: Path, kernels: Sequence[str], text: str) -> None:
    """Put the table of these kernels between its two marks of a file, of which the first names them.

    Raises:
        SystemExit: the file lacks the marks.
    """
    mark = f"<!-- {' '.join(('kernels.gpu.targets', *kernels))} -->"
    before, start, rest = path.read_text(encoding="utf-8").partition(mark)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{path} has no place for the table: put the lines {mark} and {END} where it belongs")
    path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or put it into a file."""
    parser = argparse.ArgumentParser(prog="python -m kernels.gpu.targets", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=DEVICES, default=["sm_80", "sm_90"])
    parser.add_argument("--kernel", nargs="+", default=[], help="only these")
    parser.add_argument("--first", type=int, metavar="N", help="only the first cases of each kernel")
    parser.add_argument("--shape", nargs="+", default=[], help="beside the first those of these shapes")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--update", type=Path, help="a file with marks for these kernels' table")
    options = parser.parse_args(argv)
    rows = compile_cases(options.target, options.kernel, options.first, options.shape)
    if options.update:
        update(options.update, options.kernel, table(rows))
    else:
        print(json.dumps([asdict(row) for row in rows]) if options.json else table(rows))


if __name__ == "__main__":
    main()
