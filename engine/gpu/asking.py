"""What some rows ask for beside a token, on the device: biases, penalties, a constraint, log-probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine.batch import TokenLogprobs
from engine.drawing import cause_of
from kernels.draws import Biases, Penalized
from kernels.gpu.logits import add_biases, apply_token_mask, penalize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from engine.gpu.rows import GpuRows

    Bring = Callable[[NDArray[np.generic]], torch.Tensor]


class Draw(NamedTuple):
    """A row of the logits.

    Attributes:
        line: of the logits.
        row: of the batch.
        position: where the token will stand.
    """

    line: int
    row: int
    seat: int
    position: int


class Asking:
    """The rows of one step that ask for something.

    Args:
        draws: all that sample.
        bring: copies an array to the device.

    Attributes:
        failures: row of the batch to one line of cause, for those that cannot go on.
    """

    def __init__(self, draws: list[Draw], rows: GpuRows, bring: Bring) -> None:
        self._draws = [
            draw
            for draw in draws
            if draw.seat in rows.extras
            or (draw.position < rows.stops_from[draw.seat] and len(rows.stop_ids[draw.seat]))
        ]
        self._rows, self._bring = rows, bring
        self.failures: dict[int, str] = {}
        self._telling = [
            draw for draw in self._draws if draw.seat in rows.extras and rows.extras[draw.seat].num_logprobs is not None
        ]
        self._told: tuple[torch.Tensor, ...] = ()
        self._extras = {draw.seat: rows.extras.get(draw.seat) for draw in self._draws}

    def __bool__(self) -> bool:
        return bool(self._draws)

    def adjust(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Change logits [S, V] before tokens are drawn; gives those of rows that will tell, as the model had them."""
        own = None
        if self._telling:
            own = logits[self._indices(self._telling)]
        biases: dict[tuple[int, int], float] = {}
        masks: list[tuple[int, NDArray[np.int32]]] = []
        penalized: list[Draw] = []
        for draw in self._draws:
            extras, params = self._extras[draw.seat], self._rows.params[draw.seat]
            only_stops, early = False, bool(draw.position < self._rows.stops_from[draw.seat])
            stop_ids = self._rows.stop_ids[draw.seat]
            if extras is not None and extras.is_constrained:
                try:
                    allowed, only_stops = extras.allow(logits.shape[1], stop_ids.astype(np.int64), early=early)
                    masks.append((draw.line, _words(allowed)))
                except Exception as error:
                    self.failures[draw.row] = cause_of(error)
            if params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty:
                penalized.append(draw)
            biases |= {
                (draw.line, token_id): value for token_id, value in params.logit_bias if 0 <= token_id < logits.shape[1]
            }
            if early and not only_stops:
                biases |= {(draw.line, int(token_id)): -math.inf for token_id in stop_ids}
        self._apply(logits, biases, penalized, masks)
        return own

    def look(self, own: torch.Tensor | None, token_ids: torch.Tensor) -> None:
        """Compute what rows will tell, from their own logits [T, V] and all drawn tokens [S]; does not wait."""
        if own is None:
            return
        num_top = max(1, *[self._rows.params[draw.seat].num_logprobs or 0 for draw in self._telling])
        norms = torch.logsumexp(own, dim=-1)
        drawn = token_ids[self._indices(self._telling)].long().clamp_(min=0)
        chosen = own.gather(-1, drawn[:, None])[:, 0] - norms
        top = torch.topk(own, min(num_top, own.shape[1]), dim=-1)
        found = (chosen, top.values - norms[:, None], top.indices)
        self._told = tuple([tensor.to("cpu", non_blocking=True) for tensor in found])

    def take(self, token_ids: Mapping[int, int]) -> tuple[dict[int, TokenLogprobs], dict[int, tuple[int, ...]]]:
        """Tokens were drawn: row of the batch to token id. Gives what is told of them, and those that follow them.

        A step that was launched since may have given a seat to another, who knows nothing of this one's tokens; nobody
        asks for them any more.
        """
        logprobs: dict[int, TokenLogprobs] = {}
        forced: dict[int, tuple[int, ...]] = {}
        for draw in self._draws:
            extras = self._extras[draw.seat]
            if extras is None or draw.row in self.failures or draw.row not in token_ids or not self._sits(draw):
                continue
            try:
                if following := extras.take(token_ids[draw.row]):
                    forced[draw.row] = following
            except Exception as error:
                self.failures[draw.row] = cause_of(error)
        for index, draw in enumerate(self._telling):
            if draw.row in token_ids and draw.row not in self.failures and self._sits(draw):
                logprobs[draw.row] = self._tell(index, draw, token_ids[draw.row])
        return logprobs, forced

    def _sits(self, draw: Draw) -> bool:
        """Whether the seat is that of the sequence that it was when the step was launched."""
        return self._rows.extras.get(draw.seat) is self._extras[draw.seat]

    def _tell(self, index: int, draw: Draw, token_id: int) -> TokenLogprobs:
        chosen = float(self._told[0][index])
        values, indices = (tensor[index].tolist() for tensor in self._told[1:])
        count = self._rows.params[draw.seat].num_logprobs or 0
        # Of equal ones the lower id first.
        top = sorted(zip(indices, values, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return TokenLogprobs(token_id, chosen, tuple(top[:count]))

    def _apply(
        self,
        logits: torch.Tensor,
        biases: dict[tuple[int, int], float],
        penalized: list[Draw],
        masks: list[tuple[int, NDArray[np.int32]]],
    ) -> None:
        if biases:
            places = np.array(list(biases), dtype=np.int32)
            values = np.array(list(biases.values()), dtype=np.float32)
            add_biases(logits, Biases(*map(self._bring, (places[:, 0], places[:, 1], values))))
        if penalized:
            penalize(logits, self._rows.token_ids, self._lines(penalized))
        if masks:
            rows = np.array([index for index, _ in masks], dtype=np.int32)
            apply_token_mask(logits, self._bring(np.stack([mask for _, mask in masks])), self._bring(rows))

    def _lines(self, draws: list[Draw]) -> Penalized:
        params = [self._rows.params[draw.seat] for draw in draws]
        numbers = [[each.repetition_penalty, each.frequency_penalty, each.presence_penalty] for each in params]

        def bring(column: list[int]) -> torch.Tensor:
            return self._bring(np.array(column, dtype=np.int32))

        return Penalized(
            rows=bring([draw.line for draw in draws]),
            seats=bring([draw.seat for draw in draws]),
            num_prompt_tokens=bring([int(self._rows.num_prompt_tokens[draw.seat]) for draw in draws]),
            num_tokens=bring([draw.position for draw in draws]),
            penalties=self._bring(np.array(numbers, dtype=np.float32)),
        )

    def _indices(self, draws: list[Draw]) -> torch.Tensor:
        return self._bring(np.array([draw.line for draw in draws], dtype=np.int64))


def _words(allowed: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Truth values [V] as a bit each, the lowest first: [⌈V / 32⌉]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32)
