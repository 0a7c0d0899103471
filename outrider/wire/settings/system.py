"""The settings of a whole system: what its file says, and what `outrider up` makes of file, flags and environment.

The launcher reads the same form.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.wire.errors import ConfigError
from outrider.wire.requests.drafters import TABLE_DRAFTERS, Drafter
from outrider.wire.settings.config import DraftConfig, GatewayConfig, Seconds, TargetConfig, WorkerConfig
from outrider.wire.settings.pools import Pool, Role, Values, mapping, read_model, read_part, read_pools

_SHORT: tuple[Role, ...] = ("target", "draft")
_KNOWN = frozenset({*_SHORT, "targets", "drafts", "gateways", "gateway", "ray", "scaling", "gpu_memory_utilization"})
_OURS = frozenset({"target", "draft", "target_for_draft", "registry"})
"""Settings of the gateway that follow from where the workers are."""
FROM_POOLS = _OURS | {"model_name"}
"""Settings of the gateway that the pools say: its environment must not."""
START_TIMEOUT_S = 900.0
"""Seconds that workers may take to load their models. Twice as much: one that hangs is reported twice as late."""
NODE_TIMEOUT_S = 300.0
"""Seconds to wait at the start for machines of a cluster that have what the workers need. Twice as much: a machine that
is missing is reported twice as late."""


DEMO_NAME = "outrider-demo"
"""Id under which the demo pair is served: its folder's path would say little."""


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
        """Return whether the workers go on without their launcher, for the next of its name to take over."""
        return self.name is not None and self.address is not None


class ScalingConfig(BaseModel):
    """When a pool with min < max grows and shrinks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    queue_high: float = Field(default=1.0, gt=0)
    """Answers that wait for a place, or were refused one in the last 5 s, for each target: above it, one more is
    started."""
    busy_high: float = Field(default=0.85, gt=0, le=1)
    """Mean share of the time that a pool's targets compute: above it, one more is started. Drafts draft ahead whenever
    they can."""
    busy_low: float = Field(default=0.5, ge=0, lt=1)
    """One is given up when the others would then be busy for less than this."""
    late_high: float = Field(default=0.25, gt=0, le=1)
    """Share of the steps for which drafts were right and came too late: above it, one more draft is started."""
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
    gpu_memory_utilization: float | None = None
    """Share of each GPU that its workers may take together; None = GPU_FRACTION of what is free for one alone."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Read {"targets": {name: {...}}, "drafts": {name: {...}}, "gateways": 1, "gateway", "ray", "scaling",
        "gpu_memory_utilization"}.

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
        drafter = gateway_config(gateway, target="127.0.0.1:0").drafter
        gateways = values.get("gateways", 1)
        if type(gateways) is not int or not 0 <= gateways <= 64:
            raise ConfigError(f"gateways is {gateways!r}, must be a number from 0 to 64")
        system = cls(
            pools=pools,
            ray=ray,
            scaling=read_model("scaling", ScalingConfig, values.get("scaling", {})),
            gateways=gateways,
            gateway=gateway,
            gpu_memory_utilization=_utilization(values.get("gpu_memory_utilization")),
        )
        if ray is None:
            system._check_plain()
        system._check_drafter(drafter)
        return system

    @property
    def targets(self) -> list[Pool]:
        return [pool for pool in self.pools if pool.role == "target"]

    @property
    def drafts(self) -> list[Pool]:
        return [pool for pool in self.pools if pool.role == "draft"]

    def ending_with_launcher(self) -> list[Pool]:
        """Return split targets of a system with a name: Ray ends their ranks with the launcher all the same."""
        if self.ray is None or self.ray.name is None:
            return []
        return [one for one in self.targets if isinstance(one.worker, TargetConfig) and one.worker.tensor_parallel > 1]

    def to_json(self) -> str:
        """Return one line that `read` takes: what differs from the defaults."""
        return json.dumps(
            {
                "targets": {pool.name: pool.values() for pool in self.targets},
                "drafts": {pool.name: pool.values() for pool in self.drafts},
                "ray": self.ray and self.ray.model_dump(exclude_unset=True),
                "scaling": self.scaling.model_dump(exclude_unset=True),
                "gateways": self.gateways,
                "gateway": self.gateway,
                "gpu_memory_utilization": self.gpu_memory_utilization,
            }
        )

    def _check_drafter(self, drafter: Drafter) -> None:
        """What nobody here would draft by."""
        own = drafter.own
        if drafter.needs_pools and len(self.drafts) < 2:
            there = f"is {'one pool' if self.drafts else 'no pool'} of drafts; name two"
            raise ConfigError(f"gateway.drafter is {drafter} and there {there}")
        if own is None:
            return
        if drafter.needs_draft_worker and not self.drafts:
            raise ConfigError(f"gateway.drafter is {drafter} and there is no draft; add one, or say {own}")
        named = [pool.worker.drafter for pool in self.drafts if isinstance(pool.worker, DraftConfig)]
        if own.reads_text and own not in named and not any(pool.worker.drafter_text for pool in self.targets):
            raise ConfigError(
                f"gateway.drafter is {drafter} and no target has a drafter_text to count in; name one, as with "
                "OUTRIDER_TARGET_DRAFTER_TEXT=FILE"
            )

    def _check_plain(self) -> None:
        """Without Ray: what nobody would do."""
        if len(self.targets) > 1:
            raise ConfigError("without Ray there is one pool of targets; leave --no-ray out")
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
    """Return the gateway's settings once the workers or their registry have addresses. Raises ConfigError.

    `workers`: registry, or target, draft and model_name.
    """
    for name in _OURS & set(values):
        raise ConfigError(f"gateway.{name} is {values[name]!r}: it follows from where the workers run; leave it out")
    return read_part("gateway", GatewayConfig, {**values, **dict.fromkeys(FROM_POOLS), **workers})


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice in one place: YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                mark = key.start_mark  # its name is the file's
                raise ConfigError(f"{mark.name}, line {mark.line + 1}: {key.value!r} is there twice; keep one")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Values:
    """Return the parts named in a YAML file. Raises ConfigError naming the file and what is wrong with it."""
    try:
        with path.open(encoding="utf-8") as file:
            values = yaml.load(file, _Loader)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if values is None:
        raise ConfigError(f"{path} is empty; name a part, such as target: {{model: FOLDER}}, or leave --config out")
    return mapping(str(path), values)


def flags(config: WorkerConfig | GatewayConfig) -> list[str]:
    """Return the command line that gives a process these settings: those that were set, not the defaults."""
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
    """Return the demo pair's folder of "target" or "draft". Raises ConfigError where only the package is installed."""
    folder = Path(__file__).resolve().parents[3] / "models" / "demo" / role
    if not folder.is_dir():
        raise ConfigError(f"no demo {role} at {folder}: install from a source checkout, or say --{role} MODEL")
    return str(folder)


def _utilization(value: object) -> float | None:
    """Raise ConfigError for what is no share of a GPU."""
    if value is None:
        return None
    try:
        share = float(str(value))
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"gpu_memory_utilization is {value!r}, must be above 0 and at most 1")
    return share


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


def merged(
    file: Values,
    flags: Values,
    *,
    no_draft: bool,
    no_ray: bool,
    certificates: Path | None = None,
    gpu_memory_utilization: str | None = None,
) -> SystemConfig:
    """Return `outrider up`'s settings: flags over the file over the environment over the demo pair.

    flags: by part, None where one was not given. certificates: the folder of `outrider certs`, with one for each part.
    gpu_memory_utilization: share of each GPU that its workers may take together. Raises ConfigError naming what is
    wrong or contradicts.
    """
    if no_draft and flags["draft"]["model"] is not None:
        raise ConfigError("--no-draft and --draft contradict each other; leave one out")
    if no_draft and flags["gateway"].get("tree") is not None:
        raise ConfigError("--no-draft and --tree contradict each other: a draft worker makes trees; leave one out")
    if no_ray and flags["ray"]["address"] is not None:
        raise ConfigError("--no-ray and --ray-address contradict each other; leave one out")
    flags = {**flags, "draft": _draft(flags["draft"], file.get("draft"))}
    off = {"draft": no_draft, "ray": no_ray}
    if "targets" in file or "drafts" in file:
        flags = _without_workers(flags, no_draft)
    values: dict[str, Any] = {**file, **{part: _part(part, file, flags[part], off.get(part, False)) for part in flags}}
    if "target" in flags:
        _fill_pair(values)
    serve_metrics(values)
    if certificates is not None:
        _use_certificates(values, certificates.absolute())
    if gpu_memory_utilization is not None:
        values["gpu_memory_utilization"] = gpu_memory_utilization
    return SystemConfig.read(values)


def serve_metrics(values: Values) -> None:
    """Give each worker a Prometheus endpoint, at a free port, unless its settings say another or null."""
    for role, pool in _workers(values):
        if not _in_environment(role, "metrics_port"):
            pool.setdefault("metrics_port", 0)


def _use_certificates(values: Values, folder: Path) -> None:
    """Every part its own, on all connections between them."""
    parts = [*_workers(values), ("gateway", values.get("gateway")), ("launcher", values.get("ray"))]
    for part, given in parts:
        if isinstance(given, dict):
            given["tls_dir"] = str(folder / part)


def _without_workers(flags: Values, no_draft: bool) -> Values:
    """The file names pools: flags for the one target or draft would be about none of them."""
    given = [(role, name) for role in _SHORT for name, value in flags[role].items() if value is not None]
    if no_draft or given:
        flag = "--no-draft" if no_draft else flag_of(*given[0])
        raise ConfigError(f"{flag} is for one target and one draft, and the file names pools; say it there")
    return {part: values for part, values in flags.items() if part not in _SHORT}


def flag_of(role: str, name: str) -> str:
    """Return the flag of a worker's setting."""
    if name == "dtype":  # for both
        return "--dtype"
    if name in ("model", "drafter", "drafter_text"):
        return f"--{role}"
    return f"--{role}-{name.removeprefix('cpu_').replace('_', '-')}"


def _part(part: str, file: Values, flags: Values, off: bool) -> Values | None:
    """None = without this part: so said a flag, or the file and no flag."""
    given = {name: value for name, value in flags.items() if value is not None}
    from_file = file.get(part, {})
    if from_file is not None and not isinstance(from_file, dict):
        raise ConfigError(f"{part} is {from_file!r}, must be settings by name, as {{NAME: VALUE}}")
    if off or (from_file is None and not {"model", "drafter", "address"} & set(given)):
        return None
    return {**(from_file or {}), **given}


def _draft(flags: Values, from_file: object) -> Values:
    """`--draft`: a model, or one of those that need none, the latter with a text where they count in one."""
    named = flags["model"]
    if named is None:
        return flags
    drafter, _, text = str(named).partition(":")
    if drafter in TABLE_DRAFTERS:
        return {**flags, "model": None, "drafter": drafter, "drafter_text": text or None}
    said = (isinstance(from_file, dict) and "drafter" in from_file) or _in_environment("draft", "drafter")
    return {**flags, "drafter": "model"} if said else flags


def _is_of_tables(role: str, settings: Values) -> bool:
    """A draft without a model, which takes its tokenizer from the target where it names none."""
    drafter = settings.get("drafter") or os.environ.get("OUTRIDER_DRAFT_DRAFTER")
    return role == "draft" and drafter in TABLE_DRAFTERS and "model" not in settings


def _fill_pair(values: Values) -> None:
    """The demo pair where no model is named at all; half a pair is refused."""
    wanted = [role for role in _SHORT if values[role] is not None and not _is_of_tables(role, values[role])]
    unnamed = [role for role in wanted if "model" not in values[role] and not _in_environment(role, "model")]
    if unnamed and len(unnamed) < len(wanted):
        missing = unnamed[0]
        if missing == "draft":
            raise ConfigError(
                "only one model of the pair is named; say --draft MODEL, a drafter without a model "
                f"({', '.join(TABLE_DRAFTERS)}), or --no-draft"
            )
        named = values["draft"].get("model") or os.environ["OUTRIDER_DRAFT_MODEL"]
        raise ConfigError(f"only one model of the pair is named, {named!r} as draft; say --target MODEL")
    for role in unnamed:
        values[role]["model"] = demo_model(role)
    if unnamed and values["gateway"] is not None and not _in_environment("gateway", "model_name"):
        values["gateway"].setdefault("model_name", DEMO_NAME)


def _workers(values: Values) -> list[tuple[str, Values]]:
    """(role, settings) of each pool, where they have a form at all; `SystemConfig` says what is wrong with others."""
    pools = [(role, values.get(role)) for role in _SHORT]
    for role in _SHORT:
        named = values.get(f"{role}s")
        pools += [(role, pool) for pool in named.values()] if isinstance(named, dict) else []
    return [(role, pool) for role, pool in pools if isinstance(pool, dict)]


def _in_environment(role: str, setting: str) -> bool:
    return f"OUTRIDER_{role}_{setting}".upper() in os.environ
