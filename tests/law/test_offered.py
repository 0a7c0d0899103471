"""Whatever a request or a target may be asked for has its law tested, and a row in docs/reports/laws.md: a new rule,
drafter, tree or parameter without a case fails here.
"""

import json
from dataclasses import fields
from typing import Any, get_args

import pytest

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs, Speculation
from outrider.engine.heads.dflash import MarkovKind
from outrider.wire.requests.params import SamplingParams
from tests.law.cases import ALL_CASES, CASES, EVERYTHING, PARAMETERS, SPARKS, TOPK, head_of
from tests.law.rows import drafts_of, rule_of
from tests.law.table import DOCUMENT, ENUMERATIONS

OWN_DRAFTERS = set(Drafter) - {Drafter.MODEL}
WISHES: dict[str, set[Any]] = {
    "enabled": {True, False},
    "num_draft_tokens": {1, 2, 3, 4, "auto"},
    "draft_logprobs": set(DraftLogprobs),
    "draft_topk": {TOPK},
    "acceptance": set(AcceptanceRule) - {AcceptanceRule.REJECTION},
    "lenience": {0.5},
    "drafter": OWN_DRAFTERS,
    "tree": {"3x2x1", "best:6x3"},
    "explain": {True, False},
}
"""Of `Speculation`: values that cases have, some with the larger samples alone, besides None, the default."""
NO_LAW = {"seed", "choice", "max_tokens", "num_logprobs", "acceptance", "lenience", "beams"}
"""Fields of SamplingParams that say nothing of the law, or are wishes above, or search and draw nothing."""
VERIFICATION = {"rejection by block", "rejection by token"}
ENUMERATED = {*VERIFICATION, "rejection in a tree", "lenient: over its bound"}


def test_the_enumerations_stand_where_make_laws_looks_for_them() -> None:
    assert [path for path in ENUMERATIONS if not path.is_file()] == []


@pytest.mark.parametrize("name", [each.name for each in fields(Speculation)])
def test_every_wish_has_its_law_tested(name: str) -> None:
    assert name in WISHES, f"say here which values of Speculation.{name} have their law tested"
    assert {getattr(case.speculation, name) for case in ALL_CASES} >= WISHES[name]


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_every_drafter_is_tested_under_every_rule(rule: AcceptanceRule) -> None:
    """Some of them with the larger samples alone."""
    asked = (None, rule) if rule is AcceptanceRule.REJECTION else (rule,)
    tested = {case.speculation.drafter for case in ALL_CASES if case.speculation.acceptance in asked}
    assert tested == {None, *OWN_DRAFTERS}


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams) if each.name not in NO_LAW])
def test_every_sampling_parameter_has_its_law_tested(name: str) -> None:
    default = getattr(SamplingParams(), name)
    assert any(getattr(case.params, name) != default for case in CASES)


@pytest.mark.parametrize("drafter", [None, *(each for each in Drafter if each in OWN_DRAFTERS)])
def test_every_drafter_is_tested_with_all_parameters_at_once_under_every_rule(drafter: Drafter | None) -> None:
    everything = SamplingParams(**EVERYTHING)
    cases = [case for case in ALL_CASES if case.params == everything]
    tested = {rule_of(case) for case in cases if case.speculation.drafter == drafter}
    unites = drafter is not None and drafter.is_merged
    assert tested >= {"rejection in a tree" if unites else "rejection by block", "coupled"}
    assert drafter or tested >= {*VERIFICATION, "rejection in a tree", "lenient, 0.5"}


def test_every_set_of_parameters_has_its_law_tested_every_day_under_some_rule() -> None:
    """At temperature 0 a law is one answer, which tests of parity compare."""
    drawn = {name for name, given in PARAMETERS.items() if given.get("temperature", 1.0) > 0}
    assert {case.name for case in CASES if case.speculation.enabled} >= drawn


@pytest.mark.parametrize("rule", ["greedy", "rejection in a tree", "coupled"])
def test_every_form_of_tree_is_tested_under_every_rule(rule: str) -> None:
    trees = [case.speculation.tree for case in ALL_CASES if case.speculation.tree and rule_of(case) == rule]
    assert {tree.startswith("best:") for tree in trees} == {True, False}


def test_every_kind_of_sequential_head_is_tested_under_every_rule() -> None:
    assert set(SPARKS.values()) == set(get_args(MarkovKind))
    for group in SPARKS:
        tested = {rule_of(case) for case in ALL_CASES if head_of(case.group) == group}
        assert tested >= {"rejection by block", "rejection in a tree", "coupled"}


def test_the_table_has_a_row_for_each() -> None:
    """Of rule, drafter and tree, and of the rounds that are enumerated."""
    document = json.loads(DOCUMENT.with_suffix(".json").read_text(encoding="utf-8"))
    rows = {(row["rule"], row["drafts"], row["k"] if "x" in str(row["k"]) else None) for row in document["chi_square"]}
    missing = {(rule_of(case), drafts_of(case), case.speculation.tree) for case in ALL_CASES} - rows
    assert not missing, f"docs/reports/laws.md has no row for {missing}; run make laws"
    assert {row["rule"] for row in document["enumerated"]} >= ENUMERATED, "run make laws"
