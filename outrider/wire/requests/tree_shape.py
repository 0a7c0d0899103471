"""`TreeShape`, the shape of a draft tree. It is parsed from a user's text, sent to workers, and reduced to a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import MAX_DRAFT_TOKENS

SYNTAX = 'children by depth such as "4x2x1", or "best:12x4", the 12 most likely nodes up to a depth of 4'
"""Description of the texts that `TreeShape.parse` accepts, for errors and documents."""
_WIDTHS = re.compile(r"[0-9]{1,4}(x[0-9]{1,4}){0,63}")
_BEST = re.compile(r"best:([0-9]{1,4})x([0-9]{1,4})")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of a draft tree. It is given either by `widths` alone, or by `num_nodes` and `max_depth`. The root (the
    last committed token) has depth 0, and its children, the first draft tokens, have depth 1.
    """

    widths: tuple[int, ...] = ()
    """Number of children of every node, by the node's depth, from 0 for the root. For example (4, 2) has 4 nodes at
    depth 1 and 8 at depth 2. Empty = the shape is given by `num_nodes`."""
    num_nodes: int = 0
    """Maximum number of nodes. The nodes with the largest products of draft probabilities along their paths from the
    root are verified. 0 = the shape is given by `widths`."""
    max_depth: int = 0
    """Maximum depth of a node, where the root's children have depth 1. Used only if `num_nodes` is given."""

    @classmethod
    def parse(cls, text: str, name: str = "tree") -> TreeShape:
        """Parse a text such as "4x2x1" or "best:12x4" (see SYNTAX). name: name of the parameter, for errors. Raises
        InvalidRequest for any other text.
        """
        best = _BEST.fullmatch(text)
        if best is not None:
            shape = cls(num_nodes=int(best[1]), max_depth=int(best[2]))
        elif _WIDTHS.fullmatch(text):
            shape = cls(widths=tuple(map(int, text.split("x"))))
        else:
            raise InvalidRequest(f"{name} is {text[:100]!r}; write {SYNTAX}", param=name)
        shape.check(name)
        return shape

    def __str__(self) -> str:
        if self.widths:
            return "x".join(map(str, self.widths))
        return f"best:{self.num_nodes}x{self.max_depth}"

    @property
    def depth(self) -> int:
        """Maximum depth of a node, where the root's children have depth 1."""
        if self.widths:
            return len(self.widths)
        return min(self.max_depth, self.num_nodes)

    @property
    def max_nodes(self) -> int:
        """Maximum number of nodes that the tree may have, without the root."""
        # widths (4, 2, 1): 4 + 8 + 8 = 20
        if not self.widths:
            return self.num_nodes
        num_nodes = 0
        num_at_depth = 1
        for width in self.widths:
            num_at_depth *= width
            num_nodes += num_at_depth
        return num_nodes

    def check(self, name: str = "tree") -> None:
        """Raise InvalidRequest if the shape has both `widths` and `num_nodes`, a number below 1, or more than
        MAX_DRAFT_TOKENS nodes or depths. name: name of the parameter, for errors.
        """
        if self.widths and self.num_nodes:
            raise InvalidRequest(f"{name} has both widths and num_nodes; give one of them", param=name)
        numbers = self.widths or (self.num_nodes, self.max_depth)
        if len(numbers) > MAX_DRAFT_TOKENS or not all(1 <= number <= MAX_DRAFT_TOKENS for number in numbers):
            raise InvalidRequest(
                f"{name} is {str(self)[:100]}: its numbers, and how many there are, must be from 1 to "
                f"{MAX_DRAFT_TOKENS}; write {SYNTAX}",
                param=name,
            )
        if self.max_nodes > MAX_DRAFT_TOKENS:
            raise InvalidRequest(
                f"{name} is {self}: it has {self.max_nodes} nodes, at most {MAX_DRAFT_TOKENS} are allowed", param=name
            )

    def reduced_to(self, depth: int, num_nodes: int) -> TreeShape | None:
        """Return this shape, cut to depth `depth` and to at most `num_nodes` nodes (the root does not count). None = no
        node would remain.

        Of `widths`, the last are dropped first. Then the largest is reduced by one, again and again, until the tree is
        small enough. A shape without `widths` gets lower limits.
        """
        # 4x2x1 to a depth of 2 and 8 nodes: 4x2 (12 nodes), 3x2 (9), 2x2 (6)
        if depth < 1 or num_nodes < 1:
            return None
        if not self.widths:
            return replace(self, num_nodes=min(self.num_nodes, num_nodes), max_depth=min(self.max_depth, depth))
        shape = replace(self, widths=self.widths[: min(depth, num_nodes)])
        while shape.max_nodes > num_nodes:
            widths = list(shape.widths)
            widths[_widest_level(widths)] -= 1
            shape = replace(shape, widths=tuple(widths))
        return shape

    def to_proto(self) -> pb.TreeShape:
        """Convert the shape to a protobuf message."""
        return pb.TreeShape(widths=self.widths, num_nodes=self.num_nodes, max_depth=self.max_depth)

    @classmethod
    def from_proto(cls, message: pb.TreeShape, name: str = "tree") -> TreeShape:
        """Convert and check a protobuf message. name: name of the field, for errors. Raises InvalidRequest for a shape
        that is not allowed.
        """
        shape = cls(tuple(message.widths), message.num_nodes, message.max_depth)
        shape.check(name)
        return shape


def _widest_level(widths: Sequence[int]) -> int:
    # [4, 2, 4]: 2, the deepest of equal ones
    widest = 0
    for level, width in enumerate(widths):
        if width >= widths[widest]:
            widest = level
    return widest
