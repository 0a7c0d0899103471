"""What can happen to the system. Each strikes one part and returns when that part is as it was before.

A part that is being struck is not struck again: whoever comes next takes another one, or waits.
"""

import asyncio
import random
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.excuses import Outages
from tests.chaos.load import Load
from tests.chaos.plan import LONGEST_AWAY_S, Planned
from tests.chaos.system import System
from tests.chaos.watching import Watcher
from tests.message_relay import ONE_WAY, Faults, MessageRelay
from tests.stack import Process
from tests.tcp_relay import TcpRelay

LIAR = "tests.e2e.faults.lying_draft"
FREED_WITHIN_S = 10.0
"""A killed gateway's slots are free by then."""
NOTICED_WITHIN_S = 12.0
"""What is promised of a hang and of a cut, with work or without: without it keepalive alone notices."""
JUDGED_AFTER_S = 15.0
"""What is demanded, on a machine that does much else."""
SLOWEST_S, FASTEST_S = 0.5, 0.05
"""Added to every byte of a slow draft, in each direction."""


@dataclass
class Strike:
    """One that happened. Monotonic times."""

    planned: Planned
    part: str = ""
    waited_s: float = 0.0
    """For a part that nothing else struck."""
    began_s: float | None = None
    over_s: float | None = None
    gateway: int | None = None
    """The one whose streams alone it can hit; None: any stream."""
    noticed_s: float | None = None
    """Of a hang or a cut: until every gateway that was connected had given the link up, or the workers the gateway's
    slots; None when it was over before."""
    freed_s: float | None = None
    """After a gateway was killed: until the workers had given up its slots; None when they could not be asked."""
    drafting_s: float | None = None
    """After a strike at a draft was over: until it was asked for proposals again."""
    violations: list[str] = field(default_factory=list)

    def begins(self, part: str, gateway: int | None = None) -> None:
        self.part, self.gateway, self.began_s = part, gateway, time.monotonic()


@dataclass
class Chaos:
    """Strikes the system; `strikes` says what happened."""

    system: System
    outages: Outages
    load: Load
    watcher: Watcher
    strikes: list[Strike] = field(default_factory=list)
    _taken: set[str] = field(default_factory=set)

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
        try:
            await FAULTS[planned.fault](self, strike, random.Random(planned.dice))
        except Exception as error:  # a part that does not come back, above all
            strike.violations.append(f"{strike.part}: {planned.fault}: {type(error).__name__}: {error}")
        strike.over_s = time.monotonic()
        print(
            f"{strike.part}: {planned.fault}, over after {strike.over_s - (strike.began_s or 0):.1f} s; "
            f"{self.load.num_running} streams",
            flush=True,
        )
        ends = strike.part.split(" to ")
        if ends[-1].startswith("draft "):
            gateways = range(len(self.system.pools.gateways)) if len(ends) == 1 else [int(ends[0].split()[1])]
            strike.drafting_s = await self.watcher.until_drafting(int(ends[-1].split()[1]), gateways)

    @asynccontextmanager
    async def _one_of(
        self, strike: Strike, dice: random.Random, parts: Sequence[str], *, unseen: bool = False
    ) -> AsyncIterator[str]:
        """A part that nothing strikes now, for the time of the block. `unseen`: users must see nothing of it."""
        asked_s = time.monotonic()
        order = dice.sample(parts, len(parts))
        while not (free := [part for part in order if part not in self._taken]):  # noqa: ASYNC110  # rare
            await asyncio.sleep(0.1)
        part = free[0]
        strike.part, strike.waited_s = part, time.monotonic() - asked_s
        self._taken.add(part)
        if not unseen:
            self.outages.begin(part, time.monotonic())
        try:
            yield part
        finally:
            self._taken.discard(part)
            if not unseen:
                self.outages.end(part, time.monotonic())

    async def _last(self, strike: Strike, noticing: Coroutine[None, None, float | None]) -> None:
        """The strike lasts as long as planned; whoever must notice it is watched meanwhile."""
        over_s = time.monotonic() + strike.planned.seconds
        watching = asyncio.create_task(noticing)
        await asyncio.wait({watching}, timeout=strike.planned.seconds)
        if watching.done():
            try:
                strike.noticed_s = watching.result()
            except TimeoutError as error:
                strike.violations.append(f"{strike.part}: {strike.planned.fault}: {error}")
        else:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await asyncio.sleep(max(0.0, over_s - time.monotonic()))

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
        async with self._one_of(strike, dice, self._names(role)) as part:
            old = self._member(part)
            strike.begins(part)
            await asyncio.to_thread(old.kill)
            await asyncio.sleep(dice.uniform(0.0, LONGEST_AWAY_S))
            await self.system.replace(old)

    async def drain(self, strike: Strike, dice: random.Random, role: str) -> None:
        """SIGTERM: what runs may end there, then it is started anew."""
        async with self._one_of(strike, dice, self._names(role)) as part:
            old = self._member(part)
            strike.begins(part)
            code = await asyncio.to_thread(old.stop)
            if code != 0:
                strike.violations.append(f"{part} left with exit code {code} after SIGTERM")
            await self.system.replace(old)

    async def hang(self, strike: Strike, dice: random.Random, role: str) -> None:
        """SIGSTOP, and SIGCONT later."""
        async with self._one_of(strike, dice, self._names(role)) as part:
            member, index = self._member(part), int(part.split()[1])
            gateways = await self.watcher.connected_to(role, index, range(len(self._names("gateway"))))
            strike.begins(part)
            member.popen.send_signal(signal.SIGSTOP)
            await self._last(strike, self.watcher.until_lost(role, index, gateways, JUDGED_AFTER_S))
            member.popen.send_signal(signal.SIGCONT)

    async def lie(self, strike: Strike, dice: random.Random) -> None:
        """Another process in the draft's place whose every proposal breaks a rule."""
        async with self._one_of(strike, dice, self._names("draft")) as part:
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
        async with self._one_of(strike, dice, self._names("gateway")) as part:
            old = self._member(part)
            strike.begins(part, gateway=int(part.split()[1]))
            await asyncio.to_thread(old.kill)
            try:
                strike.freed_s = await self.watcher.until_freed(FREED_WITHIN_S)
            except TimeoutError as error:
                strike.violations.append(f"{part}: gateway killed: {error}")
            await self.system.replace(old)

    async def hang_gateway(self, strike: Strike, dice: random.Random) -> None:
        """Its clients may see an error; what they have not given up goes on afterwards."""
        async with self._one_of(strike, dice, self._names("gateway")) as part:
            process = self._member(part).popen
            strike.begins(part, gateway=int(part.split()[1]))
            process.send_signal(signal.SIGSTOP)
            await self._last(strike, self.watcher.until_freed(JUDGED_AFTER_S))
            process.send_signal(signal.SIGCONT)

    async def fill_disk(self, strike: Strike, dice: random.Random) -> None:
        """No file of a part takes another byte, and it has something to say: a gateway of each request, a draft of its
        streams to the targets, which end. A target says nothing while it serves.
        """
        role = dice.choice([role for role in ("draft", "gateway") if self._names(role)])
        async with self._one_of(strike, dice, self._names(role), unseen=True) as part:
            member = self._member(part)
            strike.begins(part, gateway=int(part.split()[1]) if role == "gateway" else None)
            size = _full_files(member, True)
            if role == "draft":
                for ends in self.system.between("drafts", "target"):
                    self.system.links[ends].reset()
            await asyncio.sleep(strike.planned.seconds)
            if _full_files(member, False) != size:
                strike.violations.append(f"{part}: its log grew on the full disk: there was none")

    # the network

    async def slow(self, strike: Strike, dice: random.Random) -> None:
        """A draft far away from everybody."""
        async with self._one_of(strike, dice, self._names("draft")) as part:
            strike.begins(part)
            links = self.system.into(part)
            for link in links:
                link.delay_s = dice.uniform(FASTEST_S, SLOWEST_S)
            await asyncio.sleep(strike.planned.seconds)
            for link in links:
                link.delay_s = 0.0

    async def cut(self, strike: Strike, dice: random.Random, one: str, other: str) -> None:
        """Nothing passes between the two, and nobody is told. Drafts and targets alone say nothing of it."""
        async with self._link(strike, dice, one, other) as link:
            index = int(strike.part.rpartition(" ")[2])
            gateways = await self.watcher.connected_to(
                other, index, [strike.gateway] if strike.gateway is not None else []
            )
            link.cut()
            await self._last(strike, self.watcher.until_lost(other, index, gateways, JUDGED_AFTER_S))
            link.heal()

    async def reset(self, strike: Strike, dice: random.Random, one: str, other: str) -> None:
        """Every connection between the two ends at once, and new ones are refused for a while."""
        async with self._link(strike, dice, one, other) as link:
            link.reset(refuse=True)
            await asyncio.sleep(strike.planned.seconds / 4)
            link.heal()

    async def garble(self, strike: Strike, dice: random.Random) -> None:
        """One-way messages between two parts are lost, come twice and overtake one another; the rest comes as it is."""
        one, other = dice.choice([("gateway", "target"), ("gateway", "draft"), ("drafts", "target")])
        async with self._link(strike, dice, one, other) as link:
            direct, faults = link.upstream, Faults(dice.randrange(1 << 30), 0.1, 0.1, 0.2, kinds=GARBLED)
            async with MessageRelay(direct, faults) as relay:
                link.upstream = relay.address
                link.reset()
                await asyncio.sleep(strike.planned.seconds)
                link.upstream = direct
                link.reset()
            print(
                f"{strike.part}: {faults.num_dropped} dropped, {faults.num_repeated} repeated, "
                f"{faults.num_reordered} reordered",
                flush=True,
            )

    @asynccontextmanager
    async def _link(self, strike: Strike, dice: random.Random, one: str, other: str) -> AsyncIterator[TcpRelay]:
        names = {" to ".join(ends): ends for ends in self.system.between(one, other)}
        async with self._one_of(strike, dice, list(names)) as part:
            ends = names[part]
            strike.begins(part, gateway=int(ends[0].split()[1]) if one == "gateway" else None)
            yield self.system.links[ends]


def _full_files(member: Process, full: bool) -> int:
    """Whether its files take another byte from now on. Returns the size of its log."""
    _, most = resource.prlimit(member.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(member.pid, resource.RLIMIT_FSIZE, (0 if full else most, most))
    return (member.stderr_path or Path("/dev/null")).stat().st_size


GARBLED = ONE_WAY | {"truncate"}
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
    "log disk full": Chaos.fill_disk,
    "gateway and target cut": lambda chaos, *how: chaos.cut(*how, "gateway", "target"),
    "gateway and draft cut": lambda chaos, *how: chaos.cut(*how, "gateway", "draft"),
    "draft and target cut": lambda chaos, *how: chaos.cut(*how, "drafts", "target"),
    "gateway and target reset": lambda chaos, *how: chaos.reset(*how, "gateway", "target"),
    "gateway and draft reset": lambda chaos, *how: chaos.reset(*how, "gateway", "draft"),
    "draft and target reset": lambda chaos, *how: chaos.reset(*how, "drafts", "target"),
    "draft messages garbled": Chaos.garble,
}


def possible(num_drafts: int, num_gateways: int) -> list[str]:
    """A system of one gateway keeps it: its clients would have nobody to ask."""
    kinds = list(FAULTS)
    if not num_drafts:
        kinds = [kind for kind in kinds if "draft" not in kind]
    return kinds if num_gateways > 1 else [kind for kind in kinds if kind not in OF_SEVERAL_GATEWAYS]
