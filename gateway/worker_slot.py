"""A request's slot on one worker, as the gateway knows it: where it is open, and up to where both sides agree."""

from __future__ import annotations

from typing import Any

from gateway.links import Connection
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb

RequestType = type[dpb.DraftRequest] | type[tpb.TargetRequest]


class WorkerSlot:
    """A slot does not outlive the connection it was opened on."""

    def __init__(self, slot_id: int, request_type: RequestType) -> None:
        self.agreed_len = 0
        """Committed length that both sides agreed on last."""
        self._slot_id = slot_id
        self._request_type = request_type
        self._connection: Connection | None = None
        self._target_epoch = 0
        self._needs_open = True

    def is_open_on(self, connection: Connection, target_epoch: int = 0) -> bool:
        """`target_epoch`: for a draft's slot, the target that its proposals are for."""
        same = self._connection is connection and self._target_epoch == target_epoch
        return same and connection.alive and not self._needs_open

    def opened(self, connection: Connection, committed_len: int, target_epoch: int = 0) -> None:
        self._connection, self._target_epoch = connection, target_epoch
        self.agreed_len, self._needs_open = committed_len, False

    def open_again(self) -> None:
        """The worker's slot is not what we thought: the next message opens it anew, under the same id."""
        self._needs_open = True

    def truncate(self, committed_len: int, reason: pb.TruncateReason) -> bool:
        """One way, coalesced with what leaves next. False when there is no slot to truncate."""
        message = pb.Truncate(slot=self._slot_id, committed_len=committed_len, reason=reason)
        return self._send(self._request_type(truncate=message))

    def close(self) -> None:
        """One way. A round in flight is cancelled by it."""
        self._send(self._request_type(close=pb.CloseSlot(slot=self._slot_id)))
        self._connection = None

    def _send(self, request: Any) -> bool:
        if self._connection is None or not self._connection.alive:
            return False
        self._connection.send(request)
        return True
