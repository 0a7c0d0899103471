"""`outrider up`'s settings: flags over the file over the environment over the demo pair."""

from __future__ import annotations

import os
from typing import Any

from outrider.cli.system import SystemConfig, Values, demo_model
from outrider.wire.errors import ConfigError

DEMO_NAME = "outrider-demo"
"""Id under which the demo pair is served: its folder's path would say little."""
_ROLES = ("target", "draft")


def merged(file: Values, flags: Values, *, no_draft: bool, no_ray: bool) -> SystemConfig:
    """`flags` by part, None where one was not given. Raises ConfigError naming what is wrong or contradicts."""
    if no_draft and flags["draft"]["model"] is not None:
        raise ConfigError("--no-draft and --draft contradict each other; leave one out")
    if no_ray and flags["ray"]["address"] is not None:
        raise ConfigError("--no-ray and --ray-address contradict each other; leave one out")
    off = {"draft": no_draft, "ray": no_ray}
    values: dict[str, Any] = {**file, **{part: _part(part, file, flags[part], off.get(part, False)) for part in flags}}
    if _default_models(values) and values["gateway"] is not None and not _in_environment("gateway", "model_name"):
        values["gateway"].setdefault("model_name", DEMO_NAME)
    for role in _ROLES:
        if values[role] is not None and not _in_environment(role, "metrics_port"):
            values[role].setdefault("metrics_port", 0)
    return SystemConfig.read(values)


def _part(part: str, file: Values, flags: Values, off: bool) -> Values | None:
    """None = without this part: so said a flag, or the file and no flag."""
    given = {name: value for name, value in flags.items() if value is not None}
    from_file = file.get(part, {})
    if from_file is not None and not isinstance(from_file, dict):
        raise ConfigError(f"{part} is {from_file!r}, must be settings by name")
    if off or (from_file is None and not {"model", "address"} & set(given)):
        return None
    return {**(from_file or {}), **given}


def _default_models(values: Values) -> bool:
    """The demo pair where no model is named at all; half a pair is refused. Whether the demo pair was taken."""
    wanted = [role for role in _ROLES if values[role] is not None]
    unnamed = [role for role in wanted if "model" not in values[role] and not _in_environment(role, "model")]
    if unnamed and len(unnamed) < len(wanted):
        missing = unnamed[0]
        alone = " or --no-draft" if missing == "draft" else ""
        raise ConfigError(f"only one model of the pair is named; say --{missing} MODEL{alone}")
    for role in unnamed:
        values[role]["model"] = demo_model(role)
    return bool(unnamed)


def _in_environment(role: str, setting: str) -> bool:
    return f"OUTRIDER_{role}_{setting}".upper() in os.environ
