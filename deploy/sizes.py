"""How many workers each pool is to have: at the start, by hand and by load. The fleet owns it and makes it so."""

from __future__ import annotations

import concurrent.futures
import queue
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deploy.loads import Loads
from deploy.member import ROLES
from deploy.scaling import Change, Scaler
from outrider.cli.pools import MAX_COUNT, Pool
from outrider.cli.system import ScalingConfig
from outrider.v1 import registry_pb2
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.log import get_logger

log = get_logger(__name__)

_BY_LOAD_EVERY_S = 1.0

_Asked = tuple[str, int | None, concurrent.futures.Future[registry_pb2.ScaleReply]]


@dataclass(frozen=True, slots=True)
class Census:
    """A pool's workers by state."""

    serving: list[str]
    """Their names."""
    num_starting: int
    num_draining: int

    @property
    def total(self) -> int:
        return len(self.serving) + self.num_starting + self.num_draining


class Sizes:
    """On the fleet's thread, but for `ask`."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        scaling: ScalingConfig,
        loads: Loads,
        census: Callable[[Pool], Census],
        room: Callable[[Pool], str | None],
        report: Callable[[str, str, str], None],
    ) -> None:
        """`room` and `report` as the fleet's."""
        self._pools = pools
        self._loads = loads
        self._census = census
        self._room = room
        self._report = report
        self._scalers = {
            pool.name: Scaler(pool.role, pool.min, pool.max, scaling) for pool in pools.values() if pool.sized_by_load
        }
        self.wanted = {pool.name: pool.count for pool in pools.values()}
        self._asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._by_load_at_s = 0.0

    def ask(self, pool: str, count: int | None) -> concurrent.futures.Future[registry_pb2.ScaleReply]:
        """From any thread: `count` workers, or only ask. An empty pool's name asks about all."""
        done: concurrent.futures.Future[registry_pb2.ScaleReply] = concurrent.futures.Future()
        self._asked.put((pool, count, done))
        return done

    def set_by_hand(self) -> list[str]:
        """As was asked since the last call. Returns the pools that were set."""
        names = []
        while not self._asked.empty():
            name, count, done = self._asked.get()
            if not done.set_running_or_notify_cancel():
                continue  # who asked has left
            try:
                if count is not None:
                    self._set(self._pool(name), count)
                    names.append(name)
                pools = [self._pool(name)] if name else list(self._pools.values())
                done.set_result(registry_pb2.ScaleReply(pools=[self._size(pool) for pool in pools]))
            except OutriderError as error:
                done.set_exception(error)
        return names

    def set_by_load(self, reports: Iterable[registry_pb2.GatewayReport], now_s: float) -> None:
        if now_s - self._by_load_at_s < _BY_LOAD_EVERY_S:
            return
        self._by_load_at_s = now_s
        self._loads.set_reports(reports, now_s)
        for name, scaler in self._scalers.items():
            pool = self._pools[name]
            census = self._census(pool)
            starting = max(census.num_starting, self.wanted[name] - len(census.serving))
            sight = self._loads.sight(pool, census.serving, num_starting=starting, num_draining=census.num_draining)
            decision = scaler.decide(sight, now_s)
            wanted = self.wanted[name] + decision.change.value
            if decision.change is Change.GROW and (reason := self._why_no_room(pool, wanted)):
                log.warning("%s would get another worker: %s; but %s", name, decision.reason, reason)
            elif decision.change is not Change.STAY:
                self.wanted[name] = wanted
                self._report(name, "scaling", f"to {wanted}: {decision.reason}")

    def _pool(self, name: str) -> Pool:
        if name not in self._pools:
            known = ", ".join(self._pools)
            raise ConfigError(f"there is no pool {name!r}; there are {known}", param="pool")
        return self._pools[name]

    def _set(self, pool: Pool, count: int) -> None:
        least, most = (pool.min, pool.max) if pool.sized_by_load else (int(pool.role == "target"), MAX_COUNT)
        if not least <= count <= most:
            by = ", its min and max" if pool.sized_by_load else ""
            raise ConfigError(f"{pool.name} cannot have {count} workers: from {least} to {most}{by}", param="count")
        if count > self.wanted[pool.name] and (reason := self._why_no_room(pool, count)):
            raise ConfigError(reason, param="count")
        self.wanted[pool.name] = count
        if pool.name in self._scalers:
            self._scalers[pool.name].reset()

    def _why_no_room(self, pool: Pool, count: int) -> str | None:
        """For so many workers. Those that drain are there: they can be taken back."""
        return self._room(pool) if count > self._census(pool).total else None

    def _size(self, pool: Pool) -> registry_pb2.PoolSize:
        census = self._census(pool)
        return registry_pb2.PoolSize(
            pool=pool.name,
            role=ROLES[pool.role],
            num_wanted=self.wanted[pool.name],
            num_starting=census.num_starting,
            num_serving=len(census.serving),
            num_draining=census.num_draining,
        )
