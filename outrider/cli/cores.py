"""How the cores of one machine are shared by a draft and a target. Used with Ray and without."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from outrider.wire.config import DraftConfig, TargetConfig, parse_cores
from outrider.wire.errors import ConfigError


def share_cores(
    workers: Mapping[str, TargetConfig | DraftConfig], on_cpu: Collection[str], offered: frozenset[int] | None
) -> dict[str, frozenset[int] | None]:
    """By role: the cores a worker was given, else its share of the rest if it is `on_cpu`; None = not pinned.

    `offered`: of this machine; None = not known, so that nothing is shared out. Raises ConfigError naming a core that
    is not among them.
    """
    given = {role: parse_cores(worker.cpu_cores) if worker.cpu_cores else None for role, worker in workers.items()}
    taken: frozenset[int] = frozenset().union(*(cores for cores in given.values() if cores))
    if offered is None:
        return given
    if not taken <= offered:
        missing = format_cores(taken - offered)
        raise ConfigError(f"cpu_cores asks for core {missing}, this machine offers {format_cores(offered)}")
    free = (offered - taken) or offered
    unpinned = [role for role in workers if given[role] is None and role in on_cpu]
    if len(unpinned) < 2:
        return {**given, **dict.fromkeys(unpinned, free)}
    target, draft = split_cores(free)
    return {**given, "target": target, "draft": draft}


def split_cores(cores: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """(target's, draft's): disjoint when there are two; a quarter of them for the draft, which is the small one."""
    ordered = sorted(cores)
    if len(ordered) == 1:
        return cores, cores
    num_draft = max(1, len(ordered) // 4)
    return frozenset(ordered[num_draft:]), frozenset(ordered[:num_draft])


def format_cores(cores: Iterable[int]) -> str:
    """{0, 2, 3} -> '0,2,3', as `cpu_cores` takes it."""
    return ",".join(str(core) for core in sorted(cores))
