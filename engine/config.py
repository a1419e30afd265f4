"""What the engine is told at start-up. Never changed afterwards: live values are `Limits`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class SloTargets:
    """What users were promised, in seconds; `None` promises nothing."""

    ttft_p95_seconds: float | None = 2.0
    itl_p95_seconds: float | None = 0.25
    e2e_p95_seconds: float | None = None


NO_TARGETS: Final = SloTargets(None, None, None)


@dataclass(frozen=True, slots=True)
class Limits:
    """The controls that move while the engine runs.

    Attributes:
        max_num_seqs: sequences that may run at the same time (seats).
        max_num_batched_tokens: tokens computed in one step over all sequences.
        generation: counts the changes; at the start it is `EngineConfig.first_generation`.
        long_prefill_token_threshold: tokens that one sequence may compute in a step; 0 is no limit of its own.
        policy: when newcomers sit down: `continuous`, `static` or `dynamic`; `static_dropped` is there to compare with.
        admission: how much memory a newcomer must find: `on_demand`, `reserve` or `predicted`.
        dynamic_preferred_size: sequences that form a batch under `dynamic`; 0 is as many as there are seats.
        dynamic_max_queue_delay_seconds: how long the first waits there for the others.
        num_speculative_tokens: drafts of one sequence in a step, at most; 0 is none.
        max_waiting: requests that may wait, in each class of work.
        max_waiting_tokens: prompt tokens that may wait, in each class of work.
        slo_admission: who would have its first token too late is refused at once, and no more is read of prompts in a
            step than the gaps promised leave time for.
        enable_prefix_caching: full blocks are kept and read again by whoever starts alike.
        draining: nothing new is taken; what is inside goes on.
        ttft_p95_seconds, itl_p95_seconds, e2e_p95_seconds: what interactive work is promised; 0 is nothing.
        background_ttft_p95_seconds, background_itl_p95_seconds, background_e2e_p95_seconds: what background work is.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    generation: int = 0
    long_prefill_token_threshold: int = 0
    policy: str = "continuous"
    admission: str = "on_demand"
    dynamic_preferred_size: int = 0
    dynamic_max_queue_delay_seconds: float = 0.1
    num_speculative_tokens: int = 0
    max_waiting: int = 256
    max_waiting_tokens: int = 262_144
    slo_admission: bool = False
    enable_prefix_caching: bool = True
    draining: bool = False
    ttft_p95_seconds: float = 0.0
    itl_p95_seconds: float = 0.0
    e2e_p95_seconds: float = 0.0
    background_ttft_p95_seconds: float = 0.0
    background_itl_p95_seconds: float = 0.0
    background_e2e_p95_seconds: float = 0.0

    @property
    def slo(self) -> SloTargets:
        """What interactive work is promised."""
        return SloTargets(self.ttft_p95_seconds or None, self.itl_p95_seconds or None, self.e2e_p95_seconds or None)

    @property
    def slo_background(self) -> SloTargets:
        """What background work is promised."""
        return SloTargets(
            self.background_ttft_p95_seconds or None,
            self.background_itl_p95_seconds or None,
            self.background_e2e_p95_seconds or None,
        )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Start-up settings of the engine; ranges are checked by whoever reads them from the outside.

    Attributes:
        model: built-in name, `.gguf` file, directory or hub id.
        dtype: one of `engine.precision.NAMES`.
        max_model_len: context length in tokens; `None` is the model's own.
        served_model_name: the name clients use; `None` is the model's own.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        num_threads: threads of torch's pool and of the native kernels; 0 is one for each core there is to take.
        block_size: tokens of a KV block.
        kv_cache_dtype: `auto`, `int8` on a processor, or `fp8` on a GPU.
        cache_memory_bytes: memory for the KV cache alone; `None` takes a share of what is free.
        long_prefill_token_threshold, policy, admission, dynamic_preferred_size, dynamic_max_queue_delay_seconds,
            num_speculative_tokens, max_waiting, max_waiting_tokens, slo_admission, enable_prefix_caching: as in
            `Limits`.
        capacity_num_seqs: the highest `max_num_seqs` that can be set while it runs.
        capacity_num_batched_tokens: the same for `max_num_batched_tokens`.
        slow_client_seconds: a reader that takes nothing for so long is aborted.
        keep_request_texts: the tokens of requests that have ended can be looked at for a while.
        slo: what interactive work was promised.
        slo_background: what background work was promised.
        first_generation: the number that changes of the limits are counted from.
    """

    model: str = "smollm2-135m"
    dtype: str = "auto"
    max_model_len: int | None = None
    served_model_name: str | None = None
    device: str = "auto"
    num_threads: int = 0
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    policy: str = "continuous"
    admission: str = "on_demand"
    dynamic_preferred_size: int = 0
    dynamic_max_queue_delay_seconds: float = 0.1
    num_speculative_tokens: int = 7
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128
    long_prefill_token_threshold: int = 0
    capacity_num_seqs: int = 64
    capacity_num_batched_tokens: int = 512
    max_waiting: int = 256
    max_waiting_tokens: int = 262_144
    slo_admission: bool = False
    slow_client_seconds: float = 30.0
    keep_request_texts: bool = False
    slo: SloTargets = field(default_factory=SloTargets)
    slo_background: SloTargets = NO_TARGETS
    first_generation: int = 0

    @property
    def limits(self) -> Limits:
        """The live limits at start-up."""
        return Limits(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.first_generation,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            policy=self.policy,
            admission=self.admission,
            dynamic_preferred_size=self.dynamic_preferred_size,
            dynamic_max_queue_delay_seconds=self.dynamic_max_queue_delay_seconds,
            num_speculative_tokens=self.num_speculative_tokens,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
            slo_admission=self.slo_admission,
            enable_prefix_caching=self.enable_prefix_caching,
            ttft_p95_seconds=self.slo.ttft_p95_seconds or 0.0,
            itl_p95_seconds=self.slo.itl_p95_seconds or 0.0,
            e2e_p95_seconds=self.slo.e2e_p95_seconds or 0.0,
            background_ttft_p95_seconds=self.slo_background.ttft_p95_seconds or 0.0,
            background_itl_p95_seconds=self.slo_background.itl_p95_seconds or 0.0,
            background_e2e_p95_seconds=self.slo_background.e2e_p95_seconds or 0.0,
        )

    @property
    def capacity(self) -> Limits:
        """The highest live limits."""
        return Limits(self.capacity_num_seqs, self.capacity_num_batched_tokens)


MAX_QUEUE_DELAY_SECONDS = 3600.0
MAX_SPECULATIVE_TOKENS = 16
MAX_WAITING = 1 << 20
MAX_WAITING_TOKENS = 1 << 30
# What `SloTargets` of a class of work may be, by the name in `Limits`; 0 promises nothing.
MAX_TARGETS: Final = {
    "ttft_p95_seconds": 3600.0,
    "itl_p95_seconds": 3600.0,
    "e2e_p95_seconds": 86_400.0,
    "background_ttft_p95_seconds": 86_400.0,
    "background_itl_p95_seconds": 86_400.0,
    "background_e2e_p95_seconds": 86_400.0,
}
# Fields of `Limits` that are on or off.
SWITCHES = ("slo_admission", "enable_prefix_caching", "draining")


def live_range(name: str, capacity: Limits) -> tuple[int, float]:
    """The lowest and the highest value that a numeric field of `Limits` can take while the engine runs.

    Raises:
        ValueError: there is no such field, or it cannot be changed.
    """
    match name:
        case "max_num_seqs":
            return 1, capacity.max_num_seqs
        case "max_num_batched_tokens":
            return 1, capacity.max_num_batched_tokens
        case "long_prefill_token_threshold":
            return 0, capacity.max_num_batched_tokens
        case "dynamic_preferred_size":
            return 0, capacity.max_num_seqs
        case "dynamic_max_queue_delay_seconds":
            return 0, MAX_QUEUE_DELAY_SECONDS
        case "num_speculative_tokens":
            return 0, MAX_SPECULATIVE_TOKENS
        case "max_waiting":
            return 1, MAX_WAITING
        case "max_waiting_tokens":
            return 1, MAX_WAITING_TOKENS
        case _ if name in MAX_TARGETS:
            return 0, MAX_TARGETS[name]
    raise ValueError(f"{name} cannot be changed while running")
