"""How many prompt tokens go beside decodes, by what steps cost on a machine."""

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.worker.step_cost import MIN_PREFILL_TOKENS, StepCost


@settings(max_examples=60)
@given(
    fixed_ms=st.floats(0.1, 50),
    decode_token_ms=st.floats(0.01, 5),
    prompt_token_ms=st.floats(0.01, 5),
    num_decode=st.integers(1, 300),
)
def test_a_step_with_prefill_is_at_most_half_as_long_again(
    fixed_ms: float, decode_token_ms: float, prompt_token_ms: float, num_decode: int
) -> None:
    """On a machine whose steps cost so much, after ten steps of each kind; the least piece goes in any case."""

    def seconds(num_decode: int, num_prompt: int) -> float:
        return (fixed_ms + num_decode * decode_token_ms + num_prompt * prompt_token_ms) / 1e3

    cost = StepCost()
    cost.note(0, 256, seconds(0, 256))
    for _ in range(10):
        cost.note(num_decode, 0, seconds(num_decode, 0))
    for _ in range(40):
        chosen = cost.prefill_tokens(num_decode, 4096)
        cost.note(num_decode, chosen, seconds(num_decode, chosen))
    chosen = cost.prefill_tokens(num_decode, 4096)
    assert chosen >= MIN_PREFILL_TOKENS
    if chosen > MIN_PREFILL_TOKENS:
        assert seconds(num_decode, chosen) <= 1.51 * seconds(num_decode, 0)
    if MIN_PREFILL_TOKENS < chosen < 4096:  # and the allowance is used
        assert seconds(num_decode, chosen + 2) >= 1.45 * seconds(num_decode, 0)
