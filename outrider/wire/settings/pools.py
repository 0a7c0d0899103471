"""`Pool`, the settings of the workers of one role and one model: how many, with which settings, on which machines.
`system` reads pools as parts of a system's settings.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import (
    DraftConfig,
    GatewayConfig,
    TargetConfig,
    WorkerConfig,
    check_variables,
    load,
    location_of,
    reason,
)
from outrider.wire.settings.cores import Role
from outrider.wire.settings.variables import suggest

Values = dict[str, Any]
"""Settings by name, as the user's file gives them. Their values are not checked yet."""
_Settings = TypeVar("_Settings", bound=WorkerConfig | GatewayConfig)
MAX_COUNT = 1000
"""Largest value of `count`, `min` and `max` of a pool, which are numbers of workers."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
"""Matches the name of a pool."""
_LABEL = re.compile(r"[A-Za-z0-9]([\w./-]*[A-Za-z0-9])?")
"""Matches the name of a Ray label."""
_SELECTOR = re.compile(r"!?(in\([\w.,/ -]+\)|[\w./-]*)")
"""Matches the value of a Ray label selector."""
_DRAFT_PREFIX = str(DraftConfig.model_config["env_prefix"])
_SIZE = ("count", "min", "max", "labels", "num_cpus", "num_gpus")
"""Names of the settings of a pool itself; the others are settings of its workers."""


class Pool(BaseModel):
    """A pool: identical workers of one role (target or draft) and one model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    role: Role
    worker: WorkerConfig
    """Settings of every worker of the pool."""
    count: int = Field(default=1, le=MAX_COUNT)
    """Number of workers at the start."""
    min: int = Field(default=1, le=MAX_COUNT)
    """Minimum number of workers, to which the pool shrinks with its load; absent = count."""
    max: int = Field(default=1, le=MAX_COUNT)
    """Maximum number of workers, to which the pool grows with its load; absent = count."""
    labels: dict[str, str] = {}
    """Ray label selector, by label name: the workers run only on machines whose labels match."""
    num_cpus: float | None = Field(default=None, gt=0)
    """Number of CPUs that Ray reserves for each worker, and cores to which it is pinned. Absent = the workers on a CPU
    share the cores of a single machine; on a cluster of several each reserves 1 and is not pinned."""
    num_gpus: float | None = Field(default=None, gt=0)
    """Number of GPUs that Ray reserves for each worker; a fraction = workers share a GPU. With tensor_parallel N it is
    N. Absent = 1, or a part of the cluster's only GPU; 0 for a worker on a CPU."""
    model_name: str | None = None
    """For a pool of targets: the id under which the model is served; None = the model's own id."""
    serves: tuple[str, ...] = ()
    """For a pool of drafts: names of the target pools for which it drafts; empty for a pool of targets."""

    @model_validator(mode="before")
    @classmethod
    def _fill_min_and_max(cls, given: Values) -> Values:
        filled = dict(given)
        for name in ("min", "max"):
            if filled.get(name) is None:
                filled[name] = given.get("count", 1)
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if value is not None and value > 1 and value != int(value):
                raise ValueError(f"{name} is {value:g}: above 1 Ray takes whole numbers only")
        if not self.min <= self.count <= self.max:
            raise ValueError(f"count {self.count} is not within min {self.min} and max {self.max}")
        min_count = 1 if self.role == "target" else 0
        if self.min < min_count:
            raise ValueError(f"min and count must be at least {min_count}; leave the pool out for none")
        for key, value in self.labels.items():
            if not _LABEL.fullmatch(key) or not _SELECTOR.fullmatch(value):
                raise ValueError(
                    f"labels has {key!r}: {value!r}, must look like zone: eu-1, !eu-1, in(a,b) or !in(a,b)"
                )
        return self

    @property
    def setting(self) -> str:
        """Name under which the pool stands in the user's settings, for errors: `target`, `draft`, `targets.NAME` or
        `drafts.NAME`.
        """
        return setting_of(self.role, self.name)

    @property
    def has_model(self) -> bool:
        """Whether the pool's workers run a model. False = they are draft workers that propose tokens from tables, and
        need little of their machine's cores and memory.
        """
        return not isinstance(self.worker, DraftConfig) or self.worker.has_model

    @property
    def drafter_or_model(self) -> str:
        """Text that names the pool's model to users or, for draft workers without a model, their drafter."""
        if isinstance(self.worker, DraftConfig) and not self.worker.has_model:
            return f"{self.worker.drafter}, without a model"
        return self.worker.model

    @property
    def is_sized_by_load(self) -> bool:
        """Whether the pool grows and shrinks with the load, because its `min` and `max` differ."""
        return self.min < self.max

    def member(self, index: int) -> str:
        """Return the name of worker number `index` of this pool, counted from 0. The name is unique in the system, and
        a restarted worker keeps it.
        """
        if self.name == self.role:
            return f"{self.name}-{index}"
        return f"{self.role}-{self.name}-{index}"

    def values(self) -> Values:
        """Return the pool's settings as a mapping from which `read_pools` makes the same pool."""
        values = self.worker.model_dump(exclude_unset=True)
        for name in ("count", "min", "max", "num_cpus", "num_gpus", "model_name"):
            value = getattr(self, name)
            if value is not None:
                values[name] = value
        if self.role == "draft":
            values["serves"] = list(self.serves)
        return {**values, "labels": dict(self.labels)}


def setting_of(role: Role, name: str) -> str:
    """Return the name of a pool in the user's settings. A pool named like its role ("target" or "draft") is `target` or
    `draft`; any other is `targets.NAME` or `drafts.NAME`.
    """
    if name == role:
        return role
    return f"{role}s.{name}"


def read_pools(targets: Mapping[str, Any], drafts: Mapping[str, Any]) -> tuple[Pool, ...]:
    """Check the settings of a system's pools and return the pools, targets first.

    targets, drafts: settings of each pool by its name. Raises ConfigError with the names of pool and setting.
    """
    target_pools = dict[str, Pool]()
    for name, values in targets.items():
        target_pools[name] = _pool("target", name, values, {})
    if not target_pools:
        raise ConfigError("targets is empty: a system needs a target; add one, such as targets: {chat: {model: ...}}")
    pools = list(target_pools.values())
    for name, values in drafts.items():
        pools.append(_pool("draft", name, values, target_pools))
    twice = set(targets) & set(drafts)
    if twice:
        raise ConfigError(f"targets and drafts both have a pool {min(twice)!r}; give them different names")
    return tuple(pools)


def read_section(name: str, cls: type[_Settings], values: object, other_names: Sequence[str] = ()) -> _Settings:
    """Return the settings of a process as an instance of class `cls`. Settings that `values` does not have are taken
    from environment variables.

    name: name of this section of the user's settings, for errors. other_names: names that the section may have besides
    settings of `cls`; `values` must not have them any more, and the error on an unknown name lists them too. Raises
    ConfigError.
    """
    given = mapping(name, values)
    unknown = sorted(set(given) - set(cls.model_fields))
    if unknown:
        raise ConfigError(
            f"{name}.{unknown[0]} is no setting; {suggest(unknown[0], [*cls.model_fields, *other_names])}"
        )
    check_variables(cls)  # before `load`: errors on variables do not need the section's name
    texts: dict[str, str | None] = {}
    for key, value in given.items():
        texts[key] = None if value is None else str(value)
    try:
        return load(cls, **texts)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.message}", param=error.param) from None


def mapping(name: str, values: object) -> Values:
    """Return `values` if it is a mapping with texts as keys; otherwise raise ConfigError. name: name of this section of
    the user's settings, for errors.
    """
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} is {values!r}, must be settings by name, as {{NAME: VALUE}}")
    return values


def read_model(name: str, cls: type[Any], values: object) -> Any:
    """Return an instance of the pydantic model `cls` whose fields are `values`. name: name of this section of the
    user's settings, for errors. Raises ConfigError for a wrong field.
    """
    given = mapping(name, values)
    for setting in given:
        if setting not in cls.model_fields:
            raise ConfigError(f"{name}.{setting} is no setting; {suggest(setting, cls.model_fields)}")
    try:
        return cls(**given)
    except ValidationError as error:
        first = error.errors()[0]
        setting = location_of(first)
        if not setting:  # settings that contradict each other
            raise ConfigError(f"{name}: {reason(first)}") from None
        raise ConfigError(f"{name}.{setting} is {first.get('input')!r}: {reason(first)}", param=setting) from None


def _pool(role: Role, name: str, values: object, targets: Mapping[str, Pool]) -> Pool:
    # targets: the target pools by name, for a draft
    setting = setting_of(role, name)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{role}s has a pool {name!r}: a name is up to 40 of a-z, 0-9 and - between them")
    given = dict(mapping(setting, values))
    own = dict[str, Any]()
    for key in _SIZE:
        if key in given:
            own[key] = given.pop(key)
    own["name"] = name
    own["role"] = role
    if role == "target":
        own["model_name"] = given.pop("model_name", None)
        own["worker"] = read_section(setting, TargetConfig, given, [*_SIZE, "model_name"])
    else:
        served = _read_serves(setting, given, tuple(targets))
        own["serves"] = served
        if served:
            _fill_draft_models(given, targets[served[0]].worker.model)
        own["worker"] = read_section(setting, DraftConfig, given, [*_SIZE, "serves"])
    pool: Pool = read_model(setting, Pool, own)
    _check_several(pool)
    return pool


def _fill_draft_models(given: Values, target_model: str) -> None:
    if _needs_no_model(given):
        given["model"] = target_model  # for its tokenizer
    elif given.get("drafter", "model") == "model" and f"{_DRAFT_PREFIX}TARGET_MODEL" not in os.environ:
        given.setdefault("target_model", target_model)  # in case the draft is a head


def _needs_no_model(given: Values) -> bool:
    model = given.get("model") or os.environ.get(f"{_DRAFT_PREFIX}MODEL")
    drafter = given.get("drafter") or os.environ.get(f"{_DRAFT_PREFIX}DRAFTER")
    return not model and drafter not in (None, "", "model")


def _read_serves(setting: str, given: Values, targets: tuple[str, ...]) -> tuple[str, ...]:
    # A list of names of target pools, or one; may be absent where there is one target pool only.
    value = given.pop("serves", None)
    if value is None and len(targets) == 1:
        return targets
    names = value
    if isinstance(value, str):
        names = (value,)
    known = ", ".join(targets)
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError(f"{setting}.serves is {value!r}, must be a list of target pools; there are {known}")
    for name in names:
        if name not in targets:
            raise ConfigError(f"{setting}.serves has {name!r}, which is no target pool; there are {known}")
    return tuple(dict.fromkeys(names))


def _check_several(pool: Pool) -> None:
    # Settings that cannot be the same for several workers.
    if pool.max == 1:
        return
    if isinstance(pool.worker, TargetConfig) and pool.worker.tensor_parallel > 1:
        raise ConfigError(
            f"{pool.setting}.tensor_parallel is {pool.worker.tensor_parallel} and its count or max {pool.max}: a pool "
            "has one split target; make a pool for each"
        )
    for name in ("port", "metrics_port"):
        if getattr(pool.worker, name) and not pool.labels:  # with labels each worker may have a machine of its own
            raise ConfigError(
                f"{pool.setting}.{name} is {getattr(pool.worker, name)} for up to {pool.max} workers, which may share "
                "a machine; leave it out, and each takes a free one, or name machines with room for one each by labels"
            )
