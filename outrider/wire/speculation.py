"""How an answer is drafted for, as its slots are told: the same for draft and target. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.params import MAX_DRAFT_TOKENS, Range, draft_logprobs_of
from outrider.wire.tree_shape import TreeShape

DEFAULT_TOPK = 128
"""Entries of a cut law where nobody says how many. Doubling it doubles the bytes of each; a little more is kept."""
MAX_DRAFTS = 8
"""Draft workers that one answer may have. Doubling it lets a step verify twice as many trees."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """What an answer's draft and target are told of it."""

    num_draft_tokens: int = 0
    """K of each step, waited for; 0 = as many as pay, down to none."""
    max_draft_tokens: int = 0
    """Most draft tokens of a step; 0 = every step is plain."""
    tree: TreeShape | None = None
    """What a step verifies, waited for; None = a chain, or what pays."""
    draft_logprobs: DraftLogprobs = DraftLogprobs.AUTO
    draft_topk: int = DEFAULT_TOPK
    """Entries of a cut law."""
    sequential: bool = False
    """Draft and target take turns."""
    place: int = 0
    """Of a draft, among those of the answer."""
    explain: bool = False
    """Of a target: its verdicts say what was verified and what was refused."""

    @property
    def is_fixed(self) -> bool:
        """Whether a step waits for drafts rather than taking what pays."""
        return self.num_draft_tokens > 0 or self.tree is not None

    def to_proto(self) -> pb.Speculation:
        return pb.Speculation(
            num_draft_tokens=self.num_draft_tokens,
            max_draft_tokens=self.max_draft_tokens,
            tree=None if self.tree is None else self.tree.to_proto(),
            draft_logprobs=self.draft_logprobs.value,
            draft_topk=self.draft_topk,
            sequential=self.sequential,
            place=self.place,
            explain=self.explain,
        )

    @classmethod
    def from_proto(cls, message: pb.Speculation, vocab_size: int) -> Speculation:
        """Read and check the message. Raises InvalidRequest."""
        Range(0, MAX_DRAFT_TOKENS).check("max_draft_tokens", message.max_draft_tokens)
        Range(0, message.max_draft_tokens).check("num_draft_tokens", message.num_draft_tokens)
        encoding = draft_logprobs_of(message.draft_logprobs, "draft_logprobs")
        Range(1 if encoding is DraftLogprobs.TOPK else 0, vocab_size).check("draft_topk", message.draft_topk)
        tree = TreeShape.from_proto(message.tree) if message.HasField("tree") else None
        Range(0, MAX_DRAFTS - 1).check("place", message.place)
        if tree is not None:
            Range(0, message.max_draft_tokens).check("nodes of tree", tree.most_nodes)
        return cls(
            message.num_draft_tokens,
            message.max_draft_tokens,
            tree,
            encoding or DraftLogprobs.AUTO,
            message.draft_topk or DEFAULT_TOPK,
            message.sequential,
            message.place,
            message.explain,
        )
