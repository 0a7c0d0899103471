"""The cores of one machine: parsed from settings and divided among workers. Used by `outrider up`, the launcher and
every worker.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from outrider.wire.errors import ConfigError

if TYPE_CHECKING:
    from outrider.wire.settings.config import WorkerConfig

Role = Literal["target", "draft"]
MAX_CORES = 4096
"""Cores that a machine may have."""
_CORES = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
"""A core or a range of cores."""


def parse_cores(text: str) -> frozenset[int]:
    """Parse the numbers of cores: {0, 2, 3} for '0,2-3'. Raises ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        numbers = _read_core_range(part.strip())
        if not numbers:
            raise ValueError(f"cpu cores are {text!r}, must look like 0 or 0,2-3")
        cores.update(numbers)
    return frozenset(cores)


def _read_core_range(text: str) -> range:
    # "2-3": range(2, 4); empty for what is no range
    found = _CORES.fullmatch(text)
    if found is None:
        return range(0)
    first = int(found[1])
    last = int(found[2] or found[1])
    if last >= MAX_CORES:
        return range(0)
    return range(first, last + 1)


def given_cores(workers: Mapping[str, WorkerConfig]) -> dict[str, frozenset[int]]:
    """Return the cores of the workers whose settings have cpu_cores, by the worker's name."""
    return {name: parse_cores(worker.cpu_cores) for name, worker in workers.items() if worker.cpu_cores}


def check_offered(taken: Iterable[frozenset[int]], offered: frozenset[int]) -> None:
    """Raise ConfigError if a core that a worker's settings give is not among those that this machine offers."""
    given: frozenset[int] = frozenset().union(*taken)
    if not given <= offered:
        missing = format_cores(given - offered)
        raise ConfigError(f"cpu_cores asks for core {missing}, this machine offers {format_cores(offered)}")


def share_cores(
    workers: Mapping[str, tuple[Role, WorkerConfig]],
    on_cpu: Collection[str],
    offered: frozenset[int],
) -> dict[str, frozenset[int] | None]:
    """Return the cores of each worker by its name: those of its settings, else a share of the other cores if the worker
    is `on_cpu`; None = not pinned.

    workers: role and settings by name. on_cpu: names of the workers that run on the CPU. offered: the cores of this
    machine. Raises ConfigError as `check_offered`.
    """
    # 4 cores, a target and a draft: {"draft": {0}, "target": {1, 2, 3}}
    given = given_cores({name: worker for name, (_, worker) in workers.items()})
    check_offered(given.values(), offered)
    free = sorted((offered - frozenset().union(*given.values())) or offered)
    sharing: dict[Role, list[str]] = {"draft": [], "target": []}  # in the order in which they get cores
    for name, (role, _) in workers.items():
        if name not in given and name in on_cpu:
            sharing[role].append(name)
    target_share, draft_share = shares(len(free), len(sharing["target"]), len(sharing["draft"]))
    share_by_role: dict[Role, float] = {"target": target_share, "draft": draft_share}
    shared: dict[str, frozenset[int] | None] = dict.fromkeys(workers, None)
    begin = 0.0
    for role, names in sharing.items():
        share = share_by_role[role]
        for name in names:
            shared[name] = _take_cores(free, int(begin), int(max(1.0, share)))
            begin += share
    return {**shared, **given}


def _take_cores(cores: Sequence[int], begin: int, num_cores: int) -> frozenset[int]:
    # Behind the last core it begins anew.
    return frozenset(cores[index % len(cores)] for index in range(begin, begin + num_cores))


def shares(num_cores: int, num_targets: int, num_drafts: int) -> tuple[float, float]:
    """Return the number of cores for (each target, each draft).

    Drafts get a quarter of the cores in all, at least one each, and targets the others. Where there are fewer cores
    than workers, all get the same number below 1: they share cores.
    """
    num_workers = num_targets + num_drafts
    if num_workers > num_cores:
        share = int(100 * num_cores / num_workers) / 100
        return share, share
    if not num_targets:
        return 0.0, float(num_cores // max(1, num_drafts))
    draft_share = 0
    if num_drafts:
        draft_share = max(1, num_cores // 4 // num_drafts)
    target_share = (num_cores - draft_share * num_drafts) // num_targets
    return float(target_share), float(draft_share)


def format_cores(cores: Iterable[int]) -> str:
    """Return cores as the setting `cpu_cores` takes them: '0,2,3' for {0, 2, 3}."""
    return ",".join(map(str, sorted(cores)))
