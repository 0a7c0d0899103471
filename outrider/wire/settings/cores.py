"""Functions that parse the setting `cpu_cores`, and divide the CPU cores of a machine among workers. Used by `outrider
up`, the launcher and every worker.
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
"""Maximum number of cores of a machine. Core numbers, which begin with 0, are smaller than this."""
_CORES = re.compile(r"([0-9]{1,4})(?:-([0-9]{1,4}))?")
"""Matches a core number or a range of core numbers, such as 3 or 0-7."""


def parse_cores(text: str) -> frozenset[int]:
    """Parse a list of core numbers and ranges: '0,2-3' gives {0, 2, 3}. Raises ValueError for any other text."""
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
    """Return the cores that the setting `cpu_cores` gives to workers, by worker name. Workers without this setting are
    left out.

    workers: settings by worker name.
    """
    return {name: parse_cores(worker.cpu_cores) for name, worker in workers.items() if worker.cpu_cores}


def check_offered(used: Iterable[frozenset[int]], offered: frozenset[int]) -> None:
    """Raise ConfigError if a worker is to be pinned to a core that this machine does not have.

    used: the cores of each worker. offered: the cores of this machine that processes may use.
    """
    given: frozenset[int] = frozenset().union(*used)
    if not given <= offered:
        missing = format_cores(given - offered)
        raise ConfigError(f"cpu_cores asks for core {missing}, this machine offers {format_cores(offered)}")


def share_cores(
    workers: Mapping[str, tuple[Role, WorkerConfig]],
    on_cpu: Collection[str],
    offered: frozenset[int],
) -> dict[str, frozenset[int] | None]:
    """Divide the cores of a machine among workers. Return the cores of each worker, by its name.

    A worker whose settings have `cpu_cores` gets the cores of that setting. Any other worker that runs on the CPU gets
    some of the remaining cores. Any other worker that runs on a GPU gets None, which means that it is not pinned.
    workers: (role, settings) by worker name. on_cpu: names of the workers that run on the CPU. offered: the cores of
    the machine. Raises ConfigError if `cpu_cores` names a core that is not in `offered`.
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
            shared[name] = _select_cores(free, int(begin), int(max(1.0, share)))
            begin += share
    return {**shared, **given}


def _select_cores(cores: Sequence[int], begin: int, num_cores: int) -> frozenset[int]:
    # Behind the last core it begins anew.
    return frozenset(cores[index % len(cores)] for index in range(begin, begin + num_cores))


def shares(num_cores: int, num_targets: int, num_drafts: int) -> tuple[float, float]:
    """Return (number of cores for each target, number of cores for each draft worker).

    All draft workers together get a quarter of the cores, and each at least one; the targets share the others. If there
    are fewer cores than workers, each worker gets the same fraction of a core, and several workers are pinned to one
    core.
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
    """Format core numbers for the setting `cpu_cores`: {0, 2, 3} gives '0,2,3'."""
    return ",".join(map(str, sorted(cores)))
