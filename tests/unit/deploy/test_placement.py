"""Who gets which GPU and which cores: arithmetic, so every machine can be tried here."""

from typing import Any

import pytest

from deploy.placement import NO_GPU, ClusterNode, Placement, check_capacity, place
from outrider.wire.errors import ConfigError
from outrider.wire.settings.system import SystemConfig

TWO_GPUS = [ClusterNode(num_cpus=16, num_gpus=2)]
ONE_GPU = [ClusterNode(num_cpus=16, num_gpus=1)]
NO_GPUS = [ClusterNode(num_cpus=2, num_gpus=0)]


def system(target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **ray: Any) -> SystemConfig:
    return SystemConfig.read(
        {"target": {"model": "t", **(target or {})}, "draft": {"model": "d", **(draft or {})}, "ray": ray}
    )


def pools(**values: Any) -> SystemConfig:
    return SystemConfig.read(values)


def each(config: SystemConfig, placed: dict[str, Placement]) -> dict[str, tuple[Placement, int]]:
    """What `check_capacity` takes: every pool at its count."""
    return {pool.setting: (placed[pool.name], pool.count) for pool in config.pools}


def fits(
    config: SystemConfig, nodes: list[ClusterNode], cores: frozenset[int] | None = None, what: str = "has"
) -> None:
    check_capacity(each(config, place(config, nodes, cores)), nodes, what)


def test_without_a_gpu_each_has_its_own_cores_and_sees_no_gpu() -> None:
    placed = place(system(), NO_GPUS, frozenset({0, 1}))
    assert placed["target"] == placed["draft"] == Placement("cpu", 0.0, 1.0, 1, NO_GPU)
    assert str(placed["target"]) == "1 CPU"


def test_two_gpus_are_one_each_and_one_is_shared() -> None:
    assert [one.num_gpus for one in place(system(), TWO_GPUS, None).values()] == [1.0, 1.0]
    shared = place(system(), ONE_GPU, None)
    assert [one.num_gpus for one in shared.values()] == [0.75, 0.25], "of models whose sizes are not known here"
    assert {one.device for one in shared.values()} == {"cuda"}
    assert {one.visible_devices for one in shared.values()} == {None}  # Ray's to say
    fits(system(), ONE_GPU)


def test_what_a_pool_reserves_it_is_pinned_to_wherever_it_runs() -> None:
    placed = place(
        system(target={"num_cpus": 3}, draft={"num_cpus": 0.5}), [ClusterNode(8, 0), ClusterNode(8, 0)], None
    )
    assert {name: (one.num_cpus, one.num_cores) for name, one in placed.items()} == {
        "target": (3.0, 3),
        "draft": (0.5, 1),
    }


def test_workers_are_placed_by_their_labels() -> None:
    config = pools(
        targets={"chat": {"model": "t", "count": 2, "num_gpus": 1, "device": "cuda", "labels": {"role": "target"}}},
        drafts={"small": {"model": "d", "device": "cpu", "labels": {"role": "draft", "zone": "!b"}}},
        ray={"address": "auto"},
    )
    targets, drafts = ClusterNode(8, 2, {"role": "target"}), ClusterNode(4, 0, {"role": "draft", "zone": "a"})
    fits(config, [targets, drafts])
    fits(config, [ClusterNode(8, 1, {"role": "target"}), ClusterNode(8, 1, {"role": "target"}), drafts])
    with pytest.raises(ConfigError, match=r"1 x drafts\.small: 0 GPU, 1 CPU with role=draft, zone=!b"):
        fits(config, [targets, ClusterNode(4, 0, {"role": "draft", "zone": "b"})])
    with pytest.raises(ConfigError, match=r"the cluster has \[.*1 GPU, 8 CPU with role=target"):
        fits(config, [ClusterNode(8, 1, {"role": "target"}), drafts])
    with pytest.raises(ConfigError, match=r"targets\.chat\.device is 'cuda' and Ray sees no GPU"):
        fits(config, [ClusterNode(8, 2, {"role": "other"}), drafts])  # its GPUs are not the pool's to use


@pytest.mark.parametrize(
    ("config", "nodes", "cores", "message"),
    [
        (system(target={"device": "cuda"}), NO_GPUS, {0, 1}, "target.device is 'cuda' and Ray sees no GPU"),
        (system(draft={"device": "cuda:1"}), TWO_GPUS, {0, 1}, "draft.device is 'cuda:1'"),
        (system(draft={"device": "tpu"}), NO_GPUS, {0, 1}, "draft.device is 'tpu'"),
        (system(target={"cpu_cores": "0,7"}), NO_GPUS, {0, 1}, "core 7, this machine offers 0,1"),
        (system(draft={"device": "cpu", "num_gpus": 1}), ONE_GPU, {0, 1}, "draft.num_gpus is 1 and"),
        (
            system(target={"tensor_parallel": 2, "num_gpus": 0.5}),
            TWO_GPUS,
            {0, 1},
            "target.num_gpus is 0.5 and target.tensor_parallel 2: a rank takes one GPU, no less and no more; say 2",
        ),
        (system(target={"tensor_parallel": 2, "num_gpus": 3}), TWO_GPUS, {0, 1}, "target.num_gpus is 3 and"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    config: SystemConfig, nodes: list[ClusterNode], cores: set[int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        place(config, nodes, frozenset(cores))
    assert message in caught.value.message


def test_ranks_of_a_split_target_have_cores_of_their_own() -> None:
    config = system(target={"tensor_parallel": 2})
    placed = place(config, [ClusterNode(8, 0)], frozenset(range(8)))
    assert (placed["target"].num_ranks, placed["target"].num_cores, placed["target"].num_cpus) == (2, 3, 3.0)
    assert (placed["draft"].num_ranks, placed["draft"].num_cores) == (1, 2)
    fits(config, [ClusterNode(8, 0)], frozenset(range(8)))
    assert str(placed["target"]) == "2 ranks of 3 CPU"


def test_a_draft_without_a_model_takes_no_core_and_no_gpu() -> None:
    config = SystemConfig.read({"target": {"model": "t"}, "draft": {"drafter": "ngram"}})
    placed = place(config, NO_GPUS, frozenset({0, 1}))
    assert (placed["target"].num_cpus, placed["target"].num_cores) == (2.0, 2)
    assert (placed["draft"].num_cpus, placed["draft"].num_cores, placed["draft"].device) == (0.0, None, "cpu")
    fits(config, NO_GPUS, frozenset({0, 1}))
    on_gpu = place(config, ONE_GPU, frozenset(range(16)))
    assert (on_gpu["target"].num_gpus, on_gpu["draft"].num_gpus, on_gpu["draft"].device) == (1.0, 0.0, "cpu")
    told = SystemConfig.read({"target": {"model": "t"}, "draft": {"drafter": "ngram", "num_cpus": 1}})
    assert [one.num_cores for one in place(told, NO_GPUS, frozenset({0, 1})).values()] == [1, 1]
    assert place(config, NO_GPUS, None)["draft"].num_cpus == 1.0, "a cluster's heads have no CPU for workers"
