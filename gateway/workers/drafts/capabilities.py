"""What the workers of a model can do together: drafters, draft trees and beam searches. Computed from their WorkerInfo.

`ServedModel.facts` passes the results to the front ends, which refuse requests for anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.workers.member import DraftMember, Member
from outrider.v1 import common_pb2 as pb
from outrider.wire.kinds import TABLES
from outrider.wire.requests.drafters import Drafter


def offered_drafters(
    targets: Iterable[Member], drafts: Iterable[DraftMember], draft_pools: Sequence[str]
) -> tuple[Drafter, ...]:
    """Return the drafters that requests may name.

    A worker that is not connected counts with its last WorkerInfo, because it may connect again. draft_pools: names of
    the draft pools that serve the model, including pools without a member now.
    """
    target_drafters = set[str]()
    runs_trees = False
    for target in targets:
        info = target.link.info
        if info is not None:
            target_drafters.update(info.drafters)
            runs_trees |= info.supports_trees
    draft_drafters = {draft.kind for draft in drafts}
    has_model = Drafter.MODEL in draft_drafters or (bool(draft_pools) and not draft_drafters)

    def is_offered(drafter: Drafter) -> bool:
        if drafter.needs_pools:
            return len(draft_pools) > 1 and runs_trees
        if not drafter.needs_draft_worker:
            return drafter in target_drafters or drafter in draft_drafters
        of_target = drafter.own
        if drafter.is_merged:
            of_target = drafter
        return has_model and (of_target is None or of_target in target_drafters)

    return tuple(filter(is_offered, Drafter))


def why_no_trees(targets: Iterable[Member], drafts: Iterable[Member]) -> str | None:
    """Return the reason why draft trees cannot be used now.

    None means that draft trees can be used, or that no worker is connected.
    """
    for role, members in (("target", targets), ("draft", drafts)):
        infos = _connected_infos(members)
        if infos and not any(info.supports_trees for info in infos):
            path = infos[0].attention_path or "none"
            why = f"runs on the path {path}"
            if path == TABLES:
                why = "is no model"
            return f"the {role} {infos[0].model_id} {why} and takes chains alone"
    return None


def why_no_beams(targets: Iterable[Member]) -> str | None:
    """Return the reason why beam search is not possible now; None means that it is.

    One target that cannot run beams is such a reason, because a search may be placed on any target of the model.
    """
    for info in _connected_infos(targets):
        if not info.supports_beams:
            return f"the target {info.model_id} runs no token trees on the path {info.attention_path}, as beams need"
    return None


def _connected_infos(members: Iterable[Member]) -> list[pb.WorkerInfo]:
    infos = list[pb.WorkerInfo]()
    for member in members:
        if member.connection is not None:
            infos.append(member.connection.info)
    return infos
