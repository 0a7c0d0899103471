"""A slot that steps by itself, with scripted times."""

from types import SimpleNamespace
from typing import Any

from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.nodes import Delivery, NodeKind
from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.speculation import Speculation
from target_service.leases.lease import Lease, SlotDraftWorker

PROMPT = [7, 8, 9]


class Course:
    """A slot whose target commits a token a step, at times that the test says."""

    def __init__(self) -> None:
        params = SamplingParams(temperature=0.0)
        slot: Any = SimpleNamespace(committed=list(PROMPT), max_len=99, params=params)
        shares = SlotAcceptance(RankAcceptance())
        job: Any = None
        self.draft = SlotDraftWorker(Drafter.MODEL, shares, ticket=1, is_active=True)
        self.lease = Lease(job, slot, Speculation(max_draft_tokens=8), [self.draft], {}, 0.0)
        self.lease.begin_step(0.0)

    def step(self, now: float) -> None:
        """A plain step ends, which commits token 1."""
        self.lease.slot.committed.append(1)
        self.draft.buffer.advance([1], len(self.lease.slot.committed) - 1, None)
        self.lease.begin_step(now)

    def deliver(self, root_len: int, now: float) -> None:
        """Guesses of one token after the other come, under the first root_len tokens."""
        nodes = Delivery(1, root_len, [1, 1], [ROOT, 0], [0, 0], [NodeKind.DETERMINISTIC] * 2, None)
        self.draft.buffer.insert(nodes, self.lease.slot.committed, 1 << 20)
        self.draft.arrived(root_len, now)
