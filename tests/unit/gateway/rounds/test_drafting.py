"""What the drafts of an answer are told, which it is given, and when one is left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds.draft_assignment import DraftAssignment
from gateway.rounds.drafting import DraftSession
from gateway.rounds.session import Session
from gateway.workers.drafts.draft_use import TRIAL, TRIAL_PERIOD
from gateway.workers.member import MAX_CALLERS, DraftMember, PairingResult, State, TargetMember
from gateway.workers.served import ServedModel
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.processes.health import FIRST_PAUSE_S
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model
from tests.unit.gateway.scripted_workers import ScriptedDraft, verdict_of


def draft_link(*drafters: Drafter, **changes: Any) -> Any:
    info = pb.WorkerInfo()
    info.CopyFrom(INFO)
    info.drafters.extend(drafters)
    info.model_id = drafters[0] if drafters else "small"
    link = link_of(connection_of(), info)
    link.connection.info = info
    return link


def mixed(**settings: Any) -> ServedModel:
    drafts = {
        "guesses": draft_link(Drafter.NGRAM),
        "pairs": draft_link(Drafter.BIGRAM),
        "small": draft_link(),
    }
    config = GatewayConfig(target="127.0.0.1:9", **settings)
    return served_model({"a": link_of(connection_of())}, drafts, gateway=config)


def given(model: ServedModel, drafter: Drafter, *, searches: bool = False) -> str | None:
    draft = model.choose_draft(model.targets["a"], drafter=drafter, searches=searches)
    return None if draft is None else draft.name


def lost(model: ServedModel, *names: str) -> None:
    for name in names:
        link: Any = model.drafts[name].link
        link.connection = None


@pytest.mark.parametrize(
    ("drafter", "name"),
    [
        (Drafter.MODEL, "small"),
        (Drafter.NGRAM, "guesses"),
        (Drafter.BIGRAM, "pairs"),
        (Drafter.NGRAM_MODEL, "small"),
        (Drafter.LOOKUP, "small"),
    ],
)
def test_a_request_is_given_a_draft_of_the_kind_that_it_asks_for(drafter: Drafter, name: str) -> None:
    """However many have that one already; +model leaves only the model to a draft; else a model is the best guess."""
    model = mixed()
    model.drafts[name].num_requests = 20
    assert given(model, drafter) == name


def test_a_beam_search_is_given_a_draft_that_can_search_as_soon_as_there_is_one() -> None:
    """A head cannot, and is asked as little as the model is."""
    model = mixed()
    target, small, head = model.targets["a"], model.drafts["small"], model.drafts["pairs"]
    assert small.link.info is not None and head.link.info is not None
    head.link.info.ClearField("drafters")
    small.link.info.beams = True
    small.num_requests = 20
    assert (given(model, Drafter.MODEL), given(model, Drafter.MODEL, searches=True)) == ("pairs", "small")
    connection, small_link = small.connection, small.link
    lost(model, "small")
    seat = DraftAssignment(model, searches=True)
    assert seat.take(target) and seat.member is head
    small_link.connection = connection
    assert not seat.may_stay(target)


def test_the_request_comes_before_the_gateways() -> None:
    model = mixed(drafter="bigram")

    def request(drafter: Drafter | None) -> GenerationRequest:
        asked = SpeculationOptions(drafter=drafter)
        return GenerationRequest("r", "m", (1,), SamplingParams(max_tokens=1), speculation=asked)

    assert [model.drafter_for(request(each)) for each in (None, Drafter.NGRAM)] == [Drafter.BIGRAM, Drafter.NGRAM]


def test_by_default_all_that_is_there_drafts() -> None:
    def asked(model: Any, **options: Any) -> Drafter:
        speculation = SpeculationOptions(**options)
        return model.drafter_for(
            GenerationRequest("r", "m", (1,), SamplingParams(max_tokens=1), speculation=speculation)
        )  # type: ignore[no-any-return]

    model = mixed()
    model.draft_pools = ("drafts",)
    assert asked(model) is asked(model, num_draft_tokens="auto") is Drafter.AUTO
    assert asked(model, num_draft_tokens=4) is asked(model, tree=TreeShape.parse("2x2")) is Drafter.MODEL
    assert asked(model, num_draft_tokens=4, drafter=Drafter.AUTO) is Drafter.AUTO
    model.draft_pools = ()
    assert asked(model, num_draft_tokens=4) is Drafter.AUTO


def paired(draft: DraftMember, target: TargetMember, why: str | None) -> None:
    assert draft.connection is not None and target.connection is not None
    draft.pairings[target.name] = PairingResult(draft.connection, target.connection, why)


def test_a_head_serves_the_targets_that_it_is_paired_with_as_long_as_both_live() -> None:
    link = draft_link()
    link.info.needs_features = True
    model = served_model({name: link_of(connection_of()) for name in "ab"}, {"head": link})
    head, (a, b) = model.drafts["head"], model.targets.values()
    assert head.state is State.LOST and not DraftAssignment(model, Drafter.MODEL).take(a), "nothing is known of it"

    paired(head, a, None)
    paired(head, b, "it is another target's head")
    assert head.state is State.SERVING, "of one target"
    answer = DraftAssignment(model, Drafter.MODEL)
    assert answer.take(a) and answer.may_stay(a)
    assert not answer.may_stay(b), "an answer that moves there goes on without it"
    assert not DraftAssignment(model, Drafter.MODEL).take(b)

    a_link: Any = a.link
    a_link.connection = connection_of()  # another life
    assert head.is_pairing_due(a) and not answer.may_stay(a)
    assert head.state is State.SERVING, "what its last known targets said still stands"
    paired(head, a, "it reads the wrong states")
    assert head.state is State.REFUSED


@pytest.mark.parametrize("change", [{"tokenizer_fingerprint": "other"}, {"vocab_size": 160}])
def test_a_draft_of_other_tokens_serves_the_targets_whose_own_it_has_learnt(change: dict[str, Any]) -> None:
    link = draft_link()
    link.info.MergeFrom(pb.WorkerInfo(**change))
    model = served_model({name: link_of(connection_of()) for name in "ab"}, {"draft": link})
    draft, (a, b) = model.drafts["draft"], model.targets.values()
    assert not draft.is_pairing_due(a) and not DraftAssignment(model, Drafter.MODEL).take(a), "it does not translate"

    link.info.translates = True
    assert draft.is_pairing_due(a) and not DraftAssignment(model, Drafter.MODEL).take(a), "it does not know them yet"
    paired(draft, a, None)
    assert DraftAssignment(model, Drafter.MODEL).take(a) and not DraftAssignment(model, Drafter.MODEL).take(b)
    paired(draft, b, "they have nothing in common")
    assert draft.state is State.SERVING and not draft.is_pairing_due(b)

    b_link: Any = b.link
    b_link.info = pb.WorkerInfo()
    b_link.info.CopyFrom(link.info)
    assert DraftAssignment(model, Drafter.MODEL).take(b), "which has the draft's own tokens, by now"


PROMPT = tuple(range(40))


class Side:
    """The draft's side of an answer at a target, with so many drafts."""

    def __init__(self, num_drafts: int = 1, max_tokens: int = 2000, wish: Any = None, **settings: Any) -> None:
        self.drafts = [ScriptedDraft() for _ in range(num_drafts)]
        links = {f"draft-{index}": link_of(draft) for index, draft in enumerate(self.drafts)}
        config = GatewayConfig(target="127.0.0.1:9", **settings)
        self.target = connection_of()
        self.model = served_model({"a": link_of(self.target)}, links, gateway=config)
        self.member = self.model.targets["a"]
        params = SamplingParams(max_tokens=max_tokens)
        request = GenerationRequest("r", "m", PROMPT, params, speculation=wish or SpeculationOptions())
        self.session = Session(request, self.model.reference.tokenizer, 1)
        self.drafting = DraftSession(self.model, self.session)

    def goes_on(self, ticket: int = 1, num_tokens: int = 0, **verdict: Any) -> bool:
        """Commit so many tokens by a verdict, and tell the draft. Returns whether the one before is not trusted."""
        if num_tokens:
            self.session.committed += [1] * num_tokens
            self.drafting.note(verdict_of(**verdict))
        distrusts = self.drafting.place(self.member)
        self.drafting.advance(ticket, self.target, self.member)
        return distrusts

    @property
    def name(self) -> str | None:
        return None if self.drafting.member is None else self.drafting.member.name


def test_a_draft_is_opened_once_and_told_what_was_committed_since() -> None:
    side = Side()
    for num_tokens in (0, 3, 2):
        side.goes_on(num_tokens=num_tokens, hit=True)
    (draft,) = side.drafts
    assert draft.names == ["open", "advance", "advance", "advance"]
    opened = draft.all_of("open")[0]
    assert (opened.deliver_to, opened.target_epoch, len(opened.committed_ids)) == ("a", 7, len(PROMPT))
    assert [(told.base_len, len(told.committed_ids)) for told in draft.all_of("advance")] == [(40, 0), (40, 3), (43, 2)]
    side.target.epoch = 8
    side.goes_on(ticket=2, num_tokens=1)
    assert draft.names[-2:] == ["open", "advance"], "the target's new life gets deliveries of its own"
    side.drafting.close()
    assert draft.names[-1] == "close" and side.model.drafts["draft-0"].num_requests == 0


def test_a_draft_that_is_behind_is_told_again_from_what_it_knows() -> None:
    side = Side()
    side.goes_on()
    side.goes_on(num_tokens=3, hit=True)
    side.drafts[0].fails(pb.WORKER_ERROR_CODE_BEHIND, known_len=41)
    side.goes_on(num_tokens=1)
    told = side.drafts[0].all_of("advance")[-1]
    assert (told.base_len, len(told.committed_ids)) == (41, 3)


@pytest.mark.parametrize(
    "code", [pb.WORKER_ERROR_CODE_UNKNOWN_SLOT, pb.WORKER_ERROR_CODE_STALE_EPOCH, pb.WORKER_ERROR_CODE_INTERNAL]
)
def test_a_slot_that_is_gone_is_opened_again(code: pb.WorkerErrorCode) -> None:
    side = Side()
    side.goes_on()
    side.drafts[0].fails(code)
    side.goes_on(num_tokens=1)
    assert side.drafts[0].names == ["open", "advance", "open", "advance"]
    assert side.drafts[0].num_dropped == (code == pb.WORKER_ERROR_CODE_STALE_EPOCH)


def test_a_draft_without_a_free_slot_is_not_asked_again_before_it_has_said_how_it_is() -> None:
    side = Side()
    side.goes_on()
    side.drafts[0].fails(pb.WORKER_ERROR_CODE_EXHAUSTED)
    num_sent = len(side.drafts[0].sent) + 1  # the close
    for _ in range(5):
        side.goes_on(num_tokens=1)
    assert (len(side.drafts[0].sent), side.name, side.model.drafts["draft-0"].num_requests) == (num_sent, None, 0)
    side.model.drafts["draft-0"].heard(INFO)
    side.goes_on(num_tokens=1)
    assert side.name == "draft-0" and side.drafts[0].names[-2:] == ["open", "advance"]


def test_a_draft_whose_deliveries_break_a_rule_is_left_for_another() -> None:
    side = Side(num_drafts=2)
    side.goes_on()
    assert side.goes_on(num_tokens=1, fallback=tpb.FALLBACK_REASON_REFUSED), "it must not deliver any more"
    assert side.name == "draft-1" and side.drafts[0].names[-1] == "close"
    assert not side.goes_on(num_tokens=1, hit=True, drafter="model")


def test_the_only_draft_is_kept_until_it_has_failed_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.goes_on()
    for _ in range(2):
        assert not side.goes_on(num_tokens=1, fallback=tpb.FALLBACK_REASON_REFUSED)
    assert side.goes_on(num_tokens=1, fallback=tpb.FALLBACK_REASON_REFUSED)
    assert side.name is None, f"it is left alone for {FIRST_PAUSE_S} s"


def test_an_unused_draft_is_told_now_and_then() -> None:
    side, num_noted = Side(), TRIAL + 4
    side.goes_on()
    for _ in range(num_noted):
        side.goes_on(num_tokens=1, hit=True)
    (draft,) = side.drafts
    assert draft.names == ["open", *["advance"] * TRIAL]
    other = DraftSession(side.model, Session(side.session.request, side.model.reference.tokenizer, 2))
    for _ in range(TRIAL_PERIOD - num_noted):
        other.place(side.member)
        other.advance(2, side.target, side.member)
        assert len(draft.names) == TRIAL + 1, "nothing was tried"
        other.note(verdict_of())
    other.advance(2, side.target, side.member)
    assert draft.names[-2:] == ["open", "advance"]
    for _ in range(TRIAL):
        other.note(verdict_of(hit=True, drafter="model", num_drafted=1, num_accepted=1))
    assert side.model.drafts["draft-0"].use_of((b"", True)).num_verdicts == 0, "who comes next drafts at once"


def test_a_caller_is_drafted_for_whatever_becomes_of_anothers_drafts() -> None:
    """Where steps are bounded, drafts of the one with many are left out for the other's sake: no reason to pause it."""
    side = Side()
    side.goes_on()
    for _ in range(TRIAL + 4):
        side.goes_on(num_tokens=1, hit=True)
    (draft,) = side.drafts
    request = replace(side.session.request, scheduling=Scheduling(b"other"))
    other = DraftSession(side.model, Session(request, side.model.reference.tokenizer, 2))
    other.place(side.member)
    other.advance(2, side.target, side.member)
    assert draft.names == ["open", *["advance"] * TRIAL, "open", "advance"]
    member = side.model.drafts["draft-0"]
    for number in range(MAX_CALLERS):
        member.use_of((b"%d" % number, True)).note(0, 1, is_ready=True)
    known = [member.use_of((caller, True)).num_verdicts for caller in (b"0", b"")]
    assert known == [1, 0], "it remembers so many callers, the last ones"


def drafted_for(num_drafts: int) -> tuple[ServedModel, DraftAssignment]:
    """A request that has the first of so many drafts."""
    drafts = {f"draft-{index}": link_of(connection_of()) for index in range(num_drafts)}
    model = served_model({"a": link_of(connection_of())}, drafts)
    seat = DraftAssignment(model)
    assert seat.take(model.targets["a"])
    assert seat.member is model.drafts["draft-0"]
    return model, seat


def moved(model: ServedModel, seat: DraftAssignment) -> bool:
    if seat.may_stay(model.targets["a"]):
        return False
    seat.leave()
    return True


async def test_a_draft_that_lies_to_several_is_left_alone_by_all() -> None:
    model, seat = drafted_for(1)
    others = [DraftAssignment(model) for _ in range(2)]
    for other in others:
        assert other.take(model.targets["a"])
    for each in (seat, *others):
        each.refused()
    assert model.drafts["draft-0"].health.is_down
    assert all(moved(model, each) for each in (seat, *others))
    assert not DraftAssignment(model).take(model.targets["a"]), "steps are plain"
