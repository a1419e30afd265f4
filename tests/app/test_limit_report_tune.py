"""What tuning tried and found, in the HTML report of `relevo limit`."""

from __future__ import annotations

from typing import Any

from app.limit.report import page_of
from tests.app.test_limit_report import Reader, hostile, measured, result

__all__ = ["measured", "result"]  # fixtures

TUNE: dict[str, Any] = {
    "controls": [
        {"name": "max_num_seqs", "range": [1, 64], "choices": None, "present": 16, "best": 32, "tried": [32],
         "idle": None},
        {"name": "admission", "range": None, "choices": ["reserve"], "present": "reserve", "best": "reserve",
         "tried": [], "idle": "the time was over"},
    ],
    "candidates": [
        {"control": "max_num_seqs", "value": 32, "settings": {"max_num_seqs": 32}, "against": {"max_num_seqs": 16},
         "rate": 4.0, "seed": 0, "requests": 100, "ended_early": False, "excess": 0.5, "their_excess": 1.5,
         "margin": {"ratio": 0.33, "low": 0.2, "high": 0.5}, "verdict": "better", "beyond": None, "limit": None,
         "why": None},
    ],
    "present": {"settings": {"max_num_seqs": 16}, "limit": {"requests_per_second": 3.5, "low": 3.4, "high": 3.6}},
    "found": {"settings": {"max_num_seqs": 32}, "limit": {"requests_per_second": 4.5, "low": 4.4, "high": 4.6}},
    "best": {"settings": {"max_num_seqs": 32}, "limit": {"requests_per_second": 4.5, "low": 4.4, "high": 4.6},
             "changes": {"max_num_seqs": [16, 32]}},
    "evidence": {"believed": True, "complete": True, "why": "each of 2 fresh seeds was better", "gain": 1.28,
                 "pairs": [{"seed": 7, "present": 3.5, "found": 4.5, "gain": 1.28},
                           {"seed": 8, "present": None, "found": 4.4, "gain": None}]},
    "trade_off": {"control": "max_num_batched_tokens", "rate": 3.0, "seed": 0, "points": [
        {"value": 64, "ttft_p95_seconds": 0.9, "itl_p95_seconds": 0.05, "e2e_p95_seconds": None, "requests": 100,
         "holds": True},
    ]},
    "complete": False,
    "applied": False,
}  # fmt: skip


def test_what_tuning_tried_and_found_stands_in_the_report(result: dict[str, Any]) -> None:
    page = Reader(page_of({**result, "tune": TUNE}))
    assert "Better for these targets: max_num_seqs 16 to 32: 1.28 times the limit" in page.words
    assert "0.33 (0.20 to 0.50)" in page.words
    assert "Not turned: admission: the time was over." in page.words
    assert "Measured again with fresh seeds" in page.words
    assert "What the token budget trades, at 3.00 requests/s" in page.words
    assert "The time was over before everything was tried." in page.words
    stopped = Reader(page_of({**result, "tune": TUNE | {"unfinished": "the search was stopped"}}))
    assert "The time was over before" not in stopped.words, "it was not"
    assert not Reader(page_of({**result, "tune": hostile(TUNE, "tune")})).outside
