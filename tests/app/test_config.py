"""Settings: order of sources, errors that help, secrets that stay secret, and config.toml as the page of defaults."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.config import Key, Settings, keys, load_settings, named_keys
from engine.config import EngineConfig, SloTargets
from engine.errors import ConfigError

CONFIG = Path(__file__).resolve().parents[2] / "config.toml"


def refused(**sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_settings(**sources)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_without_sources_the_defaults_hold() -> None:
    assert load_settings() == Settings()
    assert Settings().engine_config() == EngineConfig()


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = written(tmp_path, "[scheduler]\nmax_num_seqs = 3\nmax_waiting = 30\nmax_waiting_tokens = 300\n")
    environ = {"RELEVO_SCHEDULER_MAX_NUM_SEQS": "4", "RELEVO_SCHEDULER_MAX_WAITING": "40", "PATH": "/bin"}
    settings = load_settings(path=path, environ=environ, flags={"scheduler.max_num_seqs": "5", "server.port": None})
    assert settings.scheduler.max_num_seqs == 5
    assert settings.scheduler.max_waiting == 40
    assert settings.scheduler.max_waiting_tokens == 300
    assert settings.server.port == 8000


def test_capacity_is_four_times_the_start_unless_it_is_set() -> None:
    config = load_settings(
        flags={"scheduler.max_num_seqs": "8", "scheduler.capacity_num_batched_tokens": "512"}
    ).engine_config()
    assert (config.capacity_num_seqs, config.capacity_num_batched_tokens) == (32, 512)


def test_capacity_below_the_start_is_refused() -> None:
    message = refused(flags={"scheduler.capacity_num_seqs": "8"})
    assert "capacity_num_seqs = 8" in message
    assert "max_num_seqs = 16" in message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("100MB", 10**8),
        ("4194304", 4 << 20),
        ("auto", None),
    ],
)
def test_sizes_in_bytes(text: str, size: int | None) -> None:
    assert load_settings(flags={"cache.memory": text}).cache.memory == size


@pytest.mark.parametrize("text", ["2GX", "lots", "", "-1GiB", "infGiB", "nan", "1KiB"])
def test_wrong_sizes(text: str) -> None:
    assert "memory" in refused(flags={"cache.memory": text})


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    message = refused(path=written(tmp_path, "[scheduler]\nmax_num_seq = 8\n"))
    assert "max_num_seq" in message
    assert "did you mean max_num_seqs?" in message


def test_key_in_the_wrong_section_names_the_right_one(tmp_path: Path) -> None:
    assert "[server] port" in refused(path=written(tmp_path, "[model]\nport = 80\n"))


def test_a_section_within_another(tmp_path: Path) -> None:
    text = "[slo]\nttft_p95_seconds = 1\n[slo.background]\nttft_p95_seconds = 60\ne2e_p95_seconds = 3600\n"
    settings = load_settings(
        path=written(tmp_path, text),
        environ={"RELEVO_SLO_BACKGROUND_ITL_P95_SECONDS": "5"},
        flags={"slo.background.e2e_p95_seconds": "7200"},
    )
    config = settings.engine_config()
    assert config.slo == SloTargets(1.0, 0.25, None)
    assert config.slo_background == SloTargets(60.0, 5.0, 7200.0)
    key = next(key for key in keys() if key.dotted == "slo.background.ttft_p95_seconds")
    assert (key.flag, key.variable) == ("--background-ttft-p95-seconds", "RELEVO_SLO_BACKGROUND_TTFT_P95_SECONDS")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "[slo.backgroud]\nttft_p95_seconds = 1",
            "[slo.backgroud] is not a known section; did you mean [slo.background]?",
        ),
        ("[slo.background]\nttft_p95 = 1", "[slo.background] has no setting ttft_p95; did you mean ttft_p95_seconds?"),
        ("[slo.background]\nitl_p95_seconds = -1", "[slo.background] itl_p95_seconds = -1"),
        ("[slo]\nbackground = 5", "[slo] has no setting background"),
        ("[cache.memory]\nsize = 5", "[cache] memory"),
        ("[model]\nttft_p95_seconds = 5", "did you mean [slo] ttft_p95_seconds?"),
    ],
)
def test_faults_in_a_section_within_another(tmp_path: Path, text: str, words: str) -> None:
    assert words in refused(path=written(tmp_path, text))


def test_unknown_section_names_the_nearest(tmp_path: Path) -> None:
    assert "did you mean [scheduler]?" in refused(path=written(tmp_path, "[schedular]\nmax_num_seqs = 8\n"))


def test_unknown_variable_names_the_nearest() -> None:
    message = refused(environ={"RELEVO_SERVER_PROT": "1"})
    assert "did you mean RELEVO_SERVER_PORT?" in message


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    environ = {
        "RELEVO_PORT": "tcp://10.0.0.1:80",
        "RELEVO_SERVICE_HOST": "10.0.0.1",
        "RELEVO_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert load_settings(environ=environ) == Settings()


@pytest.mark.parametrize(
    ("dotted", "value", "expected"),
    [
        ("scheduler.max_num_seqs", "0", "1 to 4096"),
        ("scheduler.max_num_seqs", "many", "1 to 4096"),
        ("server.port", "70000", "0 to 65535"),
        ("server.request_timeout_seconds", "0", "more than 0 to 86400"),
        ("server.request_timeout_seconds", "nan", "more than 0 to 86400"),
        ("server.vllm_metric_names", "perhaps", "true or false"),
        ("model.dtype", "float8", "auto, native, int8, bfloat16, float16, float32"),
        ("model.name", "", "text, not empty"),
        ("slo.ttft_p95_seconds", "-1", "more than 0 to 3600, or none"),
        ("security.api_keys", ["nokey"], "name=key"),
    ],
)
def test_out_of_range_names_key_value_and_range(dotted: str, value: object, expected: str) -> None:
    message = refused(flags={dotted: value})
    section, _, name = dotted.partition(".")
    assert f"[{section}] {name}" in message
    assert expected in message
    assert repr(value) in message or name == "api_keys"


@pytest.mark.parametrize("value", ["true", "[1]", "{a = 1}"])
def test_a_number_is_not_a_truth_value_or_a_table(tmp_path: Path, value: str) -> None:
    assert "1 to 4096" in refused(path=written(tmp_path, f"[scheduler]\nmax_num_seqs = {value}\n"))


def test_a_file_that_is_missing_or_no_toml(tmp_path: Path) -> None:
    assert "no configuration file" in refused(path=tmp_path / "none.toml")
    assert "cannot be read" in refused(path=tmp_path)
    assert "TOML" in refused(path=written(tmp_path, "port: 8000\n"))
    assert refused(path=written(tmp_path, "a = " + "[" * 5000)).endswith(" is nested too deeply.")
    assert "section" in refused(path=written(tmp_path, "model = 'x'\n"))


@pytest.mark.parametrize(("number", "said"), [("9", "more digits than can be read"), ("0xf", "max_num_seqs (from ")])
def test_a_number_without_end(tmp_path: Path, number: str, said: str) -> None:
    endless = number + number[-1] * 5000
    assert said in refused(path=written(tmp_path, f"[scheduler]\nmax_num_seqs = {endless}\n"))


def test_api_keys_come_as_list_commas_or_repeated_flags(tmp_path: Path) -> None:
    for settings in (
        load_settings(path=written(tmp_path, '[security]\napi_keys = ["a=1", "b=2=3"]\n')),
        load_settings(environ={"RELEVO_SECURITY_API_KEYS": "a=1, b=2=3"}),
        load_settings(flags={"security.api_keys": ["a=1", "b=2=3"]}),
    ):
        assert [(key.name, key.key.get_secret_value()) for key in settings.security.api_keys] == [
            ("a", "1"),
            ("b", "2=3"),
        ]
    assert "once" in refused(flags={"security.api_keys": ["a=1", "a=2"]})


@pytest.mark.parametrize("source", ["environ", "flags", "file"])
def test_secrets_lose_the_line_end_of_their_file(tmp_path: Path, source: str) -> None:
    if source == "environ":
        environ = {"RELEVO_SECURITY_ADMIN_TOKEN": "hunter2\n", "RELEVO_SECURITY_API_KEYS": "a=1\n,b=2\n"}
        settings = load_settings(environ=environ)
    elif source == "flags":
        settings = load_settings(flags={"security.admin_token": " hunter2\r\n", "security.api_keys": ["a=1\n", "b=2"]})
    else:
        text = '[security]\nadmin_token = "hunter2\\n"\napi_keys = ["a=1\\n", "b=2"]\n'
        settings = load_settings(path=written(tmp_path, text))
    assert settings.security.admin_token is not None
    assert settings.security.admin_token.get_secret_value() == "hunter2"
    assert [key.key.get_secret_value() for key in settings.security.api_keys] == ["1", "2"]
    assert load_settings(environ={"RELEVO_SECURITY_ADMIN_TOKEN": "\n"}).security.admin_token is None


def test_secrets_are_shown_nowhere() -> None:
    settings = load_settings(
        environ={"RELEVO_SECURITY_ADMIN_TOKEN": "hunter2"}, flags={"security.api_keys": ["alice=hunter3"]}
    )
    assert "hunter" not in repr(settings) + str(settings) + str(settings.model_dump())
    assert settings.security.admin_token is not None
    assert "hunter" not in refused(flags={"security.api_keys": ["hunter3"]})
    assert "hunter" not in refused(flags={"security.admin_token": ["hunter3"]})


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().scheduler.max_num_seqs = 3  # type: ignore[misc]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    load_settings(flags={"server.host": host}).check_exposure()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_beyond_loopback_wants_keys_and_token_or_consent(host: str) -> None:
    flags: dict[str, object] = {"server.host": host}
    with pytest.raises(ConfigError, match="--insecure"):
        load_settings(flags=flags).check_exposure()
    with pytest.raises(ConfigError, match="admin_token"):
        load_settings(flags=flags | {"security.api_keys": ["a=b"]}).check_exposure()
    load_settings(flags=flags).check_exposure(insecure=True)
    load_settings(flags=flags | {"security.api_keys": ["a=b"], "security.admin_token": "t"}).check_exposure()


def test_the_shipped_file_equals_the_defaults() -> None:
    assert load_settings(path=CONFIG) == Settings()
    document = tomllib.loads(CONFIG.read_text(encoding="utf-8"))
    document["slo.background"] = document["slo"].pop("background")
    shipped = {f"{section}.{name}": value for section, values in document.items() for name, value in values.items()}
    assert shipped == {key.dotted: key.default for key in keys()}


@pytest.mark.parametrize("key", [*keys(), *named_keys()], ids=lambda key: key.dotted)
def test_every_key_has_a_unit_and_a_reason_in_the_shipped_file(key: Key) -> None:
    text = CONFIG.read_text(encoding="utf-8").partition(f"[{key.section}]\n")[2]
    comment = re.search(rf"^# (.+)\n(?:# )?{key.name} = ", text, re.MULTILINE)
    assert comment is not None
    assert key.reason in comment[1]
    assert key.unit in comment[1]


def test_flags_and_variables_are_unique() -> None:
    flags, variables = [key.flag for key in keys()], [key.variable for key in keys()]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)


def test_a_batch_larger_than_its_seats_is_refused() -> None:
    message = refused(flags={"scheduler.dynamic_preferred_size": "17"})
    assert "dynamic_preferred_size = 17 is above max_num_seqs = 16" in message
    settings = load_settings(flags={"scheduler.dynamic_preferred_size": "16", "scheduler.policy": "dynamic"})
    assert settings.engine_config().limits.dynamic_preferred_size == 16


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("policy", "magic", "continuous, static, dynamic"),
        ("policy", "static_dropped", "continuous, static, dynamic"),
        ("admission", "magic", "on_demand, reserve, predicted"),
        ("dynamic_max_queue_delay_seconds", "-1", "0 to 3600"),
        ("dynamic_preferred_size", "0", "1 to 4096"),
    ],
)
def test_policies_that_cannot_be_name_what_can(key: str, value: str, words: str) -> None:
    assert words in refused(flags={f"scheduler.{key}": value})
