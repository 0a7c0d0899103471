"""Who gets which GPU and which cores: arithmetic, so every machine can be tried here."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.placement import NO_GPU, Node, Placement, check_fits, place
from outrider.cli.cores import split_cores
from outrider.cli.system import SystemConfig
from outrider.wire.errors import ConfigError

TWO_GPUS = [Node(num_cpus=16, num_gpus=2)]
ONE_GPU = [Node(num_cpus=16, num_gpus=1)]
NO_GPUS = [Node(num_cpus=2, num_gpus=0)]


def system(target: dict[str, Any] | None = None, draft: dict[str, Any] | None = None, **ray: Any) -> SystemConfig:
    return SystemConfig.read(
        {"target": {"model": "t", **(target or {})}, "draft": {"model": "d", **(draft or {})}, "ray": ray}
    )


@pytest.mark.parametrize(
    ("num_cores", "target", "draft"),
    [(2, {1}, {0}), (3, {1, 2}, {0}), (4, {1, 2, 3}, {0}), (8, {2, 3, 4, 5, 6, 7}, {0, 1})],
)
def test_cores_are_disjoint_and_the_target_has_most(num_cores: int, target: set[int], draft: set[int]) -> None:
    assert split_cores(frozenset(range(num_cores))) == (target, draft)


def test_one_core_is_shared_and_reserved_once() -> None:
    placed = place(system(), [Node(1, 0)], frozenset({5}))
    assert placed["target"].cpu_cores == placed["draft"].cpu_cores == {5}
    assert sum(one.num_cpus for one in placed.values()) == 1
    check_fits(placed, [Node(1, 0)], "has")


def test_without_a_gpu_each_has_its_own_cores_and_sees_no_gpu() -> None:
    placed = place(system(), NO_GPUS, frozenset({0, 1}))
    assert placed["target"] == Placement("cpu", 0.0, 1.0, frozenset({1}), NO_GPU)
    assert placed["draft"] == Placement("cpu", 0.0, 1.0, frozenset({0}), NO_GPU)
    assert str(placed["target"]) == "cores 1"


def test_two_gpus_are_one_each_and_one_is_shared() -> None:
    assert [one.num_gpus for one in place(system(), TWO_GPUS, None).values()] == [1.0, 1.0]
    shared = place(system(), ONE_GPU, None)
    assert [one.num_gpus for one in shared.values()] == [0.5, 0.5]
    assert {one.device for one in shared.values()} == {"cuda"}
    assert {one.visible_devices for one in shared.values()} == {None}  # Ray's to say
    check_fits(shared, ONE_GPU, "has")


def test_asked_shares_are_kept() -> None:
    placed = place(system(target_gpus=0.75, draft_gpus=0.25), ONE_GPU, None)
    assert (placed["target"].num_gpus, placed["draft"].num_gpus) == (0.75, 0.25)
    check_fits(placed, ONE_GPU, "has")


def test_a_draft_on_the_cpu_leaves_the_gpu_to_the_target() -> None:
    placed = place(system(draft={"device": "cpu"}), ONE_GPU, frozenset(range(4)))
    assert (placed["target"].num_gpus, placed["draft"].num_gpus) == (1.0, 0.0)
    assert placed["target"].cpu_cores is None
    assert placed["draft"].cpu_cores == {0, 1, 2, 3}


def test_given_cores_are_kept_and_the_other_gets_the_rest() -> None:
    placed = place(system(target={"cpu_cores": "0"}), NO_GPUS, frozenset({0, 1}))
    assert (placed["target"].cpu_cores, placed["draft"].cpu_cores) == ({0}, {1})


def test_cores_of_other_machines_are_not_guessed() -> None:
    placed = place(system(), [Node(8, 0), Node(8, 0)], None)
    assert {one.cpu_cores for one in placed.values()} == {None}
    assert {one.num_cpus for one in placed.values()} == {1.0}


def test_overlapping_cores_are_reserved_in_amounts_that_ray_takes() -> None:
    placed = place(system(target={"cpu_cores": "0-2"}, draft={"cpu_cores": "0"}), [Node(3, 0)], frozenset(range(3)))
    assert {role: one.num_cpus for role, one in placed.items()} == {"target": 1.0, "draft": 0.5}


@pytest.mark.parametrize(
    ("config", "nodes", "cores", "message"),
    [
        (system(target={"device": "cuda"}), NO_GPUS, {0, 1}, "target.device is 'cuda' and Ray sees no GPU"),
        (system(draft={"device": "cuda:1"}), TWO_GPUS, {0, 1}, "draft.device is 'cuda:1'"),
        (system(draft={"device": "tpu"}), NO_GPUS, {0, 1}, "draft.device is 'tpu'"),
        (system(target={"cpu_cores": "0,7"}), NO_GPUS, {0, 1}, "core 7, this machine offers 0,1"),
        (
            system(draft={"device": "cpu"}, draft_gpus=1),
            ONE_GPU,
            {0, 1},
            "ray.draft_gpus is 1 and",
        ),
        (
            system(target={"tensor_parallel": 2}, target_gpus=0.5),
            TWO_GPUS,
            {0, 1},
            "ray.target_gpus is 0.5 and target.tensor_parallel 2: a rank takes one GPU, no less and no more; say 2",
        ),
        (system(target={"tensor_parallel": 2}, target_gpus=3), TWO_GPUS, {0, 1}, "ray.target_gpus is 3 and"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    config: SystemConfig, nodes: list[Node], cores: set[int], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        place(config, nodes, frozenset(cores))
    assert message in caught.value.message


def test_fitting_is_by_node_and_not_by_sum() -> None:
    placed = place(system(target_gpus=2), [Node(4, 2), Node(4, 1)], None)
    check_fits(placed, [Node(4, 2), Node(4, 1)], "has")
    with pytest.raises(ConfigError, match="target: 2 GPU"):
        check_fits(placed, [Node(4, 1), Node(4, 1), Node(4, 1)], "has")


def test_one_worker_each_on_two_small_nodes() -> None:
    placed = place(system(), [Node(1, 1), Node(1, 1)], None)
    check_fits(placed, [Node(1, 1), Node(1, 1)], "has")
    with pytest.raises(ConfigError, match=r"has free \[1 GPU, 1 CPU\]"):
        check_fits(placed, [Node(1, 1)], "has free")


def test_no_draft_no_placement() -> None:
    config = SystemConfig.read({"target": {"model": "t"}, "draft": None})
    assert list(place(config, NO_GPUS, frozenset({0, 1}))) == ["target"]
    assert place(config, NO_GPUS, frozenset({0, 1}))["target"].cpu_cores == {0, 1}


def test_ranks_of_a_split_target_have_cores_of_their_own() -> None:
    placed = place(system(target={"tensor_parallel": 2}), [Node(8, 0)], frozenset(range(8)))
    assert list(placed) == ["target", "draft", "target-rank-1"]
    assert [sorted(one.cpu_cores or ()) for one in placed.values()] == [[2, 3, 4], [0, 1], [5, 6, 7]]
    assert [one.num_cpus for one in placed.values()] == [3.0, 2.0, 3.0]
    check_fits(placed, [Node(8, 0)], "has")


def test_ranks_share_cores_where_there_are_too_few() -> None:
    placed = place(system(target={"tensor_parallel": 2}), NO_GPUS, frozenset({0, 1}))
    assert [one.cpu_cores for one in placed.values()] == [{1}, {0}, {1}]
    assert sum(one.num_cpus for one in placed.values()) == 2
    check_fits(placed, NO_GPUS, "has")


def test_gpus_asked_for_a_split_target_are_those_of_all_its_ranks() -> None:
    placed = place(system(target={"tensor_parallel": 2}, draft={"device": "cpu"}, target_gpus=2), TWO_GPUS, None)
    assert {role: one.num_gpus for role, one in placed.items()} == {"target": 1.0, "draft": 0.0, "target-rank-1": 1.0}
    check_fits(placed, TWO_GPUS, "has")


def test_ranks_never_share_a_gpu() -> None:
    placed = place(system(target={"tensor_parallel": 2}), [Node(16, 3)], None)
    assert [one.num_gpus for one in placed.values()] == [1.0, 1.0, 1.0]
    check_fits(placed, [Node(16, 3)], "has")
    with pytest.raises(ConfigError, match="cannot be placed"):
        check_fits(place(system(target={"tensor_parallel": 2}), TWO_GPUS, None), TWO_GPUS, "has")
