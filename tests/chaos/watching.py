"""What the parts show of a strike while it lasts and afterwards: who noticed when, what is freed, who drafts again."""

import asyncio
import time
from collections.abc import Sequence

import grpc
import httpx

from tests.chaos.excuses import Outages
from tests.chaos.system import System
from tests.samples import total
from tests.stack import parse_metrics

POLL_S = 0.2
ASK_TIMEOUT_S = 2.0
CALM_S = 3.0
"""Without a slot too many: they are free."""
DRAFTS_AGAIN_WITHIN_S = 30.0
"""Watched for so long; a breaker's pause is at most 15 s."""

Samples = dict[str, float]


class Watcher:
    """Asks the parts themselves, past every relay."""

    def __init__(self, system: System, outages: Outages) -> None:
        self._system = system
        self._outages = outages
        self._http = httpx.AsyncClient(timeout=ASK_TIMEOUT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def gateway(self, index: int) -> Samples | None:
        """Its metrics; None when it does not answer."""
        return await self._samples(f"{self._system.pools.http(index)}/metrics")

    async def draft(self, index: int) -> Samples | None:
        return await self._samples(f"http://{self._system.pools.drafts[index].ready['metrics_address']}/metrics")

    async def _samples(self, url: str) -> Samples | None:
        try:
            return parse_metrics((await self._http.get(url)).text)
        except httpx.TransportError:
            return None

    async def connected_to(self, role: str, index: int, gateways: Sequence[int]) -> list[int]:
        """Those of them that have a stream to this worker, and are not struck."""
        up = [gateway for gateway in gateways if gateway in self._outages.gateways_up]
        found = {gateway: await self.gateway(gateway) for gateway in up}
        return [gateway for gateway, samples in found.items() if samples and _is_connected(samples, role, index)]

    async def until_lost(self, role: str, index: int, gateways: Sequence[int], limit_s: float) -> float | None:
        """Seconds from now until each of these gateways, which were connected to it, has given the worker up.

        None when there is none, or one was struck itself meanwhile. Raises TimeoutError after `limit_s`, naming those
        that have not.
        """
        began_s, waiting = time.monotonic(), list(gateways)
        while waiting:
            if time.monotonic() - began_s >= limit_s:
                raise TimeoutError(f"gateways {waiting} had not noticed after {limit_s:g} s")
            await asyncio.sleep(POLL_S)
            waiting = await self.connected_to(role, index, waiting)
            if not self._outages.untouched((f"gateway {gateway}" for gateway in gateways), began_s):
                return None
        return time.monotonic() - began_s if gateways else None

    async def until_drafting(self, index: int, gateways: Sequence[int]) -> float | None:
        """Seconds from now until it proposes while one of these gateways has requests there.

        None when it is struck again before, or after DRAFTS_AGAIN_WITHIN_S.
        """
        began_s = time.monotonic()
        proposed: float | None = None
        while time.monotonic() - began_s < DRAFTS_AGAIN_WITHIN_S and not self._outages.struck(f"draft {index}"):
            samples = [await self.gateway(gateway) for gateway in gateways]
            own = await self.draft(index)
            used = any(each and total(each, "outrider_member_requests", member=f"draft-{index}") for each in samples)
            if own is not None and used:
                before, proposed = proposed, num_proposed(own)
                if before is not None and proposed > before:
                    return time.monotonic() - began_s
            await asyncio.sleep(POLL_S)
        return None

    async def until_freed(self, limit_s: float) -> float | None:
        """Seconds from now until the targets hold no more slots than the gateways that are not struck have answers.

        None when a target was struck all the time and could not be asked, or another gateway was struck or came back
        meanwhile: what runs there is not known then. Raises TimeoutError after `limit_s`.
        """
        began_s, too_many = time.monotonic(), False
        living = self._outages.gateways_up
        freed_s: float | None = None
        while (took_s := time.monotonic() - began_s) < limit_s + CALM_S:
            found = await self._slots_and_answers()
            if self._outages.gateways_up != living:
                return None
            if found is not None:
                freed_s, before, too_many = freed_s or 0.0, too_many, found[0] > found[1]
                if too_many and before:  # once alone is a slot whose answer has just ended
                    freed_s = time.monotonic() - began_s
                    if freed_s > limit_s:
                        raise TimeoutError(f"{found[0]} slots are held {freed_s:.1f} s later by {found[1]} answers")
                elif took_s > freed_s + CALM_S:
                    break
            await asyncio.sleep(POLL_S)
        return freed_s

    async def _slots_and_answers(self) -> tuple[int, int] | None:
        """Answers: the most of before and after the slots were counted, since they come and go."""
        system = self._system
        targets = range(len(system.pools.targets))
        if any(self._outages.struck(f"target {index}") for index in targets):
            return None
        try:
            before = await self._num_running()
            infos = [await asyncio.to_thread(system.info, "target", index) for index in targets]
            after = await self._num_running()
        except (grpc.RpcError, TypeError):
            return None
        return sum(info.num_slots_in_use for info in infos), max(before, after)

    async def _num_running(self) -> int:
        """Raises TypeError when a gateway does not answer."""
        found = [await self.gateway(index) for index in self._outages.gateways_up]
        return sum(int(samples["outrider_running"]) for samples in found if samples is not None)


def num_proposed(samples: Samples) -> float:
    """By this draft, in this life."""
    return total(samples, "outrider_worker_steps_total", kind="grow")


def _is_connected(samples: Samples, role: str, index: int) -> bool:
    return total(samples, "outrider_worker_connected", member=f"{role}-{index}") == 1
