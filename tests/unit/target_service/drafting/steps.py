"""What steps took."""

from types import SimpleNamespace
from typing import Any

from outrider.engine.speculation.ranks import RankAcceptance, SlotAcceptance
from outrider.engine.speculation.row_cost import RowCost
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import AUTO, Speculation
from target_service.drafting.budget import VerifyBudget, VerifyDemand
from target_service.leases.hold import PendingDraft
from target_service.leases.lease import Lease, SlotDraftWorker

FREE_UNTIL = 12


def cliff(num_rows: int) -> float:
    """Seconds of a step of the CPU that this was measured on: rows cost little up to 12, then much."""
    return 0.04 * (1 + 0.0107 * (num_rows - 1) if num_rows <= FREE_UNTIL else 0.2 + 0.085 * num_rows)


def learnt(seconds: Any = cliff, most: int = 24) -> RowCost:
    cost = RowCost()
    for _ in range(60):
        for num_rows in range(1, most + 1):
            cost.note(num_rows, seconds(num_rows))
    return cost


def lease(now: float = 0.0, eta_s: float | None = None, gap_s: float | None = None) -> Any:
    """A slot for which nothing lies ready."""
    shares = SlotAcceptance(RankAcceptance())
    slot: Any = SimpleNamespace(committed=[7], max_len=99, scheduling=Scheduling())
    draft = SlotDraftWorker(Drafter.MODEL, shares, 1, is_active=True)
    draft.starved_since_s[1], draft.eta_s, draft.gap_s = now, eta_s, gap_s
    return Lease(None, slot, Speculation(AUTO, max_draft_tokens=32), [draft], {}, now)  # type: ignore[arg-type]


def pending(lease: Any, prob: float) -> PendingDraft:
    return PendingDraft(lease, lease.first, prob)


def demand(probs: list[float], num_required: int = 0, **values: Any) -> VerifyDemand:
    return VerifyDemand(probs, num_required, num_required, **values)


def counts(made: VerifyBudget, demands: list[VerifyDemand], max_rows: int = 256) -> list[int]:
    return [share[0] for share in made.choose(demands, max_rows, max_rows, ()) if share is not None]


def budget(tokens_per_s: float = 25.0) -> VerifyBudget:
    made = VerifyBudget()
    for _ in range(60):
        made.note(1, 1, 1 / tokens_per_s)
    made.cost = learnt()
    return made
