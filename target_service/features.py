"""Rows of features for the drafts that read them: made after a forward, kept a while, sent as they come.

`heads` knows what is registered and by whom; here are the maps themselves. Nothing is done while there is none. On the
engine thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.engine.cuda.host_copy import to_device, to_host
from outrider.engine.heads.opening import OpeningMap
from outrider.engine.model_runner import ModelRunner
from outrider.engine.step_plan import Row
from outrider.engine.worker.jobs import Fault, JobError, SlotKey
from outrider.wire.errors import OutriderError
from outrider.wire.log import get_logger
from target_service.feature_jobs import (
    AddHead,
    DropHead,
    FeatureJob,
    LinkGone,
    Probed,
    ProbeJob,
    RowsLink,
    Wanting,
    WantRows,
)
from target_service.kept_rows import KeptRows
from target_service.lease import Lease
from target_service.leases import Leases

log = get_logger(__name__)

MAX_KEPT_BYTES = 256 << 20
"""Bytes of the rows kept for all slots and heads; those of the slot that was longest without a new one are let go.
Doubling it keeps those of twice as many slots."""
MAX_EARLY = 1024
"""Requests for leases that have not begun; the oldest is forgotten. Doubling it lets drafts be ahead in twice as
many."""


@dataclass(slots=True)
class _Head:
    opening: OpeningMap
    places: Tensor
    """Of its taps among those of the runner, int64, on the device."""


@dataclass(frozen=True, slots=True)
class _Staying:
    """Tokens of the last forward that are committed."""

    key: SlotKey
    start: int
    """Position of the first."""
    places: Sequence[int]
    """Among all that was fed."""


class Features:
    """Makes rows for every head, of every slot that may be drafted for."""

    def __init__(self, runner: ModelRunner, leases: Leases, answer: Callable[[Callable[[], None]], None]) -> None:
        """answer: posts an answer."""
        self._runner = runner
        self._leases = leases
        self._answer = answer
        self._heads: dict[bytes, _Head] = {}
        self._kept: OrderedDict[tuple[bytes, SlotKey], KeptRows] = OrderedDict()
        self.num_kept_bytes = 0
        """Of all rows that are kept. May be read by any thread."""
        self._early: OrderedDict[int, WantRows] = OrderedDict()
        """By ticket."""
        self._lacking: dict[int, tuple[Lease, Wanting]] = {}
        """By ticket."""
        self._first: dict[int, int] = {}
        """By the identity of a row of the last forward: how many tokens were fed before its own."""
        self._staying: list[_Staying] = []

    # jobs

    def handle(self, job: FeatureJob) -> None:
        match job:
            case AddHead():
                self._add(job)
            case DropHead(digest):
                self._drop(digest)
            case WantRows():
                self._want(job)
            case LinkGone(link, done):
                self._forget(link)
                self._answer(done)
            case ProbeJob():
                self._probe(job)

    def _add(self, job: AddHead) -> None:
        error = None
        try:
            self._heads[job.digest] = _Head(job.opening.to(self._runner.device), torch.empty(0, dtype=torch.int64))
            self._set_taps()
        except (OutriderError, RuntimeError) as failure:  # torch's own out-of-memory errors are RuntimeErrors
            self._drop(job.digest)
            error = JobError(Fault.EXHAUSTED, f"the target cannot run the head's opening map: {failure}")
        self._answer(lambda: job.respond(error))

    def _drop(self, digest: bytes) -> None:
        if self._heads.pop(digest, None) is not None:
            self._set_taps()
        self._let_go([each for each in self._kept if each[0] == digest])

    def _set_taps(self) -> None:
        taps = sorted({tap for head in self._heads.values() for tap in head.opening.spec.taps})
        self._runner.set_taps(taps)
        for head in self._heads.values():
            places = [taps.index(tap) for tap in head.opening.spec.taps]
            head.places = to_device(np.array(places, dtype=np.int64), self._runner.device)

    def _want(self, job: WantRows) -> None:
        lease = self._leases.of_ticket(job.ticket)
        if lease is not None:
            self._begin(lease, job)
            return
        self._early[job.ticket] = job
        if len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)

    def _begin(self, lease: Lease, job: WantRows) -> None:
        wanting = lease.of_ticket(job.ticket).wanting = Wanting(job)
        self._send_since(lease, wanting, job.start)

    def _forget(self, link: RowsLink) -> None:
        for ticket in [ticket for ticket, job in self._early.items() if job.link is link]:
            del self._early[ticket]
        for draft in (draft for lease in self._leases for draft in lease.drafts):
            if draft.wanting is not None and draft.wanting.job.link is link:
                draft.wanting = None

    def _probe(self, job: ProbeJob) -> None:
        result: Probed | JobError
        try:
            states, best_ids = self.see(job.token_ids, job.taps)
            result = Probed(_as_bytes(states), best_ids.tolist())
        except (OutriderError, RuntimeError) as failure:
            result = JobError(Fault.EXHAUSTED, f"the target cannot run the probe now: {failure}")
        self._answer(lambda: job.respond(result))

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

    # slots and leases

    def row(self, digest: bytes, key: SlotKey, position: int) -> Tensor | None:
        """Return the row [d] bfloat16 of a head and a slot, on the CPU; None where it was not made or is not kept."""
        kept = self._kept.get((digest, key))
        if kept is None or not kept.start <= position < kept.end:
            return None
        _, data = kept.since(position)
        return torch.frombuffer(bytearray(data[: kept.row_bytes]), dtype=torch.bfloat16)

    def lease_began(self, lease: Lease) -> None:
        """Take up what was asked for before."""
        for draft in lease.drafts:
            early = self._early.pop(draft.ticket, None)
            if early is not None:
                self._begin(lease, early)

    def cut(self, key: SlotKey, end: int) -> None:
        """Forget the rows of a slot from a position on: other tokens are there now, or may come."""
        for digest in self._heads:
            kept = self._kept.get((digest, key))
            if kept is not None:
                self.num_kept_bytes -= kept.num_bytes
                kept.cut(end)
                self.num_kept_bytes += kept.num_bytes

    def closed(self, key: SlotKey) -> None:
        """Forget the rows of a slot."""
        self._let_go([each for each in self._kept if each[1] == key])

    def owner_gone(self, owner: int) -> None:
        """Forget the rows of all slots of a stream that ended."""
        self._let_go([each for each in self._kept if each[1][0] == owner])

    def _let_go(self, keys: Sequence[tuple[bytes, SlotKey]]) -> None:
        for each in keys:
            self.num_kept_bytes -= self._kept.pop(each).num_bytes

    # steps

    def fed(self, rows: Sequence[Row]) -> None:
        """Note what the forward that has just run was fed."""
        self._staying.clear()
        self._first.clear()
        num_fed = 0
        for row in rows if self._heads else ():
            self._first[id(row)] = num_fed
            num_fed += row.num_new

    def stays(self, key: SlotKey, row: Row, nodes: Sequence[int]) -> None:
        """Note which of a row's new tokens are committed: their indices among them, by position."""
        if self._heads and nodes and self._leases.may_be_drafted(key):
            first = self._first[id(row)]
            self._staying.append(_Staying(key, row.num_cached, [first + node for node in nodes]))

    def send(self) -> None:
        """Make the rows of what stays; keep them, and send them to those that want them."""
        try:
            self._send_staying()
        except RuntimeError as error:  # as torch says that there is no memory; rows may be lost, steps may not
            log.warning("rows of %d tokens were not made: %s", sum(len(s.places) for s in self._staying), error)
        self._staying.clear()
        self._send_lacking()

    def _send_staying(self) -> None:
        if not self._staying:
            return
        places = np.array([place for each in self._staying for place in each.places])
        seen = self._runner.features
        seen = seen[to_device(places, seen.device)]  # [N, taps, hidden]
        made = [head.opening(seen.index_select(1, head.places)) for head in self._heads.values()]  # [N, d] each
        for digest, rows in zip(list(self._heads), to_host(*made), strict=True):  # one wait for all heads
            data = _as_bytes(rows)
            row_bytes, at = len(data) // len(places), 0
            for each in self._staying:
                end = at + row_bytes * len(each.places)
                self._add_rows(digest, each, data[at:end], row_bytes)
                at = end

    def _add_rows(self, digest: bytes, staying: _Staying, data: bytes, row_bytes: int) -> None:
        kept = self._kept.setdefault((digest, staying.key), KeptRows(row_bytes))
        self.num_kept_bytes -= kept.num_bytes
        kept.put(staying.start, data)
        self.num_kept_bytes += kept.num_bytes
        self._kept.move_to_end((digest, staying.key))
        while self.num_kept_bytes > MAX_KEPT_BYTES:
            self._let_go([next(iter(self._kept))])
        lease = self._leases.get(staying.key)
        for wanting in () if lease is None else [draft.wanting for draft in lease.drafts]:
            if lease is not None and wanting is not None and wanting.job.digest == digest:
                num_unwanted = max(0, wanting.job.start - staying.start)
                rest = data[num_unwanted * row_bytes :]
                self._send(lease, wanting, staying.start + num_unwanted, len(rest) // row_bytes, rest)

    def _send_since(self, lease: Lease, wanting: Wanting, start: int) -> None:
        kept = self._kept.get((wanting.job.digest, lease.slot.key))
        if kept is not None:
            first, data = kept.since(start)
            self._send(lease, wanting, first, kept.end - first, data)

    def _send(self, lease: Lease, wanting: Wanting, start: int, num_rows: int, data: bytes) -> None:
        """Send rows. Where too much waits on the way, they are sent later, as far as they are kept, and all that follow
        behind them.
        """
        job = wanting.job
        if not data:
            return
        if wanting.lacks is None and job.link.has_room:
            job.link.send_rows(job, start, num_rows, data)
            return
        job.link.note_dropped(num_rows, len(data))
        if wanting.lacks is None:
            wanting.lacks = start
            self._lacking[job.ticket] = (lease, wanting)

    def _send_lacking(self) -> None:
        lacking, self._lacking = self._lacking, {}
        for ticket, (lease, wanting) in lacking.items():
            is_over = lease.of_ticket(ticket).wanting is not wanting or lease is not self._leases.get(lease.slot.key)
            if is_over or wanting.lacks is None:
                continue
            if wanting.job.link.has_room:
                start, wanting.lacks = wanting.lacks, None
                self._send_since(lease, wanting, start)
            else:
                self._lacking[ticket] = (lease, wanting)


def _as_bytes(rows: Tensor) -> bytes:
    """Return the numbers as bfloat16."""
    return rows.to(torch.bfloat16).contiguous().view(torch.int16).cpu().numpy().tobytes()
