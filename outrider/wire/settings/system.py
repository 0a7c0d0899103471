"""The settings of a whole system, from a YAML file and the command line. The launcher reads the same form."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

import outrider
from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import GatewayConfig, Seconds, TargetConfig, WorkerConfig
from outrider.wire.settings.pools import Pool, Role, Values, mapping, read_model, read_part, read_pools

_SHORT: tuple[Role, ...] = ("target", "draft")
_KNOWN = frozenset({*_SHORT, "targets", "drafts", "gateways", "gateway", "ray", "scaling"})
_OURS = frozenset({"target", "draft", "target_for_draft", "registry"})
"""Settings of the gateway that follow from where the workers are."""
FROM_POOLS = _OURS | {"model_name"}
"""Settings of the gateway that the pools say: its environment must not."""
MAX_GATEWAYS = 64
START_TIMEOUT_S = 900.0
"""How long workers may take to load their models. Twice as much: one that hangs is reported twice as late."""
NODE_TIMEOUT_S = 300.0
"""How long to wait at the start for machines of a cluster that have what the workers need."""


class RayConfig(BaseModel):
    """How Ray places the workers, and how gateways hear of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    address: str | None = None
    """A running cluster's address, or "auto"; absent = start Ray on this machine and end it with the system."""
    name: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    """The system's name on the cluster. With it, workers outlive a launcher that was killed, and the next of this name
    takes them over, but for split targets (tensor_parallel); absent = they end with it."""
    registry: str | None = Field(default=None, pattern=r"^.+:\d{1,5}$")
    """host:port that gateways join at; port 0 takes a free one. Absent = a free one that only this machine reaches, or
    0.0.0.0:7000 when the launcher runs alone."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem for the registry and for the calls to workers, as at the workers."""

    @property
    def workers_outlive_launcher(self) -> bool:
        """For the next one of its name to take over: they and their Ray are not the launcher's own."""
        return self.name is not None and self.address is not None


class ScalingConfig(BaseModel):
    """When a pool with min < max grows and shrinks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    queue_high: float = Field(default=1.0, gt=0)
    """Answers that wait for a place, or were refused one in the last 5 s, for each target: above it, one more is
    started."""
    busy_high: float = Field(default=0.85, gt=0, le=1)
    """Mean share of the time that a pool's workers compute: above it, one more is started."""
    busy_low: float = Field(default=0.5, ge=0, lt=1)
    """One is given up when the others would then be busy for less than this."""
    late_high: float = Field(default=0.25, gt=0, le=1)
    """Share of the rounds whose proposal came too late: above it, one more draft is started."""
    up_after_s: Seconds = 5.0
    """How long it must be too much without a pause."""
    down_after_s: Seconds = 60.0
    """How long it must be too little without a pause."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.busy_low >= self.busy_high:
            raise ValueError(f"busy_low {self.busy_low:g} is not below busy_high {self.busy_high:g}")
        return self


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """Pools of workers, how they are placed, and the gateways. `gateway` holds what was given: addresses come later."""

    pools: tuple[Pool, ...]
    """Targets first."""
    ray: RayConfig | None
    """None = plain processes."""
    scaling: ScalingConfig
    gateways: int
    gateway: Values

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """From {"targets": {name: {...}}, "drafts": {name: {...}}, "gateways": 1, "gateway", "ray", "scaling"}.

        "target" and "draft" with a worker's settings are short for one pool each, named so, with one worker; "ray":
        None is for plain processes. Settings come over those of environment variables. Raises ConfigError naming pool
        and setting.
        """
        unknown = sorted(set(values) - _KNOWN)
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no part of a system; known: {', '.join(sorted(_KNOWN))}")
        ray = None if values.get("ray", {}) is None else read_model("ray", RayConfig, values.get("ray", {}))
        gateway = dict(mapping("gateway", values.get("gateway", {})))
        pools = read_pools(*_pools_of(values, gateway))
        gateway_config(gateway, target="127.0.0.1:0")
        system = cls(
            pools=pools,
            ray=ray,
            scaling=read_model("scaling", ScalingConfig, values.get("scaling", {})),
            gateways=_num_gateways(values.get("gateways", 1)),
            gateway=gateway,
        )
        if ray is None:
            system._check_plain()
        return system

    @property
    def targets(self) -> list[Pool]:
        return [pool for pool in self.pools if pool.role == "target"]

    @property
    def drafts(self) -> list[Pool]:
        return [pool for pool in self.pools if pool.role == "draft"]

    def ending_with_launcher(self) -> list[Pool]:
        """Of a system with a name: split targets, whose ranks Ray ends with the launcher all the same."""
        if self.ray is None or self.ray.name is None:
            return []
        return [one for one in self.targets if isinstance(one.worker, TargetConfig) and one.worker.tensor_parallel > 1]

    def to_json(self) -> str:
        """One line that `read` takes: what differs from the defaults."""
        return json.dumps(
            {
                "targets": {pool.name: pool.values() for pool in self.targets},
                "drafts": {pool.name: pool.values() for pool in self.drafts},
                "ray": self.ray and self.ray.model_dump(exclude_unset=True),
                "scaling": self.scaling.model_dump(exclude_unset=True),
                "gateways": self.gateways,
                "gateway": self.gateway,
            }
        )

    def _check_plain(self) -> None:
        """Without Ray: what nobody would do."""
        if len(self.targets) > 1 or len(self.drafts) > 1:
            raise ConfigError("without Ray there is one pool of targets and one of drafts; leave --no-ray out")
        for pool in self.pools:
            for name, given in (
                ("labels", bool(pool.labels)),
                ("num_cpus", pool.num_cpus is not None),
                ("num_gpus", pool.num_gpus is not None),
                ("min and max", pool.sized_by_load),
            ):
                if given:
                    raise ConfigError(
                        f"{pool.setting}: {name} and no Ray, which would see to it; leave one of them out"
                    )


def gateway_config(values: Values, **workers: str | None) -> GatewayConfig:
    """The gateway's settings once the workers or their registry have addresses. Raises ConfigError.

    `workers`: registry, or target, draft and model_name.
    """
    for name in _OURS & set(values):
        raise ConfigError(f"gateway.{name} is {values[name]!r}: it follows from where the workers run; leave it out")
    return read_part("gateway", GatewayConfig, {**values, **dict.fromkeys(FROM_POOLS), **workers})


def read_yaml(path: Path) -> Values:
    """The parts named in a YAML file. Raises ConfigError naming the file and what is wrong with it."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    return mapping(str(path), values)


def flags(config: WorkerConfig | GatewayConfig) -> list[str]:
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


def _pools_of(values: Mapping[str, Any], gateway: Values) -> tuple[Values, Values]:
    """Settings of the target pools and of the draft pools, by name. Takes the model's name out of `gateway`."""
    if "targets" in values:
        return _pools_in_full(values, gateway)
    if "drafts" in values:
        raise ConfigError("drafts without targets: name the pools of both, or say target and draft for one of each")
    found: dict[Role, Values] = {"target": {}, "draft": {}}
    for role in _SHORT:
        part = values.get(role, {} if role == "target" else None)
        if part is not None:
            found[role][role] = dict(mapping(role, part))
    name = gateway.pop("model_name", None) or os.environ.get("OUTRIDER_GATEWAY_MODEL_NAME")
    if name is not None:
        found["target"]["target"].setdefault("model_name", str(name))
    return found["target"], found["draft"]


def _pools_in_full(values: Mapping[str, Any], gateway: Values) -> tuple[Values, Values]:
    for role in _SHORT:
        if values.get(role) is not None:
            raise ConfigError(f"{role} and targets are two forms of the same; make it a pool in {role}s")
    if "model_name" in gateway:
        raise ConfigError(f"gateway.model_name is {gateway['model_name']!r}; pools say targets.NAME.model_name")
    return mapping("targets", values["targets"]), mapping("drafts", values.get("drafts") or {})


def _num_gateways(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_GATEWAYS:
        raise ConfigError(f"gateways is {value!r}, must be a number from 0 to {MAX_GATEWAYS}")
    return value
