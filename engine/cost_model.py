"""How long a step takes, as a sum of what it is made of; with it a workload can be played through without a model.

    matrix products     a curve over the step's tokens (padding too): flat while the weights are read, then rising
    output head         a curve over the rows that sample
    attention           per token of context for rows of one token; per chunk, per token of context and per pair of
                        tokens for rows of more
    the engine          per step and per row: planning, the hop to the other thread and back

The parts are fitted to measured steps by `relevo bench`, or follow from the data sheet of a machine (`of_machine`).
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from engine.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from engine.batch import ScheduledBatch

SECONDS = (
    "decode_token_seconds",
    "prefill_pair_seconds",
    "prefill_context_seconds",
    "chunk_seconds",
    "row_seconds",
    "engine_step_seconds",
    "engine_row_seconds",
)


class StepShape(NamedTuple):
    """What a step's time depends on; rows of padding count as rows.

    Attributes:
        num_tokens: computed, all rows together.
        num_rows: rows.
        num_samples: rows that draw a token.
        decode_context: tokens of context of the rows that compute one token, together.
        num_chunks: rows that compute more.
        prefill_context: tokens of context of those, together.
        prefill_pairs: (query, key) pairs of those. Only a chunk that nothing precedes is spared its upper triangle.
    """

    num_tokens: int
    num_rows: int
    num_samples: int
    decode_context: int
    num_chunks: int = 0
    prefill_context: int = 0
    prefill_pairs: int = 0


def shape_of(batch: ScheduledBatch) -> StepShape:
    """The shape of a step."""
    starts, counts = batch.starts, batch.counts
    num_samples = sum(batch.samples)
    if batch.padding:
        starts += tuple([row.start for row in batch.padding])
        counts += tuple([row.count for row in batch.padding])
        num_samples += sum([row.samples for row in batch.padding])
    num_tokens, num_rows = sum(counts), len(counts)
    context = sum(starts) + num_tokens
    if num_tokens == num_rows:
        return StepShape(num_tokens, num_rows, num_samples, context)
    num_chunks = pairs = prefill_context = 0
    for start, count in zip(starts, counts, strict=True):
        if count > 1:
            num_chunks += 1
            prefill_context += start + count
            pairs += count * (start + count) if start else count * (count + 1) // 2
    decode_context = context - prefill_context
    return StepShape(num_tokens, num_rows, num_samples, decode_context, num_chunks, prefill_context, pairs)


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds over a number, straight between points; level before the first, and on with the last slope after them.

    Args:
        points: (number, seconds), by rising number.
    """

    points: tuple[tuple[float, float], ...]

    def at(self, number: float) -> float:
        """Seconds for a number; 0 for 0."""
        points = self.points
        if not points or number <= 0:
            return 0.0
        right = min(bisect_right(points, (number, math.inf)), len(points) - 1)
        if right == 0:
            return points[0][1]
        (low, below), (high, above) = points[right - 1], points[right]
        return below + (number - low) * (above - below) / (high - low)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of the parts of a step; see the module."""

    products: Curve
    head: Curve = Curve(())
    decode_token_seconds: float = 0.0
    prefill_pair_seconds: float = 0.0
    prefill_context_seconds: float = 0.0
    chunk_seconds: float = 0.0
    row_seconds: float = 0.0
    engine_step_seconds: float = 0.0
    engine_row_seconds: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """A whole step, from one plan to the next."""
        engine = self.engine_step_seconds + self.engine_row_seconds * shape.num_rows
        return self.execute_seconds(shape) + engine

    def execute_seconds(self, shape: StepShape) -> float:
        """The model's part of it."""
        return (
            self.products.at(shape.num_tokens)
            + self.head.at(shape.num_samples)
            + self.row_seconds * shape.num_rows
            + self.decode_token_seconds * shape.decode_context
            + self.chunk_seconds * shape.num_chunks
            + self.prefill_pair_seconds * shape.prefill_pairs
            + self.prefill_context_seconds * shape.prefill_context
        )

    @classmethod
    def of_machine(
        cls,
        *,
        memory_gb_per_second: float,
        tflops: float,
        num_parameters: float,
        bytes_per_weight: float,
        kv_bytes_per_token: float,
    ) -> CostModel:
        """Another machine, by the two rates that bound it: `max(read the weights, tokens x arithmetic)`.

        It reads its cache too. The arithmetic of attention and the engine's own time are not counted.

        Args:
            memory_gb_per_second: what it reads, in 10^9 bytes; the rate it reaches rather than that of the sheet.
            tflops: what it multiplies, in 10^12 operations.
            num_parameters: of the model, head included.
            kv_bytes_per_token: of all layers.

        Raises:
            ConfigError: a number is out of range.
        """
        needed = (memory_gb_per_second, tflops, num_parameters, bytes_per_weight)
        if not (all(0 < value < math.inf for value in needed) and 0 <= kv_bytes_per_token < math.inf):
            raise ConfigError(
                "A machine needs memory rate, TFLOP/s, parameters and bytes a weight above 0, cache bytes from 0."
            )
        read_rate, flops = memory_gb_per_second * 1e9, tflops * 1e12
        read, per_token = num_parameters * bytes_per_weight / read_rate, 2 * num_parameters / flops
        knee = read / per_token
        return cls(
            products=Curve(((knee, read), (2 * knee, 2 * read))),
            decode_token_seconds=kv_bytes_per_token / read_rate,
            prefill_context_seconds=kv_bytes_per_token / read_rate,
        )

    def to_json(self) -> dict[str, Any]:
        """Everything, ready to be written."""
        curves = {"products": [list(p) for p in self.products.points], "head": [list(p) for p in self.head.points]}
        return {**curves, **{name: getattr(self, name) for name in SECONDS}}

    @classmethod
    def from_json(cls, data: object) -> CostModel:
        """What `to_json` gave; other keys are passed over.

        Raises:
            ConfigError: a part is missing or no number of seconds, or a step would take none.
        """
        if not isinstance(data, dict):
            raise ConfigError("A cost model is a JSON object, as `relevo bench --json` writes it.")
        missing = [name for name in ("products", "head", *SECONDS) if name not in data]
        if missing:
            raise ConfigError(f"The cost model lacks {', '.join(missing)}; write a new one with `relevo bench --json`.")
        products, head = _curve("products", data["products"]), _curve("head", data["head"])
        if not products.points:
            raise ConfigError("The cost model's products have no points.")
        model = cls(products, head, *[_seconds(name, data[name]) for name in SECONDS])
        if model.seconds(StepShape(1, 1, 1, 1)) <= 0:
            raise ConfigError("By the cost model a step takes no time; write a new one with `relevo bench --json`.")
        return model


def read_cost_model(path: Path) -> CostModel:
    """The cost model in a file: one of its own, or what `relevo bench --json` wrote.

    Raises:
        ConfigError: the file cannot be read or holds no cost model.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The cost model {path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON; a cost model is written by `relevo bench --json`.") from error
    if isinstance(data, dict) and "cost_model" in data:
        data = data["cost_model"]
    return CostModel.from_json(data)


def _curve(name: str, value: object) -> Curve:
    points: list[tuple[float, float]] = []
    for point in value if isinstance(value, list) else [None]:
        if not isinstance(point, list) or len(point) != 2:
            raise ConfigError(f"The cost model's {name} is not a list of [number, seconds].")
        points.append((_seconds(name, point[0]), _seconds(name, point[1])))
    if any(a >= b for (a, _), (b, _) in pairwise(points)):
        raise ConfigError(f"The cost model's {name} are not ordered by number.")
    if any(a > b for (_, a), (_, b) in pairwise(points)):
        raise ConfigError(f"The cost model's {name} fall: more cannot take less time.")
    return Curve(tuple(points))


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ConfigError(f"The cost model's {name} holds {value!r}; it takes numbers from 0.")
    return float(value)
