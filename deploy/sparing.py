"""Whose silence is not held against it: the launcher itself may be the one that is cut off. No I/O.

The fleet ends a worker that hangs. What the launcher does not see it asks others about: gateways say whom they hear.
"""

from __future__ import annotations

from collections.abc import Collection

from deploy.member import PoolMember
from outrider.wire.log import get_logger

log = get_logger(__name__)


class Sparing:
    """`spare` at each look."""

    def __init__(self, seen_s: float, least_s: float) -> None:
        """seen_s: a worker that answered no longer ago can be seen. least_s: what one must fail for to be spared."""
        self._seen_s = seen_s
        self._least_s = least_s
        self._spared: set[str] = set()

    def spare(self, members: Collection[PoolMember], heard: Collection[str], now_s: float) -> None:
        """Their time begins anew. heard: members that answer gateways."""
        is_blind = self._is_blind(members, now_s)
        spared = set()
        for member in members:
            why = self._why(member, member.name in heard, is_blind, now_s)
            if why is None:
                continue
            if member.name not in self._spared:
                log.warning("%s does not answer here, and is not ended for it: %s", member.name, why)
            spared.add(member.name)
            member.hanging_since_s = now_s
        self._spared = spared

    def _is_blind(self, members: Collection[PoolMember], now_s: float) -> bool:
        """None of several is seen. Of one alone nobody can tell."""
        num_placed = sum(member.started is not None for member in members)
        return num_placed > 1 and not any(
            member.seen_at_s is not None and now_s - member.seen_at_s <= self._seen_s for member in members
        )

    def _why(self, member: PoolMember, is_heard: bool, is_blind: bool, now_s: float) -> str | None:
        """None when its time counts."""
        if member.hanging_since_s is None or member.failing_since_s is None:
            return None
        if now_s - member.failing_since_s < self._least_s:
            return None
        if is_blind:
            return "none of the workers does, so it is the launcher that is cut off"
        return "it answers a gateway" if member.is_silent and is_heard else None
