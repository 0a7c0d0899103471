"""Two workers on one GPU: what each may take of its memory, whoever starts them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from deploy.placement import ClusterNode, place
from deploy.ray_workers import RayWorkers
from outrider.cli.up import supervisor
from outrider.engine import memory
from outrider.wire.models.model_id import INDEX
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
    workers = RayWorkers("run", lambda pool: placements[pool.name], lasting=False, local=True, folder=None)
    specs = {pool.name: workers._spec(pool, pool.member(0)) for pool in config.pools}
    return {name: spec.settings["gpu_memory_utilization"] for name, spec in specs.items()}


def by_plain_processes(models: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(supervisor, "GPU_DEVICE", Path("/dev/null"))
    return supervisor.own_gpu_memory(system(models, ray=None).pools)


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
        found = {name: settings(workers[name]).gpu_memory_utilization for name in ("target", "draft")}
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


def test_the_size_of_a_model_is_that_of_all_its_files_or_not_known(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(bytes(100))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert num_weight_bytes(str(tmp_path)) == 200
    (tmp_path / "b.safetensors").unlink()
    assert num_weight_bytes(str(tmp_path)) is None
    assert num_weight_bytes("nobody/has-this-one") is None
    config = system({"target": str(tmp_path), "draft": "nobody/has-this-one"})
    assert gpu_shares(config.pools) == {"target": 0.75, "draft": 0.25}
    assert "--gpu-memory-utilization" in flags(
        config.targets[0].worker.model_copy(update={"gpu_memory_utilization": 1})
    )
