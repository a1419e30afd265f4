"""Which tests begin first: files that take longest, so that no worker is left alone with one of them in the end."""

from __future__ import annotations

from typing import Final

# By the seconds they took, the longest first.
LONGEST: Final = (
    "engine/test_gpu_quantized.py",
    "engine/test_gpu.py",
    "engine/test_gpu_compiled.py",
    "app/test_chat_page.py",
    "app/test_accessibility.py",
    "app/test_tuning_browser.py",
    "app/test_table_browser.py",
    "app/test_fuzz.py",
    "kernels/test_targets.py",
    "engine/test_gpu_extras.py",
    "engine/test_crowd.py",
    "app/test_limit_tune_live.py",
    "app/test_limit_browser.py",
    "app/test_limit_command.py",
    "app/test_browser.py",
    "app/test_processes.py",
    "app/test_soak.py",
    "kernels/test_triton.py",
    "app/test_dashboard_restarts.py",
    "app/test_raw_fuzz.py",
    "app/test_real_server.py",
    "engine/test_smollm2.py",
    "app/test_hostile_browser.py",
    "app/test_connections.py",
    "app/test_history_browser.py",
)
