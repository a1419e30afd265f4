"""Every setting, declared once: type, range, default, unit and the reason it exists.

Flags and environment variables derive from these classes; tests hold config.toml and the README's table to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.config_types import ApiKeys, Bytes, Names, Origins, Secret
from engine.config import (
    MAX_QUEUE_DELAY_SECONDS,
    MAX_SPECULATIVE_TOKENS,
    MAX_TARGETS,
    MAX_WAITING,
    MAX_WAITING_TOKENS,
    EngineConfig,
    SloTargets,
)
from engine.errors import ConfigError

_CAPACITY_FACTOR = 4


def setting(
    default: Any,
    unit: str,
    reason: str,
    *,
    absent: str | None = None,
    entries: str = "",
    takes: str = "",
    **limits: Any,
) -> Any:
    """Declare a setting.

    Args:
        absent: the word that stands for `None` in files, variables and flags.
        entries: what a list is a list of.
        takes: what it may be, in words, where its type and limits do not say it.
    """
    extra: dict[str, Any] = {"unit": unit, "absent": absent, "entries": entries, "takes": takes}
    return Field(default, description=reason, json_schema_extra=extra, **limits)


class Section(BaseModel):
    """One `[section]` of config.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class ModelSection(Section):
    """`[model]`."""

    name: str = setting("smollm2-135m", "", "a built-in name, a .gguf file, a directory or a hub id", min_length=1)
    dtype: Literal["auto", "native", "int8", "bfloat16", "float16", "float32"] = setting(
        "auto", "", "arithmetic of the model; auto is the fastest here: native or int8 with a C++ compiler, else floats"
    )
    max_model_len: int | None = setting(
        None, "tokens", "longest prompt plus answer; auto is the model's own", absent="auto", ge=2, le=1 << 20
    )


class EngineSection(Section):
    """`[engine]`."""

    device: str = setting(
        "auto",
        "",
        "what computes: auto takes a GPU where there is one; cpu, cuda, or cuda:1 for the second",
        min_length=1,
    )
    num_threads: int | None = setting(
        None, "threads", "how many compute; auto is one for each core there is to take", absent="auto", ge=1, le=1024
    )


class CacheSection(Section):
    """`[cache]`."""

    block_size: int = setting(
        16, "tokens", "size of a KV block; smaller wastes less, larger is less bookkeeping", ge=1, le=256
    )
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = setting(
        "auto",
        "",
        "numbers kept of each token; int8 with the native kernels, and fp8 on a GPU, take about half of auto's memory",
    )
    memory: Bytes | None = setting(
        None,
        "bytes",
        "for the KV cache alone; auto takes a quarter of what is free, on a GPU nine tenths",
        absent="auto",
        ge=1 << 20,
    )
    enable_prefix_caching: bool = setting(
        True, "", "keep what was computed and read it again where prompts begin alike; live"
    )
    cache_sharing: str = setting(
        "auto",
        "",
        "who shares cached prompts: all, each key alone, or groups like alice+bob; auto is all without keys, else key",
        min_length=1,
    )


class SchedulerSection(Section):
    """`[scheduler]`."""

    policy: Literal["continuous", "static", "dynamic"] = setting(
        "continuous", "", "when newcomers sit down: at any step, or in whole batches, to compare with; live"
    )
    admission: Literal["on_demand", "reserve", "predicted"] = setting(
        "on_demand",
        "",
        "memory a newcomer must find: what it needs now, its longest answer, or an answer of usual length; live",
    )
    max_num_seqs: int = setting(16, "sequences", "seats: how many run at once; live", ge=1, le=4096)
    max_num_batched_tokens: int = setting(
        128,
        "tokens",
        "computed in one step; higher reads prompts faster, lower keeps the gaps short; live",
        ge=1,
        le=1 << 20,
    )
    long_prefill_token_threshold: int | None = setting(
        None,
        "tokens",
        "of one prompt in one step, so that it leaves budget to others; none leaves it all; live",
        absent="none",
        ge=1,
        le=1 << 20,
    )
    dynamic_preferred_size: int | None = setting(
        None,
        "sequences",
        "that make a batch under the dynamic policy; auto is as many as there are seats; live",
        absent="auto",
        ge=1,
        le=4096,
    )
    dynamic_max_queue_delay_seconds: float = setting(
        0.1,
        "seconds",
        "the first waits so long for a batch under the dynamic policy; live",
        ge=0,
        le=MAX_QUEUE_DELAY_SECONDS,
    )
    num_speculative_tokens: int = setting(
        7,
        "tokens",
        "most drafted for one request and checked in one step; as many as pay are drafted, with 0 none; live",
        ge=0,
        le=MAX_SPECULATIVE_TOKENS,
    )
    capacity_num_seqs: int | None = setting(
        None, "sequences", "highest live max_num_seqs; auto is four times it", absent="auto", ge=1, le=16384
    )
    capacity_num_batched_tokens: int | None = setting(
        None, "tokens", "highest live max_num_batched_tokens; auto is four times it", absent="auto", ge=1, le=1 << 22
    )
    max_waiting: int = setting(
        256,
        "requests",
        "how many may wait, in each class of work; the next is refused at once with 503; live",
        ge=1,
        le=MAX_WAITING,
    )
    max_waiting_tokens: int = setting(
        262_144,
        "tokens",
        "prompts that may wait, in each class of work; 1,024 for each of 256 requests; live",
        ge=1,
        le=MAX_WAITING_TOKENS,
    )
    slo_admission: bool = setting(
        False, "", "keep what is promised: refuse who would be late, and read prompts no faster than gaps allow; live"
    )


class ServerSection(Section):
    """`[server]`."""

    host: str = setting(
        "127.0.0.1", "", "address to listen on; beyond loopback wants keys and an admin token", min_length=1
    )
    port: int = setting(8000, "", "port to listen on; 0 lets the system choose", ge=0, le=65535)
    drain_timeout_seconds: float = setting(
        30.0, "seconds", "running requests may finish for so long after a SIGTERM", ge=0, le=3600
    )
    request_timeout_seconds: float = setting(
        600.0, "seconds", "deadline of every request; what the openai client waits by default", gt=0, le=86400
    )
    queue_timeout_seconds: float | None = setting(
        None, "seconds", "who has waited for a seat for so long gets 503", absent="none", gt=0, le=86400
    )
    slow_client_seconds: float = setting(
        30.0, "seconds", "a reader that takes nothing for so long gives up its seat", gt=0, le=3600
    )
    vllm_metric_names: bool = setting(True, "", "serve /metrics under vllm: too, for existing dashboards")
    served_model_name: str | None = setting(
        None, "", "the name clients use; auto is the built-in, file or folder name", absent="auto", min_length=1
    )
    cors_origins: Origins = setting(
        (), "", "sites whose pages may use the API, each with a key of its own; * is every site", entries="origins"
    )
    keep_request_texts: bool = setting(
        False,
        "",
        "the tokens of the last 200 requests can be looked at under /ops/requests; off, none outlives its answer",
    )
    log_format: Literal["human", "json"] = setting(
        "human", "", "lines of the log, on stderr: for people or for programs"
    )
    log_level: Literal["info", "warning", "error"] = setting(
        "info", "", "the least that is logged; info has a line for each request, without a word of its text"
    )
    tracing: bool = setting(
        False, "", "OpenTelemetry traces of requests, as the OTEL_ variables say; needs the extra relevo[otel]"
    )
    state_dir: str | None = setting(
        None,
        "",
        "folder for what outlives the process: keys, history, changes of settings, recordings; "
        "auto is $XDG_STATE_HOME/relevo",
        absent="auto",
        min_length=1,
    )


class SecuritySection(Section):
    """`[security]`."""

    api_keys: ApiKeys = setting(
        (), "", "who may use /v1, as name=key; none leaves it to loopback peers", entries="name=key"
    )
    admin_token: Secret = setting(
        None, "", "opens /ops, /admin and /metrics from elsewhere; empty leaves them to loopback peers", absent=""
    )
    background_keys: Names = setting(
        (), "", "names of keys whose requests are all background work, which waits for the interactive", entries="names"
    )


class KeyLimits(Section):
    """`[security.limits.NAME]`: how much one API key may ask for."""

    max_concurrent: int | None = setting(None, "requests", "being answered at once", absent="none", ge=1, le=1 << 20)
    requests_per_minute: int | None = setting(
        None, "requests", "on average; as many may come at once after a quiet minute", absent="none", ge=1, le=1 << 30
    )
    tokens_per_minute: int | None = setting(
        None,
        "tokens",
        "of prompts and answers, on average; what was over is paid back",
        absent="none",
        ge=1,
        le=1 << 40,
    )


class SloSection(Section):
    """`[slo]`: what users are promised."""

    ttft_p95_seconds: float | None = setting(
        2.0,
        "seconds",
        "95 % of first tokens come within it; about how long a person waits calmly; live",
        absent="none",
        gt=0,
        le=MAX_TARGETS["ttft_p95_seconds"],
    )
    itl_p95_seconds: float | None = setting(
        0.25,
        "seconds",
        "95 % of gaps between tokens; four tokens a second is reading speed; live",
        absent="none",
        gt=0,
        le=MAX_TARGETS["itl_p95_seconds"],
    )
    e2e_p95_seconds: float | None = setting(
        None,
        "seconds",
        "95 % of whole answers; none, because it depends on their length; live",
        absent="none",
        gt=0,
        le=MAX_TARGETS["e2e_p95_seconds"],
    )


class SloBackgroundSection(Section):
    """`[slo.background]`: what background work is promised."""

    ttft_p95_seconds: float | None = setting(
        None,
        "seconds",
        "95 % of first tokens of background work; none, because it waits for the interactive; live",
        absent="none",
        gt=0,
        le=MAX_TARGETS["background_ttft_p95_seconds"],
    )
    itl_p95_seconds: float | None = setting(
        None,
        "seconds",
        "95 % of gaps between tokens of background work; none, because nobody watches it come; live",
        absent="none",
        gt=0,
        le=MAX_TARGETS["background_itl_p95_seconds"],
    )
    e2e_p95_seconds: float | None = setting(
        None,
        "seconds",
        "95 % of whole answers of background work; to be set where results are due at some time; live",
        absent="none",
        gt=0,
        le=MAX_TARGETS["background_e2e_p95_seconds"],
    )


class Settings(Section):
    """All settings, checked and frozen. An underscore in a section's name is its dot: `[slo.background]`.

    Attributes:
        security_limits: by the name of an API key.
    """

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    server: ServerSection = ServerSection()
    security: SecuritySection = SecuritySection()
    security_limits: Mapping[str, KeyLimits] = Field(default_factory=dict)
    slo: SloSection = SloSection()
    slo_background: SloBackgroundSection = SloBackgroundSection()

    def engine_config(self) -> EngineConfig:
        """What the engine is told at start-up."""
        scheduler = self.scheduler
        return EngineConfig(
            model=self.model.name,
            dtype=self.model.dtype,
            max_model_len=self.model.max_model_len,
            served_model_name=self.server.served_model_name,
            device=self.engine.device,
            num_threads=self.engine.num_threads or 0,
            block_size=self.cache.block_size,
            kv_cache_dtype=self.cache.kv_cache_dtype,
            cache_memory_bytes=self.cache.memory,
            enable_prefix_caching=self.cache.enable_prefix_caching,
            policy=scheduler.policy,
            admission=scheduler.admission,
            dynamic_preferred_size=scheduler.dynamic_preferred_size or 0,
            dynamic_max_queue_delay_seconds=scheduler.dynamic_max_queue_delay_seconds,
            num_speculative_tokens=scheduler.num_speculative_tokens,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            long_prefill_token_threshold=scheduler.long_prefill_token_threshold or 0,
            capacity_num_seqs=scheduler.capacity_num_seqs or _CAPACITY_FACTOR * scheduler.max_num_seqs,
            capacity_num_batched_tokens=scheduler.capacity_num_batched_tokens
            or _CAPACITY_FACTOR * scheduler.max_num_batched_tokens,
            max_waiting=scheduler.max_waiting,
            max_waiting_tokens=scheduler.max_waiting_tokens,
            slo_admission=scheduler.slo_admission,
            slow_client_seconds=self.server.slow_client_seconds,
            keep_request_texts=self.server.keep_request_texts,
            slo=SloTargets(**self.slo.model_dump()),
            slo_background=SloTargets(**self.slo_background.model_dump()),
        )

    def check_exposure(self, *, insecure: bool = False, has_keys: bool = False) -> None:
        """Refuse to listen beyond loopback while everybody there could use and tune the server.

        Args:
            insecure: its owner accepts that.
            has_keys: API keys were made while it ran before.

        Raises:
            ConfigError: keys or the admin token are missing.
        """
        has_keys = has_keys or bool(self.security.api_keys)
        if insecure or is_loopback(self.server.host) or (has_keys and self.security.admin_token):
            return
        raise ConfigError(
            f"Listening on {self.server.host} is open to others: set [security] api_keys and admin_token, "
            "or pass --insecure to accept that anyone who can reach it may use it."
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
