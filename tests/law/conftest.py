"""Services and samples shared by the tests of the law. Each sample is drawn at its first use."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest

from outrider.wire.telemetry.metrics import PLAIN_REASONS
from tests.law.cases import (
    ADAPTS,
    ALL_CASES,
    CASES,
    DRAFT_SERVICES,
    DRAFTED_FOR,
    ENCODER_DECODER,
    FEATURE_FAULTS,
    MEMORY_KINDS,
    NUM_ANSWERS,
    NUM_EVERYDAY,
    ONE_MODEL_TWICE,
    TRANSLATED,
    TWO_DRAFTS,
    Case,
    batches,
    head_of,
)
from tests.law.sampling import Sample, draw
from tests.law.services import ENDLESSLY_PATIENT, HASTY, OPTIONS, PATIENT, Models, Services, make_models
from tests.stack import Process, read_metrics


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return make_models(tmp_path_factory.mktemp("law_models"))


@pytest.fixture(scope="package")
def services(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    started = Services(models, tmp_path_factory.mktemp("law_logs"))
    try:
        yield started
    finally:
        started.stop()


UNDRAFTED = ("none_parked", "refused", "no_draft")
"""Reasons for a plain step where drafts were asked for and there was room for them."""


def undrafted(counters: Mapping[str, float]) -> dict[str, float]:
    """Return steps that were plain for want of a proposal, by reason, of a gateway's counters."""
    steps = {name: value for name, value in counters.items() if name.startswith("spec_plain_steps_total")}
    assert steps and set(UNDRAFTED) < set(PLAIN_REASONS)
    by_reason = {
        reason: sum(value for name, value in steps.items() if f'reason="{reason}"' in name) for reason in UNDRAFTED
    }
    return {reason: num_steps for reason, num_steps in by_reason.items() if num_steps}


class Samples:
    """What the services answered."""

    def __init__(self, services: Services, num_answers: int, asked: Set[str]) -> None:
        """num_answers: of each case. asked: ids of the cases that this run tests."""
        self.num_answers = num_answers
        self._services = services
        self._asked = asked
        self._batches = [*batches(CASES), *batches([case for case in ALL_CASES if case.slow])]
        assert sorted(case.id for batch in self._batches for case in batch) == sorted(case.id for case in ALL_CASES)
        self._samples: dict[str, Sample] = {}
        self.counters: dict[str, dict[str, float]] = {}
        """By group: the gateway's counters, increments while the group's batch was drawn."""
        self.delivered: dict[str, dict[str, float]] = {}
        """By group: the draft's counters after it."""

    def of(self, case: Case) -> Sample:
        """Of one of few cases that are tested, by `-k` or by name, the rest of its batch is not drawn."""
        if case.id not in self._samples:
            batch = next(batch for batch in self._batches if case in batch)
            self._draw([each for each in batch if each is case or each.id in self._asked - self._samples.keys()])
        return self._samples[case.id]

    def gateway(self, batch: list[Case]) -> Process:
        """The services that the batch is meant for."""
        if batch[0].group == "unreliable draft":
            return self._services.gateway(draft_module="tests.law.faults.unreliable", target_options=HASTY)
        if batch[0].group in MEMORY_KINDS:
            options: dict[str, Any] = {"draft_module": "tests.law.faults.unreliable", "target_options": HASTY}
            return self._services.gateway(pair=self._services.models.pair(batch[0].group), **options)
        if batch[0].group in ADAPTS:
            options = (
                *OPTIONS,
                "@gateway.workers.drafts.draft_use.TRIAL_PERIOD=16",
            )  # drafts that add little never pause
            module = "turns" if batch[0].group == ADAPTS[2] else "adaptive"
            return self._services.gateway(target_module=f"tests.law.faults.{module}", options=options)
        if batch[0].group == DRAFTED_FOR:
            by = ("--drafted-by", "lookup", "@outrider.drafting.lookup.MIN_N=1")
            modules = ("tests.law.faults.adaptive", "tests.law.faults.guessing")
            options = (*OPTIONS, "@gateway.workers.drafts.draft_use.TRIAL_PERIOD=16")
            return self._services.gateway(*modules, options=options, draft_options=by)
        if batch[0].group == "by token":
            return self._services.gateway(target_module="tests.law.faults.by_token")
        if batch[0].group == "lenient":  # every round has drafts: the draft is not full of another gateway's answers
            return self._services.gateway(target_options=ENDLESSLY_PATIENT, draft_options=("--max-slots", "65"))
        if batch[0].group in ENCODER_DECODER:
            return self._services.gateway(pair=self._services.models.across)
        if batch[0].group in TRANSLATED:
            return self._services.gateway(draft_options=("--model", self._services.models.other))
        if batch[0].group in (*TWO_DRAFTS, ONE_MODEL_TWICE):
            models = self._services.models
            return self._services.gateway(beside=models.second if batch[0].group in TWO_DRAFTS else models.draft)
        if batch[0].group in DRAFT_SERVICES:
            return self._services.gateway(draft_options=self._services.models.draft_of(DRAFT_SERVICES[batch[0].group]))
        if batch[0].group in FEATURE_FAULTS:
            fault = FEATURE_FAULTS[batch[0].group]
            of_head = self._services.models.head("eagle3")
            return self._services.gateway(draft_module=f"tests.law.faults.{fault}_rows", draft_options=of_head)
        head = head_of(batch[0].group)
        if head == "heads":
            heads = ("--heads", f"{self._services.models.heads}/medusa", "--trust-draft-config")
            return self._services.gateway(target_options=(*PATIENT, *heads))
        return self._services.gateway(draft_options=() if head is None else self._services.models.head(head))

    def _draw(self, batch: list[Case]) -> None:
        gateway = self.gateway(batch)
        url = f"http://{gateway.ready['http']}/metrics"
        before = read_metrics(url)
        self._samples |= draw(str(gateway.ready["grpc"]), batch, self.num_answers)
        increments = {name: value - before.get(name, 0.0) for name, value in read_metrics(url).items()}
        self.counters |= {case.group: increments for case in batch}
        metrics = self._services.draft_of[id(gateway)].ready["metrics_address"]
        self.delivered |= {case.group: read_metrics(f"http://{metrics}/metrics") for case in batch}


@pytest.fixture(scope="package")
def samples(services: Services, every_day: bool, request: pytest.FixtureRequest) -> Samples:
    tested = (item.callspec.params.get("case_id") for item in request.session.items if hasattr(item, "callspec"))
    return Samples(services, NUM_EVERYDAY if every_day else NUM_ANSWERS, {str(case_id) for case_id in tested})
