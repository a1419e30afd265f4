"""How far another program's logits are from ours in float32, on the same tokens: `python -m tests.bench.kl_file`.

`--ids FILE.jsonl` writes what to compute: one list of token ids a line, each a sequence of its own. Compute them
elsewhere, put the logits of all tokens one under the other, and give them with `--logits FILE.npy`: float16 or float32
[tokens, vocabulary]. The figures are those of `relevo bench`, made by the same function.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from app.bench import QUALITY_TOKENS, quality_line
from app.cli.options import count
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from engine.quality import compare_logits, cut_passages
from engine.startup import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator


class FileLogits:
    """Logits in the order in which they are asked for, cut into chunks like a runner's.

    Args:
        rows: [tokens, vocabulary]; may be mapped from a file, only a chunk is read at a time.
    """

    def __init__(self, rows: np.ndarray[Any, Any], chunk: int) -> None:
        self._rows, self._chunk, self._done = rows, chunk, 0

    def logits_of(self, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """The next rows of the file."""
        for first in range(0, len(token_ids), self._chunk):
            end = self._done + min(self._chunk, len(token_ids) - first)
            yield first, torch.from_numpy(self._rows[self._done : end].astype(np.float32))
            self._done = end


def read_logits(path: Path, num_tokens: int, vocab_size: int) -> np.ndarray[Any, Any]:
    """Map the file; one of another shape or kind ends the program."""
    rows: np.ndarray[Any, Any] = np.load(path, mmap_mode="r")
    if rows.shape != (num_tokens, vocab_size) or rows.dtype not in (np.float16, np.float32):
        sys.exit(f"{path} holds {rows.dtype} {rows.shape}; wanted is float16 or float32 ({num_tokens}, {vocab_size})")
    return rows


def main(words: list[str] | None = None) -> None:
    """Write the ids, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--tokens", type=count, default=QUALITY_TOKENS, metavar="N")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--ids", type=Path, metavar="FILE.jsonl")
    what.add_argument("--logits", type=Path, metavar="FILE.npy")
    options = parser.parse_args(words)
    config = EngineConfig(model=options.model, dtype="float32")
    model = load_model(config)
    passages = cut_passages(model.tokenizer, options.tokens, model.max_model_len)
    if options.ids is not None:
        lines = [json.dumps(passage.token_ids) for passage in passages]
        options.ids.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    assert isinstance(model.runner, ModelRunner)
    num_tokens = sum([len(passage.token_ids) for passage in passages])
    rows = read_logits(options.logits, num_tokens, model.runner.model.config.vocab_size)
    theirs = FileLogits(rows, config.capacity_num_batched_tokens)
    print(quality_line(compare_logits(model.runner, theirs, passages, lambda done, total: None)))


if __name__ == "__main__":
    main()
