"""All that is to be measured on a machine with a GPU, in one go: `python -m tests.bench.gpu --json FILE`.

First whole steps and a crowd of requests with random weights of a known shape; then each Triton kernel, in the first of
its cases, checked against its plain version and timed; steps of a larger shape, and transformers' `generate` on the
first shape; then the kernels' other cases. Each part is a process of its own, of the kernels a new one behind each that
breaks the device, and FILE is written anew behind each figure: what fails, or takes longer than it may, costs no other
figure. `--rehearse` goes the whole way without a GPU, with tiny shapes in Triton's interpreter: those figures mean
nothing.

There has to be this checkout (nothing of it is installed or built), torch with CUDA, triton, numpy, a C compiler and
Python's headers; for steps trio, which brings attrs, idna, outcome, sniffio and sortedcontainers along; for `generate`
transformers. What is missing costs the parts that want it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.files import write_json
from kernels.bench.running import settle
from kernels.build import what_triton_lacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.bench_offline import Crowd

    Keep = Callable[[Any], object]


class Plan(NamedTuple):
    """Whole steps of a shape of `engine.random_model.SHAPES`, and requests to answer as fast as can be.

    Attributes:
        crowd: what `engine.bench_offline.Crowd` takes, or its name there.
    """

    shape: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    crowd: str | tuple[int, int, int] | None = None


STEPS, FIRST_KERNELS, LARGE_STEPS, GENERATE, KERNELS = PARTS = (
    "steps", "first-kernels", "large-steps", "generate", "kernels",
)  # fmt: skip
PLANS = {
    STEPS: Plan("qwen3-0.6b", (1, 16, 64, 256), (800, 4000), "nano-vllm"),
    LARGE_STEPS: Plan("llama-3.1-8b", (1, 64), (800, 4000)),
}
TINY_PLANS = {STEPS: Plan("tiny", (1, 2), (6,), (3, 2, 3)), LARGE_STEPS: Plan("tiny", (2,), (6,))}
# Cases of each kernel that go before the others.
FIRST = 2
SECONDS_PER_ROW = 3.0
# Decode steps of `generate`.
NEW_TOKENS, FEW_TOKENS = 32, 2
MISSING = (
    "prefill beside decode in one launch: torch's attention for rows of several lengths runs on GPUs alone, so that "
    "nothing made of it could be checked without one",
    "the workload: of the engines that batch requests as they come none is brought along; tests.bench.versus asks "
    "those that serve somewhere",
)


class Results:
    """The file: `parts` by name, and in `ended` what became of each. One process writes at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self) -> None:
        """What was there is gone.

        Raises:
            OSError: the file cannot be written.
        """
        write_json(self._path, {"parts": {}, "ended": {}, "missing": MISSING})

    def read(self) -> dict[str, Any]:
        """All there is."""
        results: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        return results

    def of(self, part: str) -> Any:
        """What there is of a part, or `None`."""
        return self.read()["parts"].get(part)

    def keep(self, table: str, part: str, value: Any) -> None:
        """Put the value into its place in `parts` or `ended`."""
        results = self.read()
        results[table][part] = value
        write_json(self._path, results)


def run_part(part: str, options: argparse.Namespace, results: Results) -> int:
    """In this process; gives the exit code."""
    keep = partial(results.keep, "parts", part)
    if part in (FIRST_KERNELS, KERNELS):
        return run_kernels(part, options, results)
    if part == GENERATE:
        run_generate(options, results, keep)
    else:
        run_steps(part, options, keep)
    return 0


def run_kernels(part: str, options: argparse.Namespace, results: Results) -> int:
    """What nobody did before of them; gives 1 where one was wrong or failed, now or before."""
    import torch

    from kernels.bench.cases import choose
    from kernels.bench.registry import main_cases, small_cases
    from kernels.bench.running import run_on_device
    from kernels.bench.timing import Device

    if options.rehearse:
        from tests.bench.gpu.rehearsal import Interpreter

        device, cases = Interpreter(), small_cases()
    else:
        device, cases = Device(torch.device("cuda", torch.cuda.current_device())), main_cases()
    first = options.first if part == KERNELS or options.first is not None else FIRST
    keep = partial(results.keep, "parts", KERNELS)
    return 1 if run_on_device(choose(cases, options.kernel, first), device, keep, results.of(KERNELS)) else 0


def run_steps(part: str, options: argparse.Namespace, keep: Keep) -> None:
    """As `relevo bench --random-weights` would."""
    from engine.bench_device import measure_device, with_gpu_sizes
    from engine.config import EngineConfig
    from engine.gpu.gpus import Gpus

    plan = (TINY_PLANS if options.rehearse else PLANS)[part]
    if options.rehearse:
        from tests.bench.gpu.rehearsal import TINY, Rehearsal

        config, gpus = TINY, Rehearsal()
    else:
        config, gpus = with_gpu_sizes(EngineConfig(device="cuda")), Gpus()
    measure_device(
        config, shape=plan.shape, batches=plan.batches, contexts=plan.contexts, crowd=crowd_of(plan),
        seconds_per_row=0.0 if options.rehearse else SECONDS_PER_ROW, report=lambda *_: None, gpus=gpus, keep=keep,
    )  # fmt: skip


def crowd_of(plan: Plan) -> Crowd | None:
    """Its requests."""
    from engine.bench_offline import CROWDS, Crowd

    return CROWDS[plan.crowd] if isinstance(plan.crowd, str) else plan.crowd and Crowd(*plan.crowd)


def run_generate(options: argparse.Namespace, results: Results, keep: Keep) -> None:
    """Beside the steps that were measured before."""
    from tests.bench.gpu.generate import Missing, compare

    plan = (TINY_PLANS if options.rehearse else PLANS)[STEPS]
    ours = {(row["batch"], row["context"]): row for row in (results.of(STEPS) or {}).get("rows", [])}
    shapes = [(batch, context) for context in plan.contexts for batch in plan.batches]
    try:
        compare(
            plan.shape, shapes, "cpu" if options.rehearse else "cuda",
            FEW_TOKENS if options.rehearse else NEW_TOKENS, ours, keep,
        )  # fmt: skip
    except Missing as missing:
        keep({"missing": str(missing)})


def run_in_process(part: str, arguments: Sequence[str], options: argparse.Namespace, results: Results) -> str:
    """In one of its own, and of the kernels in another one behind each that breaks it; gives in words how it ended."""
    command = [sys.executable, "-m", "tests.bench.gpu", *arguments, "--here", part]
    # The interpreter must be chosen before Triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if options.rehearse else None
    began, done = time.monotonic(), -1
    while True:
        left = None if options.limit is None else max(0.0, options.limit - (time.monotonic() - began))
        try:
            code = subprocess.run(command, env=environment, timeout=left).returncode
            how = f"done in {time.monotonic() - began:.0f} s" if code == 0 else f"failed, exit code {code}"
        except subprocess.TimeoutExpired:
            code, how = None, f"cut short after {options.limit} s"
        if part not in (FIRST_KERNELS, KERNELS) or not (figures := results.of(KERNELS)):
            return how
        goes_on = settle(figures, how)
        results.keep("parts", KERNELS, figures)
        before, done = done, len(figures["rows"]) + len(figures["failed"])
        if code is None or not goes_on or done == before:
            return how


def lines_of(part: str, figures: dict[str, Any]) -> list[str]:
    """What came of a part, as far as it has not told of it itself."""
    if part in PLANS:
        from app.bench_device import device_table

        return device_table(figures)
    if part == GENERATE:
        from tests.bench.gpu.generate import table

        return table(figures)
    return []


def no_gpu() -> str | None:
    """Why nothing can begin, or `None`."""
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return what_triton_lacks()


def main(argv: Sequence[str] | None = None) -> int:
    """Gives the exit code: 1 where there is no GPU, or where a part failed or was cut short."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="write all figures here")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    parser.add_argument("--kernel", nargs="+", default=[], help="of the kernels only these")
    parser.add_argument("--first", type=int, metavar="N", help="of each kernel only the first cases")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="that each part may take")
    parser.add_argument("--rehearse", action="store_true", help="on the processor, with tiny shapes")
    parser.add_argument("--here", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    results = Results(options.json)
    if options.here is not None:
        return run_part(options.here, options, results)
    if not options.rehearse and (obstacle := no_gpu()):
        print(f"{obstacle}: --rehearse goes the whole way without a GPU.", file=sys.stderr)
        return 1
    results.begin()
    for part in options.only:
        print(f"\n## {part}\n", flush=True)
        results.keep("ended", part, run_in_process(part, arguments, options, results))
        found = results.read()
        lines = lines_of(part, found["parts"][part]) if part in found["parts"] else []
        print("\n".join([*lines, f"{part}: {found['ended'][part]}"]), flush=True)
    print("\n" + "\n".join([f"Not compared: {what}." for what in MISSING]))
    return 0 if all(word.startswith("done") for word in results.read()["ended"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
