"""`AsyncClient`: a whole answer, what is served, and deadlines that cannot be."""

import pytest

from outrider.client import AsyncClient, FinishReason
from outrider.wire.errors import ConfigError
from tests.unit.outrider.client.scripted_gateway import TEXT, ScriptedGateway


async def test_generate_returns_the_whole_answer_typed(gateway: ScriptedGateway) -> None:
    async with AsyncClient(gateway.address) as client:
        completion = await client.generate("hello")
    assert completion.text == TEXT
    assert completion.request_id == "r-1"
    (choice,) = completion.choices
    assert [token.id for token in choice.tokens] == [1, 2, 3, 4, 5, 6, 7]
    assert [token.kind.value for token in choice.tokens] == [
        *("accepted", "accepted", "recovered"),
        *("accepted", "accepted", "bonus"),
        "plain",
    ]
    assert choice.finish_reason is FinishReason.STOP
    assert choice.stop_reason == "END"
    assert choice.usage.acceptance_rate == 4 / 5
    assert choice.usage.mean_accepted_length == 1 + 4 / 2
    assert choice.usage.tokens_per_target_pass == 7 / 3
    assert choice.usage.num_wasted_tokens == 3
    assert choice.usage.seed == 2**63 + 5
    assert choice.usage.num_cached_prompt_tokens == 3


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_deadline_that_cannot_be_met_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=f"^timeout_s is {timeout_s}, must be greater than 0, or None") as refused:
        AsyncClient(timeout_s=timeout_s)
    assert refused.value.param == "timeout_s"
