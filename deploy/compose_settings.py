"""`python -m deploy.compose_settings`: prints deploy/docker/settings.yml, made from the settings' own classes.

Compose replaces a container when one of its own variables has changed. So each service has its own variables of .env: a
change of the gateway's variables does not replace the workers.
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
"""Classes of the settings that each service reads. Workers get their settings from the launcher."""


def variable_names(cls: type[GatewayConfig] | type[DraftConfig] | type[TargetConfig]) -> list[str]:
    """Return the names of the environment variables that set the settings in `cls`."""
    return [f"{cls.model_config['env_prefix']}{name}".upper() for name in cls.model_fields]


def compose_settings() -> str:
    """Return the text of settings.yml: names of environment variables without values. Compose gives the services
    those that the user has set.
    """
    services = {}
    for service, parts in _READ_BY.items():
        names = list[str]()
        for cls in parts:
            names += variable_names(cls)
        services[service] = {"environment": names}
    return _HEAD + yaml.safe_dump({"services": services}, sort_keys=False)


if __name__ == "__main__":
    sys.stdout.write(compose_settings())
