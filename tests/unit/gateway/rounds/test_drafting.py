"""What the drafts of an answer are told, which kind it is given, and when one is left."""

from dataclasses import replace
from typing import Any

import pytest

from gateway.generation import GenerationRequest, SpeculationOptions
from gateway.rounds.drafting import DraftSession
from gateway.rounds.session import Session
from gateway.workers.drafts.draft_use import TRIAL, TRIAL_PERIOD
from gateway.workers.member import MAX_USES
from outrider.v1 import common_pb2 as pb
from outrider.v1 import target_pb2 as tpb
from outrider.wire.processes.health import FIRST_PAUSE_S
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import SamplingParams
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.tree_shape import TreeShape
from outrider.wire.settings.config import GatewayConfig
from tests.unit.gateway.rounds.drafts import given, mixed
from tests.unit.gateway.scripted_pool import INFO, connection_of, link_of, served_model
from tests.unit.gateway.scripted_workers import ScriptedDraft, verdict_of


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
def test_a_request_gets_a_draft_of_the_drafter_that_it_names(drafter: Drafter, name: str) -> None:
    """However many have that one already; +model leaves only the model to a draft; else a model is the best guess."""
    model = mixed()
    model.drafts[name].num_choices = 20
    assert given(model, drafter) == name


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


def test_a_draft_is_opened_once_and_then_sent_committed_tokens() -> None:
    side = Side()
    for num_tokens in (0, 3, 2):
        side.goes_on(num_tokens=num_tokens, has_drafts=True)
    (draft,) = side.drafts
    assert draft.names == ["open", "advance", "advance", "advance"]
    opened = draft.all_of("open")[0]
    assert (opened.target_address, opened.target_epoch, len(opened.committed_ids)) == ("a", 7, len(PROMPT))
    assert [(told.base_len, len(told.committed_ids)) for told in draft.all_of("advance")] == [(40, 0), (40, 3), (43, 2)]
    side.target.epoch = 8
    side.goes_on(ticket=2, num_tokens=1)
    assert draft.names[-2:] == ["open", "advance"], "the target's new life gets deliveries of its own"
    side.drafting.close()
    assert draft.names[-1] == "close" and side.model.drafts["draft-0"].num_choices == 0


def test_a_draft_that_is_behind_is_sent_all_after_its_last_token() -> None:
    side = Side()
    side.goes_on()
    side.goes_on(num_tokens=3, has_drafts=True)
    side.drafts[0].fails(pb.WORKER_ERROR_CODE_BEHIND, committed_len=41)
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


def test_a_draft_without_a_free_slot_is_not_used_before_its_next_report() -> None:
    side = Side()
    side.goes_on()
    side.drafts[0].fails(pb.WORKER_ERROR_CODE_EXHAUSTED)
    num_sent = len(side.drafts[0].sent) + 1  # the close
    for _ in range(5):
        side.goes_on(num_tokens=1)
    assert (len(side.drafts[0].sent), side.name, side.model.drafts["draft-0"].num_choices) == (num_sent, None, 0)
    side.model.drafts["draft-0"].update_load(INFO)
    side.goes_on(num_tokens=1)
    assert side.name == "draft-0" and side.drafts[0].names[-2:] == ["open", "advance"]


def test_a_draft_whose_deliveries_break_a_rule_is_left_for_another() -> None:
    side = Side(num_drafts=2)
    side.goes_on()
    assert side.goes_on(num_tokens=1, fallback=tpb.FALLBACK_REASON_REFUSED), "it must not deliver any more"
    assert side.name == "draft-1" and side.drafts[0].names[-1] == "close"
    assert not side.goes_on(num_tokens=1, has_drafts=True, drafter="model")


def test_the_only_draft_is_kept_until_it_has_failed_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side()
    side.goes_on()
    for _ in range(2):
        assert not side.goes_on(num_tokens=1, fallback=tpb.FALLBACK_REASON_REFUSED)
    assert side.goes_on(num_tokens=1, fallback=tpb.FALLBACK_REASON_REFUSED)
    assert side.name is None, f"it is left alone for {FIRST_PAUSE_S} s"


def test_an_unused_draft_is_tried_now_and_then() -> None:
    side, num_noted = Side(), TRIAL + 4
    side.goes_on()
    for _ in range(num_noted):
        side.goes_on(num_tokens=1, has_drafts=True)
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
        other.note(verdict_of(has_drafts=True, drafter="model", num_drafted=1, num_accepted=1))
    assert side.model.drafts["draft-0"].use_of((b"", True)).num_verdicts == 0, "who comes next drafts at once"


def test_a_caller_is_drafted_for_whatever_becomes_of_anothers_drafts() -> None:
    """Where steps are bounded, drafts of the one with many are left out for the other's sake: no reason to pause it."""
    side = Side()
    side.goes_on()
    for _ in range(TRIAL + 4):
        side.goes_on(num_tokens=1, has_drafts=True)
    (draft,) = side.drafts
    request = replace(side.session.request, scheduling=Scheduling(b"other"))
    other = DraftSession(side.model, Session(request, side.model.reference.tokenizer, 2))
    other.place(side.member)
    other.advance(2, side.target, side.member)
    assert draft.names == ["open", *["advance"] * TRIAL, "open", "advance"]
    member = side.model.drafts["draft-0"]
    for number in range(MAX_USES):
        member.use_of((b"%d" % number, True)).note(0, 1, is_ready=True)
    known = [member.use_of((caller, True)).num_verdicts for caller in (b"0", b"")]
    assert known == [1, 0], "it remembers so many callers, the last ones"
