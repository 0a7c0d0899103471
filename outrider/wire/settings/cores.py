"""How the cores of one machine are shared by its workers. Used with Ray and without."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import WorkerConfig, parse_cores

_Role = Literal["target", "draft"]


def given_cores(workers: Mapping[str, WorkerConfig]) -> dict[str, frozenset[int]]:
    """By name: the cores of those workers whose settings say them."""
    return {name: parse_cores(worker.cpu_cores) for name, worker in workers.items() if worker.cpu_cores}


def check_offered(taken: Iterable[frozenset[int]], offered: frozenset[int]) -> None:
    """Raise ConfigError naming a core that this machine does not offer."""
    asked: frozenset[int] = frozenset().union(*taken)
    if not asked <= offered:
        missing = format_cores(asked - offered)
        raise ConfigError(f"cpu_cores asks for core {missing}, this machine offers {format_cores(offered)}")


def share_cores(
    workers: Mapping[str, tuple[_Role, WorkerConfig]],
    on_cpu: Collection[str],
    offered: frozenset[int],
) -> dict[str, frozenset[int] | None]:
    """By name: the cores a worker was given, else its share of the rest if it is `on_cpu`; None = not pinned.

    `offered`: of this machine. Raises ConfigError naming a core that is not among them.
    """
    given = given_cores({name: worker for name, (_, worker) in workers.items()})
    check_offered(given.values(), offered)
    free = sorted((offered - frozenset().union(*given.values())) or offered)
    sharing = [name for name in workers if name not in given and name in on_cpu]
    numbers = {role: sum(workers[name][0] == role for name in sharing) for role in ("target", "draft")}
    of_target, of_draft = shares(len(free), numbers["target"], numbers["draft"])
    shared: dict[str, frozenset[int] | None] = dict.fromkeys(workers, None)
    begin = 0
    for name in sorted(sharing, key=lambda name: workers[name][0]):  # drafts have the first cores
        count = int(max(1.0, of_target if workers[name][0] == "target" else of_draft))
        shared[name] = frozenset(free[(begin + step) % len(free)] for step in range(count))
        begin += count
    return {**shared, **given}


def shares(num_cores: int, num_targets: int, num_drafts: int) -> tuple[float, float]:
    """Cores of (each target, each draft): disjoint where there are enough, a quarter of them for the drafts in all.

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
    """{0, 2, 3} -> '0,2,3', as `cpu_cores` takes it."""
    return ",".join(str(core) for core in sorted(cores))
