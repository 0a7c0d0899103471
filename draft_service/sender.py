"""When a proposal's tokens leave for the target, and in what form. `deliveries.py` carries them.

When is decided on the engine thread. The form is made where they leave, on the gRPC loop's thread: laws that come from
a device are waited for there, while the engine is at its next step.

What is sent is the law that the token was really drawn from: whoever drew has cut it already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

from draft_service.active import Asked, CopiedLaw, Law, Payload
from draft_service.jobs import PartOut
from outrider.engine.engine_thread import EngineThread
from outrider.engine.row_law import RowLaw
from outrider.engine.wire_tensors import encode_laws
from outrider.wire.codec import DenseRows

SMALL_PAYLOAD_BYTES = 64 * 1024
"""Cut laws of up to this many bytes travel as one part; a wide cut of many tokens would pass the message limit."""


class Sender:
    def __init__(self, engine: EngineThread, deliver: Callable[[PartOut], None]) -> None:
        """`deliver` runs on the gRPC loop's thread."""
        self._engine = engine
        self._deliver = deliver

    def send_due(self, a: Asked) -> None:
        """Whole laws leave row by row, so that the wire works while the draft does; small payloads leave at the end."""
        if a.unsent and (a.topk is None or len(a.unsent) * a.topk * 8 > SMALL_PAYLOAD_BYTES):
            self._deliver_part(a)
        if a.done and (a.num_sent < len(a.draft_ids) or not a.draft_ids):
            self._deliver_part(a)

    def send_large(self, a: Asked) -> None:
        """Of a proposal that is there at once: what has grown too large for one part leaves before the rest."""
        if sum(law.scores.nbytes for law in a.unsent if isinstance(law, RowLaw)) > SMALL_PAYLOAD_BYTES:
            self._deliver_part(a)

    def send_tree(self, a: Asked) -> None:
        """When it is grown, for then it is known how many nodes it has. Wide laws go one by one, each with the tokens
        that were drawn from it.
        """
        if a.unsent and (a.topk is None or len(a.unsent) * a.topk * 8 > SMALL_PAYLOAD_BYTES):
            for _, brood in groupby(a.parents):
                self._deliver_part(a, len(list(brood)), 1)
        else:
            self._deliver_part(a)

    def _deliver_part(self, a: Asked, num_ids: int | None = None, num_laws: int | None = None) -> None:
        """The next tokens with their laws; all that there are without a number."""
        laws, a.unsent = a.unsent[:num_laws], [] if num_laws is None else a.unsent[num_laws:]
        end = len(a.draft_ids) if num_ids is None else a.num_sent + num_ids
        ids = tuple(a.draft_ids[a.num_sent : end])
        part = PartOut(
            address=a.deliver_to,
            ticket=a.job.ticket,
            target_epoch=a.target_epoch,
            committed_len=len(a.slot.committed),
            start=a.num_sent,
            draft_ids=ids,
            rows=None,
            num_draft_tokens=a.num_announced,
            parents=tuple(a.parents[a.num_sent : end]),
        )
        a.num_sent += len(ids)
        self._engine.answer(lambda: self._send(part, laws, a.topk is not None, a.payload))

    def _send(self, part: PartOut, laws: Sequence[Law], prefer_sparse: bool, payload: Payload) -> None:
        """On the gRPC loop's thread."""
        if laws:
            here = [law.wait() if isinstance(law, CopiedLaw) else law for law in laws]
            rows = encode_laws(here, prefer_sparse=prefer_sparse)
            part = replace(part, rows=rows)
            full = isinstance(rows, DenseRows)
            payload.encoding = "full" if full else "topk"
            payload.num_bytes += len(rows.data) if full else len(rows.ids) + len(rows.log_probs)
        payload.num_bytes += 4 * len(part.draft_ids)
        self._deliver(part)
