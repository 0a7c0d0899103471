"""A worker as the gateway uses it: its link, its health, its load, and the line for a target's slots.

The line is first come, first served. A slot that is open but has no KV blocks yet waits inside the target.
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
"""Seconds after which the first choice in line tries again to open a slot. When another gateway frees a slot, this
gateway is not told."""
SILENT_S = 1.0
"""Seconds without a step, two polls long, after which a worker with work gets no new choice while another worker is
usable."""
MAX_USES = 1024
"""Maximal number of DraftUse records, one for each UseKey, that are kept of a draft worker. They take some 100 KB.
Without API keys a client may send a new `user` with each request, so their number has no other limit."""


UseKey = tuple[bytes, bool]
"""Digest of a caller, and whether the choices are greedy. A caller's greedy and other choices are counted apart because
their acceptance rates differ."""


class SlotQueue:
    """The line of choices that wait for a slot of one target, which get slots in the order in which they entered it."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()

    def note_freed(self) -> None:
        """Record that this gateway closed a slot on the target, so that the first choice in line tries at once."""
        self._freed.set()

    async def enter(self, try_open: Callable[[], Awaitable[bool]]) -> None:
        """Wait in line until `try_open` opens a slot and returns True.

        If `try_open` raises an error, the choice leaves the line and the error is passed on.
        """
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
    """State of a worker: value of the label `state` of the metric outrider_members."""

    SERVING = "serving"
    DRAINING = "draining"
    FAILING = "failing"
    """The worker is connected, but gets no new choices because recent ones failed on it."""
    LOST = "lost"
    """The gateway cannot use the worker, since it is not connected; or it is a draft worker that reads hidden states,
    and no pairing check with a target has finished yet."""
    REFUSED = "refused"
    """The worker answers, but the gateway does not use it: it is incompatible with the model or with the gateway."""


class Member:
    """One worker that the gateway knows, connected or not: its link, health and load."""

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        self.spec = spec
        self.link = link
        self.health = Health()
        self.num_choices = 0
        """Number of choices of this gateway that are placed on the worker now: they run there or wait for a slot."""
        self._max_choices = 0
        """Largest number of choices of this gateway on the worker at one time since the last poll."""
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
    def is_draining(self) -> bool:
        """Whether the worker only finishes what it runs and takes no new choices."""
        if self.spec.is_draining:
            return True
        info = self.link.info
        return info is not None and (info.is_draining or info.epoch == self._draining_epoch)

    @property
    def is_usable(self) -> bool:
        """Whether a choice may be placed on the worker: it is connected, does not drain, and its health allows it."""
        return self.connection is not None and not self.is_draining and self.health.is_usable

    @property
    def is_usable_alone(self) -> bool:
        """Whether a choice may be placed on the worker while no worker is usable. If this one is down because choices
        failed on it, it is tried again sooner than `is_usable` allows.
        """
        return self.connection is not None and not self.is_draining and self.health.is_usable_alone

    @property
    def state(self) -> State:
        if self.connection is None:
            if self.link.refused is not None:
                return State.REFUSED
            return State.LOST
        if self.is_draining:
            return State.DRAINING
        if self.health.is_down:
            return State.FAILING
        return State.SERVING

    @property
    def is_silent(self) -> bool:
        """Whether the worker has work and made no step for SILENT_S, though it does not count as hung yet."""
        return self.link.silent_s > SILENT_S

    @property
    def load(self) -> WorkerLoad:
        """Load of the worker.

        The slots that other gateways hold are those of the last poll. A worker that refused to open a slot because it
        had none counts as full until the next poll.

            # 3 choices of this gateway, 2 of others: 5 of `num_slots` 8, or 5 of 5 after a refusal
        """
        info = self.link.info or pb.WorkerInfo()
        num_choices = self.num_choices + self._num_others
        num_slots: int = info.num_slots
        if self._has_refused_slot:
            num_slots = num_choices
        kv_share = 0.0
        if info.num_kv_blocks:
            kv_share = info.num_kv_blocks_in_use / info.num_kv_blocks
        return WorkerLoad(self.name, num_choices, num_slots, kv_share, self.link.rtt_s, self.is_silent)

    def update_load(self, info: pb.WorkerInfo) -> None:
        """Update the load from the WorkerInfo of a poll.

        Slots that this gateway closed since the previous poll do not count as slots of other gateways.

            # 7 slots in use; since the last poll this gateway held 5 at most, and holds 3 now: others hold 2
        """
        self._num_others = max(0, info.num_slots_in_use - self._max_choices)
        self._max_choices = self.num_choices
        self._has_refused_slot = False

    def attach(self, choice: object) -> None:
        """Count a choice as placed on the worker. choice: any object that stands for the choice."""
        self.num_choices += 1
        self._max_choices = max(self._max_choices, self.num_choices)
        self.health.begin(choice)

    def detach(self) -> None:
        """Count a choice as no longer on the worker."""
        self.num_choices -= 1

    def note_draining(self) -> None:
        """Record that the worker refused a slot because it drains: in this epoch it takes no new choices."""
        self._draining_epoch = 0
        if self.link.info is not None:
            self._draining_epoch = self.link.info.epoch

    def note_exhausted(self) -> None:
        """Record that the worker refused a slot because none was free: it counts as full until the next poll."""
        self._has_refused_slot = True

    def restarted(self) -> None:
        """Reset the state that belongs to the worker's previous process, such as its health."""
        self.health.restarted()

    def changed(self, before: Connection | None, after: Connection | None) -> None:
        """Record that the worker's connection began (`before` is None) or ended (`after` is None)."""
        if before is not None and after is None:
            outcome = CallOutcome.REFUSED
            if before.is_hung:
                outcome = CallOutcome.LOST
            self.health.note(outcome)
        if after is not None:
            if self._epoch not in (0, after.epoch):
                self.restarted()
            self._epoch = after.epoch


class TargetMember(Member):
    """A target worker, with the line of choices that wait for its slots."""

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        super().__init__(spec, link)
        self.slot_queue = SlotQueue()

    @property
    def deliver_address(self) -> str:
        """Address to which draft workers deliver draft tokens for this target."""
        return self.spec.deliver_address


@dataclass(frozen=True, slots=True)
class PairingResult:
    """Result of the pairing check of one draft worker with one target. It is valid only as long as `draft` and `target`
    are the connections of the two workers.

    Only draft workers that read hidden states or translate between tokenizers are checked.
    """

    draft: Connection
    target: Connection
    why: str | None
    """Reason why the draft worker and the target are incompatible; None if they are compatible."""


_DRAFTERS = {drafter.value: drafter for drafter in Drafter}
"""Drafters by the labels that workers report."""


class DraftMember(Member):
    """A draft worker, with its pairing checks, the health of its deliveries, and how many of its draft tokens were
    accepted for each caller.
    """

    def __init__(self, spec: MemberSpec, link: WorkerLink) -> None:
        super().__init__(spec, link)
        self.pairings: dict[str, PairingResult] = {}
        """Last result of the pairing check with each target, by the target's name."""
        self.deliveries: defaultdict[str, Health] = defaultdict(Health)
        """Record of whether deliveries to a target arrive there and are valid, by the target's name."""
        self._uses: dict[UseKey, DraftUse] = {}
        """Use of the draft worker by UseKey, the least recent first. If a caller's draft tokens are rejected, the draft
        worker goes on drafting for other callers."""

    def use_of(self, key: UseKey) -> DraftUse:
        """Return the record of how many draft tokens of the draft worker were accepted for one caller's greedy choices,
        or for its others. A new key gets an empty record.
        """
        use = self._uses[key] = self._uses.pop(key, DraftUse())
        if len(self._uses) > MAX_USES:
            least_recent = next(iter(self._uses))
            del self._uses[least_recent]
        return use

    @property
    def kind(self) -> Drafter:
        """Drafter that the worker runs: MODEL, or the table from which it drafts without a model."""
        info = self.link.info
        if info is None or not info.drafters:
            return Drafter.MODEL
        return _DRAFTERS.get(info.drafters[0], Drafter.MODEL)

    @property
    def state(self) -> State:
        """State of the draft worker, which also depends on its pairing checks.

        A draft worker that reads hidden states is LOST until a check with some target has finished. It is REFUSED if it
        is incompatible with every target with which it was checked.
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
        """Return whether the draft worker needs a pairing check with this target.

        It needs one if it reads the target's hidden states, or if it drafts with a tokenizer other than the target's.
        """
        info = self.link.info
        if info is None:
            return False
        if info.needs_features:
            return True
        if not info.supports_retokenization:
            return False
        target_info = target.link.info
        return target_info is None or not has_same_tokens(info, target_info)

    def pairing(self, target: TargetMember) -> PairingResult | None:
        """Return the result of the pairing check on the current connections of both workers; None without one.

        # after a restart of the target its connection is another one: the check of the previous one no longer counts
        """
        pairing = self.pairings.get(target.name)
        if pairing is None or pairing.draft is not self.connection or pairing.target is not target.connection:
            return None
        return pairing

    def is_pairing_due(self, target: TargetMember) -> bool:
        """Return whether a pairing check with this target is needed and not yet done, and both are connected."""
        are_connected = self.connection is not None and target.connection is not None
        return are_connected and self.needs_pairing(target) and self.pairing(target) is None

    def can_serve(self, target: TargetMember) -> bool:
        """Return whether the draft worker is usable, its deliveries reach this target, and the two are compatible."""
        return self.is_usable and self.deliveries[target.name].is_usable and self.is_compatible(target)

    def is_compatible(self, target: TargetMember) -> bool:
        """Return whether the draft worker passed its pairing check with the target, or needs none."""
        pairing = self.pairing(target)
        return not self.needs_pairing(target) or (pairing is not None and pairing.why is None)
