"""The shape of a tree of drafts: as users write it, as it travels, and cut to the room left. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import MAX_DRAFT_TOKENS

FORMS = 'children by depth such as "4x2x1", or "best:12x4", the 12 most likely nodes up to a depth of 4'
_WIDTHS = re.compile(r"[0-9]{1,4}(x[0-9]{1,4}){0,63}")
_BEST = re.compile(r"best:([0-9]{1,4})x([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Either `widths`, or `num_nodes` and `max_depth`. Depth 1 follows the committed tokens."""

    widths: tuple[int, ...] = ()
    """Children of every node at depths 0, 1, ..."""
    num_nodes: int = 0
    """Most nodes; those of largest path probability under the draft are taken."""
    max_depth: int = 0

    @classmethod
    def parse(cls, text: str, name: str = "tree") -> TreeShape:
        """Parse one of FORMS. Raises InvalidRequest naming `name`."""
        best = _BEST.fullmatch(text)
        if best is not None:
            shape = cls(num_nodes=int(best[1]), max_depth=int(best[2]))
        elif _WIDTHS.fullmatch(text):
            shape = cls(widths=tuple(map(int, text.split("x"))))
        else:
            raise InvalidRequest(f"{name} is {text[:100]!r}; write {FORMS}", param=name)
        shape.check(name)
        return shape

    def __str__(self) -> str:
        return "x".join(map(str, self.widths)) if self.widths else f"best:{self.num_nodes}x{self.max_depth}"

    @property
    def depth(self) -> int:
        """Largest depth that a node may have."""
        return len(self.widths) if self.widths else min(self.max_depth, self.num_nodes)

    @property
    def most_nodes(self) -> int:
        if not self.widths:
            return self.num_nodes
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        return total

    def check(self, name: str = "tree") -> None:
        """Raise InvalidRequest, naming `name`, for a shape that nobody can draft or verify."""
        if self.widths and self.num_nodes:
            raise InvalidRequest(f"{name} has both widths and num_nodes; give one of them", param=name)
        numbers = self.widths or (self.num_nodes, self.max_depth)
        if len(numbers) > MAX_DRAFT_TOKENS or not all(1 <= number <= MAX_DRAFT_TOKENS for number in numbers):
            raise InvalidRequest(
                f"{name} is {str(self)[:100]}: its numbers, and how many there are, must be from 1 to "
                f"{MAX_DRAFT_TOKENS}; write {FORMS}",
                param=name,
            )
        if self.most_nodes > MAX_DRAFT_TOKENS:
            raise InvalidRequest(
                f"{name} is {self}: it has {self.most_nodes} nodes, at most {MAX_DRAFT_TOKENS} are allowed", param=name
            )

    def fitted(self, depth: int, num_nodes: int) -> TreeShape | None:
        """Return a shape no deeper than `depth` and with at most `num_nodes` nodes, or None when nothing is left.

        The deepest levels go first, then one child at a time of the widest.
        """
        if depth < 1 or num_nodes < 1:
            return None
        if not self.widths:
            return replace(self, num_nodes=min(self.num_nodes, num_nodes), max_depth=min(self.max_depth, depth))
        shape = replace(self, widths=self.widths[: min(depth, num_nodes)])
        while shape.most_nodes > num_nodes:
            widest = max(range(len(shape.widths)), key=lambda d: (shape.widths[d], d))  # the deepest if equal
            shape = replace(shape, widths=tuple(w - (d == widest) for d, w in enumerate(shape.widths)))
        return shape

    def to_proto(self) -> pb.TreeShape:
        return pb.TreeShape(widths=self.widths, num_nodes=self.num_nodes, max_depth=self.max_depth)

    @classmethod
    def from_proto(cls, message: pb.TreeShape, name: str = "tree") -> TreeShape:
        """Read and check the message. Raises InvalidRequest."""
        shape = cls(tuple(message.widths), message.num_nodes, message.max_depth)
        shape.check(name)
        return shape
