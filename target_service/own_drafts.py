"""Drafts that the target makes itself: which of its drafters follows which slot, and what it proposes.

A tree of one branch is grown when the slot is taken into a step: no ticket, and no wait. On the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from outrider.drafting.drafter import Follower, SequenceDrafter
from outrider.drafting.prediction import Prediction, PredictionFollower
from outrider.engine.drafters import OF_A_TEXT, make_drafters
from outrider.engine.sampling.noise import Purpose
from outrider.engine.sampling.penalties import SamplingState
from outrider.engine.speculation.drafter import Said, of_logits, of_table
from outrider.engine.speculation.drawing import grow
from outrider.engine.speculation.ranks import SlotShares
from outrider.engine.speculation.tree import GrowingTree, Node, Plan
from outrider.engine.worker.jobs import Fault, JobError, OpenJob, SlotKey
from outrider.engine.worker.slots import Slot
from outrider.wire import kinds
from outrider.wire.settings.config import TargetConfig
from outrider.wire.speculation import Speculation
from target_service.jobs import VerifyJob
from target_service.own_heads import OwnHeads

Say = Callable[[Node], Said | None]
"""Returns what follows the last node of a chain; None where nothing is known of it."""


def make_own_drafts(
    config: TargetConfig, tokenizer_json: bytes, vocab_size: int, heads: OwnHeads | None = None
) -> OwnDrafts:
    """Return the drafters that the settings allow. Raises ConfigError."""
    wanted = (kinds.Drafter.NGRAM, kinds.Drafter.LOOKUP, *(OF_A_TEXT if config.drafter_text else ()))
    drafters = make_drafters(wanted, config.drafter_text, tokenizer_json, vocab_size)
    return OwnDrafts(drafters, vocab_size, heads)


class OwnDrafts:
    """Keeps the followers of each slot with drafters of its own, in the order in which they are asked. It must hear of
    every change of the committed tokens.
    """

    def __init__(
        self, drafters: Mapping[kinds.Drafter, SequenceDrafter], vocab_size: int, heads: OwnHeads | None = None
    ) -> None:
        """heads: those that draft by kinds.Drafter.HEADS."""
        self._drafters = drafters
        self._heads = heads
        self._headed: dict[SlotKey, Slot] = {}
        """Slots that these draft for."""
        self._vocab_size = vocab_size
        self._followers: dict[SlotKey, dict[kinds.Drafter, Follower]] = {}

    def __len__(self) -> int:
        """Return how many slots are followed."""
        return len(self._followers)

    @property
    def offered(self) -> tuple[kinds.Drafter, ...]:
        heads = () if self._heads is None else (kinds.Drafter.HEADS,)
        return (*self._drafters, *heads, kinds.Drafter.PREDICTION)

    def refuses(self, kind: kinds.Drafter | None) -> JobError | None:
        """Return the error for a drafter that this worker does not offer, else None."""
        if kind is None or (kind in self.offered and kind is not kinds.Drafter.PREDICTION):
            return None
        offered = ", ".join(each.label for each in self.offered if each is not kinds.Drafter.PREDICTION)
        return JobError(
            Fault.INVALID,
            f"drafter is {kind.label}, this target has {offered}; name one of them, or none"
            + ("; for unigram and bigram start it with --drafter-text FILE" if kind in OF_A_TEXT else "")
            + ("; for heads start it with --heads FOLDER" if kind is kinds.Drafter.HEADS else ""),
        )

    def open(self, job: OpenJob, slot: Slot) -> None:
        """Follow a slot that has been opened, perhaps in place of an older one."""
        self.drop(slot.key)
        for kind in job.own_drafters:
            if kind is kinds.Drafter.HEADS:
                self._headed[slot.key] = slot
                continue
            drafter = Prediction(job.prediction_ids) if kind is kinds.Drafter.PREDICTION else self._drafters[kind]
            # What an encoder reads comes before the prompt: the output may copy from it.
            before = [*job.source_ids, *slot.committed]
            follower = drafter.open(before, len(job.source_ids) + slot.num_prompt, job.cache_salt)
            self._followers.setdefault(slot.key, {})[kind] = follower

    def commit(self, job: VerifyJob, slot: Slot) -> None:
        """Set the slot's tokens to committed[:base_len] + committed_ids."""
        for follower in self._of(slot.key).values():
            follower.truncate(slot.num_source_tokens + job.base_len)
            follower.append(job.committed_ids)

    def append(self, key: SlotKey, token_ids: Sequence[int]) -> list[bool]:
        """Append what a verdict committed; return, of what a prediction said before those tokens, whether it came."""
        outcomes = list[bool]()
        for follower in self._of(key).values():
            follower.append(token_ids)
            if isinstance(follower, PredictionFollower):
                outcomes = follower.outcomes(len(token_ids))
        return outcomes

    def asked(self, key: SlotKey, *, insists: bool) -> Iterator[kinds.Drafter]:
        """Give those of the slot's drafters that have a guess worth verifying, in order; then, where the request
        insists on drafts, the last whatever it has.
        """
        followers = self._of(key)
        speaking = [kind for kind, follower in followers.items() if follower.has_next()]
        yield from speaking
        headed = self._headed.get(key)
        if headed is not None:
            assert self._heads is not None, "there are no heads"
            if self._heads.has_row(headed):
                yield kinds.Drafter.HEADS
        elif insists and followers and (last := next(reversed(followers))) not in speaking:
            yield last

    def grown(self, slot: Slot, kind: kinds.Drafter, state: SamplingState, shares: SlotShares, most: int) -> list[Node]:
        """Return a chain of at most `most` nodes, fewer where there is nothing more to say."""
        chain = Speculation(num_draft_tokens=most, max_draft_tokens=most, sequential=True)
        plan = Plan(chain, slot.params, shares, takes_trees=False, topk=None, purpose=Purpose.OWN_DRAFT)
        tree = GrowingTree(slot.committed, slot.max_len, slot.params, plan)
        say = (
            self._by_heads(slot, tree, state)
            if kind is kinds.Drafter.HEADS
            else self._by_table(slot, kind, tree, state)
        )
        found, node = list[Node](), tree.root
        while tree.offers(1) and (said := say(node)) is not None:
            tree.feed(node)
            grow([said])
            if not node.children or (node in tree.ended and node is not tree.root):  # the root ends once all is grown
                break
            node = node.children[0]
            found.append(node)
        return found

    def _by_table(self, slot: Slot, kind: kinds.Drafter, tree: GrowingTree, state: SamplingState) -> Say:
        follower, num_tokens = self._followers[slot.key][kind], slot.num_source_tokens + len(slot.committed)
        assert follower.num_tokens == num_tokens, f"{follower.num_tokens} tokens followed of {num_tokens}"
        walk = follower.walk()

        def say(node: Node) -> Said:
            if node is not tree.root:
                walk.step(node.token_id)
            return of_table(tree, node, state, lambda path: walk.next(), self._vocab_size)

        return say

    def _by_heads(self, slot: Slot, tree: GrowingTree, state: SamplingState) -> Say:
        assert self._heads is not None, "there are no heads"
        logits, num_positions = self._heads.logits(slot), self._heads.num_positions

        def say(node: Node) -> Said | None:
            depth = tree.depth(node)
            return of_logits(tree, node, state, logits, depth) if depth < num_positions else None

        return say

    def close(self, key: SlotKey) -> None:
        """Stop following a closed slot, whose drafter may remember its tokens."""
        self._unhead(key)
        for follower in self._followers.pop(key, {}).values():
            follower.close()

    def _unhead(self, key: SlotKey) -> None:
        if self._headed.pop(key, None) is not None and self._heads is not None:
            self._heads.forget(key)

    def close_owner(self, owner: int) -> None:
        for key in [key for key in (*self._followers, *self._headed) if key[0] == owner]:
            self.close(key)

    def drop(self, key: SlotKey) -> None:
        """Stop following a slot that begins anew or must not be remembered."""
        self._unhead(key)
        self._followers.pop(key, None)

    def _of(self, key: SlotKey) -> dict[kinds.Drafter, Follower]:
        return self._followers.get(key, {})
