"""Where a launcher places workers at a start, on a cluster that is played."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest

from deploy.cluster import Cluster
from deploy.launcher import Launcher
from deploy.placement import ClusterNode
from outrider.wire.errors import ConfigError
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import RayConfig, SystemConfig

CONFIG = SystemConfig.read(
    {
        "targets": {"chat": {"model": "t", "labels": {"role": "target"}}},
        "drafts": {"small": {"model": "d", "serves": ["chat"], "labels": {"role": "draft"}}},
        "ray": {"address": "auto"},
    }
)


@dataclass
class PlayedCluster:
    """A cluster that others make, whose machines come one by one."""

    machines: list[ClusterNode]
    is_ours = False

    def nodes(self) -> list[ClusterNode]:
        return self.machines

    def free(self) -> list[ClusterNode]:
        return self.machines

    def local_cores(self) -> None:
        return None


@pytest.fixture
def launcher(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    """With `needs_drafts`, or without."""
    monkeypatch.setattr("deploy.launcher._DRAFT_NODES_S", 0.0)
    monkeypatch.setattr("deploy.launcher.system.NODE_TIMEOUT_S", 0.0)
    made = Launcher(CONFIG, RayConfig(address="auto"), StopFlag(), io.StringIO(), needs_drafts=request.param)
    yield made
    made._registry.loop.close()


@pytest.mark.parametrize("launcher", [True], indirect=True)
def test_a_missing_machine_for_a_needed_worker_is_the_end(launcher: Launcher) -> None:
    cluster = cast("Cluster", PlayedCluster([ClusterNode(1, 0, {"role": "target"})]))
    with pytest.raises(ConfigError, match=r"the workers cannot be placed: .* with role=draft"):
        launcher._place(cluster)


@pytest.mark.parametrize("launcher", [False], indirect=True)
def test_targets_start_without_drafts_whose_machine_is_away_and_these_follow(launcher: Launcher) -> None:
    played = PlayedCluster([ClusterNode(1, 0, {"role": "target"})])
    cluster = cast("Cluster", played)
    (drafts,) = CONFIG.draft_pools
    placements = launcher._place(cluster)
    assert list(placements) == ["chat"]
    with pytest.raises(ConfigError, match="with role=draft"):
        launcher._placement_of(drafts, placements, cluster)
    played.machines.append(ClusterNode(1, 0, {"role": "draft"}))
    assert launcher._placement_of(drafts, placements, cluster).labels == {"role": "draft"}
