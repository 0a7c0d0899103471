"""Features for heads. A feature is one vector per committed token: a head's projection of the target's hidden states.

Features are made after each forward, kept for a while, and sent to the draft workers that subscribe. `registered_heads`
registers the heads of draft workers; this module runs their projections. Without a head it does nothing. Called by
`step` and by `FeatureJob`s, on the engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.engine.feature_buffer import FeatureBuffer
from outrider.engine.heads.projection import Projection
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
"""Maximum bytes of kept features of all slots and heads. Above it, the features of the slot that has gone longest
without a new token are dropped first."""
MAX_KEPT_TOKENS = 512
"""Maximum number of a slot's tokens, without those of its last step, whose features are kept for draft workers that
have not received them yet."""
MAX_SUBSCRIPTIONS = 4096
"""Maximum number of subscriptions in a target, each of a draft worker to the features of one slot in one lease. Above
it, the oldest is dropped, and its draft worker has to subscribe again."""


@dataclass(eq=False, slots=True)
class FeatureSubscription:
    """Subscription of one draft worker to the features of a slot's committed tokens during one lease. The features that
    the target keeps are sent at once, and later ones after each step.
    """

    link: FeatureStream
    digest: bytes
    """Digest of the head whose features are sent."""
    ticket: int
    next_position: int
    """Position of the first token whose feature has not been sent."""
    request_id: int = 0
    """Number that the draft worker gave its request; it is returned with the features."""
    has_begun: bool = False
    """Whether the lease has begun. A draft worker may subscribe before its lease has begun at the target."""
    dropped_end: int = 0
    """Position before which unsent features are already counted as dropped in the metrics."""


@dataclass(frozen=True, slots=True)
class FeatureJob:
    """Job that calls a function with the target's `Features` on the engine thread."""

    run: Callable[[Features], None]


@dataclass(slots=True)
class _Head:
    projection: Projection
    columns: Tensor
    """Indices of the head's tapped layers among all layers that the runner taps, [number of taps] int64, on the
    runner's device."""


class Features:
    """Makes, keeps and sends the features of all registered heads, for all slots for which draft tokens may be
    verified.
    """

    def __init__(self, runner: ModelRunner, leases: Leases) -> None:
        self._runner = runner
        self._leases = leases
        self._heads: dict[bytes, _Head] = {}
        """Heads by digest."""
        self._buffers: OrderedDict[SlotKey, dict[bytes, FeatureBuffer]] = OrderedDict()
        """Kept features by slot and digest of the head. The slot that has gone longest without a new token comes
        first."""
        self._subscriptions: OrderedDict[int, FeatureSubscription] = OrderedDict()
        """Subscriptions by ticket, the oldest first."""
        self._first_index: dict[int, int] = {}
        """Index of each row's first token among all tokens of the last forward, by the row's `id()`."""
        self._spans: list[tuple[SlotKey, int, list[int]]] = []
        """Committed tokens of the last forward, per slot: slot, position of the first token, indices among all tokens
        of the forward."""

    @property
    def num_kept_bytes(self) -> int:
        """Bytes of all kept features. Any thread may read it."""
        return sum(map(_num_bytes, list(self._buffers.values())))

    # heads and subscriptions

    def add_head(self, digest: bytes, projection: Projection) -> None:
        """Make features for a head from the next step on. Raises InvalidRequest if there is no memory for its
        projection.

        digest: name of the head: the SHA-256 of its serialised projection, or `own_heads.DIGEST`. projection: linear
        map from hidden states to features; it is moved to the runner's device.
        """
        try:
            self._heads[digest] = _Head(projection.to(self._runner.device), torch.empty(0, dtype=torch.int64))
            self._set_taps()
        except (OutriderError, RuntimeError) as failure:  # torch's own out-of-memory errors are RuntimeErrors
            self.drop_head(digest)
            raise InvalidRequest(f"the target cannot run the head's projection: {failure}") from None

    def drop_head(self, digest: bytes) -> None:
        """Stop making features for a head, and drop its kept features."""
        if self._heads.pop(digest, None) is not None:
            self._set_taps()
        for key, buffers in list(self._buffers.items()):
            buffers.pop(digest, None)
            if not buffers:
                del self._buffers[key]

    def _set_taps(self) -> None:
        tapped = set[int]()
        for head in self._heads.values():
            tapped.update(head.projection.spec.taps)
        taps = sorted(tapped)
        self._runner.set_taps(taps)
        for head in self._heads.values():
            columns = np.array([taps.index(tap) for tap in head.projection.spec.taps], dtype=np.int64)
            head.columns = to_device(columns, self._runner.device)

    def subscribe(self, subscription: FeatureSubscription) -> None:
        """Begin a subscription, and send the kept features that it asks for. It replaces an earlier subscription with
        the same ticket. If the ticket's lease has not begun yet, features are sent once it begins.
        """
        self._subscriptions.pop(subscription.ticket, None)
        self._subscriptions[subscription.ticket] = subscription
        if len(self._subscriptions) > MAX_SUBSCRIPTIONS:
            self._subscriptions.popitem(last=False)
        self._send(subscription)

    def end_link(self, link: FeatureStream) -> None:
        """Drop the subscriptions of a stream that has ended."""
        for ticket, subscription in list(self._subscriptions.items()):
            if subscription.link is link:
                del self._subscriptions[ticket]

    def probe(self, token_ids: Sequence[int], taps: Sequence[int]) -> tpb.ProbeReply:
        """Return the hidden states of a text, and the likeliest token after each of its tokens. A draft worker compares
        its head's predictions with these tokens, to test whether the head reads the right layers. Raises Unavailable if
        the target cannot run the text now, for example for lack of memory.

        token_ids: the text. taps: layers whose hidden states are returned.
        """
        try:
            hidden, best_ids = self.forward_text(token_ids, taps)
        except (OutriderError, RuntimeError) as failure:
            raise Unavailable(f"the target cannot run the probe now: {failure}") from None
        return tpb.ProbeReply(taps=_as_bytes(hidden), best_ids=best_ids.tolist())

    def forward_text(self, ids: Sequence[int], taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run a forward over a text of T tokens that belongs to no slot. Return the text's hidden states at the layers
        `taps`, [T, len(taps), hidden size], and the likeliest id after each token, [T] int64.

        Raises OutOfBlocks if too few KV blocks are free, RuntimeError if torch has no memory, and InvalidRequest for an
        id outside the vocabulary or a text longer than the context.
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
        """Return a head's feature of a slot's token at `position`, [d] bfloat16 on the CPU; None if it is not kept.
        digest: digest of the head.
        """
        buffer = self._buffers.get(key, {}).get(digest)
        if buffer is None or not buffer.start <= position < buffer.end:
            return None
        return torch.frombuffer(buffer.read(position, position + 1), dtype=torch.bfloat16)

    def cut(self, key: SlotKey, end: int) -> None:
        """Drop the kept features of a slot from position `end` on. Call it when the slot's tokens from there on were
        replaced.
        """
        for buffer in self._buffers.get(key, {}).values():
            buffer.truncate(end)

    def closed(self, key: SlotKey) -> None:
        """Drop the kept features of a slot that is closed."""
        self._buffers.pop(key, None)

    # steps

    def fed(self, rows: Sequence[Row]) -> None:
        """Record the rows of the forward that has just run, for the calls of `note_committed` that follow."""
        self._first_index.clear()
        self._spans.clear()
        if self._heads:
            num_fed = 0
            for row in rows:
                self._first_index[id(row)] = num_fed
                num_fed += row.num_new

    def note_committed(self, key: SlotKey, row: Row, nodes: Sequence[int]) -> None:
        """Record which of the tokens that a row fed are committed now; `send` makes features for these.

        nodes: indices of these tokens among the row's new tokens, in order of their positions.
        """
        if self._heads and nodes and self._leases.may_be_drafted(key):
            first = self._first_index[id(row)]
            self._spans.append((key, row.num_cached, [first + node for node in nodes]))

    def send(self) -> None:
        """Make and keep the features of the tokens that `note_committed` recorded, and send them to the draft workers
        that have subscribed to them.
        """
        if self._spans:
            try:
                self._project()
            except RuntimeError as error:  # torch has no memory: features may be lost, steps may not
                log.warning("features of %d slots were not made: %s", len(self._spans), error)
        for subscription in list(self._subscriptions.values()):
            self._send(subscription)
        num_bytes = self.num_kept_bytes
        while num_bytes > MAX_KEPT_BYTES:
            _, buffers = self._buffers.popitem(last=False)
            num_bytes -= _num_bytes(buffers)

    def begin_leases(self, tickets: Iterable[int]) -> None:
        """Record that a lease begins, and send kept features to the draft workers that have subscribed under its
        tickets. tickets: all tickets of the lease.
        """
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
        made = list[Tensor]()
        for head in self._heads.values():
            made.append(head.projection(states.index_select(1, head.columns)))  # [N, d]
        for digest, features in zip(list(self._heads), to_host(*made), strict=True):  # one wait for all heads
            data = _as_bytes(features)
            feature_bytes = len(data) // len(indices)
            at = 0
            for key, start, stay in self._spans:
                buffer = self._buffers.setdefault(key, {}).setdefault(digest, FeatureBuffer(feature_bytes))
                self._buffers.move_to_end(key)
                buffer.drop_before(buffer.end - MAX_KEPT_TOKENS)
                end = at + len(stay) * feature_bytes
                buffer.put(start, data[at:end])
                at = end

    def _send(self, subscription: FeatureSubscription) -> None:
        # Where too many bytes wait to be written, features are sent later if they are still kept.
        lease = self._leases.lease_of_ticket(subscription.ticket)
        if lease is None:
            if subscription.has_begun:
                del self._subscriptions[subscription.ticket]
            return
        if not subscription.has_begun:
            subscription.has_begun = True
            lease.draft_of_ticket(subscription.ticket).needs_features = True
        buffer = self._buffers.get(lease.slot.key, {}).get(subscription.digest)
        if buffer is None or buffer.end <= subscription.next_position:
            return
        start = max(subscription.next_position, buffer.start)
        link = subscription.link
        if link.has_capacity:
            link.send_features(subscription, start, buffer.end - start, bytes(buffer.read(start, buffer.end)))
            subscription.next_position = buffer.end
        elif buffer.end > subscription.dropped_end:
            num_dropped = buffer.end - max(start, subscription.dropped_end)
            link.count("dropped", num_dropped, num_dropped * buffer.feature_bytes)
            subscription.dropped_end = buffer.end


def _num_bytes(buffers: Mapping[bytes, FeatureBuffer]) -> int:
    return sum(buffer.num_bytes for buffer in list(buffers.values()))


def _as_bytes(states: Tensor) -> bytes:
    return states.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes()
