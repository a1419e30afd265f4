"""Which tests begin first: files that take longest, so that no worker is left alone with one of them in the end."""

from __future__ import annotations

from typing import Final

# By the seconds they took, the longest first.
LONGEST: Final = (
    "app/test_soak.py",
    "kernels/test_targets.py",
    "app/test_limit_tune_live.py",
    "engine/test_gpu.py",
    "engine/test_gpu_quantized.py",
    "engine/test_crowd.py",
    "kernels/test_triton.py",
    "app/test_fuzz.py",
    "kernels/test_bench.py",
    "app/test_chat_page.py",
    "app/test_accessibility.py",
    "app/test_tuning_browser.py",
    "app/test_cancellation_matrix.py",
    "app/test_table_browser.py",
    "app/test_limit_command.py",
    "app/test_limit_servers.py",
    "app/test_limit_tune.py",
    "app/test_processes.py",
    "test_conditions.py",
    "engine/test_smollm2.py",
    "app/test_connections.py",
    "app/test_browser.py",
    "app/test_limit_page.py",
    "app/test_limit_browser.py",
    "engine/test_batching.py",
    "app/test_real_server.py",
    "app/test_limit_generator.py",
)
