"""What a product costs by the bits of the weights: `python -m tests.bench.products`.

The native kernels on one thread, on matrices of 1,536 × 576 of which there are so many that none stays in the caches;
the kinds in turn, so that all see the same machine. Microseconds of processor time a product, medians.
"""

from __future__ import annotations

import time
from statistics import median

import torch

from engine.precision import kernels_dir
from kernels.native import load
from tests.kernels.test_native import BITS, random_blocks

ROWS, COLS, NUM_MATRICES, ROUNDS = 1536, 576, 60, 9


def main() -> None:
    """Print a line for each number of rows of activations."""
    torch.set_num_threads(1)
    library = load(kernels_dir())
    matrices = {
        bits: [library.pack(random_blocks(ROWS, COLS, bits=bits)) for _ in range(NUM_MATRICES)] for bits in BITS
    }
    sizes = {bits: 8 * packed[0].tiles.nbytes / (ROWS * COLS) for bits, packed in matrices.items()}
    print(f"{library.instructions}; bits a weight with scales:", *(f"{size:.1f}" for size in sizes.values()))
    for count in (1, 8, 64):
        x = torch.randn(count, COLS)
        spent: dict[int, list[float]] = {bits: [] for bits in BITS}
        for _ in range(ROUNDS):
            for bits, packed in matrices.items():
                begin = time.thread_time()
                for matrix in packed:
                    library.multiply(x, matrix)
                spent[bits].append((time.thread_time() - begin) / NUM_MATRICES * 1e6)
        times = {bits: median(values) for bits, values in spent.items()}
        words = (f"{bits} bits {times[bits]:.0f} µs ({times[8] / times[bits]:.2f} × as fast as 8)" for bits in BITS)
        print(f"{count} rows:", ", ".join(words))


if __name__ == "__main__":
    main()
