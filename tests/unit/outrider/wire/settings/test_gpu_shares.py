"""Two workers on one GPU: what each may take of its memory, whoever starts them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deploy.placement import ClusterNode, place
from deploy.ray_workers import RayWorkers
from outrider.cli.up import machine_shares
from outrider.engine import memory
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import INDEX_FILE
from outrider.wire.settings.config import WorkerConfig
from outrider.wire.settings.gpu_shares import gpu_shares, num_weight_bytes
from outrider.wire.settings.system import SystemConfig, flags
from tests.forked import REPO

GB = 10**9
SIZES = {"target": 16 * GB, "draft": 25 * GB // 10}
"""Bytes of the weights of an 8B and a 1B in bfloat16."""
CARD = 80 * GB
POOL: dict[str, Any] = {"replicas": 1, "cpu": 1, "memory": "1Gi", "gpus": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with weights of those sizes, which take no room on the disk."""
    folders = {}
    for role, size in SIZES.items():
        folder = tmp_path_factory.mktemp(role)
        with (folder / "model.safetensors").open("wb") as file:
            file.truncate(size)
        folders[role] = str(folder)
    return folders


def system(models: dict[str, str], **values: Any) -> SystemConfig:
    return SystemConfig.read({**{role: {"model": model} for role, model in models.items()}, **values})


def by_launcher(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return what the actors' settings say."""
    config = system(models)
    placements = place(config, [ClusterNode(num_cpus=16, num_gpus=1)], None)
    assert sum(one.num_gpus for one in placements.values()) <= 1, "or Ray would never place both"
    workers = RayWorkers("run", lambda pool: placements[pool.name], is_lasting=False, is_local=True, folder=None)
    specs = {pool.name: workers._spec(pool, pool.member(0)) for pool in config.pools}
    return {name: spec.settings["gpu_memory_utilization"] for name, spec in specs.items()}


def by_plain_processes(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(machine_shares, "GPU_DEVICE", Path("/dev/null"))
    return machine_shares.own_gpu_memory(system(models, ray=None).pools)


def by_compose(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return what the launcher tells workers on the nodes that docker-compose.gpu.yml makes of a machine's one GPU."""
    services = yaml.safe_load((REPO / "docker-compose.gpu.yml").read_text())["services"]
    nodes = []
    for service in services.values():
        text = re.sub(r"\$\{\w+:-(\w*)\}", r"\1", service["environment"]["OUTRIDER_NODE_LABELS"])
        labels = dict(pair.split("=") for pair in text.split(","))
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert re.sub(r"\$\{\w+:-(\w*)\}", r"\1", device["device_ids"][0]) == labels["outrider/gpu"] == "0"
        nodes.append(ClusterNode(num_cpus=1, num_gpus=1, labels=labels))
    monkeypatch.setenv("OUTRIDER_TARGET_MODEL", models["target"])
    monkeypatch.setenv("OUTRIDER_DRAFT_MODEL", models["draft"])
    config = SystemConfig.read(yaml.safe_load((REPO / "deploy/docker/cluster-model-draft.yaml").read_text()))
    placements = place(config, nodes, None)
    assert {one.num_gpus for one in placements.values()} == {1.0}, "each node shows Ray a whole one"
    return {name: one.gpu_memory_utilization or 1.0 for name, one in placements.items()}


def by_chart(models: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, kuberay: bool = False) -> dict[str, float]:
    """Return what pods are told of a GPU that the device plugin shows twice."""
    from tests.kubernetes.chart import rendered  # skips where there is no Helm, these cases alone
    from tests.kubernetes.check import launcher_settings, pods, settings

    values: dict[str, Any] = {
        "kuberay": kuberay,
        "workersPerGpu": 2,
        "targets": [{**POOL, "name": "target", "model": models["target"]}],
        "drafts": [{**POOL, "name": "draft", "model": models["draft"], "serves": ["target"]}],
    }
    manifests = rendered(values)
    if kuberay:
        (file,) = [one for one in manifests if one["kind"] == "ConfigMap" and "cluster.yaml" in one["data"]]
        found = {pool.name: pool.worker.gpu_memory_utilization for pool in launcher_settings(file).pools}
    else:
        workers = {labels.get("outrider/pool"): spec["containers"][0] for labels, spec in pods(manifests)}
        found = {}
        for name in ("target", "draft"):
            config = settings(workers[name])
            assert isinstance(config, WorkerConfig)
            found[name] = config.gpu_memory_utilization
    return {name: value or 1.0 for name, value in found.items()}


def by_kuberay(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    return by_chart(models, monkeypatch, kuberay=True)


@pytest.mark.parametrize(
    ("derive", "target", "draft"),
    [
        (by_launcher, 0.711, 0.18),
        (by_plain_processes, 0.711, 0.18),
        (by_compose, 0.711, 0.18),
        (by_chart, 0.45, 0.45),  # Helm reads no models, and the plugin's other pods may be anybody's
        (by_kuberay, 0.45, 0.45),
    ],
)
def test_two_workers_on_one_gpu_have_a_budget_each(
    derive: Any, target: float, draft: float, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = derive(models, monkeypatch)
    assert told == {"target": target, "draft": draft}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (CARD, CARD))  # as whoever comes first sees it
    budgets = {role: memory.shared_memory_bytes(torch.device("cuda:0"), told[role], SIZES[role]) for role in SIZES}
    assert budgets == {role: int(told[role] * CARD) - SIZES[role] for role in SIZES}
    assert sum(budgets.values()) + sum(SIZES.values()) <= 0.9 * CARD


def test_a_single_worker_and_one_with_its_own_setting_are_unchanged(models: dict[str, str]) -> None:
    alone = place(system({"target": models["target"]}), [ClusterNode(16, 1)], None)
    apart = place(system(models), [ClusterNode(16, 2)], None)
    assert [one.gpu_memory_utilization for one in (*alone.values(), *apart.values())] == [None, None, None]
    draft = {"model": models["draft"], "device": "cuda", "gpu_memory_utilization": 0.3}
    target = {"model": models["target"], "device": "cuda:0"}
    assert machine_shares.own_gpu_memory(SystemConfig.read({"target": target, "draft": draft, "ray": None}).pools) == {
        "target": 0.6
    }
    placed = place(system(models, target={**target, "device": "cuda"}, draft=draft), [ClusterNode(16, 1)], None)
    assert {name: one.gpu_memory_utilization for name, one in placed.items()} == {"target": 0.6, "draft": None}
    target["device"] = "cuda:1"
    assert machine_shares.own_gpu_memory(SystemConfig.read({"target": target, "draft": draft, "ray": None}).pools) == {}


def test_workers_that_ray_counts_parts_of_a_gpu_for_get_these_parts(models: dict[str, str]) -> None:
    target = {"model": models["target"], "num_gpus": 0.6}
    config = SystemConfig.read({"target": target, "draft": {"model": models["draft"], "count": 2}})
    placed = place(config, [ClusterNode(16, 1)], None)
    assert {name: (one.num_gpus, one.gpu_memory_utilization) for name, one in placed.items()} == {
        "target": (0.6, 0.54),
        "draft": (0.2, 0.18),
    }


def test_weights_that_leave_nothing_of_the_share_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 << 30, 80 << 30))
    message = "gpu_memory_utilization is 0.1, 8.0 GiB of the 80.0 GiB of cuda:0, and .* takes 15.0 GiB: raise it"
    with pytest.raises(ConfigError, match=message):
        memory.shared_memory_bytes(torch.device("cuda:0"), 0.1, 15 << 30)


def test_the_size_of_a_model_is_of_all_its_files_or_unknown(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(bytes(100))
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert num_weight_bytes(str(tmp_path)) == 200
    (tmp_path / "b.safetensors").unlink()
    assert num_weight_bytes(str(tmp_path)) is None
    assert num_weight_bytes("nobody/has-this-one") is None
    config = system({"target": str(tmp_path), "draft": "nobody/has-this-one"})
    assert gpu_shares(config.pools) == {"target": 0.75, "draft": 0.25}
    assert "--gpu-memory-utilization" in flags(
        config.target_pools[0].worker.model_copy(update={"gpu_memory_utilization": 1})
    )


def test_what_all_workers_of_a_gpu_may_take_together_is_a_setting_of_the_system(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_pool(config: SystemConfig, num_gpus: int) -> dict[str, float | None]:
        placements = place(config, [ClusterNode(num_cpus=16, num_gpus=num_gpus)], None)
        return {name: one.gpu_memory_utilization for name, one in placements.items()}

    pair = system(models, gpu_memory_utilization=0.5)
    shared = by_pool(pair, 1)
    assert 0.49 < sum(share or 0.0 for share in shared.values()) <= 0.5
    assert by_pool(pair, 2) == {"target": 0.5, "draft": 0.5}
    assert by_pool(system({"target": models["target"]}, gpu_memory_utilization="0.8"), 1) == {"target": 0.8}
    monkeypatch.setattr(machine_shares, "GPU_DEVICE", Path("/dev/null"))
    plain = machine_shares.own_gpu_memory(system(models, ray=None).pools, 0.5)
    assert plain == shared
    for wrong in (0, 1.5, "much"):
        with pytest.raises(ConfigError, match=f"gpu_memory_utilization is {wrong!r}, must be above 0 and at most 1"):
            system(models, gpu_memory_utilization=wrong)
