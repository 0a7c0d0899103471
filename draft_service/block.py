"""What a drafter of blocks keeps of a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockShape:
    """How a draft is asked to fill a block in one forward: the last committed token, which is the anchor, and masks."""

    size: int
    """B, tokens of a block, the anchor included."""
    mask_id: int
    from_anchor: bool = True
    """Whether the anchor's logits are of the token after it and the last mask's of the B-th; else a mask's logits are
    of the token in its own place, and the anchor's of nothing."""
    feature: Tensor | None = None
    """[d], of each mask; None where masks have none."""

    @property
    def num_drafts(self) -> int:
        """Tokens behind the anchor that a block proposes."""
        return self.size if self.from_anchor else self.size - 1

    def token_ids(self, anchor: int, max_tokens: int) -> list[int]:
        """Return the ids of a block, cut to `max_tokens`, which are 1 at least."""
        return [anchor, *[self.mask_id] * (min(self.size, max_tokens) - 1)]


@dataclass(eq=False, slots=True)
class Block:
    """Output of a drafter at the positions behind a committed token, before any of their tokens is known."""

    position: int
    """Of that token."""
    logits: Tensor
    """[N, V] float32, of what follows that token, and of the next positions."""
    hidden: Tensor | None = None
    """[N, d], what the logits were made of, for a sequential head."""
    states: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    """States [1, r] of a sequential head, by the draft tokens up to where they were left."""
