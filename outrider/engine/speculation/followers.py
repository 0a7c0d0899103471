"""The target's own drafters without a model: a table, or the request's prediction, with a follower of each slot's
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.prediction import Prediction, PredictionFollower
from outrider.drafting.sequence_drafter import Follower, SequenceDrafter
from outrider.engine.sampling.count_distribution import distribution_of_counts
from outrider.engine.sampling.penalties import LogitRow, SamplingState
from outrider.engine.sampling.token_distribution import TokenDistribution
from outrider.engine.speculation.candidates import CandidateTree
from outrider.engine.speculation.drawing import propose_chain
from outrider.engine.speculation.ranks import SlotAcceptance
from outrider.engine.speculation.target_drafter import TargetDrafter
from outrider.engine.worker.jobs import OpenJob, SlotKey
from outrider.engine.worker.slots import Slot


class TableDrafter(TargetDrafter):
    """Drafter in the target that proposes a chain from a drafter without a model: n-grams, lookup, unigrams, bigrams,
    or the request's prediction.
    """

    def __init__(self, table: SequenceDrafter | None, vocab_size: int) -> None:
        """Create the drafter. table: table for all slots; None if each slot drafts from its request's prediction."""
        self._table = table
        self._vocab_size = vocab_size
        self._followers: dict[SlotKey, Follower] = {}

    def open(self, job: OpenJob, slot: Slot) -> None:
        table = self._table or Prediction(job.prediction_ids)
        # What an encoder reads comes before the prompt: the output may copy from it.
        before = [*job.source_ids, *slot.committed]
        self._followers[slot.key] = table.open(before, len(job.source_ids) + slot.num_prompt, job.corpus_id)

    def commit(self, slot: Slot, num_same: int) -> None:
        follower = self._followers[slot.key]
        follower.truncate(slot.num_source_tokens + num_same)
        follower.append(slot.committed[num_same:])

    def append(self, slot: Slot, token_ids: Sequence[int]) -> Sequence[bool]:
        follower = self._followers[slot.key]
        follower.append(token_ids)
        if isinstance(follower, PredictionFollower):
            return follower.outcomes(len(token_ids))
        return ()

    def has_next(self, slot: Slot) -> bool:
        return self._followers[slot.key].has_next()

    def propose(self, slot: Slot, state: SamplingState, acceptance: SlotAcceptance, max_tokens: int) -> CandidateTree:
        follower = self._followers[slot.key]
        num_tokens = slot.num_source_tokens + len(slot.committed)
        assert follower.num_tokens == num_tokens, f"{follower.num_tokens} tokens followed of {num_tokens}"
        walk = follower.walk()

        def next_distribution(row: LogitRow) -> TokenDistribution | None:
            if row.draft_prefix:
                walk.step(row.draft_prefix[-1])
            counts = walk.next()
            if counts is None:
                return None
            return distribution_of_counts(counts, row, self._vocab_size)

        return propose_chain(slot, state, acceptance, max_tokens, next_distribution, is_counted=True)

    def close(self, key: SlotKey, *, is_ended: bool) -> None:
        follower = self._followers.pop(key)
        if is_ended:
            follower.close()
