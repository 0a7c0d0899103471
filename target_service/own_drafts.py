"""Drafts that the target makes itself: which of its drafters follows which slot, and what it proposes. On the engine
thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from outrider.drafting.drafter import Follower, SequenceDrafter
from outrider.drafting.prediction import Prediction, PredictionFollower
from outrider.engine.drafters import OF_A_TEXT, make_drafters
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.draft_tree import ROOT
from outrider.engine.speculation.drafter import Said, of_table
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import GrowingTree
from outrider.engine.worker.jobs import Fault, JobError, OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire import kinds
from outrider.wire.settings.config import TargetConfig
from target_service.chains import grown_chain
from target_service.jobs import VerifyJob
from target_service.lease import Candidate, Scaffold
from target_service.step_drafter import StepDrafter

_NEEDS = {
    **dict.fromkeys(OF_A_TEXT, "start it with --drafter-text FILE"),
    kinds.Drafter.HEADS: "start it with --heads FOLDER",
    kinds.Drafter.PASS: "start it with --lookahead-embeddings FILE",
    **dict.fromkeys(
        (kinds.Drafter.LOOKAHEAD, *(each for each in kinds.Drafter if each.unites)),
        "take a model and an attention_path that run token trees",
    ),
}
"""What a target is to be given that does not offer a drafter."""


def make_own_drafts(
    config: TargetConfig,
    tokenizer_json: bytes,
    vocab_size: int,
    by_steps: Mapping[kinds.Drafter, StepDrafter] | None = None,
    *,
    takes_trees: bool = False,
) -> OwnDrafts:
    """Return the drafters that the settings allow, besides those by steps. takes_trees: whether steps may have token
    trees. Raises ConfigError.
    """
    wanted = (kinds.Drafter.NGRAM, kinds.Drafter.LOOKUP, *(OF_A_TEXT if config.drafter_text else ()))
    drafters = make_drafters(wanted, config.drafter_text, tokenizer_json, vocab_size)
    return OwnDrafts(drafters, vocab_size, by_steps, takes_trees=takes_trees)


class OwnDrafts:
    """Keeps the followers of each slot with drafters of its own, in the order in which they are asked. It must hear of
    every change of the committed tokens.
    """

    def __init__(
        self,
        drafters: Mapping[kinds.Drafter, SequenceDrafter],
        vocab_size: int,
        by_steps: Mapping[kinds.Drafter, StepDrafter] | None = None,
        *,
        takes_trees: bool = False,
    ) -> None:
        self._drafters = drafters
        self._united = [each for each in kinds.Drafter if each.unites and each.own in drafters and takes_trees]
        self._by_steps = by_steps or {}
        self._stepping: dict[SlotKey, kinds.Drafter] = {}
        """Slots that these draft for, and which of them."""
        self._vocab_size = vocab_size
        self._followers: dict[SlotKey, dict[kinds.Drafter, Follower]] = {}
        self._candidates: dict[SlotKey, dict[kinds.Drafter, tuple[int, Sequence[Candidate]]]] = {}
        """By slot and drafter: how many were asked for, and what was said, until tokens are committed. A slot that
        waits for its part of a step is asked again in each, and drafting anew would take the time of all."""

    def __len__(self) -> int:
        """Return how many slots are drafted for."""
        return len({*self._followers, *self._stepping})

    @property
    def offered(self) -> tuple[kinds.Drafter, ...]:
        return (*self._drafters, *self._by_steps, kinds.Drafter.PREDICTION, *self._united)

    def refuses(self, kind: kinds.Drafter | None) -> JobError | None:
        """Return the error for a drafter that this worker does not offer, else None."""
        if kind is None or (kind in self.offered and kind is not kinds.Drafter.PREDICTION):
            return None
        offered = ", ".join(each.label for each in self.offered if each is not kinds.Drafter.PREDICTION)
        return JobError(
            Fault.INVALID,
            f"drafter is {kind.label}, this target has {offered}; name one of them, or none"
            + (f"; for {kind.label} {_NEEDS[kind]}" if kind in _NEEDS else ""),
        )

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Follow a slot that has been opened, perhaps in place of an older one."""
        self.drop(slot.key)
        for kind in job.own_drafters:
            if kind in self._by_steps:
                self._by_steps[kind].open(slot)
                self._stepping[slot.key] = kind
                continue
            is_prediction = kind is kinds.Drafter.PREDICTION
            drafter = Prediction(job.prediction_ids) if is_prediction else self._drafters[kind.own or kind]
            # What an encoder reads comes before the prompt: the output may copy from it.
            before = [*job.source_ids, *slot.committed]
            follower = drafter.open(before, len(job.source_ids) + slot.num_prompt, job.corpus_id)
            self._followers.setdefault(slot.key, {})[kind] = follower

    def commit(self, job: VerifyJob, slot: Slot, num_same: int) -> None:
        """Set the slot's tokens to committed[:base_len] + committed_ids. num_same: of the first ones, which are what
        they were.
        """
        self._candidates.pop(slot.key, None)
        for follower in self._of(slot.key).values():
            follower.truncate(slot.num_source_tokens + job.base_len)
            follower.append(job.committed_ids)
        if slot.key in self._stepping:
            self._by_steps[self._stepping[slot.key]].cut(slot.key, num_same)

    def append(self, key: SlotKey, token_ids: Sequence[int]) -> list[bool]:
        """Append what a verdict committed; return, of what a prediction said before those tokens, whether it came."""
        self._candidates.pop(key, None)
        outcomes = list[bool]()
        for follower in self._of(key).values():
            follower.append(token_ids)
            if isinstance(follower, PredictionFollower):
                outcomes = follower.outcomes(len(token_ids))
        return outcomes

    def asked(self, slot: Slot, *, insists: bool, is_drafted: bool) -> Iterator[kinds.Drafter]:
        """Give those of the slot's drafters that have a guess worth verifying, in order; then, where the request
        insists on drafts, and of no draft or beside it, the last whatever it has.
        """
        followers = self._of(slot.key)
        speaking = [kind for kind, follower in followers.items() if follower.has_next()]
        yield from speaking
        stepping = self._stepping.get(slot.key)
        if stepping is not None:
            if self._by_steps[stepping].has_next(slot):
                yield stepping
        elif insists and followers:
            last = next(reversed(followers))
            if last not in speaking and (last.unites or not is_drafted):
                yield last

    def candidates(
        self, slot: Slot, kind: kinds.Drafter, state: SamplingState, shares: SlotShares, most: int
    ) -> Sequence[Candidate]:
        """Return at most `most` drafts of one of those that are asked, best first, none where there is nothing to
        say. They stay the same until tokens are committed.
        """
        known = self._candidates.setdefault(slot.key, {})
        if kind not in known or known[kind][0] != most:
            known[kind] = most, self._draft(slot, kind, state, shares, most)
        return known[kind][1]

    def _draft(
        self, slot: Slot, kind: kinds.Drafter, state: SamplingState, shares: SlotShares, most: int
    ) -> Sequence[Candidate]:
        if kind in self._by_steps:
            return self._by_steps[kind].candidates(slot, state, shares, most)
        follower, num_tokens = self._followers[slot.key][kind], slot.num_source_tokens + len(slot.committed)
        assert follower.num_tokens == num_tokens, f"{follower.num_tokens} tokens followed of {num_tokens}"
        walk = follower.walk()

        def say(tree: GrowingTree, node: int) -> Said:
            if node != ROOT:
                walk.step(tree.ids[node])
            return of_table(tree, node, state, lambda path: walk.next(), self._vocab_size)

        return grown_chain(slot, shares, most, say)

    def scaffold(self, slot: Slot, parents: Sequence[int]) -> Scaffold | None:
        """Return what is to be fed beside the drafts of the slot's next step, each of which follows the one at that
        index; None for nothing.
        """
        stepping = self._stepping.get(slot.key)
        return None if stepping is None else self._by_steps[stepping].scaffold(slot, parents)

    def learn(self, slot: Slot, logits: Tensor, path: Sequence[int], scaffold: Scaffold) -> None:
        """Take what the target says behind a scaffold, logits [S, V] float32, before anything is committed. path: the
        drafts that stay.
        """
        self._by_steps[scaffold.drafter].learn(slot, logits, path, scaffold)

    def close(self, key: SlotKey) -> None:
        """Stop following a closed slot, whose drafter may remember its tokens."""
        for follower in self._followers.pop(key, {}).values():
            follower.close()
        self.drop(key)

    def close_owner(self, owner: int) -> None:
        for key in [key for key in (*self._followers, *self._stepping) if key[0] == owner]:
            self.close(key)

    def drop(self, key: SlotKey) -> None:
        """Stop following a slot that begins anew or must not be remembered."""
        self._followers.pop(key, None)
        self._candidates.pop(key, None)
        stepping = self._stepping.pop(key, None)
        if stepping is not None:
            self._by_steps[stepping].forget(key)

    def _of(self, key: SlotKey) -> dict[kinds.Drafter, Follower]:
        return self._followers.get(key, {})
