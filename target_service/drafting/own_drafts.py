"""The target's own drafters of all slots, and their proposals. Called by `step` and `verifier`."""

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
    """The drafters of each slot, in order of preference. Every change of committed tokens is passed on to them here."""

    def __init__(self, drafters: Mapping[Drafter, TargetDrafter], *, takes_trees: bool = False) -> None:
        """Create the table of slots. drafters: those that the target was started with. takes_trees: whether a step may
        verify token trees, without which no merged drafter is offered.
        """
        self._drafters = dict(drafters)
        for drafter in Drafter:
            own = drafter.own
            if own is not None and drafter.is_merged and takes_trees and own in drafters:
                self._drafters[drafter] = drafters[own]
        self._slots: dict[SlotKey, dict[Drafter, TargetDrafter]] = {}
        """Drafters by slot; a slot without drafters is missing."""
        self._candidates: dict[SlotKey, dict[tuple[Drafter, int], CandidateTree]] = {}
        """Proposals by slot, drafter and limit of draft tokens, until tokens are committed. A slot that waits for its
        part of a step proposes in each step; to draft anew each time would cost all slots time."""

    @property
    def offered(self) -> tuple[Drafter, ...]:
        """The drafters that a request may name, in the order of `Drafter`."""
        available = [Drafter.AUTO]
        for drafter in Drafter:
            if drafter in self._drafters:
                available.append(drafter)
        return tuple(available)

    def refuses(self, drafter: Drafter | None) -> JobError | None:
        """Return the error for a drafter that this worker does not offer; None for one that it does, and for none."""
        by_name = list(self.offered)
        if Drafter.PREDICTION in by_name:
            by_name.remove(Drafter.PREDICTION)  # a request has a prediction, and does not name it
        if drafter is None or drafter in by_name:
            return None
        why = f"drafter is {drafter}, this target has {', '.join(by_name)}; name one of them, or none"
        return JobError(JobFault.INVALID, why + drafter.remedy)

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Begin to draft for a new slot, in place of an older one with its key."""
        self.close(slot.key, is_ended=False)
        available = dict[Drafter, TargetDrafter]()
        for name in job.own_drafters:
            if name in self._drafters:
                available[name] = self._drafters[name]
        if available:
            self._slots[slot.key] = available
        for drafter in self._of(slot.key).values():
            drafter.open(job, slot)

    def commit(self, slot: Slot, num_same: int) -> None:
        """Follow a slot whose committed tokens were replaced. num_same: tokens at their beginning that stay as they
        were.
        """
        self._candidates.pop(slot.key, None)
        for drafter in self._of(slot.key).values():
            drafter.commit(slot, num_same)

    def append(self, slot: Slot, token_ids: Sequence[int]) -> list[bool]:
        """Follow a slot of which a step has committed these tokens.

        Returns whether the request's prediction was right, for each of them that it had proposed, verified or not.
        """
        self._candidates.pop(slot.key, None)
        found = list[bool]()
        for drafter in self._of(slot.key).values():
            found += drafter.append(slot, token_ids)
        return found

    def asked(self, slot: Slot, *, insists: bool, is_drafted: bool) -> Iterator[Drafter]:
        """Yield the slot's drafters that have something worth verifying, in order of preference.

        insists: the request names how many draft tokens are verified. Then the last drafter is yielded whatever it has,
        unless a draft worker drafts for the slot (is_drafted) and the drafter is not merged with it.
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
        self, slot: Slot, name: Drafter, state: SamplingState, shares: SlotAcceptance, max_tokens: int
    ) -> CandidateTree:
        """Return at most max_tokens draft tokens of a drafter, best first; an empty tree where it has none.

        They stay the same until tokens are committed.
        """
        proposals = self._candidates.setdefault(slot.key, {})
        key = (name, max_tokens)
        if key not in proposals:
            proposals[key] = self._drafters[name].propose(slot, state, shares, max_tokens)
        return proposals[key]

    def max_len(self, name: Drafter) -> int:
        """Return the maximum number of draft tokens that a drafter proposes."""
        return self._drafters[name].max_len

    def feeds_rows(self, slot: Slot) -> bool:
        """Return whether a drafter of the slot has rows fed beside a step's draft tokens."""
        return any(drafter.feeds_rows for drafter in self._of(slot.key).values())

    def rows_beside(self, slot: Slot, parents: Sequence[int]) -> ExtraRows | None:
        """Return the rows that the slot's next step is to feed beside draft tokens with these parents; None for none.

        Call it with all draft tokens that the step might verify, and again with the first ones, which it does verify.
        """
        for drafter in self._of(slot.key).values():
            rows = drafter.rows_beside(slot, parents)
            if rows is not None:
                return rows
        return None

    def read(self, slot: Slot, logits: Tensor, path: Sequence[int], rows: ExtraRows) -> None:
        """Pass the logits [E, V] float32 after the rows to their drafter, before anything is committed.

        path: the accepted nodes.
        """
        self._drafters[rows.drafter].read(slot, logits, path, rows)

    def close(self, key: SlotKey, *, is_ended: bool = True) -> None:
        """Stop drafting for a slot. is_ended: its output is complete, and a drafter may remember it."""
        self._candidates.pop(key, None)
        for drafter in self._slots.pop(key, {}).values():
            drafter.close(key, is_ended=is_ended)

    def _of(self, key: SlotKey) -> Mapping[Drafter, TargetDrafter]:
        return self._slots.get(key, {})
