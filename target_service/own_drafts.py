"""Drafts that the target makes itself: which of its drafters follows which slot, and what it proposes.

On the engine thread: a chain is drawn when its verify is taken into a step, so there is no ticket and no wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.drafting.drafter import Drafter, Follower
from outrider.engine.chain import Chain, draw_chain
from outrider.engine.drafters import OF_A_TEXT, LookupSizes, make_drafters
from outrider.engine.jobs import Fault, JobError, OpenJob
from outrider.engine.penalties import SamplingState
from outrider.engine.scheduler import SlotKey
from outrider.engine.slots import Slot
from outrider.wire import kinds
from outrider.wire.config import TargetConfig
from target_service.jobs import VerifyJob


def make_own_drafts(config: TargetConfig, tokenizer_json: bytes, vocab_size: int) -> OwnDrafts:
    """All that the settings allow. Raises ConfigError."""
    wanted = (kinds.Drafter.NGRAM, kinds.Drafter.LOOKUP, *(OF_A_TEXT if config.drafter_text else ()))
    sizes = LookupSizes(config.lookup_min_n, config.lookup_max_n, config.lookup_corpus_tokens)
    drafters = make_drafters(wanted, config.drafter_text, tokenizer_json, vocab_size, sizes)
    return OwnDrafts(drafters, vocab_size)


class OwnDrafts:
    """A slot's follower is what is committed there: whatever changes that is told here as well."""

    def __init__(self, drafters: Mapping[kinds.Drafter, Drafter], vocab_size: int) -> None:
        self._drafters = drafters
        self._vocab_size = vocab_size
        self._followers: dict[SlotKey, Follower] = {}

    def __len__(self) -> int:
        """Slots that are followed."""
        return len(self._followers)

    @property
    def offered(self) -> tuple[kinds.Drafter, ...]:
        return tuple(self._drafters)

    def refuses(self, kind: kinds.Drafter | None) -> JobError | None:
        """None for one that this worker offers, and for none."""
        if kind is None or kind in self._drafters:
            return None
        offered = ", ".join(each.label for each in self._drafters)
        return JobError(
            Fault.INVALID,
            f"drafter is {kind.label}, this target has {offered}; name one of them, or none"
            + ("; for unigram and bigram start it with --drafter-text FILE" if kind in OF_A_TEXT else ""),
        )

    def open(self, job: OpenJob, slot: Slot) -> None:
        """The slot has been opened, perhaps in place of an older one."""
        self.drop(slot.key)
        if job.drafter is not None:
            drafter = self._drafters[job.drafter]
            self._followers[slot.key] = drafter.open(slot.committed, slot.num_prompt, job.cache_salt)

    def commit(self, job: VerifyJob) -> None:
        """committed = committed[:base_len] + committed_ids."""
        follower = self._followers.get((job.owner, job.slot_id))
        if follower is not None:
            follower.truncate(job.base_len)
            follower.append(job.committed_ids)

    def append(self, key: SlotKey, token_ids: Sequence[int]) -> bool:
        """A verdict has committed these. Returns whether the slot's drafter has something to say behind them."""
        follower = self._followers.get(key)
        if follower is None:
            return False
        follower.append(token_ids)
        return follower.has_next()

    def follows(self, key: SlotKey) -> bool:
        return key in self._followers

    def draw(self, slot: Slot, state: SamplingState, num_draft_tokens: int) -> Chain:
        follower, committed_len = self._followers[slot.key], len(slot.committed)
        assert follower.num_tokens == committed_len, f"{follower.num_tokens} tokens followed of {committed_len}"
        return draw_chain(follower.walk(), state, committed_len, num_draft_tokens, self._vocab_size)

    def close(self, key: SlotKey) -> None:
        """Its drafter may remember what the slot said."""
        follower = self._followers.pop(key, None)
        if follower is not None:
            follower.close()

    def close_owner(self, owner: int) -> None:
        for key in [key for key in self._followers if key[0] == owner]:
            self.close(key)

    def drop(self, key: SlotKey) -> None:
        """It begins anew, or nobody should remember it."""
        self._followers.pop(key, None)
