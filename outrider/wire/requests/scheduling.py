"""`Scheduling`, a request's caller and priority, and `VirtualTokens`, which decides which caller is served next.

The gateway's queue, a worker's prefill, and the steps of targets and drafts each have their own `VirtualTokens`.
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
"""Maximum bytes of `Scheduling.caller`, a digest of 256 bits."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """Parameters by which a request is scheduled among others: its caller with a weight, its priority, and a limit on
    the time per output token.
    """

    caller: bytes = b""
    """Digest of the identity of the user for whom the request counts, at most 32 bytes. All requests with an empty
    digest count for one common caller."""
    weight: float = 1.0
    """Weight of the caller among callers that compete: a caller of weight 2 is served twice as many tokens as one of
    weight 1. From 0.001 to 1000."""
    priority: int = 0
    """Order of the request among the requests of the same caller: a lower number runs first, as in vLLM."""
    max_tpot_ms: float | None = None
    """Upper limit of the time per output token of the request, in milliseconds. To keep it, a step that includes the
    request verifies fewer draft tokens, also of other slots. None = no limit."""

    def to_proto(self) -> pb.Scheduling:
        """Convert the parameters to a protobuf message."""
        return pb.Scheduling(
            caller=self.caller, weight=self.weight, priority=self.priority, max_tpot_ms=self.max_tpot_ms or 0.0
        )

    @classmethod
    def from_proto(cls, message: pb.Scheduling) -> Scheduling:
        """Convert and check a protobuf message. Raises InvalidRequest for a value that is not allowed."""
        Range(0, MAX_CALLER_BYTES).check("bytes of caller", len(message.caller))
        if message.weight:
            WEIGHT.check("weight", message.weight)
        if message.max_tpot_ms:
            MAX_TPOT_MS.check("max_tpot_ms", message.max_tpot_ms)
        return cls(message.caller, message.weight or 1.0, message.priority, message.max_tpot_ms or None)


class VirtualTokens:
    """Fair queueing of callers. It counts, for each caller that has requests, what the caller was served (tokens, rows,
    seconds or choices: the unit of `add_served`), divided by its weight. The waiting caller with the smallest count
    should be served next.

    This is algorithm 2 of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, with the virtual time
    of weighted fair queueing (Demers, Keshav and Shenker, 1989). No caller can save up service by being idle: when it
    begins to wait, its count is raised to at least the weighted mean of the waiting callers' counts.
    """

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        """Tokens served divided by weight, by active caller."""
        self._weights: dict[bytes, float] = {}
        """Weights of the waiting callers."""
        self._total_weight = 0.0
        self._average = 0.0
        """Weighted mean of `_served` over the waiting callers."""

    def wait(self, waiting: Mapping[bytes, float], active: Iterable[bytes]) -> None:
        """Set which callers are waiting and active now. The counts of all other callers are forgotten.

        waiting: weight of each caller that has a request waiting to be served. active: all callers that have requests,
        waiting or running.
        """
        served = dict[bytes, float]()
        for caller in (*active, *waiting):
            served[caller] = self._served.get(caller, self._average)
        for caller in waiting.keys() - self._weights.keys():
            served[caller] = max(served[caller], self._average)
        self._served = served
        self._weights = dict(waiting)
        self._total_weight = sum(waiting.values())

    def add_served(self, caller: bytes, amount: float) -> None:
        """Add `amount` to what a caller was served. The last call of `wait` must have named the caller as waiting."""
        self._served[caller] += amount / self._weights[caller]
        self._average += amount / self._total_weight

    def served(self, caller: bytes) -> float:
        """Return the count of a caller that has requests: what it was served, divided by its weight."""
        return self._served[caller]

    def served_after(self, caller: bytes, amount: float) -> float:
        """Return what `served` would return for a waiting caller after `add_served(caller, amount)`."""
        return self._served[caller] + amount / self._weights[caller]
