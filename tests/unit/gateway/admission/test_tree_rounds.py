"""Which trees may be asked for: what the workers can draft and verify. The rounds themselves: tests/e2e/test_trees."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.admission.requests import Demand, FieldNames, check_demand
from gateway.generation import Drafter, ServedFacts, SpeculationOptions
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.tree_shape import TreeShape
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model

TREE = TreeShape.parse("4x2x1")


def worker_info(trees: bool, context_limit: int = 512, num_kv_blocks: int = 100) -> pb.WorkerInfo:
    info = pb.WorkerInfo(trees=trees, context_limit=context_limit, num_kv_blocks=num_kv_blocks, kv_block_size=16)
    found = pb.WorkerInfo.FromString(INFO.SerializeToString())
    found.MergeFrom(info)
    return found


@pytest.mark.parametrize(
    ("wishes", "no_trees", "why"),
    [
        ({}, "the target m takes chains alone (path flash)", "path flash"),
        ({"lenience": 0.9}, None, "lenience 0.9"),
    ],
)
def test_refused_by_name(wishes: dict[str, Any], no_trees: str | None, why: str) -> None:
    facts = ServedFacts("m", 512, 320, 0, 320, "draft", (Drafter.MODEL,), no_trees=no_trees)
    options = SpeculationOptions(tree=TREE, **wishes)
    names = FieldNames(prompt="prompt")
    demand = Demand(
        request_id="r",
        model="m",
        prompts=("a",),
        names=names,
        params=SamplingParams(),
        max_tokens=4,
        seed=1,
        speculation=options,
    )
    with pytest.raises(InvalidRequest, match=r"speculation\.tree is 4x2x1") as caught:
        check_demand(demand, [facts])
    assert why in caught.value.message and caught.value.param == "speculation.tree"


@pytest.mark.parametrize(
    ("trees", "refused"), [((True, True), None), ((False, True), "target"), ((True, False), "draft")]
)
def test_what_the_workers_say_decides_what_is_offered(trees: tuple[bool, bool], refused: str | None) -> None:
    connection, draft = connection_of(), connection_of()
    connection.info, draft.info = (worker_info(each) for each in trees)
    why = served_model({"t": link_of(connection)}, {"d": link_of(draft)}).facts().no_trees
    assert (why is None) if refused is None else (why is not None and f"the {refused}" in why)
