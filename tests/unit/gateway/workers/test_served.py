"""What a served model offers, how its heads are paired, and how it is told from another."""

import pytest

from gateway.workers.drafts.reference_target import ReferenceTarget
from gateway.workers.member import State
from gateway.workers.membership import Membership, PoolSpec
from gateway.workers.worker_pools import Pools
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import IncompatiblePair
from tests.unit.gateway.rounds.test_detokenizer import byte_level
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model
from tests.unit.gateway.workers.started import CHAT, CODE, Parts


def worker_info(trees: bool, context_limit: int = 512, num_kv_blocks: int = 100) -> pb.WorkerInfo:
    info = pb.WorkerInfo(
        supports_trees=trees, context_limit=context_limit, num_kv_blocks=num_kv_blocks, kv_block_size=16
    )
    found = pb.WorkerInfo.FromString(INFO.SerializeToString())
    found.MergeFrom(info)
    return found


@pytest.mark.parametrize(
    ("trees", "refused"), [((True, True), None), ((False, True), "target"), ((True, False), "draft")]
)
def test_reports_of_the_workers_decide_the_offer(trees: tuple[bool, bool], refused: str | None) -> None:
    connection, draft = connection_of(), connection_of()
    connection.info, draft.info = (worker_info(each) for each in trees)
    why = served_model({"t": link_of(connection)}, {"d": link_of(draft)}).facts().no_trees
    assert (why is None) if refused is None else (why is not None and f"the {refused}" in why)


async def test_a_head_is_paired_with_each_target_on_its_own(pools: Pools) -> None:
    parts = Parts(pools)
    await parts.connect("a")
    await parts.connect("c")
    assert (parts.asked, parts.served()) == ([("a:1", 7)], []), "what is not there yet is not waited for"
    assert pools.members["c"].state is State.LOST, "no target knows it"
    parts.says("a:1", None)
    await parts.settle()
    assert parts.served() == ["a"]
    await parts.connect("b", 8)
    assert (parts.asked[1:], parts.served()) == ([("b:1", 8)], ["a"]), "while the other is asked, too"
    parts.says("b:1", None)
    await parts.settle()
    assert parts.served() == ["a", "b"]
    await parts.connect("a", 9)
    assert (parts.asked[2:], parts.served()) == ([("a:1", 9)], ["a", "b"]), "each life is asked of"


async def test_two_models_of_one_short_name_are_distinguished_or_refused(pools: Pools) -> None:
    pools.update(Membership((CHAT, CODE, PoolSpec("more", "target")), ()))
    chat, code, more = (pools.models[name] for name in ("chat", "code", "more"))
    for model, path in ((chat, "/a/model"), (code, "/b/model")):
        model.set_reference(ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), path))
    assert [model.id for model in (chat, code)] == ["model", "coder"], "one has a model_name"
    assert [model.load().target for model in (chat, code)] == ["model", "model@code"], "their rounds are counted apart"
    with pytest.raises(IncompatiblePair, match="model id 'model' of the pool more is that of the pool chat already"):
        more.set_reference(ReferenceTarget(INFO, pb.TokenizerFiles(), byte_level(), "/c/model"))
