"""`python -m deploy.compose_settings`: the text of deploy/docker/settings.yml, written from the settings themselves.

Compose starts a container anew when something of its own has changed. So each service has its own variables of .env:
one of the gateway leaves the workers as they are.
"""

from __future__ import annotations

import sys

import yaml

from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig

_HEAD = """\
# The settings that docker-compose.yml gives to its services where .env, or the shell, has them. Written by
# `make env-example`.
"""
_READ_BY = {"gateway": (GatewayConfig,), "launcher": (TargetConfig, DraftConfig)}
"""Settings that each service reads, by service. Workers get theirs from the launcher."""


def variable_names(cls: type[GatewayConfig] | type[DraftConfig] | type[TargetConfig]) -> list[str]:
    """Return the variables that hold a part's settings."""
    return [f"{cls.model_config['env_prefix']}{name}".upper() for name in cls.model_fields]


def compose_settings() -> str:
    """Return the whole file. A variable without a value is passed on where it is set."""
    services = {}
    for service, parts in _READ_BY.items():
        names = [name for cls in parts for name in variable_names(cls)]
        services[service] = {"environment": names}
    return _HEAD + yaml.safe_dump({"services": services}, sort_keys=False)


if __name__ == "__main__":
    sys.stdout.write(compose_settings())
