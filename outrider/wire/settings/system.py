"""`SystemConfig`, the settings of a whole system: pools of workers, gateways and how they are placed.

The launcher reads it from a file; `outrider up` merges file, flags and environment (`merged`).
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
from outrider.wire.settings.cores import Role
from outrider.wire.settings.pools import Pool, Values, mapping, read_model, read_pools, read_section

_ROLES: tuple[Role, ...] = ("target", "draft")
"""Keys of a system's file whose values are one pool each. (Under "targets" and "drafts" there are several by name.)"""
_KNOWN = frozenset({*_ROLES, "targets", "drafts", "gateways", "gateway", "ray", "scaling", "gpu_memory_utilization"})
"""All keys that a system's file may have."""
_FROM_ADDRESSES = frozenset({"target", "draft", "target_for_draft", "registry"})
"""Names of the gateway's settings that are set from the workers' addresses, so that users must not give them."""
FROM_POOLS = _FROM_ADDRESSES | {"model_name"}
"""Names of those gateway settings that the launcher derives from the pools of workers. Environment variables for these
settings are ignored."""
START_TIMEOUT_S = 900.0
"""Maximum seconds for workers to load their models and start."""
NODE_TIMEOUT_S = 300.0
"""Maximum seconds for which the start waits until the cluster has machines with the CPUs and GPUs that the workers
need."""


DEMO_NAME = "outrider-demo"
"""Model id under which the demo pair is served."""


class RayConfig(BaseModel):
    """Settings of Ray, which places the workers, and of the registry, from which gateways get the list of workers."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    address: str | None = None
    """Address of a running cluster, or "auto"; absent = start Ray on this machine and end it with the system."""
    name: str | None = Field(default=None, pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")
    """Name of the system on the cluster. If it is given, workers outlive a launcher that was killed, and the next
    launcher of that name takes them over; targets with tensor_parallel end nevertheless. Absent = workers end with
    their launcher."""
    registry: str | None = Field(default=None, pattern=r"^.+:\d{1,5}$")
    """host:port on which the launcher's registry listens for gateways; port 0 = any free port. Absent = a free port
    that only this machine reaches, or 0.0.0.0:7000 for a launcher that was not started by `outrider up`."""
    tls_dir: str | None = None
    """Folder with ca.pem, cert.pem and key.pem, for TLS on the registry's connections and on the launcher's calls to
    workers."""

    @property
    def workers_outlive_launcher(self) -> bool:
        """Whether workers keep running after their launcher has ended, until the next launcher of a system with the
        same name takes them over.
        """
        return self.name is not None and self.address is not None


class ScalingConfig(BaseModel):
    """Thresholds at which a pool with min < max grows and shrinks."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    queue_high: float = Field(default=1.0, gt=0)
    """A target is added if more than this number of choices per target wait in the queue or were refused in the last 5
    s."""
    busy_high: float = Field(default=0.85, gt=0, le=1)
    """A target is added if the targets of its pool are busy with steps for more than this fraction of the time, on
    average. There is no such limit for drafts, since they draft ahead whenever they can."""
    busy_low: float = Field(default=0.5, ge=0, lt=1)
    """A worker is removed if the remaining workers of its pool would be busy for less than this fraction of the
    time."""
    late_high: float = Field(default=0.25, gt=0, le=1)
    """A draft is added if in more than this fraction of the steps draft tokens equalled the output but arrived too
    late."""
    up_after_s: Seconds = 5.0
    """Seconds for which the load must be too high without interruption before a worker is added."""
    down_after_s: Seconds = 60.0
    """Seconds for which the load must be too low without interruption before a worker is removed."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.busy_low >= self.busy_high:
            raise ValueError(f"busy_low {self.busy_low:g} is not below busy_high {self.busy_high:g}")
        return self


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """Settings of a system: pools of workers, how they are placed, and the gateways."""

    pools: tuple[Pool, ...]
    """All pools of workers, the pools of targets first."""
    ray: RayConfig | None
    """Settings of Ray; None = workers are plain processes of this machine."""
    scaling: ScalingConfig
    gateways: int
    """Number of gateways."""
    gateway: Values
    """Settings of every gateway as the user gave them. They lack the workers' addresses, which `gateway_config`
    adds."""
    gpu_memory_utilization: float | None = None
    """Fraction of each GPU's memory that all its workers may take together. None = GPU_FRACTION; a worker that is alone
    on its GPU then takes that fraction of the free memory."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Check the settings of a system, as a file gives them, and return them as a SystemConfig.

        values: {"targets": {name: {...}}, "drafts": {name: {...}}, "gateways": 1, "gateway": {...}, "ray": {...},
        "scaling": {...}, "gpu_memory_utilization": 0.9}; every key may be absent. In place of "targets" and "drafts"
        there may be "target" and "draft", each with the settings of one worker, which becomes a pool of that name.
        "ray": None means plain processes without Ray. These settings override environment variables. Raises ConfigError
        with the names of the pool and of the setting.
        """
        unknown = sorted(set(values) - _KNOWN)
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no part of a system; known: {', '.join(sorted(_KNOWN))}")
        ray = values.get("ray", {})
        if ray is not None:
            ray = read_model("ray", RayConfig, ray)
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
    def target_pools(self) -> list[Pool]:
        """The pools of target workers."""
        return [pool for pool in self.pools if pool.role == "target"]

    @property
    def draft_pools(self) -> list[Pool]:
        """The pools of draft workers."""
        return [pool for pool in self.pools if pool.role == "draft"]

    def pools_ending_with_launcher(self) -> list[Pool]:
        """Return the pools whose workers end with their launcher although the system has a name, so that all others
        outlive it: targets with tensor_parallel. The list is empty for a system without a name.
        """
        if self.ray is None or self.ray.name is None:
            return []
        split = list[Pool]()
        for pool in self.target_pools:
            if isinstance(pool.worker, TargetConfig) and pool.worker.tensor_parallel > 1:
                split.append(pool)
        return split

    def to_json(self) -> str:
        """Return the system's settings as one line of JSON: an object that `read` takes. Settings of workers that were
        not given are left out.
        """
        return json.dumps(
            {
                "targets": {pool.name: pool.values() for pool in self.target_pools},
                "drafts": {pool.name: pool.values() for pool in self.draft_pools},
                "ray": self.ray and self.ray.model_dump(exclude_unset=True),
                "scaling": self.scaling.model_dump(exclude_unset=True),
                "gateways": self.gateways,
                "gateway": self.gateway,
                "gpu_memory_utilization": self.gpu_memory_utilization,
            }
        )

    def _check_drafter(self, drafter: Drafter) -> None:
        # Refuses a default drafter that no worker of this system has.
        own = drafter.own
        if drafter.needs_pools and len(self.draft_pools) < 2:
            num_pools = "one pool" if self.draft_pools else "no pool"
            raise ConfigError(f"gateway.drafter is {drafter} and there is {num_pools} of drafts; name two")
        if own is None:
            return
        if drafter.needs_draft_worker and not self.draft_pools:
            raise ConfigError(f"gateway.drafter is {drafter} and there is no draft; add one, or say {own}")
        if own.reads_text and not self._has_text_for(own):
            raise ConfigError(
                f"gateway.drafter is {drafter} and no target has a drafter_text to count in; name one, as with "
                "OUTRIDER_TARGET_DRAFTER_TEXT=FILE"
            )

    def _has_text_for(self, drafter: Drafter) -> bool:
        for pool in self.pools:
            if pool.role == "target" and pool.worker.drafter_text:
                return True
            if isinstance(pool.worker, DraftConfig) and pool.worker.drafter == drafter:
                return True
        return False

    def _check_plain(self) -> None:
        # Refuses settings that only Ray implements.
        if len(self.target_pools) > 1:
            raise ConfigError("without Ray there is one pool of targets; leave --no-ray out")
        for pool in self.pools:
            for name, is_given in (
                ("labels", bool(pool.labels)),
                ("num_cpus", pool.num_cpus is not None),
                ("num_gpus", pool.num_gpus is not None),
                ("min and max", pool.is_sized_by_load),
            ):
                if is_given:
                    raise ConfigError(
                        f"{pool.setting}: {name} and no Ray, which would see to it; leave one of them out"
                    )


def gateway_config(values: Values, **workers: str | None) -> GatewayConfig:
    """Return the settings of a gateway process, made of the system's settings and the workers' addresses.

    values: `SystemConfig.gateway`. workers: either the setting `registry`, or the settings `target`, `draft` and
    `model_name`. Raises ConfigError for a wrong value, and for a setting in `values` that the workers' addresses give.
    """
    for name in _FROM_ADDRESSES & set(values):
        raise ConfigError(f"gateway.{name} is {values[name]!r}: it follows from where the workers run; leave it out")
    return read_section("gateway", GatewayConfig, {**values, **dict.fromkeys(FROM_POOLS), **workers})


class _Loader(yaml.SafeLoader):
    # Refuses a key that stands twice in one mapping: YAML would take the last one.

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                mark = key.start_mark  # its name is the file's
                raise ConfigError(f"{mark.name}, line {mark.line + 1}: {key.value!r} is there twice; keep one")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> Values:
    """Return the content of a YAML file, which must be a mapping. Raises ConfigError with the file's path and what is
    wrong.
    """
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
    """Return the command-line arguments that give a process these settings. Settings that were not given are
    left out.
    """
    # WorkerConfig(model="M", prefix_caching=False): ["--model", "M", "--no-prefix-caching"]
    line: list[str] = []
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name not in config.model_fields_set or value is None:
            continue
        flag = name.replace("_", "-")
        if value is True:
            line.append(f"--{flag}")
        elif value is False:
            line.append(f"--no-{flag}")
        else:
            line += [f"--{flag}", str(value)]
    return line


def demo_model(role: str) -> str:
    """Return the path of the demo model for role "target" or "draft". Raises ConfigError if there is no clone of the
    repository, since the installed package does not contain the demo models.
    """
    folder = Path(__file__).resolve().parents[3] / "models" / "demo" / role
    if not folder.is_dir():
        raise ConfigError(f"no demo {role} at {folder}: install from a source checkout, or say --{role} MODEL")
    return str(folder)


def _utilization(value: object) -> float | None:
    if value is None:
        return None
    try:
        fraction = float(str(value))
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise ConfigError(f"gpu_memory_utilization is {value!r}, must be above 0 and at most 1")
    return fraction


def _pools_of(values: Mapping[str, Any], gateway: Values) -> tuple[Values, Values]:
    # Settings of the target pools and of the draft pools, by name. Takes model_name out of `gateway`.
    if "targets" in values:
        return _named_pools(values, gateway)
    if "drafts" in values:
        raise ConfigError("drafts without targets: name the pools of both, or say target and draft for one of each")
    found: dict[Role, Values] = {"target": {}, "draft": {}}
    for role in _ROLES:
        default: Values | None = {} if role == "target" else None
        part = values.get(role, default)
        if part is not None:
            found[role][role] = dict(mapping(role, part))
    name = gateway.pop("model_name", None) or os.environ.get("OUTRIDER_GATEWAY_MODEL_NAME")
    if name is not None:
        found["target"]["target"].setdefault("model_name", str(name))
    return found["target"], found["draft"]


def _named_pools(values: Mapping[str, Any], gateway: Values) -> tuple[Values, Values]:
    for role in _ROLES:
        if values.get(role) is not None:
            raise ConfigError(f"{role} and targets are two forms of the same; make it a pool in {role}s")
    if "model_name" in gateway:
        raise ConfigError(f"gateway.model_name is {gateway['model_name']!r}; pools say targets.NAME.model_name")
    return mapping("targets", values["targets"]), mapping("drafts", values.get("drafts") or {})


def merge_settings(
    file: Values,
    flags: Values,
    *,
    no_draft: bool,
    no_ray: bool,
    certificates: Path | None = None,
    gpu_memory_utilization: str | None = None,
) -> SystemConfig:
    """Return the settings of a system that `outrider up` starts. Each setting is taken from the flags, or else from the
    file, or else from the environment. If none of them names a model, the demo pair is served.

    file: content of the system's file. flags: values by section ("target", "draft", "gateway", "ray") and setting, with
    None for a flag that was not given. no_draft: whether to leave out the draft worker. no_ray: whether to leave out
    Ray. certificates: folder that `outrider certs` wrote, with a folder for each kind of process.
    gpu_memory_utilization: fraction of each GPU that its workers may take together. Raises ConfigError for settings
    that are wrong or contradict each other.
    """
    if no_draft and flags["draft"]["model"] is not None:
        raise ConfigError("--no-draft and --draft contradict each other; leave one out")
    if no_draft and flags["gateway"].get("tree") is not None:
        raise ConfigError("--no-draft and --tree contradict each other: a draft worker makes trees; leave one out")
    if no_ray and flags["ray"]["address"] is not None:
        raise ConfigError("--no-ray and --ray-address contradict each other; leave one out")
    flags = {**flags, "draft": _read_draft_flag(flags["draft"], file.get("draft"))}
    is_off = {"draft": no_draft, "ray": no_ray}
    if "targets" in file or "drafts" in file:
        flags = _without_workers(flags, no_draft)
    values: dict[str, Any] = dict(file)
    for part, part_flags in flags.items():
        values[part] = _part(part, file, part_flags, is_off.get(part, False))
    if "target" in flags:
        _fill_pair(values)
    serve_metrics(values)
    if certificates is not None:
        _use_certificates(values, certificates.absolute())
    if gpu_memory_utilization is not None:
        values["gpu_memory_utilization"] = gpu_memory_utilization
    return SystemConfig.read(values)


def serve_metrics(values: Values) -> None:
    """Set `metrics_port` in the settings of every worker to 0, in place, so that each worker serves its metrics on a
    free port. Workers whose settings or environment already give a metrics_port (or null) keep it.
    """
    for role, pool in _workers(values):
        if not _in_environment(role, "metrics_port"):
            pool.setdefault("metrics_port", 0)


def _use_certificates(values: Values, folder: Path) -> None:
    parts = [*_workers(values), ("gateway", values.get("gateway")), ("launcher", values.get("ray"))]
    for part, given in parts:
        if isinstance(given, dict):
            given["tls_dir"] = str(folder / part)


def _without_workers(flags: Values, no_draft: bool) -> Values:
    # For a file that names pools: a flag of the one target or the one draft would be of none of them.
    flag = _first_worker_flag(flags)
    if no_draft:
        flag = "--no-draft"
    if flag is not None:
        raise ConfigError(f"{flag} is for one target and one draft, and the file names pools; say it there")
    return {part: values for part, values in flags.items() if part not in _ROLES}


def _first_worker_flag(flags: Values) -> str | None:
    for role in _ROLES:
        for name, value in flags[role].items():
            if value is not None:
                return flag_of(role, name)
    return None


def flag_of(role: str, name: str) -> str:
    """Return the flag of `outrider up` for a worker's setting: "--draft-cores" for cpu_cores of the draft."""
    if name == "dtype":  # one flag for both workers
        return "--dtype"
    if name in ("model", "drafter", "drafter_text"):
        return f"--{role}"
    return f"--{role}-{name.removeprefix('cpu_').replace('_', '-')}"


def _part(part: str, file: Values, flags: Values, off: bool) -> Values | None:
    # Returns None for a system without this part: a flag turns it off, or the file does and no flag turns it on.
    given = {name: value for name, value in flags.items() if value is not None}
    from_file = file.get(part, {})
    if from_file is not None and not isinstance(from_file, dict):
        raise ConfigError(f"{part} is {from_file!r}, must be settings by name, as {{NAME: VALUE}}")
    if off or (from_file is None and not {"model", "drafter", "address"} & set(given)):
        return None
    return {**(from_file or {}), **given}


def _read_draft_flag(flags: Values, from_file: object) -> Values:
    # --draft is a model, or a drafter that needs none: "bigram:FILE" is {"drafter": "bigram", "drafter_text": "FILE"}.
    draft = flags["model"]
    if draft is None:
        return flags
    drafter, _, text = str(draft).partition(":")
    if drafter in TABLE_DRAFTERS:
        return {**flags, "model": None, "drafter": drafter, "drafter_text": text or None}
    has_drafter = (isinstance(from_file, dict) and "drafter" in from_file) or _in_environment("draft", "drafter")
    if not has_drafter:
        return flags
    return {**flags, "drafter": "model"}


def _is_of_tables(role: str, settings: Values) -> bool:
    # A draft without a model takes the target's tokenizer where it has no setting `model`.
    drafter = settings.get("drafter") or os.environ.get("OUTRIDER_DRAFT_DRAFTER")
    return role == "draft" and drafter in TABLE_DRAFTERS and "model" not in settings


def _fill_pair(values: Values) -> None:
    # Fills in the demo pair where no model is given; refuses half a pair.
    with_model = list[Role]()
    missing = list[Role]()
    for role in _ROLES:
        if values[role] is None or _is_of_tables(role, values[role]):
            continue
        with_model.append(role)
        if "model" not in values[role] and not _in_environment(role, "model"):
            missing.append(role)
    if not missing:
        return
    if len(missing) < len(with_model):
        raise _half_a_pair(missing[0], values)
    for role in missing:
        values[role]["model"] = demo_model(role)
    if values["gateway"] is not None and not _in_environment("gateway", "model_name"):
        values["gateway"].setdefault("model_name", DEMO_NAME)


def _half_a_pair(missing: Role, values: Values) -> ConfigError:
    if missing == "draft":
        return ConfigError(
            "only one model of the pair is named; say --draft MODEL, a drafter without a model "
            f"({', '.join(TABLE_DRAFTERS)}), or --no-draft"
        )
    draft = values["draft"].get("model") or os.environ["OUTRIDER_DRAFT_MODEL"]
    return ConfigError(f"only one model of the pair is named, {draft!r} as draft; say --target MODEL")


def _workers(values: Values) -> list[tuple[str, Values]]:
    # (role, settings) of each pool whose settings are a mapping; `SystemConfig.read` refuses others.
    pools: list[tuple[str, Any]] = [(role, values.get(role)) for role in _ROLES]
    for role in _ROLES:
        named_pools = values.get(f"{role}s")
        if isinstance(named_pools, dict):
            pools += [(role, pool) for pool in named_pools.values()]
    return [(role, pool) for role, pool in pools if isinstance(pool, dict)]


def _in_environment(role: str, setting: str) -> bool:
    return f"OUTRIDER_{role}_{setting}".upper() in os.environ
