"""What can happen to the system. Each strikes one part and returns when that part is as it was before.

A part that is being struck is not struck again: whoever comes next takes another one, or waits.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.chaos.load import Gateways, Load
from tests.chaos.plan import LONGEST_AWAY_S, Planned
from tests.chaos.system import System
from tests.stack import Process, read_metrics
from tests.tcp_relay import TcpRelay

LIAR = "tests.e2e.faults.lying_draft"
FREED_WITHIN_S = 10.0
"""A killed gateway's slots are free by then."""
SLOWEST_S, FASTEST_S = 0.5, 0.05
"""Added to every byte of a slow draft, in each direction."""


@dataclass
class Strike:
    """One that happened. Monotonic times."""

    planned: Planned
    part: str = ""
    began_s: float | None = None
    over_s: float | None = None
    gateway: int | None = None
    """The one whose streams alone it can hit; None: any stream."""
    freed_s: float | None = None
    """After a gateway was killed: until the workers had given up its slots."""
    violation: str | None = None

    def begins(self, part: str, gateway: int | None = None) -> None:
        self.part, self.gateway, self.began_s = part, gateway, time.monotonic()


@dataclass
class Chaos:
    """Strikes the system; `strikes` says what happened."""

    system: System
    gateways: Gateways
    load: Load
    strikes: list[Strike] = field(default_factory=list)
    _struck: set[str] = field(default_factory=set)

    async def run(self, plan: Sequence[Planned]) -> None:
        """All of the plan, each at its time, those that take longer side by side."""
        started_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for planned in plan:
                await asyncio.sleep(max(0.0, started_s + planned.at_s - time.monotonic()))
                self.load.level = planned.level
                strike = Strike(planned)
                self.strikes.append(strike)
                group.create_task(self._strike(strike))

    async def _strike(self, strike: Strike) -> None:
        planned = strike.planned
        await FAULTS[planned.fault](self, strike, random.Random(planned.dice))
        strike.over_s = time.monotonic()
        print(
            f"{strike.part}: {planned.fault}, over after {strike.over_s - (strike.began_s or 0):.1f} s; "
            f"{self.load.num_running} streams",
            flush=True,
        )

    @asynccontextmanager
    async def _one_of(self, dice: random.Random, parts: Sequence[str]) -> AsyncIterator[str]:
        """A part that nothing strikes now, for the time of the block."""
        order = dice.sample(parts, len(parts))
        while not (free := [part for part in order if part not in self._struck]):  # noqa: ASYNC110  # rare
            await asyncio.sleep(0.1)
        self._struck.add(free[0])
        self._note_targetless()
        try:
            yield free[0]
        finally:
            self._struck.discard(free[0])
            self._note_targetless()

    def _note_targetless(self) -> None:
        for index, gateway in enumerate(self.gateways):
            paths = ({name, f"gateway {index} to {name}"} for name in self._names("target"))
            gateway.note(targetless=all(path & self._struck for path in paths))

    def _members(self, role: str) -> list[Process]:
        pools = self.system.pools
        return {"target": pools.targets, "draft": pools.drafts, "gateway": pools.gateways}[role]

    def _names(self, role: str) -> list[str]:
        return [f"{role} {index}" for index in range(len(self._members(role)))]

    def _member(self, part: str) -> Process:
        role, index = part.split()
        return self._members(role)[int(index)]

    # processes

    async def kill(self, strike: Strike, dice: random.Random, role: str) -> None:
        """SIGKILL, and a new life with a new epoch at the same port some seconds later."""
        async with self._one_of(dice, self._names(role)) as part:
            old = self._member(part)
            strike.begins(part)
            await asyncio.to_thread(old.kill)
            await asyncio.sleep(dice.uniform(0.0, LONGEST_AWAY_S))
            await self.system.replace(old)

    async def drain(self, strike: Strike, dice: random.Random, role: str) -> None:
        """SIGTERM: what runs may end there, then it is started anew."""
        async with self._one_of(dice, self._names(role)) as part:
            old = self._member(part)
            strike.begins(part)
            code = await asyncio.to_thread(old.stop)
            if code != 0:
                strike.violation = f"{part} left with exit code {code} after SIGTERM"
            await self.system.replace(old)

    async def hang(self, strike: Strike, dice: random.Random, role: str) -> None:
        """SIGSTOP, and SIGCONT later."""
        async with self._one_of(dice, self._names(role)) as part:
            member = self._member(part)
            strike.begins(part)
            member.popen.send_signal(signal.SIGSTOP)
            await asyncio.sleep(strike.planned.seconds)
            member.popen.send_signal(signal.SIGCONT)

    async def lie(self, strike: Strike, dice: random.Random) -> None:
        """Another process in the draft's place whose every proposal breaks a rule."""
        async with self._one_of(dice, self._names("draft")) as part:
            draft = self._member(part)
            honest = draft.module
            await asyncio.to_thread(draft.kill)
            liar = await self.system.replace(draft, LIAR)
            strike.begins(part)
            await asyncio.sleep(strike.planned.seconds)
            await asyncio.to_thread(liar.kill)
            await self.system.replace(liar, honest)

    async def kill_gateway(self, strike: Strike, dice: random.Random) -> None:
        """Its clients see an error and ask the other one; the workers free its slots."""
        async with self._one_of(dice, self._names("gateway")) as part:
            index = int(part.split()[1])
            old = self._member(part)
            strike.begins(part, gateway=index)
            self.gateways[index].note(down=True)
            await asyncio.to_thread(old.kill)
            await self._watch_slots(strike)
            await self.system.replace(old)
            self.gateways[index].note(down=False)

    async def hang_gateway(self, strike: Strike, dice: random.Random) -> None:
        """Its clients may see an error; what they have not given up goes on afterwards."""
        async with self._one_of(dice, self._names("gateway")) as part:
            index = int(part.split()[1])
            process = self._member(part).popen
            strike.begins(part, gateway=index)
            self.gateways[index].note(down=True)
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(strike.planned.seconds)
            process.send_signal(signal.SIGCONT)
            self.gateways[index].note(down=False)

    async def _watch_slots(self, strike: Strike) -> None:
        """How long the targets hold more slots than the gateways that live have answers running."""
        began_s = time.monotonic()
        strike.freed_s = 0.0
        while (now_s := time.monotonic()) - began_s < FREED_WITHIN_S:
            held, running = await asyncio.to_thread(self._slots_and_answers)
            if held is not None and held > running:
                strike.freed_s = time.monotonic() - began_s
            elif held is not None and now_s - began_s > strike.freed_s + 3.0:
                return
            await asyncio.sleep(0.2)
        if strike.freed_s > FREED_WITHIN_S - 3.0:
            strike.violation = f"{held} slots are held {FREED_WITHIN_S:g} s later by {running} answers"

    def _slots_and_answers(self) -> tuple[int | None, int]:
        """None while a target cannot be asked: another strike has it."""
        if any(part.startswith("target") for part in self._struck):
            return None, 0
        held = sum(self.system.info("target", index).num_slots_in_use for index in range(len(self._members("target"))))
        urls = [self.gateways[index].http for index in self.gateways.up]
        return held, int(sum(read_metrics(f"{url}/metrics")["outrider_running"] for url in urls))

    # the network

    async def slow(self, strike: Strike, dice: random.Random) -> None:
        """A draft far away from everybody."""
        async with self._one_of(dice, self._names("draft")) as part:
            strike.begins(part)
            links = self.system.into(part)
            for link in links:
                link.delay_s = dice.uniform(FASTEST_S, SLOWEST_S)
            await asyncio.sleep(strike.planned.seconds)
            for link in links:
                link.delay_s = 0.0

    async def cut(self, strike: Strike, dice: random.Random, one: str, other: str) -> None:
        """Nothing passes between the two, and nobody is told."""
        async with self._link(strike, dice, one, other) as link:
            link.cut()
            await asyncio.sleep(strike.planned.seconds)
            link.heal()

    async def reset(self, strike: Strike, dice: random.Random, one: str, other: str) -> None:
        """Every connection between the two ends at once, and new ones are refused for a while."""
        async with self._link(strike, dice, one, other) as link:
            link.reset(refuse=True)
            await asyncio.sleep(strike.planned.seconds / 4)
            link.heal()

    @asynccontextmanager
    async def _link(self, strike: Strike, dice: random.Random, one: str, other: str) -> AsyncIterator[TcpRelay]:
        names = {" to ".join(ends): ends for ends in self.system.between(one, other)}
        async with self._one_of(dice, list(names)) as part:
            ends = names[part]
            strike.begins(part, gateway=int(ends[0].split()[1]) if one == "gateway" else None)
            yield self.system.links[ends]


OF_SEVERAL_GATEWAYS = ("gateway killed", "gateway hung")
Blow = Callable[[Chaos, Strike, random.Random], Awaitable[None]]

FAULTS: dict[str, Blow] = {
    "draft killed": lambda chaos, *how: chaos.kill(*how, "draft"),
    "draft hung": lambda chaos, *how: chaos.hang(*how, "draft"),
    "draft slow": Chaos.slow,
    "draft lying": Chaos.lie,
    "draft drained": lambda chaos, *how: chaos.drain(*how, "draft"),
    "target killed": lambda chaos, *how: chaos.kill(*how, "target"),
    "target hung": lambda chaos, *how: chaos.hang(*how, "target"),
    "target drained": lambda chaos, *how: chaos.drain(*how, "target"),
    "gateway killed": Chaos.kill_gateway,
    "gateway hung": Chaos.hang_gateway,
    "gateway and target cut": lambda chaos, *how: chaos.cut(*how, "gateway", "target"),
    "gateway and draft cut": lambda chaos, *how: chaos.cut(*how, "gateway", "draft"),
    "draft and target cut": lambda chaos, *how: chaos.cut(*how, "drafts", "target"),
    "gateway and target reset": lambda chaos, *how: chaos.reset(*how, "gateway", "target"),
    "gateway and draft reset": lambda chaos, *how: chaos.reset(*how, "gateway", "draft"),
    "draft and target reset": lambda chaos, *how: chaos.reset(*how, "drafts", "target"),
}


def possible(num_drafts: int, num_gateways: int) -> list[str]:
    """A system of one gateway keeps it: its clients would have nobody to ask."""
    kinds = list(FAULTS)
    if not num_drafts:
        kinds = [kind for kind in kinds if "draft" not in kind]
    return kinds if num_gateways > 1 else [kind for kind in kinds if kind not in OF_SEVERAL_GATEWAYS]
