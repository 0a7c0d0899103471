"""The arguments of LLM as settings of a system."""

import os

import pytest

from outrider.cli.offline import remove_variables, system_of
from outrider.wire.errors import ConfigError
from outrider.wire.settings.system import SystemConfig


def test_settings_reach_the_parts_that_have_them() -> None:
    found = system_of({"model": "t", "dtype": "float16"}, "d", {"dtype": "float32", "max_queue": 5})
    assert found["target"] == {"model": "t", "dtype": "float16"}, "its own goes before that of both"
    assert found["draft"] == {"model": "d", "dtype": "float32"}
    assert found["gateway"]["max_queue"] == 5 and "dtype" not in found["gateway"]
    assert (found["gateway"]["port"], found["gateway"]["grpc_port"], found["ray"]) == (0, 0, None)
    config = SystemConfig.read(found)
    assert [pool.worker.dtype for pool in config.pools] == ["float16", "float32"]
    assert "draft" not in system_of("t", None, {})


def test_a_request_waits_as_long_as_it_may_run() -> None:
    assert system_of("t", None, {"request_timeout_s": 7.0})["gateway"]["max_queue_wait_s"] == 7.0
    given = system_of("t", None, {"request_timeout_s": 7.0, "max_queue_wait_s": 2.0})
    assert given["gateway"]["max_queue_wait_s"] == 2.0


@pytest.mark.parametrize("name", ["port", "model", "api_keys", "tls_dir", "nothing_like_it"])
def test_what_the_program_may_not_give_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is no setting of an LLM: "):
        system_of("t", None, {name: "x"})


def test_a_services_addresses_in_the_environment_are_not_an_llms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OUTRIDER_GATEWAY_PORT", "outrider_target_model", "OUTRIDER_DRAFT_MAX_SLOTS"):
        monkeypatch.setenv(name, "1")
    remove_variables()
    left = {name for name in os.environ if name.upper().startswith("OUTRIDER_")}
    assert "OUTRIDER_DRAFT_MAX_SLOTS" in left
    assert not left & {"OUTRIDER_GATEWAY_PORT", "outrider_target_model"}
