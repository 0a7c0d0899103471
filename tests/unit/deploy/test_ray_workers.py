"""What a launcher does with the workers of the one before it, with a Ray that is played."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy import ray_workers
from deploy.actors import ActorSpec
from deploy.placement import Placement
from deploy.ray_workers import RayWorkers
from outrider.wire.settings.pools import Pool, read_pools

PLACEMENT = Placement("cpu", 0.0, 1.0, None, None)


@dataclass
class Method:
    """Stands for a method of an actor: notes its calls."""

    name: str
    calls: list[Any]
    result: Any = None

    def remote(self, *arguments: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        self.calls.append((self.name, *arguments))
        return self.result


class PlayedActor:
    def __init__(self, member: str, spec: ActorSpec | Exception, calls: list[Any]) -> None:
        self.member = member
        self.spec = Method("spec", [], spec)
        self.outcome = Method("outcome", [])
        self.drain = Method(f"drain {member}", calls, member)


@dataclass
class PlayedRay:
    actors: dict[str, PlayedActor] = field(default_factory=dict)
    calls: list[Any] = field(default_factory=list)

    @property
    def util(self) -> "PlayedRay":
        return self

    def list_named_actors(self) -> list[str]:
        return list(self.actors)

    def get_actor(self, name: str, namespace: str) -> PlayedActor:
        return self.actors[name]

    def get(self, value: Any, timeout: float) -> Any:
        return value

    def wait(self, draining: list[Any], num_returns: int, timeout: float) -> None:
        self.calls.append(("wait", sorted(draining), num_returns, timeout))

    def kill(self, actor: PlayedActor, no_restart: bool) -> None:
        self.calls.append(("kill", actor.member))


def spec_of(pool: Pool, **settings: Any) -> ActorSpec:
    given = {**pool.worker.model_dump(exclude_unset=True), "device": "cpu", **settings}
    return ActorSpec(pool.member(0), pool.name, pool.role, given, PLACEMENT)


def test_a_worker_of_other_settings_drains_before_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("kept", "changed", "slow")
    pools = {pool.name: pool for pool in read_pools({name: {"model": "m"} for name in names}, {})}
    ray = PlayedRay()
    specs: dict[str, ActorSpec | Exception] = {
        "kept": spec_of(pools["kept"]),
        "changed": spec_of(pools["changed"], max_slots=3),
        "slow": spec_of(pools["slow"], drain_timeout_s=60.0),
        "silent": RuntimeError("it hangs"),
    }
    ray.actors = {f"mine/{name}/1": PlayedActor(name, spec, ray.calls) for name, spec in specs.items()}
    ray.actors["other/changed/1"] = PlayedActor("of another system", specs["changed"], ray.calls)
    monkeypatch.setattr(ray_workers, "_ray", lambda: ray)
    workers = RayWorkers("mine", lambda _: PLACEMENT, is_lasting=True, is_local=False, folder=None)
    assert set(workers.take_over(pools.values())) == {"target-kept-0"}
    assert ray.calls == [
        ("kill", "silent"),
        ("drain changed", 5.0),
        ("drain slow", 60.0),
        ("wait", ["changed", "slow"], 2, 62.0),
        ("kill", "changed"),
        ("kill", "slow"),
    ]
