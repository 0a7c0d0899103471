"""How the cores of one machine are shared by a draft and a target. Used with Ray and without."""

from __future__ import annotations

from collections.abc import Iterable


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
