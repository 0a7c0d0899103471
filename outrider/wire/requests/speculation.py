"""How an answer is drafted for: the same for draft and target. Imports no torch."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from numbers import Integral
from typing import Final, Literal

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import DRAFT_TOKENS, MAX_DRAFT_TOKENS, Range, draft_logprobs_of
from outrider.wire.requests.tree_shape import TreeShape

DEFAULT_TOPK = 128
"""Most likely tokens in a distribution that is cut, unless the request says otherwise."""
MIN_GAIN = 1.2
"""Times the tokens of plain decoding that draft tokens have to promise in a step, and those of a draft in a trial. What
they cost beside their rows, messages and memory that others read, was 5 to 10 % of a step of 8 to 64 answers on two
cores, and at 1.1 eight answers were 0.91 times as fast as plain. At 1.4 draft tokens that pay are passed over."""
MAX_DRAFTS = 8
"""Draft workers that one answer may have."""

AUTO: Final = "auto"
NumDraftTokens = int | Literal["auto"]
"""K, how many draft tokens a step may verify: a number, for which steps wait, or AUTO, as many as pay, down to none.
0 = every step is plain."""


def check_num_draft_tokens(value: object, name: str = "num_draft_tokens") -> NumDraftTokens:
    """Return K. Raises InvalidRequest, naming the field `name`, for what is none."""
    if value == AUTO:
        return AUTO
    if not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) <= MAX_DRAFT_TOKENS:
        return int(value)
    shown = reprlib.repr(value)
    raise InvalidRequest(f"{name} is {shown}, must be a whole number {DRAFT_TOKENS}, or {AUTO}", param=name)


def read_num_draft_tokens(text: str, name: str = "num_draft_tokens") -> NumDraftTokens:
    """Return K as people write it. Raises InvalidRequest, naming the field `name`."""
    return check_num_draft_tokens(int(text) if text.isdecimal() else text, name)


def num_draft_tokens_to_proto(num_draft_tokens: NumDraftTokens) -> pb.NumDraftTokens:
    return pb.NumDraftTokens(number=num_draft_tokens if isinstance(num_draft_tokens, int) else None)


def num_draft_tokens_from_proto(message: pb.NumDraftTokens, name: str = "num_draft_tokens") -> NumDraftTokens:
    """Read and check the message. Raises InvalidRequest, naming the field `name`."""
    return check_num_draft_tokens(message.number if message.HasField("number") else AUTO, name)


def check_what_is_drafted(
    num_draft_tokens: NumDraftTokens | None,
    tree: TreeShape | None,
    drafter: Drafter | None,
    max_draft_tokens: int,
    prefix: str = "",
) -> None:
    """Raise InvalidRequest for more draft tokens than a server allows, and for what does not go with a tree; None = not
    given. prefix: of the fields' names.
    """
    too_many = f"and at most {max_draft_tokens} tokens are drafted; give fewer, or raise max_draft_tokens"
    if isinstance(num_draft_tokens, int) and num_draft_tokens > max_draft_tokens:
        name = f"{prefix}num_draft_tokens"
        raise InvalidRequest(f"{name} is {num_draft_tokens}, {too_many}", param=name)
    if tree is None:
        return
    name = f"{prefix}tree"
    shown = f"{name} is {tree}"
    if tree.most_nodes > max_draft_tokens:
        raise InvalidRequest(f"{shown}, {tree.most_nodes} nodes, {too_many}", param=name)
    if num_draft_tokens is not None:
        why = f"num_draft_tokens {num_draft_tokens}, which is of chains; leave one out"
        raise InvalidRequest(f"{shown} and {why}", param=name)
    if drafter is not None and not drafter.asks_draft_worker:
        why = f"drafter {drafter}, which asks no model; say model, or leave tree out"
        raise InvalidRequest(f"{shown} and {why}", param=name)


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a slot is drafted for; by default not at all: a step may verify no draft token."""

    num_draft_tokens: NumDraftTokens = AUTO
    """K; AUTO where there is a tree."""
    max_draft_tokens: int = 0
    """Most draft tokens that a step may verify, of all drafters together: the bound of AUTO, and of merged trees."""
    tree: TreeShape | None = None
    """What a step verifies, and waits for; None = a chain of K, or what pays."""
    draft_logprobs: DraftLogprobs = DraftLogprobs.AUTO
    draft_topk: int = DEFAULT_TOPK
    """Most likely tokens in a distribution that is cut."""
    sequential: bool = False
    """Draft and target take turns."""
    place: int = 0
    """Index of a draft among those of the answer."""
    explain: bool = False
    """Whether the target's verdicts say what was verified and what was refused."""

    @property
    def is_plain(self) -> bool:
        """Whether every step is without drafts."""
        return self.num_draft_tokens == 0 or not self.max_draft_tokens

    @property
    def is_fixed(self) -> bool:
        """Whether a step waits for drafts rather than taking what pays."""
        return self.num_draft_tokens != AUTO or self.tree is not None

    @property
    def max_depth(self) -> int:
        """The most draft tokens that a step may accept."""
        if self.is_plain or self.tree is None:
            return self.chain_len(self.max_draft_tokens)
        return self.tree.depth

    def chain_len(self, room: int) -> int:
        """Return how many draft tokens a step with room for `room` may verify one after the other."""
        return min(self.num_draft_tokens, room) if isinstance(self.num_draft_tokens, int) else room

    def to_proto(self) -> pb.Speculation:
        return pb.Speculation(
            num_draft_tokens=num_draft_tokens_to_proto(self.num_draft_tokens),
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
        num_draft_tokens = num_draft_tokens_from_proto(message.num_draft_tokens)
        if isinstance(num_draft_tokens, int):
            Range(0, message.max_draft_tokens).check("num_draft_tokens", num_draft_tokens)
        encoding = draft_logprobs_of(message.draft_logprobs, "draft_logprobs")
        Range(1 if encoding is DraftLogprobs.TOPK else 0, vocab_size).check("draft_topk", message.draft_topk)
        tree = TreeShape.from_proto(message.tree) if message.HasField("tree") else None
        Range(0, MAX_DRAFTS - 1).check("place", message.place)
        if tree is not None:
            Range(0, message.max_draft_tokens).check("nodes of tree", tree.most_nodes)
        return cls(
            num_draft_tokens,
            message.max_draft_tokens,
            tree,
            encoding or DraftLogprobs.AUTO,
            message.draft_topk or DEFAULT_TOPK,
            message.sequential,
            message.place,
            message.explain,
        )
