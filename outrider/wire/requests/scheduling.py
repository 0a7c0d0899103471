"""`Scheduling`, for which caller and with which priority a request runs, and `VirtualTokens`, which caller is next.

The gateway's queue, a worker's prefill, and the steps of targets and drafts each have a `VirtualTokens` of their own.
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
"""Bytes of `Scheduling.caller`, which is a digest of 256 bits."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a request is scheduled among others."""

    caller: bytes = b""
    """Digest of the caller, at most 32 bytes; empty = the requests without a caller, which count as one caller's."""
    weight: float = 1.0
    """The caller's share where several compete, relative to a caller of weight 1; from 0.001 to 1000."""
    priority: int = 0
    """Order among the caller's requests: a lower number runs first, as in vLLM."""
    max_tpot_ms: float | None = None
    """Milliseconds that an output token should take at most; a step verifies fewer draft tokens, of all slots, for it.
    None = no aim."""

    def to_proto(self) -> pb.Scheduling:
        """Return the message."""
        return pb.Scheduling(
            caller=self.caller, weight=self.weight, priority=self.priority, max_tpot_ms=self.max_tpot_ms or 0.0
        )

    @classmethod
    def from_proto(cls, message: pb.Scheduling) -> Scheduling:
        """Read and check a message. Raises InvalidRequest."""
        Range(0, MAX_CALLER_BYTES).check("bytes of caller", len(message.caller))
        if message.weight:
            WEIGHT.check("weight", message.weight)
        if message.max_tpot_ms:
            MAX_TPOT_MS.check("max_tpot_ms", message.max_tpot_ms)
        return cls(message.caller, message.weight or 1.0, message.priority, message.max_tpot_ms or None)


class VirtualTokens:
    """Tokens that each active caller was served, divided by its weight. Of the waiting callers the one with the least
    is served next.

    It is algorithm 2 of Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, with the virtual time of
    weighted fair queueing (Demers, Keshav and Shenker, 1989). No caller saves up by not asking: one that begins to wait
    starts at no less than the weighted mean of the waiting callers. The mean grows with every token served, so that no
    caller waits for ever while others come and go.
    """

    def __init__(self) -> None:
        self._served: dict[bytes, float] = {}
        """Tokens over weight, by caller."""
        self._weights: dict[bytes, float] = {}
        """Weights of the waiting callers."""
        self._total_weight = 0.0
        self._average = 0.0
        """Weighted mean of `_served` over the waiting callers."""

    def wait(self, waiting: Mapping[bytes, float], active: Iterable[bytes]) -> None:
        """Set the waiting callers and their weights, and the active callers, waiting or not. Others are
        forgotten.
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
        """Record that a waiting caller was served `amount` tokens."""
        self._served[caller] += amount / self._weights[caller]
        self._average += amount / self._total_weight

    def given(self, caller: bytes) -> float:
        """Return the tokens that a caller was served over its weight: the waiting caller with the least is next."""
        return self._served[caller]

    def served_after(self, caller: bytes, amount: float) -> float:
        """Return what `given` would be after serving a waiting caller `amount` more tokens."""
        return self._served[caller] + amount / self._weights[caller]
