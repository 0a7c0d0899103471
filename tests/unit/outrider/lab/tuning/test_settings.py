"""Settings that are compared, as the gateway is told them."""

from outrider.lab.tuning.settings import chain, compared_drafters, environment, gateway_settings


def test_a_setting_is_sent_to_the_gateway_in_full() -> None:
    assert list(compared_drafters(4, 12, 1.0, [])) == ["plain", "K = auto", "K = 4"]
    sampled = {"num_draft_tokens": "4", "drafter": "model", "acceptance": "rejection", "draft_logprobs": "auto"}
    assert gateway_settings(chain(4, 1.0)) == sampled
    assert gateway_settings(chain(0, 1.0)) == {"num_draft_tokens": "0"}
    greedy = {"num_draft_tokens": "33", "max_draft_tokens": "33", "drafter": "model"}
    assert gateway_settings(chain(33, 0.0)) == greedy
    assert environment({"num_draft_tokens": "4", "acceptance": "coupled"}) == (
        "OUTRIDER_GATEWAY_NUM_DRAFT_TOKENS=4 OUTRIDER_GATEWAY_ACCEPTANCE=coupled"
    )
