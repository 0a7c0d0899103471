"""Which trees a gateway asks for: as wished, as deep as max_tokens and context leave room, of who can draft them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.admission.requests import Demand, FieldNames, check_demand
from gateway.generation import Drafter, GenerationRequest, ModelFacts, SpeculationOptions
from gateway.rounds.draft_length import tree_of
from gateway.rounds.drafting import Drafting
from gateway.rounds.session import Session
from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.wire.errors import InvalidRequest
from outrider.wire.params import SamplingParams
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.tree_shape import TreeShape
from tests.unit.scripted_pool import INFO, connection_of, link_of, served_model

PROMPT = tuple(range(40))
TREE = TreeShape.parse("4x2x1")


def worker_info(trees: bool, context_limit: int = 512, num_kv_blocks: int = 100) -> pb.WorkerInfo:
    info = pb.WorkerInfo(trees=trees, context_limit=context_limit, num_kv_blocks=num_kv_blocks, kv_block_size=16)
    found = pb.WorkerInfo.FromString(INFO.SerializeToString())
    found.MergeFrom(info)
    return found


class ScriptedDraft:
    """A connection that keeps what it is asked."""

    alive, epoch = True, 7

    def __init__(self, info: pb.WorkerInfo) -> None:
        self.info = info
        self.asked: list[dpb.DraftRequest] = []

    def call(self, request: dpb.DraftRequest) -> asyncio.Future[dpb.DraftReply]:
        self.asked.append(request)
        return asyncio.get_running_loop().create_future()


def asked_for(
    num_committed: int = 0,
    *,
    target: pb.WorkerInfo | None = None,
    draft: pb.WorkerInfo | None = None,
    config: GatewayConfig | None = None,
    max_tokens: int = 200,
    lenience: float = 1.0,
    **wishes: Any,
) -> dpb.Propose | None:
    """Of the round after so many more committed tokens."""
    connection, scripted = connection_of(), ScriptedDraft(draft or worker_info(True))
    connection.info = target or worker_info(True)
    model = served_model({"target-0": link_of(connection)}, {"draft-0": link_of(scripted)}, gateway=config)
    params = SamplingParams(max_tokens=max_tokens, lenience=lenience)
    request = GenerationRequest("r", "m", PROMPT, params, speculation=SpeculationOptions(**wishes))
    session = Session(request, model.tokenizer, 1)
    session.committed.extend(range(num_committed))
    side = Drafting(model, session)
    num_draft_tokens = side.propose(1, connection, model.targets["target-0"])
    if not num_draft_tokens:
        return None
    asked = scripted.asked[-1].propose
    assert asked.num_draft_tokens == num_draft_tokens
    assert side.asked_for_tree is asked.HasField("tree")
    return asked


def shape(asked: dpb.Propose | None) -> str | None:
    assert asked is not None
    return str(TreeShape.from_proto(asked.tree)) if asked.HasField("tree") else None


@pytest.mark.parametrize(
    ("max_tokens", "expected"), [(200, "4x2x1"), (4, "4x2x1"), (3, "4x2"), (2, "4")], ids=["much", "just", "two", "one"]
)
async def test_as_deep_as_max_tokens_leave_room(max_tokens: int, expected: str) -> None:
    assert shape(asked_for(tree=TREE, max_tokens=max_tokens)) == expected
    assert asked_for(max_tokens=1, tree=TREE) is None


async def test_as_deep_as_the_drafts_context_and_as_large_as_the_smaller_cache() -> None:
    assert shape(asked_for(tree=TREE, draft=worker_info(True, context_limit=43))) == "4x2"
    assert shape(asked_for(tree=TREE, target=worker_info(True, num_kv_blocks=4))) == "2x1x1"  # 48 - 40 nodes
    assert shape(asked_for(tree=TREE, draft=worker_info(True, num_kv_blocks=4))) == "2x1x1"
    assert asked_for(tree=TREE, draft=worker_info(True, num_kv_blocks=3)) is None


async def test_the_gateways_tree_gives_way_to_a_requests_own_wishes() -> None:
    config = GatewayConfig(target="127.0.0.1:9", tree="best:12x4")
    assert shape(asked_for(config=config)) == "best:12x4"
    assert shape(asked_for(config=config, tree=TREE)) == "4x2x1"
    assert shape(asked_for(config=config, num_draft_tokens=3)) is None
    assert asked_for(config=config, lenience=0.5) is None, "as many as pay, which nobody knows at first"
    request = GenerationRequest("r", "m", PROMPT, SamplingParams(), speculation=SpeculationOptions())
    assert tree_of(request, GatewayConfig(target="127.0.0.1:9")) is None


@pytest.mark.parametrize(
    ("wishes", "no_trees", "why"),
    [
        ({}, "the target m takes chains alone (path flash)", "path flash"),
        ({"num_draft_tokens": 0}, None, "num_draft_tokens 0"),
        ({"lenience": 0.9}, None, "lenience 0.9"),
    ],
)
def test_refused_by_name(wishes: dict[str, Any], no_trees: str | None, why: str) -> None:
    facts = ModelFacts("m", 512, 320, 0, 320, "draft", (Drafter.MODEL,), no_trees)
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
    connection, draft = connection_of(), ScriptedDraft(worker_info(trees[1]))
    connection.info = worker_info(trees[0])
    why = served_model({"t": link_of(connection)}, {"d": link_of(draft)}).model_facts().no_trees
    assert (why is None) if refused is None else (why is not None and f"the {refused}" in why)
