"""Names of environment variables: what is misspelt, and what Kubernetes wrote."""

from typing import Any

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GatewayConfig
from tests.unit.outrider.wire.settings.loading import ALL, env, load


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "OUTRIDER_GATEWY_PORT",
            "1",
            "OUTRIDER_GATEWY_PORT is a setting of no part; did you mean OUTRIDER_GATEWAY_PORT?",
        ),
        ("OUTRIDER_CACH_DIR", "/c", "did you mean OUTRIDER_CACHE_DIR?"),
        ("OUTRIDER_GATEWAY_PORT", "tcp://10.96.12.3:8000", "say enableServiceLinks: false in the pod's spec"),
        ("OUTRIDER_GATEWAY_CHAT_SERVICE_HOST", "10.96.12.3", "say enableServiceLinks: false in the pod's spec"),
        ("OUTRIDER_GATEWAY_PORT_8000_TCP_ADDR", "10.96.12.3", "say enableServiceLinks: false in the pod's spec"),
    ],
)
def test_a_slip_and_a_variable_of_kubernetes_are_met_with_what_to_do(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(GatewayConfig, [], {**env(GatewayConfig), name: value})
    assert name in error.value.message and message in error.value.message


@pytest.mark.parametrize("cls", ALL)
def test_an_unknown_variable_of_ours_is_refused_with_a_suggestion(cls: Any) -> None:
    prefix = cls.model_config["env_prefix"]
    with pytest.raises(ConfigError) as error:
        load(cls, [], {**env(cls), f"{prefix}POTR": "1"})
    assert f"{prefix}POTR" in error.value.message and f"{prefix}PORT" in error.value.message
