"""Features for heads: one vector a token, which a head's projection makes of the target's hidden states.

They are made after a forward of the tokens that are committed, kept a while, and sent to the drafts that subscribe.
`heads` registers heads for drafts, and this module runs their projections. Without a head it does nothing. Runs on the
engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.engine.heads.feature_buffer import FeatureBuffer
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.host_copy import to_device, to_host
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import SlotKey
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import InvalidRequest, OutriderError, Unavailable
from outrider.wire.telemetry.log import get_logger
from target_service.leases.leases import Leases

if TYPE_CHECKING:
    from target_service.features.feature_stream import FeatureStream

log = get_logger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Bytes kept for all slots and heads; those of the slot that was longest without a new token go first."""
MAX_KEPT_TOKENS = 512
"""Tokens of a slot before its last step whose features are kept for a draft that subscribes late or reads slowly."""
MAX_SUBSCRIPTIONS = 4096
"""Subscriptions of leases that run or have not begun; the oldest goes, and its draft subscribes again."""


@dataclass(eq=False, slots=True)
class FeatureSubscription:
    """A draft's subscription to the features of one lease: what is kept, and the rest as it is made."""

    link: FeatureStream
    digest: bytes
    """Of the head whose projection makes them."""
    ticket: int
    next_position: int
    """First position that was not sent."""
    request_id: int = 0
    """Comes back with the features."""
    has_begun: bool = False
    """Whether the lease has begun."""
    dropped_end: int = 0
    """Position behind the last one that was counted as dropped."""


@dataclass(frozen=True, slots=True)
class FeatureJob:
    """A call of `Features` on the engine thread."""

    run: Callable[[Features], None]


@dataclass(slots=True)
class _Head:
    projection: OpeningMap
    columns: Tensor
    """Indices of its taps among those of the runner, int64, on the device."""


class Features:
    """Makes features for every head, of every slot that may be drafted for."""

    def __init__(self, runner: ModelRunner, leases: Leases) -> None:
        self._runner = runner
        self._leases = leases
        self._heads: dict[bytes, _Head] = {}
        """By digest."""
        self._buffers: OrderedDict[SlotKey, dict[bytes, FeatureBuffer]] = OrderedDict()
        """By slot and head, the slot that was longest without a new token first."""
        self._subscriptions: OrderedDict[int, FeatureSubscription] = OrderedDict()
        """By ticket."""
        self._first_index: dict[int, int] = {}
        """Number of tokens of the last forward before a row, by the row's identity."""
        self._spans: list[tuple[SlotKey, int, list[int]]] = []
        """Committed tokens of the last forward: the slot's key, the position of the first, and their indices."""

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of all features that are kept. May be read by any thread."""
        return sum(map(_num_bytes, list(self._buffers.values())))

    # heads and subscriptions

    def add_head(self, digest: bytes, projection: OpeningMap) -> None:
        """Make features for a head from the next step on. Raises InvalidRequest where there is no memory for it."""
        try:
            self._heads[digest] = _Head(projection.to(self._runner.device), torch.empty(0, dtype=torch.int64))
            self._set_taps()
        except (OutriderError, RuntimeError) as failure:  # torch's own out-of-memory errors are RuntimeErrors
            self.drop_head(digest)
            raise InvalidRequest(f"the target cannot run the head's opening map: {failure}") from None

    def drop_head(self, digest: bytes) -> None:
        """Make no features for a head any more."""
        if self._heads.pop(digest, None) is not None:
            self._set_taps()
        for key, buffers in list(self._buffers.items()):
            buffers.pop(digest, None)
            if not buffers:
                del self._buffers[key]

    def _set_taps(self) -> None:
        taps = sorted({tap for head in self._heads.values() for tap in head.projection.spec.taps})
        self._runner.set_taps(taps)
        for head in self._heads.values():
            columns = np.array([taps.index(tap) for tap in head.projection.spec.taps], dtype=np.int64)
            head.columns = to_device(columns, self._runner.device)

    def subscribe(self, subscription: FeatureSubscription) -> None:
        """Send the features of a lease, in place of what was sent under its ticket. The lease may begin later."""
        self._subscriptions.pop(subscription.ticket, None)
        self._subscriptions[subscription.ticket] = subscription
        if len(self._subscriptions) > MAX_SUBSCRIPTIONS:
            self._subscriptions.popitem(last=False)
        self._send(subscription)

    def end_link(self, link: FeatureStream) -> None:
        """Send nothing more to a draft whose stream has ended."""
        for ticket, subscription in list(self._subscriptions.items()):
            if subscription.link is link:
                del self._subscriptions[ticket]

    def probe(self, token_ids: Sequence[int], taps: Sequence[int]) -> tpb.ProbeReply:
        """Run a text alone, for a draft that tests its head. Raises Unavailable where it cannot be run now."""
        try:
            hidden, best_ids = self.see(token_ids, taps)
        except (OutriderError, RuntimeError) as failure:
            raise Unavailable(f"the target cannot run the probe now: {failure}") from None
        return tpb.ProbeReply(taps=_as_bytes(hidden), best_ids=best_ids.tolist())

    def see(self, ids: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run a text of T tokens alone. Return hidden states [T, taps, dt], and the likeliest id after each token [T].

        Raises OutOfBlocks, InvalidRequest, and what torch raises for memory.
        """
        table = self._runner.pool.new_table()
        try:
            self._runner.set_taps(taps)
            logits = self._runner.forward([Row.of(table, ids, 0, len(ids))])  # [T, V] float32
            return self._runner.features, logits.argmax(dim=-1)
        finally:
            table.free()
            self._set_taps()

    # slots

    def feature(self, digest: bytes, key: SlotKey, position: int) -> Tensor | None:
        """Return the feature [d] bfloat16 of a head and a slot's token, on the CPU; None where it is not kept."""
        buffer = self._buffers.get(key, {}).get(digest)
        if buffer is None or not buffer.start <= position < buffer.end:
            return None
        return torch.frombuffer(buffer.read(position, position + 1), dtype=torch.bfloat16)

    def cut(self, key: SlotKey, end: int) -> None:
        """Drop the features of a slot from a position on: other tokens are there now, or may come."""
        for buffer in self._buffers.get(key, {}).values():
            buffer.truncate(end)

    def closed(self, key: SlotKey) -> None:
        """Drop the features of a slot."""
        self._buffers.pop(key, None)

    # steps

    def fed(self, rows: Sequence[Row]) -> None:
        """Note the rows of the forward that has just run."""
        self._first_index.clear()
        self._spans.clear()
        if self._heads:
            num_fed = 0
            for row in rows:
                self._first_index[id(row)] = num_fed
                num_fed += row.num_new

    def stays(self, key: SlotKey, row: Row, nodes: Sequence[int]) -> None:
        """Note which of a row's new tokens are committed: their indices among them, by position."""
        if self._heads and nodes and self._leases.may_be_drafted(key):
            first = self._first_index[id(row)]
            self._spans.append((key, row.num_cached, [first + node for node in nodes]))

    def send(self) -> None:
        """Make the features of what is committed, keep them, and send them to those that subscribe."""
        if self._spans:
            try:
                self._project()
            except RuntimeError as error:  # as torch says that there is no memory; features may be lost, steps may not
                log.warning("features of %d slots were not made: %s", len(self._spans), error)
        for subscription in list(self._subscriptions.values()):
            self._send(subscription)
        num_bytes = self.num_kept_bytes
        while num_bytes > MAX_KEPT_BYTES:
            _, buffers = self._buffers.popitem(last=False)
            num_bytes -= _num_bytes(buffers)

    def begun(self, tickets: Iterable[int]) -> None:
        """Send what is kept to those that subscribe to a lease that has just begun, under one of its tickets."""
        for ticket in tickets:
            subscription = self._subscriptions.get(ticket)
            if subscription is not None:
                self._send(subscription)

    def _project(self) -> None:
        indices = list[int]()
        for _, _, stay in self._spans:
            indices += stay
        states = self._runner.features  # [T, taps, hidden]
        states = states[to_device(np.array(indices), states.device)]  # [N, taps, hidden]
        made = [head.projection(states.index_select(1, head.columns)) for head in self._heads.values()]  # [N, d] each
        for digest, features in zip(list(self._heads), to_host(*made), strict=True):  # one wait for all heads
            data = _as_bytes(features)
            token_bytes, at = len(data) // len(indices), 0
            for key, start, stay in self._spans:
                buffer = self._buffers.setdefault(key, {}).setdefault(digest, FeatureBuffer(token_bytes))
                self._buffers.move_to_end(key)
                buffer.drop_before(buffer.end - MAX_KEPT_TOKENS)
                end = at + len(stay) * token_bytes
                buffer.put(start, data[at:end])
                at = end

    def _send(self, subscription: FeatureSubscription) -> None:
        """Send what is kept and was not sent. Where too much waits on the way it is sent later, if it is still kept."""
        lease = self._leases.of_ticket(subscription.ticket)
        if lease is None:
            if subscription.has_begun:
                del self._subscriptions[subscription.ticket]
            return
        if not subscription.has_begun:
            subscription.has_begun = True
            lease.of_ticket(subscription.ticket).reads_features = True
        buffer = self._buffers.get(lease.slot.key, {}).get(subscription.digest)
        if buffer is None or buffer.end <= subscription.next_position:
            return
        start, link = max(subscription.next_position, buffer.start), subscription.link
        if link.has_room:
            link.send_features(subscription, start, buffer.end - start, bytes(buffer.read(start, buffer.end)))
            subscription.next_position = buffer.end
        elif buffer.end > subscription.dropped_end:
            num_dropped = buffer.end - max(start, subscription.dropped_end)
            link.count("dropped", num_dropped, num_dropped * buffer.token_bytes)
            subscription.dropped_end = buffer.end


def _num_bytes(buffers: Mapping[bytes, FeatureBuffer]) -> int:
    return sum(buffer.num_bytes for buffer in list(buffers.values()))


def _as_bytes(states: Tensor) -> bytes:
    """Return the numbers as bfloat16."""
    return states.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes()
