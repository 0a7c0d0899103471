"""The target's own drafters: which of them draft for which slot, and what they propose. Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.worker.jobs import Fault, JobError, OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter


class OwnDrafts:
    """Keeps the drafters of each slot, in the order in which they draft. Every change of the committed tokens goes
    through it.
    """

    def __init__(self, drafters: Mapping[Drafter, TargetDrafter], *, takes_trees: bool = False) -> None:
        """takes_trees: whether steps may verify token trees."""
        self._drafters = dict(drafters)
        for drafter in Drafter:
            own = drafter.own
            if own is not None and drafter.is_merged and takes_trees and own in drafters:
                self._drafters[drafter] = drafters[own]
        self._slots: dict[SlotKey, dict[Drafter, TargetDrafter]] = {}
        """Drafters of each slot that has some."""
        self._candidates: dict[SlotKey, dict[tuple[Drafter, int], CandidateTree]] = {}
        """Proposals by drafter and limit of draft tokens, until tokens are committed. A slot that waits for its part of
        a step is asked again in each, and drafting anew would take the time of all."""

    @property
    def offered(self) -> tuple[Drafter, ...]:
        return (Drafter.AUTO, *(drafter for drafter in Drafter if drafter in self._drafters))

    def refuses(self, drafter: Drafter | None) -> JobError | None:
        """Return the error for a drafter that this worker does not offer, else None."""
        by_name = [offered for offered in self.offered if offered is not Drafter.PREDICTION]
        if drafter is None or drafter in by_name:
            return None
        why = f"drafter is {drafter}, this target has {', '.join(by_name)}; name one of them, or none"
        return JobError(Fault.INVALID, why + drafter.remedy)

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Draft for a slot that has been opened, perhaps in place of an older one."""
        self.close(slot.key, is_ended=False)
        available = {name: self._drafters[name] for name in job.own_drafters if name in self._drafters}
        if available:
            self._slots[slot.key] = available
        for drafter in self._of(slot.key).values():
            drafter.open(job, slot)

    def commit(self, slot: Slot, num_same: int) -> None:
        """Follow a slot whose committed tokens were set: the first num_same of them are the previous ones."""
        self._candidates.pop(slot.key, None)
        for drafter in self._of(slot.key).values():
            drafter.commit(slot, num_same)

    def append(self, slot: Slot, token_ids: Sequence[int]) -> list[bool]:
        """Follow a slot that a step has committed these tokens of; return, for each of them that a prediction proposed,
        verified or not, whether it was right.
        """
        self._candidates.pop(slot.key, None)
        found = list[bool]()
        for drafter in self._of(slot.key).values():
            found += drafter.append(slot, token_ids)
        return found

    def asked(self, slot: Slot, *, insists: bool, is_drafted: bool) -> Iterator[Drafter]:
        """Yield those of the slot's drafters that have something worth verifying, in order; then, where the request
        insists on drafts, and of no draft worker or beside it, the last whatever it has.
        """
        last = None
        for name, drafter in self._of(slot.key).items():
            last = name
            if drafter.has_next(slot):
                yield name
                last = None
        if last is not None and insists and (last.is_merged or not is_drafted):
            yield last

    def candidates(
        self, slot: Slot, name: Drafter, state: SamplingState, shares: SlotShares, max_tokens: int
    ) -> CandidateTree:
        """Return at most max_tokens draft tokens of one of those that are asked, best first; an empty tree where it has
        none. They stay the same until tokens are committed.
        """
        known = self._candidates.setdefault(slot.key, {})
        asked = (name, max_tokens)
        if asked not in known:
            known[asked] = self._drafters[name].propose(slot, state, shares, max_tokens)
        return known[asked]

    def max_len(self, name: Drafter) -> int:
        """Return the most draft tokens that a drafter proposes."""
        return self._drafters[name].max_len

    def feeds_rows(self, slot: Slot) -> bool:
        """Return whether one of the slot's drafters has rows fed beside a step's draft tokens."""
        return any(drafter.feeds_rows for drafter in self._of(slot.key).values())

    def rows_beside(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return what the slot's next step is to feed beside draft tokens with these parents; None for nothing. Call it
        with all that the step might verify, and again with the first of them that it does.
        """
        for drafter in self._of(slot.key).values():
            rows = drafter.rows_beside(slot, parents)
            if rows is not None:
                return rows
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Let the drafter of the rows read the logits [R, V] float32 after them, before anything is committed. path:
        the accepted nodes.
        """
        self._drafters[rows.drafter].read(slot, logits, path, rows)

    def close(self, key: SlotKey, *, is_ended: bool = True) -> None:
        """Stop drafting for a slot. is_ended: its tokens may be remembered."""
        self._candidates.pop(key, None)
        for drafter in self._slots.pop(key, {}).values():
            drafter.close(key, is_ended=is_ended)

    def _of(self, key: SlotKey) -> Mapping[Drafter, TargetDrafter]:
        return self._slots.get(key, {})
