"""The ranks of a split target as Ray actors: one placement group, rank 0 the worker itself, a follower for each more.

Used by `launcher`. All on this machine: ranks meet in a folder, and share every layer's sums.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.actors import FollowerActor, actor_options
from deploy.placement import Placement, follower_name
from outrider.cli.cores import format_cores


class Ranks:
    """`start_followers` and `stop` once each."""

    def __init__(self, run: str, num_ranks: int, placements: Mapping[str, Placement], parent: str | None) -> None:
        """`run`: names the system. `parent`: a folder that goes with Ray's session, None = the system's own for such.

        `placements`: of "target" and of every follower.
        """
        ray = _ray()
        self._run = run
        names = ["target", *(follower_name(rank) for rank in range(1, num_ranks))]
        self._placements = [placements[name] for name in names]
        self._followers: list[Any] = []
        self.folder = str(Path(parent or tempfile.gettempdir()) / f"outrider-ranks-{run}")
        bundles = [_bundle(placement) for placement in self._placements]
        bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001  # this machine, and the pack is strict
        self._group: Any = ray.util.placement_group(bundles, "STRICT_PACK", name=f"{run}-ranks", lifetime="detached")

    def strategy(self, rank: int) -> Any:
        """Ray's, for the actor that is this rank, after restarts too."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)

    def start_followers(self) -> None:
        ray = _ray()
        for rank, placement in enumerate(self._placements[1:], 1):
            cores = None if placement.cpu_cores is None else format_cores(placement.cpu_cores)
            options = actor_options(f"{self._run}-{follower_name(rank)}", placement, self.strategy(rank))
            actor = ray.remote(FollowerActor).options(**options)
            self._followers.append(actor.remote(self.folder, rank, cores, placement.visible_devices))

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


def _bundle(placement: Placement) -> dict[str, float]:
    wanted = {"CPU": placement.num_cpus, "GPU": placement.num_gpus}
    return {name: amount for name, amount in wanted.items() if amount}
