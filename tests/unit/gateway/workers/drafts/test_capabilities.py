"""What is offered follows from what the workers say of themselves."""

from typing import Any, cast

from gateway.workers.drafts.capabilities import offered_drafters, why_no_beams, why_no_trees
from gateway.workers.member import DraftMember, TargetMember
from gateway.workers.membership import MemberSpec
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TABLES
from outrider.wire.requests.drafters import Drafter
from tests.unit.gateway.scripted_pool import connection_of, link_of


def linked(connected: bool, facts: dict[str, Any]) -> Any:
    info = pb.WorkerInfo(model_id="m", **facts)
    connection = connection_of() if connected else None
    if connection is not None:
        connection.info = info
    return link_of(connection, info)


def target(connected: bool = True, **facts: Any) -> TargetMember:
    return TargetMember(MemberSpec("t", "t", "target", "t", "t"), cast(Any, linked(connected, facts)))


def draft(connected: bool = True, **facts: Any) -> DraftMember:
    return DraftMember(MemberSpec("d", "d", "draft", "d"), cast(Any, linked(connected, facts)))


def test_a_drafter_is_offered_where_its_worker_is_listed() -> None:
    ngram = target(drafters=["ngram"])
    alone = offered_drafters([ngram], [], [])
    assert Drafter.NGRAM in alone and not {Drafter.MODEL, Drafter.NGRAM_MODEL, Drafter.BIGRAM} & {*alone}
    assert {Drafter.NGRAM, Drafter.MODEL} <= {*offered_drafters([ngram], [draft(connected=False)], ["d"])}
    assert Drafter.MODEL in offered_drafters([target()], [], ["d"]), "its pool has no member now"
    of_table = offered_drafters([target()], [draft(drafters=["bigram"])], ["d"])
    assert Drafter.BIGRAM in of_table and Drafter.MODEL not in of_table


def test_trees_need_one_worker_of_each_role_that_runs_them() -> None:
    chains: dict[str, Any] = {"attention_path": "flash"}
    assert why_no_trees([target(supports_trees=True), target(**chains)], [draft(supports_trees=True)]) is None
    assert why_no_trees([], []) is why_no_trees([target(False, **chains)], []) is None
    assert why_no_trees([target(**chains)], []) == "the target m runs on the path flash and takes chains alone"
    why = why_no_trees([target(supports_trees=True)], [draft(attention_path=TABLES)])
    assert why == "the draft m is no model and takes chains alone"


def test_beams_need_every_connected_target() -> None:
    assert why_no_beams([target(supports_beams=True), target(connected=False)]) is None
    why = why_no_beams([target(supports_beams=True), target(attention_path="flash")])
    assert why == "the target m runs no token trees on the path flash, as beams need"
