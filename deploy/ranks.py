"""The ranks of a split target as Ray actors: one placement group, rank 0 the worker itself, a follower for each more.

All on one machine: ranks meet in a folder, and share every layer's sums. They end with the launcher.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

from deploy.actors import FollowerActor
from deploy.placement import Placement
from outrider.cli.cores import format_cores
from outrider.wire.config import parse_cores
from outrider.wire.host import split_evenly


class Ranks:
    """`start_followers` and `stop` once each."""

    def __init__(self, name: str, placement: Placement, cpu_cores: str | None, parent: str | None) -> None:
        """`name`: the worker's, unique on the cluster. `placement`: of each rank. `cpu_cores`: to share out, as in the
        settings. `parent`: a folder that goes with Ray's session, None = the system's own for such.
        """
        self._placement = placement
        num_ranks = placement.num_ranks
        self._cores = split_evenly(parse_cores(cpu_cores), num_ranks) if cpu_cores else [None] * num_ranks
        self._followers: list[Any] = []
        self.folder = str(Path(parent or tempfile.gettempdir()) / f"outrider-ranks-{name.replace('/', '-')}")
        wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
        bundle = {name: amount for name, amount in wanted.items() if amount}
        labels = {"bundle_label_selector": [dict(placement.labels)] * num_ranks} if placement.labels else {}
        self._group: Any = _ray().util.placement_group([bundle] * num_ranks, "STRICT_PACK", **labels)

    def cores_of(self, rank: int) -> str | None:
        """As `cpu_cores` takes it; None where the settings say none."""
        cores = self._cores[rank]
        return None if cores is None else format_cores(cores)

    def options(self, options: dict[str, Any], rank: int) -> dict[str, Any]:
        """Those of an actor on its own, for the one that is this rank, after restarts too."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
        alone = {name: value for name, value in options.items() if name != "label_selector"}  # the group has it
        return {**alone, "scheduling_strategy": strategy}

    def start_followers(self, options: dict[str, Any]) -> None:
        """`options`: as of the worker itself."""
        ray, placement = _ray(), self._placement
        for rank in range(1, placement.num_ranks):
            mine = {**self.options(options, rank), "name": f"{options['name']}-rank-{rank}"}
            arguments = (self.folder, rank, self.cores_of(rank), placement.num_cores, placement.visible_devices)
            self._followers.append(ray.remote(FollowerActor).options(**mine).remote(*arguments))

    def stop(self) -> None:
        """After the target, which has told the followers to end."""
        ray = _ray()
        for follower in self._followers:
            with contextlib.suppress(Exception):
                ray.kill(follower, no_restart=True)
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(self._group)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ray() -> Any:
    """Imported late, as everywhere here. Untyped: so are its functions."""
    import ray

    return ray
