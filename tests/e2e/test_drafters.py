"""Drafts that the target makes itself, through gateways with and without a draft worker: the text is the target's, and
what was drafted is counted under the drafter's name.
"""

import pytest

from outrider.client import Client, Drafter, Speculation, Usage
from outrider.wire.models.model_id import short_name
from tests.e2e.streams import PROMPT
from tests.samples import total
from tests.stack import Stack

REPETITIVE = "\n".join(f'{{"name": "item-{i}", "size": {i}, "tags": ["a", "b"]}}' for i in range(12)) + "\n"
MAX_TOKENS = 48
OWN = (Drafter.NGRAM, Drafter.LOOKUP, Drafter.LOOKAHEAD)
BOTH = (Drafter.NGRAM_MODEL, Drafter.LOOKUP_MODEL, Drafter.LOOKAHEAD_MODEL)
UNIONS = (Drafter.NGRAM_AND_MODEL, Drafter.LOOKUP_AND_MODEL)


def said(address: str, prompt: str, wish: Speculation | bool) -> tuple[list[int], Usage]:
    with Client(address) as client:
        answer = client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, speculation=wish)
    return [token.id for token in answer.choices[0].tokens], answer.usage


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, list[int]]:
    """Of the target alone."""
    return {prompt: said(stack.grpc, prompt, False)[0] for prompt in (PROMPT, REPETITIVE)}


@pytest.mark.parametrize("drafter", [*OWN, *BOTH, *UNIONS])
def test_every_drafter_leaves_the_text_the_targets(
    stack: Stack, expected: dict[str, list[int]], drafter: Drafter
) -> None:
    own = {"target": short_name(stack.target_info().model_id), "draft": drafter.own or drafter}
    model = {**own, "draft": short_name(stack.draft_info().model_id)}
    before, drafted, accepted, rounds = stack.metrics(), 0, 0, 0
    for prompt, ids in expected.items():
        found, usage = said(stack.grpc, prompt, Speculation(drafter=drafter, num_draft_tokens=4))
        assert found == ids
        assert usage.num_rounds > 0 and 0 < usage.num_accepted_tokens <= usage.num_draft_tokens
        drafted += usage.num_draft_tokens
        accepted += usage.num_accepted_tokens
        rounds += usage.num_rounds
    after = stack.metrics()

    def counted(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    pairs = (own, model) if drafter in (*BOTH, *UNIONS) else (own,)
    assert counted("spec_draft_tokens_total", **own) > 0
    assert sum(counted("spec_draft_tokens_total", **pair) for pair in pairs) == drafted
    assert sum(counted("spec_accepted_tokens_total", **pair) for pair in pairs) == accepted
    assert sum(counted("spec_rounds_total", **pair) for pair in pairs) == rounds
    if drafter in (*BOTH, *UNIONS):
        assert counted("spec_draft_tokens_total", **model) > 0, "the draft worker had its share"
