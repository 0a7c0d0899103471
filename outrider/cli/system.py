"""The settings of a whole system, from a YAML file and the command line. The launcher reads the same form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import outrider
from outrider.wire.config import Config, DraftConfig, GatewayConfig, Seconds, TargetConfig, load, reason
from outrider.wire.errors import ConfigError

Values = dict[str, Any]
_PARTS = {"target": TargetConfig, "draft": DraftConfig, "gateway": GatewayConfig}
_OURS = frozenset({"target", "draft", "target_for_draft"})
"""Settings of the gateway that follow from where the workers are."""


class RayConfig(BaseModel):
    """How Ray places the workers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    address: str | None = None
    """A running cluster's address, or "auto"; absent = start Ray on this machine and end it with the system.

    A cluster of one machine: workers listen on addresses that the gateway reaches on its own machine alone.
    """
    target_gpus: float | None = Field(default=None, gt=0)
    """GPUs to reserve for the target, a fraction to share one; absent = 1, or half when there is one for both.

    With tensor_parallel N it is N: one for each rank.
    """
    draft_gpus: float | None = Field(default=None, gt=0)
    """The same for the draft."""
    start_timeout_s: Seconds = 900.0
    """How long the workers may take to load their models."""


class SystemConfig(BaseModel):
    """A pair, how it is placed, and its gateway. `gateway` holds only what was given: addresses come later."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: TargetConfig
    draft: DraftConfig | None
    ray: RayConfig | None
    """None = plain processes."""
    gateway: Values

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From {"target": {...}, "draft": {...} | None, "ray": {...} | None, "gateway": {...}}.

        Each part's settings come over those of its environment variables. Raises ConfigError naming part and setting.
        """
        unknown = sorted(set(values) - {*_PARTS, "ray"})
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no part of a system; known: draft, gateway, ray, target")
        gateway = _mapping("gateway", values.get("gateway", {}))
        gateway_config(gateway, "127.0.0.1:0", None)
        draft, ray = values.get("draft"), values.get("ray", {})
        return cls(
            target=_part("target", TargetConfig, values.get("target", {})),
            draft=None if draft is None else _part("draft", DraftConfig, draft),
            ray=None if ray is None else _ray(ray),
            gateway=gateway,
        )

    def to_json(self) -> str:
        """One line that `read` takes: what differs from the defaults."""
        values = {name: getattr(self, name) for name in ("target", "draft", "ray")}
        given = {name: value and value.model_dump(exclude_unset=True) for name, value in values.items()}
        return json.dumps({**given, "gateway": self.gateway})


def workers_of(config: SystemConfig) -> dict[str, TargetConfig | DraftConfig]:
    """By role; no draft without one."""
    workers: dict[str, TargetConfig | DraftConfig] = {"target": config.target}
    return workers if config.draft is None else {**workers, "draft": config.draft}


def gateway_config(values: Values, target: str, draft: str | None) -> GatewayConfig:
    """The gateway's settings once the workers have addresses ("host:port"). Raises ConfigError."""
    for name in _OURS & set(values):
        raise ConfigError(f"gateway.{name} is {values[name]!r}: it follows from where the workers run; leave it out")
    return _part("gateway", GatewayConfig, {**values, "target": target, "draft": draft})


def read_yaml(path: Path) -> Values:
    """The parts named in a YAML file. Raises ConfigError naming the file and what is wrong with it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    return _mapping(str(path), values)


def flags(config: TargetConfig | DraftConfig | GatewayConfig) -> list[str]:
    """The command line that gives a process these settings: those that were set, not the defaults."""
    line: list[str] = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name not in config.model_fields_set or value is None:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            line.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            line += [f"--{flag}", str(value)]
    return line


def demo_model(role: str) -> str:
    """Folder of the demo pair's "target" or "draft". Raises ConfigError where only the package is installed."""
    folder = Path(outrider.__file__).resolve().parents[1] / "models" / "demo" / role
    if not folder.is_dir():
        raise ConfigError(f"no demo {role} at {folder}: install from a source checkout, or say --{role} MODEL")
    return str(folder)


def _mapping(name: str, values: object) -> Values:
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} is {values!r}, must be settings by name")
    return values


def _part(name: str, cls: type[Config], values: object) -> Config:
    given = _mapping(name, values)
    unknown = sorted(set(given) - set(cls.model_fields))
    if unknown:
        raise ConfigError(f"{name}.{unknown[0]} is no setting; known: {', '.join(sorted(cls.model_fields))}")
    prefix = str(cls.model_config["env_prefix"])
    environ = {key: value for key, value in os.environ.items() if key.upper().startswith(prefix)}
    environ.update({f"{prefix}{key}".upper(): str(value) for key, value in given.items() if value is not None})
    try:
        return load(cls, environ=environ)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.message}", param=error.param) from None


def _ray(values: object) -> RayConfig:
    try:
        return RayConfig(**_mapping("ray", values))
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"ray.{setting} is {first.get('input')!r}: {reason(first)}", param=setting) from None
