"""Heads that are registered at a scripted target."""

import asyncio
from types import SimpleNamespace
from typing import Any

from draft_service.targets.registration import Registration, SerializedHead
from outrider.v1 import target_pb2 as tpb

HEAD = SerializedHead(bytes(range(10)), b"d" * 32, 4)


class Peer:
    """A target's end of the stream."""

    def __init__(self) -> None:
        self.asked: list[tpb.HeadRequest] = []
        outbox: Any = SimpleNamespace(put=self.asked.append, wait_below=self.wait_below)
        self.registration = Registration(HEAD, "a:1", outbox)

    async def wait_below(self, num: int) -> None:
        await asyncio.sleep(0)

    def says(self, state: Any, why: str = "", digest: bytes = HEAD.digest, epoch: int = 7) -> None:
        self.registration.handle_reply(tpb.HeadReply(digest=digest, state=state, reason=why, target_epoch=epoch))

    def took(self) -> list[tuple[Any, ...]]:
        """Return what came since the last call."""
        asked, found = list(self.asked), list[tuple[Any, ...]]()
        self.asked.clear()
        for ask in asked:
            kind = ask.WhichOneof("item")
            item = getattr(ask, str(kind))
            facts = {
                "head": ("target_epoch", "num_bytes"),
                "weights": ("offset", "data"),
                "features": ("ticket", "start"),
            }
            found.append((kind, *(getattr(item, name) for name in facts[str(kind)])))
            assert item.digest == HEAD.digest
        return found
