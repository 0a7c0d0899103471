"""Settings as a process reads them from an environment of a test's."""

import os
from typing import Any

import pytest

from outrider.wire.settings import config as settings_of
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig

ALL = [DraftConfig, TargetConfig, GatewayConfig]
NEEDED = {DraftConfig: {"model": "m"}, TargetConfig: {"model": "m"}, GatewayConfig: {"target": "h:1"}}


def env(cls: Any, **settings: object) -> dict[str, str]:
    prefix = cls.model_config["env_prefix"]
    return {f"{prefix}{name}".upper(): str(value) for name, value in {**NEEDED[cls], **settings}.items()}


def load(cls: Any, argv: list[str], environ: dict[str, str]) -> Any:
    """Read as a process does whose environment is this one."""
    with pytest.MonkeyPatch.context() as patched:
        for name in [name for name in os.environ if name.startswith("OUTRIDER_")]:
            patched.delenv(name)
        for name, value in environ.items():
            patched.setenv(name, value)
        return settings_of.load(cls, argv)
