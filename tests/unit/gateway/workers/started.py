"""Members of a pool whose links the test makes."""

import asyncio
from dataclasses import replace
from typing import Any, cast

from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.membership import Membership, MemberSpec, PoolSpec
from gateway.workers.worker_pools import Pools
from outrider.v1 import common_pb2 as pb
from tests.unit.gateway.scripted_pool import connection_of

CHAT, CODE = PoolSpec("chat", "target"), PoolSpec("code", "target", "coder")
SMALL, TINY = PoolSpec("small", "draft", serves=("chat", "code")), PoolSpec("tiny", "draft", serves=("code",))


def members(*names: str, **changes: object) -> tuple[MemberSpec, ...]:
    """By "pool/name"; nobody listens at their addresses."""
    role = {"chat": "target", "code": "target", "small": "draft", "tiny": "draft"}
    return tuple(
        replace(MemberSpec(name, pool, role[pool], "127.0.0.1:9", "127.0.0.1:9"), **changes)  # type: ignore[arg-type]
        for pool, name in (each.split("/") for each in names)
    )


class Parts:
    """Two pools of a target each and a head that serves both, whose links are the test's."""

    def __init__(self, pools: Pools) -> None:
        self.pools = pools
        self.asked: list[tuple[str, int]] = []
        self.said: dict[str, asyncio.Future[str | None]] = {}
        """What the head says of each target, by its address."""
        specs = members("chat/a", "code/b", "small/c")
        specs = tuple(replace(each, deliver_address=f"{each.name}:1") for each in specs)
        pools.update(Membership((CHAT, CODE, SMALL), specs))
        head: Any = pools.members["c"].link
        head.info = pb.WorkerInfo(needs_features=True, num_slots=1, epoch=3)
        head.pair = self._pair
        for address in ("a:1", "b:1"):
            self.said[address] = asyncio.get_running_loop().create_future()

    async def _pair(self, address: str, epoch: int) -> str | None:
        self.asked.append((address, epoch))
        return await asyncio.shield(self.said[address])

    def says(self, address: str, why: str | None) -> None:
        if self.said[address].done():
            self.said[address] = asyncio.get_running_loop().create_future()
        self.said[address].set_result(why)

    async def connect(self, name: str, epoch: int = 7) -> None:
        link = self.pools.members[name].link
        before, link._connection = link._connection, cast(Any, connection_of(epoch))
        self.pools._link_changed(name, link, before, link._connection)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def served(self) -> list[str]:
        """Return the targets whose requests the head may be given."""
        head = cast(DraftMember, self.pools.members["c"])
        targets = [cast(TargetMember, self.pools.members[name]) for name in "ab"]
        return [target.name for target in targets if head.can_serve(target)]
