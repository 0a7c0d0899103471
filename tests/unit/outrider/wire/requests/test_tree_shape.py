"""How trees are written, and cut to the room that is left."""

import pytest

from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.tree_shape import TreeShape


@pytest.mark.parametrize(
    ("text", "num_nodes", "depth"),
    [("1", 1, 1), ("4", 4, 1), ("4x2x1", 20, 3), ("1x1x1x1", 4, 4), ("best:12x4", 12, 4), ("best:3x9", 3, 3)],
)
def test_written_and_read(text: str, num_nodes: int, depth: int) -> None:
    shape = TreeShape.parse(text)
    assert (str(shape), shape.max_nodes, shape.depth) == (text, num_nodes, depth)
    assert TreeShape.from_proto(pb.TreeShape.FromString(shape.to_proto().SerializeToString())) == shape


@pytest.mark.parametrize("text", ["", "4x", "-1", "4x0x1", "8x8", "best:12", "best:12x0", "best:65x4", "65", "٤"])
def test_what_is_no_tree_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"speculation\.tree is") as caught:
        TreeShape.parse(text, "speculation.tree")
    assert caught.value.param == "speculation.tree"


@pytest.mark.parametrize(
    "message",
    [
        pb.TreeShape(),
        pb.TreeShape(max_depth=3),
        pb.TreeShape(widths=[1], num_nodes=1, max_depth=1),
        pb.TreeShape(widths=[2**32 - 1] * 10_000),
        pb.TreeShape(num_nodes=2**32 - 1, max_depth=2**32 - 1),
    ],
)
def test_a_message_is_checked_likewise(message: pb.TreeShape) -> None:
    with pytest.raises(InvalidRequest) as caught:
        TreeShape.from_proto(message)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("text", "depth", "num_nodes", "fits"),
    [
        ("4x2x1", 64, 64, "4x2x1"),
        ("4x2x1", 3, 20, "4x2x1"),
        ("4x2x1", 2, 20, "4x2"),
        ("4x2x1", 1, 64, "4"),
        ("4x2x1", 64, 19, "3x2x1"),
        ("4x2x1", 64, 8, "2x1x1"),
        ("4x2x1", 64, 4, "1x1x1"),
        ("4x2x1", 64, 2, "1x1"),
        ("4", 9, 3, "3"),
        ("best:12x4", 64, 5, "best:5x4"),
        ("best:12x4", 3, 64, "best:12x3"),
    ],
)
def test_cut_to_a_number_of_nodes(text: str, depth: int, num_nodes: int, fits: str) -> None:
    shape = TreeShape.parse(text).reduced_to(depth, num_nodes)
    assert str(shape) == fits
    assert shape is not None and shape.max_nodes <= num_nodes and shape.depth <= depth


def test_too_few_nodes() -> None:
    assert TreeShape.parse("4x2x1").reduced_to(0, 64) is None
    assert TreeShape.parse("best:12x4").reduced_to(4, 0) is None
