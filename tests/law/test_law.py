"""Invariants 1 and 3 through the real services: under `rejection` and `coupled`, answers have the target's law. Broken
rules are caught.

Target, draft and gateway are processes; answers come over gRPC. Each case is tested by chi-square on the joint law of
its first three and of its last three tokens. Seeds and sample sizes are fixed. Family-wise error: all tests of sound
services of a run together fail by chance with probability at most ALPHA (Bonferroni); every broken rule must fail below
BROKEN, in the same test with the number of answers of which `test_power.py` computes beforehand that it will.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.law.cases import (
    ADAPTS,
    ALL_CASES,
    CASE,
    CASES,
    DRAFTED_FOR,
    MEMORY_KINDS,
    NUM_ANSWERS,
    PROMPT,
    Case,
    batches,
)
from tests.law.chi_square import Fit, first_three, fit, last_three, p_value, seen_through
from tests.law.conftest import Samples, undrafted
from tests.law.expected import Law, conditionals, joint
from tests.law.rounds import lenient, output_law
from tests.law.rows import chi_square_row
from tests.law.sampling import Sample, draw
from tests.law.services import HASTY, Models, Services
from tests.law.table import CHI_SQUARE

ALPHA = 1e-3
BROKEN = 1e-6
WINDOWS = {"first": first_three, "last": last_three}
MIN_OF_A_KIND = 100 / NUM_ANSWERS
"""Of the number of answers: tokens of each kind that a case must hold, for a rule that never ran was not tested."""
MIN_FAULTS = 0.02
"""The same for proposals that are late, and for those that are refused."""
MIN_BYTES = 20_000 / NUM_ANSWERS
"""For each answer. In all of them about 200 proposals, of the everyday sample fewer."""
pytestmark = pytest.mark.timeout(900)
"""The first test of a batch has the services started and the batch drawn."""
PLAIN = CASE["full: nothing"]
LARGER = batches(ALL_CASES)


def threshold(cases: Sequence[Case]) -> float:
    """p-value below which a run over these cases fails. Of sound services it has two chi-square tests for each case,
    three of a draft's times and two of independence.
    """
    return ALPHA / (len(WINDOWS) * len(cases) + 5)


@pytest.fixture(scope="session")
def least_p(every_day: bool) -> float:
    """The run's threshold."""
    return threshold(CASES if every_day else ALL_CASES)


@lru_cache(maxsize=8)
def target_law(models: Models, case_id: str) -> Law:
    """Of a lenient case the law that it is allowed: known, and not the target's."""
    case = CASE[case_id]
    params, wish = case.params, case.speculation
    target_model, draft_model = models.pair(case.group)
    target = conditionals(target_model, PROMPT, params)
    if wish.lenience is None:
        return joint(target, params.max_tokens)
    draft = conditionals(draft_model, PROMPT, params)
    assert wish.num_draft_tokens is not None
    return output_law(target, draft, lenient(wish.lenience), wish.num_draft_tokens, params.max_tokens)


def fits(models: Models, case: Case, sample: Sample) -> dict[str, Fit]:
    """By window: the test that sound services pass and broken ones fail."""
    law = target_law(models, case.id)
    return {name: fit(sample.counts(window), seen_through(law, window)) for name, window in WINDOWS.items()}


def p_values(models: Models, case: Case, sample: Sample) -> dict[str, float]:
    """By window."""
    return {name: each.p_value for name, each in fits(models, case, sample).items()}


def ids_of(cases: Iterable[Case]) -> list[ParameterSet]:
    """To draw all of them is for `make laws` and the slow tests."""
    return [pytest.param(case.id, marks=[pytest.mark.slow] if case.slow else []) for case in cases]


@pytest.mark.parametrize("case_id", ids_of(ALL_CASES))
def test_answers_have_the_targets_law(
    models: Models, samples: Samples, least_p: float, case_id: str, record_property: Callable[[str, object], None]
) -> None:
    case = CASE[case_id]
    sample = samples.of(case)
    assert len(sample.answers) == samples.num_answers
    found = fits(models, case, sample)
    record_property(CHI_SQUARE, chi_square_row(case, samples.num_answers, found))
    assert min(each.p_value for each in found.values()) > least_p


def assert_drafts_were_kept_replaced_and_followed(case: Case, sample: Sample) -> None:
    """Else a case proves nothing of speculation."""
    kept = sum(sample.kinds[kind] for kind in ("accepted", "forced", "predicted"))
    recovered, bonus = sample.kinds["recovered"], sample.kinds["bonus"]
    if case.params.grammar:  # what it forces is verified alone where the drafter's share, learnt before, promises less
        recovered = bonus = recovered + bonus
    least = min(kept, recovered, bonus)
    assert least >= MIN_OF_A_KIND * len(sample.answers), case.id
    if case.group == "K adapts":
        assert sample.kinds["plain"] >= MIN_OF_A_KIND * len(sample.answers)


def drafts(case: Case) -> bool:
    """At temperature 0 every sample is the same answer, so that a kind may be missing."""
    return case.speculation.enabled and not case.params.greedy


@pytest.mark.parametrize("case_id", ids_of(case for case in ALL_CASES if drafts(case)))
def test_drafts_were_kept_replaced_and_followed(samples: Samples, case_id: str) -> None:
    assert_drafts_were_kept_replaced_and_followed(CASE[case_id], samples.of(CASE[case_id]))


@pytest.mark.parametrize("case_id", ids_of(case for case in ALL_CASES if not case.speculation.enabled))
def test_without_speculation_all_steps_are_plain(samples: Samples, case_id: str) -> None:
    assert set(samples.of(CASE[case_id]).kinds) == {"plain"}


def test_auto_shipped_whole_and_cut_laws(samples: Samples) -> None:
    samples.of(CASE["auto: nothing"])
    shipped = samples.delivered["auto"]
    for encoding in ("full", "topk"):
        name = f'outrider_worker_delivered_bytes_total{{encoding="{encoding}",worker="draft"}}'
        assert shipped[name] > MIN_BYTES * samples.num_answers


def test_drafters_took_turns(samples: Samples) -> None:
    """A chain of one is followed by a chain of another, and what is left of the first may be verified behind it."""
    group = ADAPTS[2]
    samples.of(CASE[f"{group}: nothing"])
    drafted = {name: value for name, value in samples.counters[group].items() if "spec_draft_tokens_total" in name}
    by_ngram = sum(value for name, value in drafted.items() if 'draft="ngram"' in name)
    assert min(by_ngram, sum(drafted.values()) - by_ngram) >= MIN_OF_A_KIND * samples.num_answers


@pytest.mark.slow
def test_a_draft_that_is_drafted_for_drew_what_was_guessed(samples: Samples) -> None:
    samples.of(CASE[f"{DRAFTED_FOR}: nothing"])
    counts = samples.delivered[DRAFTED_FOR]
    for fate in ("drawn", "dropped"):
        name = f'outrider_worker_guessed_tokens_total{{fate="{fate}",worker="draft"}}'
        assert counts[name] >= MIN_OF_A_KIND * samples.num_answers


def test_an_unreliable_draft_was_late_and_refused(samples: Samples) -> None:
    samples.of(CASE["unreliable draft: nothing"])
    counted = undrafted(samples.counters["unreliable draft"])
    for fault in ("none_parked", "refused"):
        assert counted[fault] >= MIN_FAULTS * samples.num_answers


@pytest.mark.slow
@pytest.mark.parametrize("group", MEMORY_KINDS)
def test_steps_without_drafts_came_between_others(samples: Samples, group: str) -> None:
    """So that what a layer keeps was cut after a long step, and read by a short one."""
    sample = samples.of(CASE[f"{group}: six tokens"])
    least = MIN_OF_A_KIND * samples.num_answers
    assert sample.kinds["plain"] >= least and sample.kinds["recovered"] >= least and sample.kinds["accepted"] >= least


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LARGER)))
def test_larger_samples(models: Models, samples: Samples, least_p: float, number: int) -> None:
    """Every case, with five times the answers, of other seeds: a fault half as large would show."""
    batch = LARGER[number]
    again = [replace(case, first_seed=case.first_seed + 500_000) for case in batch]
    drawn = draw(str(samples.gateway(batch).ready["grpc"]), again, 5 * NUM_ANSWERS)
    for case in batch:
        assert len(drawn[case.id].answers) == 5 * NUM_ANSWERS
        assert min(p_values(models, case, drawn[case.id]).values()) > least_p, case.id
        if drafts(case):
            assert_drafts_were_kept_replaced_and_followed(case, drawn[case.id])


def test_every_lenient_round_had_its_drafts(samples: Samples) -> None:
    """A lenient law is that of rounds with drafts; a plain step has the target's own."""
    samples.of(CASE["lenient: nothing"])
    assert undrafted(samples.counters["lenient"]) == {}


def test_lenience_is_no_more_than_was_asked_for_and_shows(models: Models, samples: Samples) -> None:
    """The promised bound holds of the law that was tested, and the target's own law does not fit the answers."""
    case = CASE["lenient: nothing"]
    exact = joint(conditionals(models.target, PROMPT, case.params), case.params.max_tokens)
    allowed = target_law(models, case.id)
    assert all(allowed[answer] <= exact[answer] / 0.5 ** len(answer) + 1e-15 for answer in exact)
    assert p_value(samples.of(case).counts(first_three), seen_through(exact, first_three)) < BROKEN


class TestIndependence:
    """Disjoint pairs of answers: what one begins with says nothing of the other."""

    def pairs(self, sample: Sample, seed_step: int, choice_step: int) -> Counter[tuple[int, ...]]:
        """First tokens of answer (seed, choice) and of the one a step further, for even numbers only."""
        counts: Counter[tuple[int, ...]] = Counter()
        for (seed, choice), answer in sample.answers.items():
            number = seed * seed_step + choice * choice_step
            if number % 2 == 0:
                other = sample.answers[seed + seed_step, choice + choice_step]
                counts[answer[0], other[0]] += 1
        return counts

    def law(self, models: Models) -> Law:
        one = seen_through(target_law(models, PLAIN.id), lambda answer: answer[:1])
        return {(*a, *b): one[a] * one[b] for a in one for b in one}

    @pytest.mark.parametrize("step", [(0, 1), (1, 0)], ids=["choices under one seed", "neighbouring seeds"])
    def test_they_are_independent(
        self, models: Models, samples: Samples, least_p: float, step: tuple[int, int]
    ) -> None:
        counts = self.pairs(samples.of(PLAIN), *step)
        assert counts.total() == samples.num_answers // 2
        assert p_value(counts, self.law(models)) > least_p

    def test_equal_choices_would_be_caught(self, models: Models, samples: Samples) -> None:
        """As if the choice were left out of the generator's counter."""
        sample = samples.of(PLAIN)
        copied = replace(sample, answers={(s, c): sample.answers[s, c - c % 2] for s, c in sample.answers})
        assert p_value(self.pairs(copied, 0, 1), self.law(models)) < BROKEN


def drawn_anew(services: Services, case: Case, num_answers: int = NUM_ANSWERS, **modules: Any) -> Sample:
    sample = draw(str(services.gateway(**modules).ready["grpc"]), [case], num_answers)[case.id]
    assert len(sample.answers) == num_answers
    return sample


def first_one(answer: tuple[int, ...]) -> tuple[int, ...]:
    return answer[:1]


class TestADraftWhoseTimesDependOnItsTokens:
    """Half of the proposals are not whole in time, for what their first token is; what has come is verified."""

    CASE = CASE["lengths: K = 2, nothing"]

    @pytest.mark.parametrize(
        ("target", "is_sound"),
        [("target_service", True), pytest.param("tests.law.faults.only_whole", False, marks=pytest.mark.slow)],
    )
    def test_the_law(
        self, models: Models, services: Services, samples: Samples, least_p: float, target: str, is_sound: bool
    ) -> None:
        modules = {"target_module": target, "draft_module": "tests.law.faults.value_timed"}
        num_answers = 2 * samples.num_answers  # with half as many, one planted fault in three is not seen
        sample = drawn_anew(services, self.CASE, num_answers, **modules, target_options=HASTY)
        law = seen_through(target_law(models, self.CASE.id), first_one)
        one = p_value(sample.counts(first_one), law)
        if is_sound:
            assert min(one, *p_values(models, self.CASE, sample).values()) > least_p
            assert_drafts_were_kept_replaced_and_followed(self.CASE, sample)
        else:
            assert one < BROKEN


BROKEN_RULES = {
    "residual_skipped": ("target", PLAIN.id),
    "truncated_after_draw": ("draft", "topk: nothing"),
    "noise_shared": ("target", PLAIN.id),
    "noise_repeated": ("target", "coupled: nothing"),
    "penalties_frozen": ("target", "full: repeated drafts"),
    "mask_not_drawn": ("draft", "full: regex"),
}
"""By module of `tests.law.faults`: the worker that it is, and the case in which it shows."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN_RULES)
def test_a_broken_rule_is_caught(models: Models, services: Services, fault: str) -> None:
    """One function of one worker is replaced; everything else is the product. Every day, that answers of another law
    are caught is shown by lenient ones.
    """
    worker, case_id = BROKEN_RULES[fault]
    case = CASE[case_id]
    sample = drawn_anew(services, case, **{f"{worker}_module": f"tests.law.faults.{fault}"})
    assert p_values(models, case, sample)["first"] < BROKEN
