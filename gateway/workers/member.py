"""A worker as the gateway uses it: its link, whether it may be used, what is known of its load, and who waits for a
slot of a target, first come, first served. A slot that has no memory yet waits inside the target.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from gateway.workers.draft_use import DraftUse
from gateway.workers.links import Connection, WorkerLink
from gateway.workers.membership import MemberSpec
from gateway.workers.placement import WorkerLoad
from outrider.v1 import common_pb2 as pb
from outrider.wire.models.pair import has_same_tokens
from outrider.wire.processes.health import Health, Outcome
from outrider.wire.requests.drafters import Drafter

POLL_S = 0.25
"""Seconds after which the head of the line tries again by itself: another gateway's requests may have freed a slot.
Doubled, it waits so much longer."""
SILENT_S = 1.0
"""Seconds without a step, two questions long, after which a worker with work gets no request while there is another.
Doubled, so many more requests go to one that hangs."""
MAX_CALLERS = 1024
"""Callers of whom a draft's use is remembered: some 100 KB. Any client of a gateway without keys may name new ones."""


UseKey = tuple[bytes, bool]
"""A caller, and whether its answers are greedy: what a draft adds to those says little of the others."""


class Room:
    """Lines up those who need a slot of one target; while somebody waits, nobody overtakes."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    def note_freed(self) -> None:
        """Take note that a slot of ours was closed."""
        self._freed.set()

    async def enter(self, try_open: Callable[[], Awaitable[bool]]) -> None:
        """Return once `try_open` has returned True. Its errors pass through."""
        if not self._line.locked() and await try_open():
            return
        async with self._line:  # asyncio's lock is fair
            while True:
                self._freed.clear()
                if await try_open():
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._freed.wait()


class State(Enum):
    """Label `state` of outrider_members."""

    SERVING = "serving"
    DRAINING = "draining"
    FAILING = "failing"
    """It is down by its health."""
    LOST = "lost"
    """Not connected, or to none of the targets that it has to be paired with."""
    REFUSED = "refused"
    """It answers, and does not fit."""


class Member:
    """Knows one worker, whatever it does."""

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        self.spec = spec
        self.link = link
        self.health = Health()
        self.num_requests = 0
        """Requests placed here."""
        self._most_requests = 0
        """At once, since it was heard last."""
        self._num_others = 0
        """Slots that others held then."""
        self._epoch = 0
        self._refused_slot = False
        """Since it was heard last."""
        self._told_draining_epoch = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def connection(self) -> Connection | None:
        return self.link.connection

    @property
    def draining(self) -> bool:
        """Whether it only finishes what runs there."""
        info = self.link.info
        told = info is not None and (info.draining or info.epoch == self._told_draining_epoch)
        return self.spec.draining or told

    @property
    def usable(self) -> bool:
        """Whether a request may be placed here."""
        return self.connection is not None and not self.draining and self.health.usable

    @property
    def usable_alone(self) -> bool:
        """Whether a request may be placed here when it can be placed nowhere else."""
        return self.connection is not None and not self.draining and self.health.usable_alone

    @property
    def state(self) -> State:
        if self.connection is None:
            return State.REFUSED if self.link.refused is not None else State.LOST
        if self.draining:
            return State.DRAINING
        return State.FAILING if self.health.is_down else State.SERVING

    @property
    def silent(self) -> bool:
        """Whether it has work and shows no sign of life, though not for long enough to be given up."""
        return self.link.silent_s > SILENT_S

    @property
    def load(self) -> WorkerLoad:
        """Return its load. Others' slots count by what the worker said last; one that it refused counts till then."""
        info = self.link.info or pb.WorkerInfo()
        num_requests = self.num_requests + self._num_others
        num_slots = num_requests if self._refused_slot else info.num_slots
        kv_share = info.num_kv_blocks_in_use / info.num_kv_blocks if info.num_kv_blocks else 0.0
        return WorkerLoad(self.name, num_requests, num_slots, kv_share, self.link.rtt_s, self.silent)

    def heard(self, info: pb.WorkerInfo) -> None:
        """Take note of how it says it is. Slots that this gateway gave back meanwhile are not others'."""
        self._num_others = max(0, info.num_slots_in_use - self._most_requests)
        self._most_requests = self.num_requests
        self._refused_slot = False

    def attach(self, request: object) -> None:
        """Place a request here."""
        self.num_requests += 1
        self._most_requests = max(self._most_requests, self.num_requests)
        self.health.begin(request)

    def detach(self) -> None:
        self.num_requests -= 1

    def told_draining(self) -> None:
        """Take note that it refused a slot because it is about to stop."""
        self._told_draining_epoch = 0 if self.link.info is None else self.link.info.epoch

    def told_exhausted(self) -> None:
        """Take note that it had no slot to give."""
        self._refused_slot = True

    def restarted(self) -> None:
        """Forget what was known of the process before."""
        self.health.restarted()

    def changed(self, before: Connection | None, after: Connection | None) -> None:
        """Take note that its connection went or came."""
        if before is not None and after is None:
            self.health.note(Outcome.LOST if before.hung else Outcome.REFUSED)
        if after is not None:
            if self._epoch not in (0, after.epoch):
                self.restarted()
            self._epoch = after.epoch


class TargetMember(Member):
    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        super().__init__(spec, link)
        self.room = Room()

    @property
    def deliver_address(self) -> str:
        """Return where drafts reach it."""
        return self.spec.deliver_address


@dataclass(frozen=True, slots=True)
class Pairing:
    """What came of pairing a draft that reads hidden states, or translates, with a target: of these two lives."""

    draft: Connection
    target: Connection
    why: str | None
    """Why the draft may not serve the target; None where it may."""


class DraftMember(Member):
    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        super().__init__(spec, link)
        self.pairings: dict[str, Pairing] = {}
        """By target, the last."""
        self.deliveries: defaultdict[str, Health] = defaultdict(Health)
        """By target: whether what it delivers arrives there."""
        self._uses: dict[UseKey, DraftUse] = {}
        """How many tokens it added, by caller: one whose drafts are rejected pauses nobody else's."""

    def use_of(self, key: UseKey) -> DraftUse:
        """Return what it adds to the answers of a caller."""
        use = self._uses[key] = self._uses.pop(key, DraftUse())
        if len(self._uses) > MAX_CALLERS:
            del self._uses[next(iter(self._uses))]  # who was noted longest ago
        return use

    @property
    def kind(self) -> Drafter:
        """Return MODEL, or what it drafts by without one."""
        drafters = () if self.link.info is None else self.link.info.drafters
        return next((drafter for drafter in Drafter if drafter in drafters), Drafter.MODEL)

    @property
    def state(self) -> State:
        """Of one that has been paired as its targets know it, LOST until one of them does where it reads their hidden
        states.
        """
        state, info = super().state, self.link.info
        found = [each.why for each in self.pairings.values() if each.draft is self.connection]
        if state is not State.SERVING or info is None or None in found:
            return state
        return State.REFUSED if found else State.LOST if info.needs_features else state

    def needs_pairing(self, target: TargetMember) -> bool:
        """Whether it reads hidden states of this target, or translates for it."""
        info, other = self.link.info, target.link.info
        if info is None or info.needs_features or not info.translates:
            return info is not None and info.needs_features
        return other is None or not has_same_tokens(info, other)

    def pairing(self, target: TargetMember) -> Pairing | None:
        """Return what came of it with this target as it is now; None while that cannot be told."""
        found = self.pairings.get(target.name)
        is_of_now = found is not None and found.draft is self.connection and found.target is target.connection
        return found if is_of_now else None

    def lacks_pairing(self, target: TargetMember) -> bool:
        """Whether it is to be paired with this target."""
        is_up = self.connection is not None and target.connection is not None
        return is_up and self.needs_pairing(target) and self.pairing(target) is None

    def serves(self, target: TargetMember) -> bool:
        """Whether a request at this target may be given to it."""
        return self.usable and self.deliveries[target.name].usable and self.fits(target)

    def fits(self, target: TargetMember) -> bool:
        """Whether it reads what it was trained on there, and knows what its tokens are, as far as it needs any."""
        pairing = self.pairing(target)
        return not self.needs_pairing(target) or (pairing is not None and pairing.why is None)
