"""Checks every Triton kernel against its plain version, then times it: `python -m kernels.bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kernels.bench.cases import choose
from kernels.bench.running import check_all, run_on_device
from kernels.bench.timing import Device

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Beside the file first: what is cut short leaves the figures before it."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def interpret(arguments: Sequence[str]) -> int:
    """Once more in a process that has Triton's interpreter: it must be chosen before Triton is imported."""
    command = ["/usr/bin/env", "TRITON_INTERPRET=1", sys.executable, "-m", "kernels.bench", *arguments]
    return subprocess.run(command, check=False).returncode  # noqa: S603


def main(argv: Sequence[str] | None = None) -> int:
    """Gives the exit code: 1 where there is no device, or a kernel was wrong or failed."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--kernel", nargs="+", default=[], help="only these")
    parser.add_argument("--first", type=int, metavar="N", help="only the first cases of each kernel")
    parser.add_argument("--interpret", action="store_true", help="check small cases in Triton's interpreter alone")
    parser.add_argument("--tune", action="store_true", help="time the attention with other cuts as well")
    parser.add_argument("--json", type=Path, metavar="F", help="write all figures here, anew behind each case")
    options = parser.parse_args(arguments)
    if options.interpret:
        try:
            import triton
        except ImportError:
            print("Triton is not installed: pip install triton", file=sys.stderr)
            return 1
        if not triton.knobs.runtime.interpret:
            return interpret(arguments)
        from kernels.bench.registry import small_cases

        check_all(choose(small_cases(), options.kernel, options.first))
        return 0
    if not torch.cuda.is_available():
        print("No GPU that torch can use: `--interpret` checks the kernels without one.", file=sys.stderr)
        return 1
    from kernels.bench.registry import main_cases, tuning_cases

    cases = choose(main_cases(), options.kernel, options.first) + (tuning_cases() if options.tune else [])
    keep = partial(write_figures, options.json) if options.json else lambda _figures: None
    device = Device(torch.device("cuda", torch.cuda.current_device()))
    return 1 if run_on_device(cases, device, keep) else 0


if __name__ == "__main__":
    sys.exit(main())
