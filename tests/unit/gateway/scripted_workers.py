"""Connections to workers that remember what they were sent and say what the test lets them say."""

import asyncio
from typing import Any

from outrider.v1 import common_pb2 as pb
from outrider.v1 import draft_pb2 as dpb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.errors import WorkerLost
from outrider.wire.kinds import TokenKind
from outrider.wire.transport.streams import Replies
from tests.unit.gateway.scripted_pool import INFO

OPENED = tpb.TargetReply(open=pb.OpenReply(committed_len=1))


DELIVERED = ("model", "model&model")


def verdict_of(num_drafts: int = 1, has_drafts: bool | None = None, num_wasted: int = 0, **facts: Any) -> tpb.Verdict:
    """A verdict of a lease with so many drafts: what was drafted came of the first, or of the target's own drafter."""
    verdict = tpb.Verdict(**facts)
    if verdict.outcomes:
        return verdict
    is_refused = verdict.fallback == tpb.FALLBACK_REASON_REFUSED
    drafts = [tpb.DraftOutcome(has_drafts=has_drafts, num_wasted=num_wasted, is_refused=is_refused)]
    drafts += [tpb.DraftOutcome() for _ in range(num_drafts - 1)]
    own = tpb.DraftOutcome()
    drafter = drafts[0] if verdict.drafter in DELIVERED else own
    drafter.num_drafted, drafter.num_accepted = verdict.num_drafted, verdict.num_accepted
    drafter.is_verified = verdict.num_drafted > 0 or drafter is drafts[0]
    verdict.outcomes.extend([*drafts, own])
    return verdict


def error(code: pb.WorkerErrorCode, committed_len: int = 0) -> pb.WorkerError:
    return pb.WorkerError(code=code, message="scripted", committed_len=committed_len)


class ScriptedConnection:
    """What both have: items by name in `sent`, and the subscriptions in order."""

    def __init__(self, info: pb.WorkerInfo = INFO) -> None:
        self.is_alive, self.epoch, self.info, self.is_hung = True, 7, info, False
        self.sent: list[tuple[str, Any]] = []
        self.subscriptions: list[Replies[Any]] = []
        self.num_dropped = 0

    def send(self, request: Any, *, owes_step: bool = False) -> None:
        name = request.WhichOneof("item")
        self.sent.append((name, getattr(request, name)))

    def subscribe(self, request: Any, *, is_expecting: bool = True) -> Replies[Any]:
        self.send(request)
        replies: Replies[Any] = Replies(is_expecting, lambda: None)
        self.subscriptions.append(replies)
        return replies

    def drop(self) -> None:
        self.num_dropped += 1

    def lose(self) -> None:
        """End the stream."""
        self.is_alive = False
        for replies in self.subscriptions:
            replies.fail(WorkerLost("lost the worker: scripted"))

    def all_of(self, name: str) -> list[Any]:
        """Return the items of this name."""
        return [item for each, item in self.sent if each == name]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.sent]


class ScriptedTarget(ScriptedConnection):
    """Opens as `open_reply` says. Verdicts are the test's to give."""

    def __init__(self, open_reply: tpb.TargetReply = OPENED, info: pb.WorkerInfo = INFO) -> None:
        super().__init__(info)
        self.open_reply = open_reply

    def call(self, request: tpb.TargetRequest) -> asyncio.Future[tpb.TargetReply]:
        self.send(request)
        future = asyncio.get_running_loop().create_future()
        future.set_result(self.open_reply)
        return future

    @property
    def lease(self) -> Any:
        """Return the last Verify."""
        return self.all_of("verify")[-1]

    def says(self, committed_len: int, ids: list[int], kinds: str, **facts: Any) -> None:
        """Give a verdict under the last lease. kinds: a letter for each token: a, r, b or p, or x for none."""
        names = {kind.name[0].lower(): kind.value for kind in TokenKind if kind.counted is kind}
        names["x"] = 99
        facts |= {"committed_len": committed_len, "token_ids": ids, "kinds": [names[letter] for letter in kinds]}
        verdict = verdict_of(len(self.lease.tickets), **facts)
        self.subscriptions[-1].put(tpb.TargetReply(verdict=verdict))

    def fails(self, code: pb.WorkerErrorCode, committed_len: int = 0) -> None:
        self.subscriptions[-1].put(tpb.TargetReply(error=error(code, committed_len)))


class ScriptedDraft(ScriptedConnection):
    def fails(self, code: pb.WorkerErrorCode, committed_len: int = 0) -> None:
        self.subscriptions[-1].put(dpb.DraftReply(error=error(code, committed_len)))
