"""The target's own drafters of all slots, and what they propose. Called by `step` and `verifier`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.speculation.target_drafter import ExtraRows, TargetDrafter
from outrider.engine.worker.jobs import JobError, JobFault, OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire.requests.drafters import Drafter


class OwnDrafts:
    """The target's own drafters of each slot, in order of preference. They are told each change of the slot's committed
    tokens.
    """

    def __init__(self, drafters: Mapping[Drafter, TargetDrafter], *, supports_trees: bool = False) -> None:
        """Create the table of slots. drafters: those that the target was started with. supports_trees: whether a step
        may verify draft trees; without them no merged drafter is offered.
        """
        self._drafters = dict(drafters)
        for drafter in Drafter:
            own = drafter.own
            if own is not None and drafter.is_merged and supports_trees and own in drafters:
                self._drafters[drafter] = drafters[own]
        self._slots: dict[SlotKey, dict[Drafter, TargetDrafter]] = {}
        """Drafters by slot; a slot without any is missing."""
        self._candidates: dict[SlotKey, dict[tuple[Drafter, int], CandidateTree]] = {}
        """What was proposed, by slot, then by drafter and maximum number of draft tokens, until tokens are committed. A
        slot that waits for its part of a step is asked in every step, and drafting anew each time would cost all slots
        time."""

    @property
    def available(self) -> tuple[Drafter, ...]:
        """Drafters that a request to this target may name, in the order of the enum `Drafter`."""
        available = [Drafter.AUTO]
        for drafter in Drafter:
            if drafter in self._drafters:
                available.append(drafter)
        return tuple(available)

    def refusal(self, drafter: Drafter | None) -> JobError | None:
        """Return the error for a request that names a drafter which this worker does not have; None if it has the
        drafter, or if the request names none.
        """
        by_name = list(self.available)
        if Drafter.PREDICTION in by_name:
            by_name.remove(Drafter.PREDICTION)  # a request has a prediction, and does not name it
        if drafter is None or drafter in by_name:
            return None
        why = f"drafter is {drafter}, this target has {', '.join(by_name)}; name one of them, or none"
        return JobError(JobFault.INVALID, why + drafter.remedy)

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Begin to draft for a new slot, in place of an older slot with the same key."""
        self.close(slot.key, is_ended=False)
        available = dict[Drafter, TargetDrafter]()
        for name in job.own_drafters:
            if name in self._drafters:
                available[name] = self._drafters[name]
        if available:
            self._slots[slot.key] = available
        for drafter in self._drafters_of(slot.key).values():
            drafter.open(job, slot)

    def commit(self, slot: Slot, num_same: int) -> None:
        """Update the slot's drafters after committed tokens were replaced. num_same: number of tokens, from the first
        on, that stay as they were.
        """
        self._candidates.pop(slot.key, None)
        for drafter in self._drafters_of(slot.key).values():
            drafter.commit(slot, num_same)

    def append(self, slot: Slot, token_ids: Sequence[int]) -> list[bool]:
        """Pass the tokens that a step committed on to the slot's drafters.

        Returns, for each of these tokens for which the request's prediction had proposed a draft token (verified or
        not), whether the proposed token equals it.
        """
        self._candidates.pop(slot.key, None)
        found = list[bool]()
        for drafter in self._drafters_of(slot.key).values():
            found += drafter.append(slot, token_ids)
        return found

    def worthwhile_drafters(self, slot: Slot, *, has_fixed_num: bool, is_drafted: bool) -> Iterator[Drafter]:
        """Yield, in order of preference, the slot's drafters that have a proposal worth verifying.

        has_fixed_num: whether the request fixes the number of draft tokens. If so, the last drafter is yielded even if
        its proposal is poor. is_drafted: whether a draft worker drafts for the slot. If so, a drafter with a poor
        proposal is yielded only if its tokens are merged with that worker's.
        """
        last = None
        for name, drafter in self._drafters_of(slot.key).items():
            last = name
            if drafter.has_next(slot):
                yield name
                last = None
        if last is not None and has_fixed_num and (last.is_merged or not is_drafted):
            yield last

    def candidates(
        self, slot: Slot, name: Drafter, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int
    ) -> CandidateTree:
        """Return at most max_tokens draft tokens of the drafter `name`, best first; an empty tree if it has none.

        Until tokens are committed, each call returns the same draft tokens. state: sampling state of the slot.
        acceptance: acceptance probabilities of the drafter in this slot.
        """
        proposals = self._candidates.setdefault(slot.key, {})
        key = (name, max_tokens)
        if key not in proposals:
            proposals[key] = self._drafters[name].propose(slot, state, acceptance, max_tokens)
        return proposals[key]

    def max_len(self, name: Drafter) -> int:
        """Return the maximum number of draft tokens that a drafter proposes at once."""
        return self._drafters[name].max_len

    def has_extra_rows(self, slot: Slot) -> bool:
        """Return whether one of the slot's drafters may add extra rows to a step, to make draft tokens for later
        steps.
        """
        return any(drafter.has_extra_rows for drafter in self._drafters_of(slot.key).values())

    def extra_rows(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return the extra rows that a drafter adds to the slot's next step, to make draft tokens for later steps; None
        if there are none.

        parents: for each draft token of the step, the index of its parent in this list; -1 = the root. Before the
        budget is chosen, call it with all draft tokens that the step might verify, to learn what the extra rows cost.
        Then call it with those that the budget took, which are the first ones of that list, for the rows to feed.
        """
        for drafter in self._drafters_of(slot.key).values():
            rows = drafter.extra_rows(slot, parents)
            if rows is not None:
                return rows
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Pass the logits after a step's extra rows, [E, V] float32, to the drafter that asked for the rows. Call it
        before the step's tokens are committed. path: the accepted nodes.
        """
        self._drafters[rows.drafter].read(slot, logits, path, rows)

    def close(self, key: SlotKey, *, is_ended: bool = True) -> None:
        """Stop drafting for a slot. is_ended: whether its output is complete; a drafter may then use it to draft for
        other slots.
        """
        self._candidates.pop(key, None)
        for drafter in self._slots.pop(key, {}).values():
            drafter.close(key, is_ended=is_ended)

    def _drafters_of(self, key: SlotKey) -> Mapping[Drafter, TargetDrafter]:
        return self._slots.get(key, {})
