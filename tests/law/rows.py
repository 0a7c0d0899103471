"""Rows of docs/reports/laws.md, as the tests record them."""

from collections.abc import Mapping
from dataclasses import fields

from outrider.client import AcceptanceRule, Drafter, DraftLogprobs
from outrider.wire.requests.params import SamplingParams
from tests.law.cases import (
    DRAFT_SERVICES,
    DRAFTED_FOR,
    ENCODER_DECODER,
    FEATURE_FAULTS,
    MEMORY_KINDS,
    TRANSLATED,
    Case,
    head_of,
)
from tests.law.chi_square import Fit
from tests.law.table import Row

RULES_OF_THEIR_OWN = ("acceptance", "lenience", "seed", "choice", "max_tokens", "ignore_eos", "num_logprobs")
"""Fields of SamplingParams that have a column, or no bearing on the law."""


def rule_of(case: Case) -> str:
    """As docs/speculation.md names it. Drafts have no say where there are none."""
    wish = case.speculation
    if not wish.enabled:
        return "plain, coupled noise" if wish.acceptance is AcceptanceRule.COUPLED else "plain"
    if case.params.greedy:
        return "greedy"
    if wish.acceptance is AcceptanceRule.COUPLED:
        return "coupled"
    if wish.lenience is not None:
        return f"lenient, {wish.lenience:g}"
    if wish.tree is not None or (wish.drafter is not None and Drafter(wish.drafter).is_merged):
        return "rejection in a tree"
    return "rejection by token" if case.group == "by token" else "rejection by block"


def drafts_of(case: Case) -> str:
    """Who drafts."""
    if not case.speculation.enabled:
        return "none"
    if case.speculation.drafter is not None:
        return str(case.speculation.drafter)
    if case.group in FEATURE_FAULTS:
        return case.group
    head = head_of(case.group)
    if head is not None:
        return head
    if case.group in ENCODER_DECODER:
        return "model, encoder-decoder"
    if case.group in TRANSLATED:
        return "model, translated"
    if case.group == DRAFTED_FOR:
        return "model, drafted by lookup"
    if case.group in DRAFT_SERVICES:
        return f"{DRAFT_SERVICES[case.group]}, a draft service"
    if case.group in MEMORY_KINDS:
        return f"model, {case.group.removeprefix('coupled, ')}, unreliable"
    return "model, unreliable" if case.group == "unreliable draft" else "model"


def parameters_of(params: SamplingParams) -> str:
    """Those that are not at their defaults."""
    plain = SamplingParams()
    told = [each.name for each in fields(params) if each.name not in RULES_OF_THEIR_OWN]
    changed = [name for name in told if getattr(params, name) != getattr(plain, name)]
    return ", ".join(f"{name} {_value(getattr(params, name))}" for name in changed) or "temperature 1.0"


def _value(value: object) -> str:
    return " ".join(str(value).split())


def chi_square_row(case: Case, num_answers: int, found: Mapping[str, Fit]) -> Row:
    """found: by window."""
    encoding = case.speculation.draft_logprobs
    return {
        "group": case.group,
        "rule": rule_of(case),
        "drafts": drafts_of(case),
        "k": (case.speculation.tree or case.speculation.num_draft_tokens) if case.speculation.enabled else 0,
        "encoding": None if encoding is None else DraftLogprobs(encoding).value,
        "parameters": parameters_of(case.params),
        "answers": num_answers,
        "windows": {
            name: {"statistic": each.statistic, "degrees": each.degrees, "p": each.p_value}
            for name, each in found.items()
        },
    }
