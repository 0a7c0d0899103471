"""`Speculation`, the parameters by which draft tokens for a slot are made and verified, and the checks of K and trees.
Used by gateway, workers and SDK.
"""

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
"""Number of likeliest tokens whose log-probs are sent per distribution where distributions are cut and neither the
request nor the gateway gives a number."""
MIN_GAIN = 1.2
"""Factor by which draft tokens must raise the expected tokens per second of a step, or the counted tokens per verdict
in a draft worker's trial, to be used. Neither includes messages and memory bandwidth, which cost 5 to 10 % of a step
(8 to 64 slots, two cores). With 1.1, eight slots were 0.91 times as fast as plain decoding; with 1.4, draft tokens that
pay are not used."""
MAX_DRAFT_WORKERS = 8
"""Maximum number of draft workers of one choice."""

AUTO: Final = "auto"
NumDraftTokens = int | Literal["auto"]
"""K, the number of draft tokens that a step may verify. A number: steps wait for that many draft tokens, and 0 means
plain decoding. AUTO: each step verifies as many draft tokens as make it faster, possibly none."""


def check_num_draft_tokens(value: object, name: str = "num_draft_tokens") -> NumDraftTokens:
    """Return `value` if it is a valid K: a whole number from 0 to MAX_DRAFT_TOKENS, or AUTO. name: name of the
    parameter, for errors. Raises InvalidRequest for any other value.
    """
    if value == AUTO:
        return AUTO
    if not isinstance(value, bool) and isinstance(value, Integral) and 0 <= int(value) <= MAX_DRAFT_TOKENS:
        return int(value)
    shown = reprlib.repr(value)
    raise InvalidRequest(f"{name} is {shown}, must be a whole number {DRAFT_TOKENS}, or {AUTO}", param=name)


def read_num_draft_tokens(text: str, name: str = "num_draft_tokens") -> NumDraftTokens:
    """Parse K, a number or "auto". name: name of the parameter, for errors. Raises InvalidRequest for other texts."""
    if text.isdecimal():
        return check_num_draft_tokens(int(text), name)
    return check_num_draft_tokens(text, name)


def num_draft_tokens_to_proto(num_draft_tokens: NumDraftTokens) -> pb.NumDraftTokens:
    """Convert K, a number or AUTO, to a protobuf message. AUTO is a message without a number."""
    if isinstance(num_draft_tokens, int):
        return pb.NumDraftTokens(number=num_draft_tokens)
    return pb.NumDraftTokens()


def num_draft_tokens_from_proto(message: pb.NumDraftTokens, name: str = "num_draft_tokens") -> NumDraftTokens:
    """Convert a protobuf message to K and check it. A message without a number means AUTO. Raises InvalidRequest for a
    number that is not allowed. name: name of the field, for errors.
    """
    if not message.HasField("number"):
        return AUTO
    return check_num_draft_tokens(message.number, name)


def check_what_is_drafted(
    num_draft_tokens: NumDraftTokens | None,
    tree: TreeShape | None,
    drafter: Drafter | None,
    max_draft_tokens: int,
    prefix: str = "",
) -> None:
    """Raise InvalidRequest if K or the tree of a request exceeds `max_draft_tokens`, or if a tree is given together
    with K or with a drafter that cannot make trees.

    num_draft_tokens, tree, drafter: values that the request gives; None = it does not give this one. max_draft_tokens:
    the gateway's limit. prefix: text before the parameters' names in errors, such as "speculation.".
    """
    too_many = f"and at most {max_draft_tokens} tokens are drafted; give fewer, or raise max_draft_tokens"
    if isinstance(num_draft_tokens, int) and num_draft_tokens > max_draft_tokens:
        name = f"{prefix}num_draft_tokens"
        raise InvalidRequest(f"{name} is {num_draft_tokens}, {too_many}", param=name)
    if tree is None:
        return
    name = f"{prefix}tree"
    shown = f"{name} is {tree}"
    if tree.max_nodes > max_draft_tokens:
        raise InvalidRequest(f"{shown}, {tree.max_nodes} nodes, {too_many}", param=name)
    if num_draft_tokens is not None:
        why = f"num_draft_tokens {num_draft_tokens}, which is of chains; leave one out"
        raise InvalidRequest(f"{shown} and {why}", param=name)
    if drafter is not None and not drafter.uses_draft_worker:
        why = f"drafter {drafter}, which asks no model; say model, or leave tree out"
        raise InvalidRequest(f"{shown} and {why}", param=name)


@dataclass(frozen=True, slots=True)
class Speculation:
    """Parameters by which draft tokens for a slot are made and verified. With the default values no step verifies draft
    tokens, because the default of `max_draft_tokens` is 0.
    """

    num_draft_tokens: NumDraftTokens = AUTO
    """K, the number of draft tokens that a step may verify. Always AUTO if `tree` is given."""
    max_draft_tokens: int = 0
    """Maximum number of draft tokens, of all drafters together, that a step may verify for the slot. It limits K if K
    is AUTO, and the size of merged trees."""
    tree: TreeShape | None = None
    """Shape of the draft tree that each step waits for and verifies. None = draft tokens form chains, of at most
    `num_draft_tokens`."""
    draft_logprobs: DraftLogprobs = DraftLogprobs.AUTO
    draft_topk: int = DEFAULT_TOPK
    """Number of likeliest tokens whose log-probs are sent per distribution where distributions are cut: with
    `draft_logprobs` topk, or auto if a step's payload is large."""
    is_sequential: bool = False
    """Whether the draft worker begins to draft for a round only after the target's verdict on the round before. False =
    it drafts ahead while the target verifies."""
    draft_index: int = 0
    """Number of the draft worker that gets these parameters, counted from 0 over all draft workers of the choice."""
    explain: bool = False
    """Whether the target's verdicts also explain which draft tokens were verified, and why no more were accepted."""

    @property
    def is_plain(self) -> bool:
        """Whether the slot's steps verify no draft tokens, because K or `max_draft_tokens` is 0."""
        return self.num_draft_tokens == 0 or not self.max_draft_tokens

    @property
    def is_fixed(self) -> bool:
        """Whether each step waits for a fixed number of draft tokens: K, or the nodes of a tree. False = K is AUTO, and
        a step verifies as many draft tokens as make it faster.
        """
        return self.num_draft_tokens != AUTO or self.tree is not None

    @property
    def max_depth(self) -> int:
        """Maximum number of draft tokens that a step may accept: length of the longest chain, or depth of the tree."""
        if self.is_plain or self.tree is None:
            return self.chain_len(self.max_draft_tokens)
        return self.tree.depth

    def chain_len(self, budget: int) -> int:
        """Return the length of the longest chain that a step may verify. budget: maximum number of draft tokens that
        the step may verify for this slot.
        """
        if isinstance(self.num_draft_tokens, int):
            return min(self.num_draft_tokens, budget)
        return budget

    def to_proto(self) -> pb.Speculation:
        """Convert the parameters to a protobuf message."""
        tree = None
        if self.tree is not None:
            tree = self.tree.to_proto()
        return pb.Speculation(
            num_draft_tokens=num_draft_tokens_to_proto(self.num_draft_tokens),
            max_draft_tokens=self.max_draft_tokens,
            tree=tree,
            draft_logprobs=self.draft_logprobs.value,
            draft_topk=self.draft_topk,
            is_sequential=self.is_sequential,
            draft_index=self.draft_index,
            explain=self.explain,
        )

    @classmethod
    def from_proto(cls, message: pb.Speculation, vocab_size: int) -> Speculation:
        """Convert and check a protobuf message. vocab_size: vocabulary size, the limit of `draft_topk`. Raises
        InvalidRequest for a value that is not allowed.
        """
        Range(0, MAX_DRAFT_TOKENS).check("max_draft_tokens", message.max_draft_tokens)
        num_draft_tokens = num_draft_tokens_from_proto(message.num_draft_tokens)
        if isinstance(num_draft_tokens, int):
            Range(0, message.max_draft_tokens).check("num_draft_tokens", num_draft_tokens)
        encoding = draft_logprobs_of(message.draft_logprobs, "draft_logprobs")
        min_topk = 1 if encoding is DraftLogprobs.TOPK else 0
        Range(min_topk, vocab_size).check("draft_topk", message.draft_topk)
        tree = None
        if message.HasField("tree"):
            tree = TreeShape.from_proto(message.tree)
        Range(0, MAX_DRAFT_WORKERS - 1).check("draft_index", message.draft_index)
        if tree is not None:
            Range(0, message.max_draft_tokens).check("nodes of tree", tree.max_nodes)
        return cls(
            num_draft_tokens,
            message.max_draft_tokens,
            tree,
            encoding or DraftLogprobs.AUTO,
            message.draft_topk or DEFAULT_TOPK,
            message.is_sequential,
            message.draft_index,
            message.explain,
        )
