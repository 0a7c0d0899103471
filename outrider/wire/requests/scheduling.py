"""Whom a request is scheduled for, and who comes next where not everybody can at once. Imports no torch.

The gateway's queue, the prompts that a worker feeds, and steps of targets and drafts go by such counters, each by its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from outrider.v1 import common_pb2 as pb
from outrider.wire.requests.params import Range

PRIORITY = Range(-(2**31), 2**31 - 1)
WEIGHT = Range(0.001, 1000)
MAX_TPOT_MS = Range(0, 3_600_000, above_low=True)
MAX_CALLER_BYTES = 32


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Whom a request is for, and how it stands among others."""

    caller: bytes = b""
    """At most 32 bytes, the same in all requests of one caller; empty = those that name none, together."""
    weight: float = 1.0
    """What the caller is given where others want it, too, over what one of weight 1 is given. From 0.001 to 1000."""
    priority: int = 0
    """Of a caller's requests, those with a lower number go first, as in vLLM."""
    max_tpot_ms: float | None = None
    """Milliseconds that a token should take at most; drafts of all are left out for it. None = as long as it takes."""

    def to_proto(self) -> pb.Scheduling:
        return pb.Scheduling(
            caller=self.caller, weight=self.weight, priority=self.priority, max_tpot_ms=self.max_tpot_ms or 0.0
        )

    @classmethod
    def from_proto(cls, message: pb.Scheduling) -> Scheduling:
        """Read and check the message. Raises InvalidRequest."""
        Range(0, MAX_CALLER_BYTES).check("bytes of caller", len(message.caller))
        if message.weight:
            WEIGHT.check("weight", message.weight)
        if message.max_tpot_ms:
            MAX_TPOT_MS.check("max_tpot_ms", message.max_tpot_ms)
        return cls(message.caller, message.weight or 1.0, message.priority, message.max_tpot_ms or None)


class VirtualTokens:
    """Counts what each caller that is here was given, over its weight: of those that wait, who has least is next (Sheng
    et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2, with the virtual time of weighted fair
    queueing: Demers, Keshav and Shenker, 1989).

    Nobody saves up: who begins to wait has at least what those that wait have on average, by their weights. That grows
    with all that is given, so that nobody waits for ever beside others that come and go.
    """

    def __init__(self) -> None:
        self._given: dict[bytes, float] = {}
        self._waiting: dict[bytes, float] = {}
        self._total_weight = 0.0
        self._average = 0.0

    def wait(self, waiting: Mapping[bytes, float], here: Iterable[bytes]) -> None:
        """Say who waits, with their weights, and who is here, waiting or not."""
        given = self._given
        self._given = {caller: given.get(caller, self._average) for caller in (*here, *waiting)}
        for caller in waiting.keys() - self._waiting.keys():
            self._given[caller] = max(self._given[caller], self._average)
        self._waiting, self._total_weight = dict(waiting), sum(waiting.values())

    def give(self, caller: bytes, amount: float) -> None:
        """Count what a caller is given that waits."""
        self._given[caller] += amount / self._waiting[caller]
        self._average += amount / self._total_weight

    def given(self, caller: bytes) -> float:
        """Return what it was given over its weight, by which callers that wait are compared."""
        return self._given[caller]

    def with_more(self, caller: bytes, amount: float) -> float:
        """Return the same once a caller that waits is given so much more."""
        return self._given[caller] + amount / self._waiting[caller]
