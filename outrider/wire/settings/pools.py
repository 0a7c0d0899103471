"""Pools of a system: workers of one role and one model, how many there are, where they may run, and on which cores.

Read by `system`; the launcher and `outrider up` share the cores of one machine out by the same functions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import (
    DraftConfig,
    GatewayConfig,
    TargetConfig,
    WorkerConfig,
    check_variables,
    load,
    meant,
    parse_cores,
    reason,
)

Values = dict[str, Any]
_Part = TypeVar("_Part", bound=WorkerConfig | GatewayConfig)
Role = Literal["target", "draft"]
MAX_COUNT = 1000
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_LABEL = re.compile(r"[A-Za-z0-9]([\w./-]*[A-Za-z0-9])?")
_DRAFT_PREFIX = str(DraftConfig.model_config["env_prefix"])
_SIZE = ("count", "min", "max", "labels", "num_cpus", "num_gpus")
"""What the settings of a pool say besides those of its workers."""
_SELECTOR = re.compile(r"!?(in\([\w.,/ -]+\)|[\w./-]*)")


class Pool(BaseModel):
    """Workers of one role and one model."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    role: Role
    worker: WorkerConfig
    """The settings of each of them."""
    count: int = Field(default=1, le=MAX_COUNT)
    """Workers at the start."""
    min: int = Field(default=1, le=MAX_COUNT)
    """Fewest workers that the load may leave; absent = count."""
    max: int = Field(default=1, le=MAX_COUNT)
    """Most workers that the load may ask for; absent = count."""
    labels: dict[str, str] = {}
    """Labels of the machines that its workers may run on, as Ray's label selectors take them."""
    num_cpus: float | None = Field(default=None, gt=0)
    """CPUs that Ray reserves for a worker, and cores that it pins itself to."""
    num_gpus: float | None = Field(default=None, gt=0)
    """GPUs that Ray reserves for a worker, a fraction to share one; with tensor_parallel N it is N."""
    model_name: str | None = None
    """Of a target: the id under which it is served; None = the model's own."""
    serves: tuple[str, ...] = ()
    """Of a draft: the target pools it drafts for."""

    @model_validator(mode="before")
    @classmethod
    def _min_and_max_are_count(cls, given: Values) -> Values:
        count = given.get("count", 1)
        return {**given, **{name: count for name in ("min", "max") if given.get(name) is None}}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if value is not None and value > 1 and value != int(value):
                raise ValueError(f"{name} is {value:g}: above 1 Ray takes whole numbers only")
        if not self.min <= self.count <= self.max:
            raise ValueError(f"count {self.count} is not within min {self.min} and max {self.max}")
        if self.min < (least := int(self.role == "target")):
            raise ValueError(f"min and count must be at least {least}; leave the pool out for none")
        for key, value in self.labels.items():
            if not _LABEL.fullmatch(key) or not _SELECTOR.fullmatch(value):
                raise ValueError(
                    f"labels has {key!r}: {value!r}, must look like zone: eu-1, !eu-1, in(a,b) or !in(a,b)"
                )
        return self

    @property
    def setting(self) -> str:
        """Return how errors call it: as the user wrote it."""
        return setting_of(self.role, self.name)

    @property
    def has_model(self) -> bool:
        """Return False for drafts that guess from tables, and take next to nothing of their machine."""
        return not isinstance(self.worker, DraftConfig) or self.worker.has_model

    @property
    def works_with(self) -> str:
        """Return the model, or who drafts without one."""
        if isinstance(self.worker, DraftConfig) and not self.worker.has_model:
            return f"{self.worker.drafter}, without a model"
        return self.worker.model

    @property
    def sized_by_load(self) -> bool:
        """Return whether the load says how many workers there are."""
        return self.min < self.max

    def member(self, index: int) -> str:
        """Return the name of one of its workers: unique in the system, and kept through restarts."""
        return f"{self.name}-{index}" if self.name == self.role else f"{self.role}-{self.name}-{index}"

    def values(self) -> Values:
        """Return what `read_pools` takes, less role and name."""
        own = {name: getattr(self, name) for name in ("count", "min", "max", "num_cpus", "num_gpus", "model_name")}
        given = {name: value for name, value in own.items() if value is not None}
        more = {"serves": list(self.serves)} if self.role == "draft" else {}
        return {**self.worker.model_dump(exclude_unset=True), **given, **more, "labels": dict(self.labels)}


def setting_of(role: Role, name: str) -> str:
    """Return how the user wrote a pool: `target` and `draft` alone are short for a pool of that name."""
    return role if name == role else f"{role}s.{name}"


def read_pools(targets: Mapping[str, Any], drafts: Mapping[str, Any]) -> tuple[Pool, ...]:
    """Read settings by name of the pool. Raises ConfigError naming pool and setting."""
    pools = [_pool("target", name, values, {}) for name, values in targets.items()]
    if not pools:
        raise ConfigError("targets is empty: a system needs a target; add one, such as targets: {chat: {model: ...}}")
    served = {pool.name: pool for pool in pools}
    pools += [_pool("draft", name, values, served) for name, values in drafts.items()]
    twice = set(targets) & set(drafts)
    if twice:
        raise ConfigError(f"targets and drafts both have a pool {min(twice)!r}; give them different names")
    return tuple(pools)


def read_part(name: str, cls: type[_Part], values: object, beside: Sequence[str] = ()) -> _Part:
    """Read a process's settings from those given, over those of its environment variables. Raises ConfigError.

    beside: settings that may stand there, too, and were read before.
    """
    given = mapping(name, values)
    unknown = sorted(set(given) - set(cls.model_fields))
    if unknown:
        raise ConfigError(f"{name}.{unknown[0]} is no setting; {meant(unknown[0], [*cls.model_fields, *beside])}")
    check_variables(cls)  # here, for a variable says itself whose it is
    try:
        return load(cls, **{key: None if value is None else str(value) for key, value in given.items()})
    except ConfigError as error:
        raise ConfigError(f"{name}.{error.message}", param=error.param) from None


def mapping(name: str, values: object) -> Values:
    """Return `values` if they are settings by name. Raises ConfigError otherwise."""
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{name} is {values!r}, must be settings by name, as {{NAME: VALUE}}")
    return values


def read_model(name: str, cls: type[Any], values: object) -> Any:
    """Read a plain model of ours from its settings. Raises ConfigError naming it and the setting."""
    given = mapping(name, values)
    for setting in given:
        if setting not in cls.model_fields:
            raise ConfigError(f"{name}.{setting} is no setting; {meant(setting, cls.model_fields)}")
    try:
        return cls(**given)
    except ValidationError as error:
        first = error.errors()[0]
        setting = ".".join(str(part) for part in first["loc"])
        if not setting:  # settings that contradict each other
            raise ConfigError(f"{name}: {reason(first)}") from None
        raise ConfigError(f"{name}.{setting} is {first.get('input')!r}: {reason(first)}", param=setting) from None


def _pool(role: Role, name: str, values: object, targets: Mapping[str, Pool]) -> Pool:
    """`targets`: the target pools by name, for a draft."""
    called = setting_of(role, name)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{role}s has a pool {name!r}: a name is up to 40 of a-z, 0-9 and - between them")
    given = dict(mapping(called, values))
    size = {key: given.pop(key) for key in _SIZE if key in given}
    served = _serves(called, given, tuple(targets)) if role == "draft" else ()
    if served and _needs_no_model(given):
        given["model"] = targets[served[0]].worker.model  # for its tokenizer
    elif served and given.get("drafter", "model") == "model" and f"{_DRAFT_PREFIX}TARGET_MODEL" not in os.environ:
        given.setdefault("target_model", targets[served[0]].worker.model)  # in case it is a head
    model_name = given.pop("model_name", None) if role == "target" else None
    beside = [*_SIZE, "serves" if role == "draft" else "model_name"]
    cls: type[WorkerConfig] = TargetConfig if role == "target" else DraftConfig
    own = {"name": name, "role": role, "worker": read_part(called, cls, given, beside)}
    pool: Pool = read_model(called, Pool, {**size, **own, "model_name": model_name, "serves": served})
    _check_several(pool)
    return pool


def _needs_no_model(given: Values) -> bool:
    """A draft that names none, and guesses without one."""
    named = given.get("model") or os.environ.get(f"{_DRAFT_PREFIX}MODEL")
    drafter = given.get("drafter") or os.environ.get(f"{_DRAFT_PREFIX}DRAFTER")
    return not named and drafter not in (None, "", "model")


def _serves(called: str, given: Values, targets: tuple[str, ...]) -> tuple[str, ...]:
    """A list of names, or one; absent where there is one target pool only."""
    named = given.pop("serves", None)
    if named is None and len(targets) == 1:
        return targets
    names = (named,) if isinstance(named, str) else named
    known = ", ".join(targets)
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError(f"{called}.serves is {named!r}, must be a list of target pools; there are {known}")
    for name in names:
        if name not in targets:
            raise ConfigError(f"{called}.serves has {name!r}, which is no target pool; there are {known}")
    return tuple(dict.fromkeys(names))


def _check_several(pool: Pool) -> None:
    """What cannot be the same for several workers."""
    if pool.max == 1:
        return
    if isinstance(pool.worker, TargetConfig) and pool.worker.tensor_parallel > 1:
        raise ConfigError(
            f"{pool.setting}.tensor_parallel is {pool.worker.tensor_parallel} and its count or max {pool.max}: a pool "
            "has one split target; make a pool for each"
        )
    for name in ("port", "metrics_port"):
        if getattr(pool.worker, name) and not pool.labels:  # machines that are chosen may have room for one each
            raise ConfigError(
                f"{pool.setting}.{name} is {getattr(pool.worker, name)} for up to {pool.max} workers, which may share "
                "a machine; leave it out, and each takes a free one, or name machines with room for one each by labels"
            )


def given_cores(workers: Mapping[str, WorkerConfig]) -> dict[str, frozenset[int]]:
    """Return the cores of those workers whose settings say them, by name."""
    return {name: parse_cores(worker.cpu_cores) for name, worker in workers.items() if worker.cpu_cores}


def check_offered(taken: Iterable[frozenset[int]], offered: frozenset[int]) -> None:
    """Raise ConfigError naming a core that this machine does not offer."""
    asked: frozenset[int] = frozenset().union(*taken)
    if not asked <= offered:
        missing = format_cores(asked - offered)
        raise ConfigError(f"cpu_cores asks for core {missing}, this machine offers {format_cores(offered)}")


def share_cores(
    workers: Mapping[str, tuple[Role, WorkerConfig]],
    on_cpu: Collection[str],
    offered: frozenset[int],
) -> dict[str, frozenset[int] | None]:
    """Return the cores a worker was given, else its share of the rest if it is `on_cpu`; None = not pinned. By name.

    offered: the cores of this machine. Raises ConfigError naming a core that is not among them.
    """
    given = given_cores({name: worker for name, (_, worker) in workers.items()})
    check_offered(given.values(), offered)
    free = sorted((offered - frozenset().union(*given.values())) or offered)
    sharing = [name for name in workers if name not in given and name in on_cpu]
    numbers = {role: sum(workers[name][0] == role for name in sharing) for role in ("target", "draft")}
    of_target, of_draft = shares(len(free), numbers["target"], numbers["draft"])
    shared: dict[str, frozenset[int] | None] = dict.fromkeys(workers, None)
    begin = 0.0
    for name in sorted(sharing, key=lambda name: workers[name][0]):  # drafts have the first cores, and share them first
        share = of_target if workers[name][0] == "target" else of_draft
        shared[name] = frozenset(free[(int(begin) + step) % len(free)] for step in range(int(max(1.0, share))))
        begin += share
    return {**shared, **given}


def shares(num_cores: int, num_targets: int, num_drafts: int) -> tuple[float, float]:
    """Return cores of (each target, each draft): disjoint if there are enough, a quarter for the drafts in all.

    Below 1 where workers share a core.
    """
    num_workers = num_targets + num_drafts
    if num_workers > num_cores:
        return (int(100 * num_cores / num_workers) / 100,) * 2
    of_draft = max(1, num_cores // 4 // num_drafts) if num_drafts and num_targets else 0
    if not num_targets:
        return 0.0, float(num_cores // max(1, num_drafts))
    return float((num_cores - of_draft * num_drafts) // num_targets), float(of_draft)


def format_cores(cores: Iterable[int]) -> str:
    """Return '0,2,3' for {0, 2, 3}, as `cpu_cores` takes it."""
    return ",".join(str(core) for core in sorted(cores))
