"""Runs the pairing checks of drafts with the targets of the models that they serve, in the background.

`Pools` starts the checks that are due whenever a worker or the membership has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import grpc.aio

from gateway.workers.links import RECONNECT_S
from gateway.workers.member import DraftMember, PairingResult, TargetMember
from outrider.wire.peer_text import Reasons
from outrider.wire.telemetry.log import get_logger
from outrider.wire.transport.rpc import describe_failure

log = get_logger(__name__)


class PairingChecks:
    """Runs the pairing checks of a gateway, at most one at a time for each pair of a draft worker and a target."""

    def __init__(
        self,
        pairs: Callable[[], Iterable[tuple[DraftMember, TargetMember]]],
        in_background: Callable[[Coroutine[Any, Any, None]], None],
        on_change: Callable[[], None],
    ) -> None:
        """Create the object, without running checks.

        pairs: returns every pair of a draft worker and a target that it may serve. in_background: runs a coroutine as a
        task. on_change: called after each check.
        """
        self._pairs = pairs
        self._in_background = in_background
        self._on_change = on_change
        self._running: set[tuple[DraftMember, TargetMember]] = set()

    def start(self, *, repeats_failed: bool = False) -> None:
        """Start a pairing check for each pair that needs one, has no result yet, and is not being checked now.

        repeats_failed: whether failed checks are repeated. The cause of a failure may be gone after a change, for
        instance memory that another worker used.
        """
        for draft, target in self._pairs():
            pairing = draft.pairing(target)
            has_failed = pairing is not None and pairing.why is not None
            is_due = draft.is_pairing_due(target) or (repeats_failed and has_failed)
            if is_due and (draft, target) not in self._running:
                self._running.add((draft, target))
                self._in_background(self._check(draft, target))

    async def _check(self, draft: DraftMember, target: TargetMember) -> None:
        # A draft that fails is not used at that target alone. The check is repeated when either of them was restarted.
        failures = Reasons()
        try:
            while (draft_connection := draft.connection) is not None and (
                target_connection := target.connection
            ) is not None:
                try:
                    why = await draft.link.pair(target.deliver_address, target_connection.epoch)
                except grpc.aio.AioRpcError as error:
                    why = describe_failure(error)
                    if failures.note(why):
                        log.warning("the draft %s cannot be paired with %s now: %s", draft.name, target.name, why)
                    await asyncio.sleep(RECONNECT_S)
                    continue
                if why is not None:
                    draft_id = draft_connection.info.model_id
                    why = f"draft {draft_id} does not fit target {target_connection.info.model_id}: {why}"
                previous = draft.pairing(target)
                draft.pairings[target.name] = PairingResult(draft_connection, target_connection, why)
                if draft.pairing(target) is None:
                    continue  # one of them was started anew meanwhile
                if why is not None and (previous is None or previous.why != why):
                    log.warning("the draft at %s is not used: %s", draft.spec.address, why)
                return
        finally:
            self._running.discard((draft, target))
            self.start()  # those that became due meanwhile
            self._on_change()
