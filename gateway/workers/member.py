"""A worker as the gateway uses it: its link, its health, its load, and the line for a target's slots.

The line is first come, first served. A slot without memory yet waits inside the target.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from gateway.workers.connection import Connection
from gateway.workers.drafts.draft_use import DraftUse
from gateway.workers.links import WorkerLink
from gateway.workers.membership import MemberSpec
from gateway.workers.request_placement import WorkerLoad
from outrider.v1 import common_pb2 as pb
from outrider.wire.models.pair import has_same_tokens
from outrider.wire.processes.health import CallOutcome, Health
from outrider.wire.requests.drafters import Drafter

POLL_S = 0.25
"""Seconds after which the head of the line tries again by itself: another gateway's requests may have freed a slot."""
SILENT_S = 1.0
"""Seconds without a step, two polls long, after which a worker with work gets no request while there is another."""
MAX_CALLERS = 1024
"""Maximal number of callers for which a draft's use is remembered: some 100 KB. Any client of a gateway without API
keys may name new ones."""


UseKey = tuple[bytes, bool]
"""A caller, and whether its choices are greedy: what a draft adds to those says little about the others."""


class SlotQueue:
    """The line for the slots of one target. While a request waits, no other overtakes it."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    def note_freed(self) -> None:
        """Record that a slot of this gateway was closed."""
        self._freed.set()

    async def enter(self, try_open: Callable[[], Awaitable[bool]]) -> None:
        """Wait in line until `try_open` returns True. Its errors are raised."""
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
    """State of a worker: label `state` of outrider_members."""

    SERVING = "serving"
    DRAINING = "draining"
    FAILING = "failing"
    """The worker is down by its health."""
    LOST = "lost"
    """The worker is not connected, or is connected to none of the targets that it must be paired with."""
    REFUSED = "refused"
    """The worker replies but does not fit."""


class Member:
    """One worker, in whatever state."""

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        self.spec = spec
        self.link = link
        self.health = Health()
        self.num_requests = 0
        """Number of requests placed on the worker."""
        self._max_requests = 0
        """Maximal number of concurrent requests since the last poll."""
        self._num_others = 0
        """Number of slots that other gateways held at the last poll."""
        self._epoch = 0
        """Epoch of the last connection, 0 before the first."""
        self._has_refused_slot = False
        """Whether the worker has refused a slot since the last poll."""
        self._draining_epoch = 0
        """Epoch in which the worker refused a slot because it drains, 0 for none."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def connection(self) -> Connection | None:
        return self.link.connection

    @property
    def draining(self) -> bool:
        """Whether the worker only finishes what it runs."""
        if self.spec.draining:
            return True
        info = self.link.info
        return info is not None and (info.draining or info.epoch == self._draining_epoch)

    @property
    def usable(self) -> bool:
        """Whether a request may be placed on the worker."""
        return self.connection is not None and not self.draining and self.health.usable

    @property
    def usable_alone(self) -> bool:
        """Whether a request may be placed on the worker if there is no other."""
        return self.connection is not None and not self.draining and self.health.usable_alone

    @property
    def state(self) -> State:
        if self.connection is None:
            if self.link.refused is not None:
                return State.REFUSED
            return State.LOST
        if self.draining:
            return State.DRAINING
        if self.health.is_down:
            return State.FAILING
        return State.SERVING

    @property
    def silent(self) -> bool:
        """Whether the worker has work and shows no sign of life, though not for long enough to be given up."""
        return self.link.silent_s > SILENT_S

    @property
    def load(self) -> WorkerLoad:
        """Load of the worker.

        Other gateways' slots count by the last poll. A worker that refused a slot counts as full until the next poll.

            # 3 requests of this gateway, 2 of others: 5 of `num_slots` 8, or 5 of 5 after a refusal
        """
        info = self.link.info or pb.WorkerInfo()
        num_requests = self.num_requests + self._num_others
        num_slots: int = info.num_slots
        if self._has_refused_slot:
            num_slots = num_requests
        kv_share = 0.0
        if info.num_kv_blocks:
            kv_share = info.num_kv_blocks_in_use / info.num_kv_blocks
        return WorkerLoad(self.name, num_requests, num_slots, kv_share, self.link.rtt_s, self.silent)

    def heard(self, info: pb.WorkerInfo) -> None:
        """Update the load from a poll.

        Slots that this gateway closed since the previous poll do not count as others'.

            # 7 slots in use; since the last poll this gateway held 5 at most, and holds 3 now: others hold 2
        """
        self._num_others = max(0, info.num_slots_in_use - self._max_requests)
        self._max_requests = self.num_requests
        self._has_refused_slot = False

    def attach(self, request: object) -> None:
        """Place a request on the worker."""
        self.num_requests += 1
        self._max_requests = max(self._max_requests, self.num_requests)
        self.health.begin(request)

    def detach(self) -> None:
        """Remove a request from the worker."""
        self.num_requests -= 1

    def note_draining(self) -> None:
        """Record that the worker refused a slot because it is about to stop."""
        self._draining_epoch = 0
        if self.link.info is not None:
            self._draining_epoch = self.link.info.epoch

    def note_exhausted(self) -> None:
        """Record that the worker had no free slot."""
        self._has_refused_slot = True

    def restarted(self) -> None:
        """Reset what was known of the previous process."""
        self.health.restarted()

    def changed(self, before: Connection | None, after: Connection | None) -> None:
        """Record that the connection went or came."""
        if before is not None and after is None:
            outcome = CallOutcome.REFUSED
            if before.hung:
                outcome = CallOutcome.LOST
            self.health.note(outcome)
        if after is not None:
            if self._epoch not in (0, after.epoch):
                self.restarted()
            self._epoch = after.epoch


class TargetMember(Member):
    """A target worker, with the line for its slots."""

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        super().__init__(spec, link)
        self.room = SlotQueue()

    @property
    def deliver_address(self) -> str:
        """Address to which drafts deliver."""
        return self.spec.deliver_address


@dataclass(frozen=True, slots=True)
class PairingResult:
    """Result of a pairing check between these connections of a draft and a target.

    Drafts that read hidden states or translate are checked.
    """

    draft: Connection
    target: Connection
    why: str | None
    """Reason why the draft does not fit the target; None if it does."""


_DRAFTERS = {drafter.value: drafter for drafter in Drafter}
"""Drafters by the labels that workers report."""


class DraftMember(Member):
    """A draft worker."""

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        super().__init__(spec, link)
        self.pairings: dict[str, PairingResult] = {}
        """Last pairing check with each target, by the target's name."""
        self.deliveries: defaultdict[str, Health] = defaultdict(Health)
        """Health of the deliveries to each target, by the target's name."""
        self._uses: dict[UseKey, DraftUse] = {}
        """Use of the draft by caller, so that a caller whose drafts are rejected pauses nobody else's."""

    def use_of(self, key: UseKey) -> DraftUse:
        """Return the draft's use for the choices of a caller."""
        use = self._uses[key] = self._uses.pop(key, DraftUse())
        if len(self._uses) > MAX_CALLERS:
            least_recent = next(iter(self._uses))
            del self._uses[least_recent]
        return use

    @property
    def kind(self) -> Drafter:
        """Drafter that the worker runs: MODEL, or the table by which it drafts without a model."""
        info = self.link.info
        if info is None or not info.drafters:
            return Drafter.MODEL
        return _DRAFTERS.get(info.drafters[0], Drafter.MODEL)

    @property
    def state(self) -> State:
        """State of the draft, in view of its pairing checks.

        A draft that reads hidden states is LOST until it was checked with a target. A draft is REFUSED if it fits none
        of the targets that it was checked with.
        """
        state = super().state
        info = self.link.info
        if state is not State.SERVING or info is None:
            return state
        is_refused = False
        for pairing in self.pairings.values():
            if pairing.draft is self.connection:
                if pairing.why is None:
                    return state
                is_refused = True
        if is_refused:
            return State.REFUSED
        if info.needs_features:
            return State.LOST
        return state

    def needs_pairing(self, target: TargetMember) -> bool:
        """Return whether the draft must be paired with this target.

        It must if it reads the target's hidden states or translates for it.
        """
        info = self.link.info
        if info is None:
            return False
        if info.needs_features:
            return True
        if not info.translates:
            return False
        target_info = target.link.info
        return target_info is None or not has_same_tokens(info, target_info)

    def pairing(self, target: TargetMember) -> PairingResult | None:
        """Return the pairing check of the current connections of both; None if there is none yet.

        # after a restart of the target its connection is another one: the check of the previous one no longer counts
        """
        pairing = self.pairings.get(target.name)
        if pairing is None or pairing.draft is not self.connection or pairing.target is not target.connection:
            return None
        return pairing

    def is_pairing_due(self, target: TargetMember) -> bool:
        """Return whether a pairing check with this target is due."""
        is_up = self.connection is not None and target.connection is not None
        return is_up and self.needs_pairing(target) and self.pairing(target) is None

    def serves(self, target: TargetMember) -> bool:
        """Return whether a request on this target may be given to the draft."""
        return self.usable and self.deliveries[target.name].usable and self.fits(target)

    def fits(self, target: TargetMember) -> bool:
        """Return whether the draft fits the target by its pairing check, or needs none."""
        pairing = self.pairing(target)
        return not self.needs_pairing(target) or (pairing is not None and pairing.why is None)
