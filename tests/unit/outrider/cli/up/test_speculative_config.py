"""vLLM's speculative config: what of it becomes which flag, and what to type in place of the rest."""

import pytest

from outrider.cli.up.speculative_config import draft_flags
from outrider.wire.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({"model": "D"}, "--draft D"),
        ({"model": "ngram", "num_speculative_tokens": 32}, "--no-draft --drafter ngram -K 32"),
        (
            {"method": "ngram_gpu", "num_speculative_tokens": 33},
            "--no-draft --drafter ngram -K 33 --max-draft-tokens 33",
        ),
        ({"method": "deepseek_mtp"}, "--mtp"),
        ({"method": "mtp", "model": "D"}, "--draft D"),
        (
            {"model": "D", "quantization": "int8", "max_model_len": 512},
            "--draft D --draft-quantization int8 --draft-context-limit 512",
        ),
        ({"model": "D", "enforce_eager": False, "draft_tensor_parallel_size": 1}, "--draft D"),
    ],
)
def test_what_is_taken_becomes_flags_without_a_note(config: dict[str, object], flags: str) -> None:
    assert draft_flags(config) == (flags.split(), [])


def test_a_key_without_effect_is_noted() -> None:
    flags, notes = draft_flags({"method": "ngram", "prompt_lookup_max": 5})
    assert flags == ["--no-draft", "--drafter", "ngram"]
    assert notes == [
        "prompt_lookup_max of --speculative-config: n-grams of 2 to 4 tokens are counted, the longest that was seen "
        "before decides"
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "eagle"}, "has no model for method 'eagle'; name it"),
        ({}, "has no model for method None"),
        ({"method": "mlp_speculator", "model": "D"}, "method 'mlp_speculator' .* is not served; instead: train a head"),
        ({"method": "magic", "model": "D"}, "method of --speculative-config is 'magic'; known: ngram, "),
        ({"model": 5}, "model of --speculative-config is 5, must be a text"),
        ({"model": "D", "enforce_eager": True}, "enforce_eager .* is True, not taken here; instead: leave it out"),
        ({"model": "D", "num_speculative_token": 5}, r"did you mean num_speculative_tokens\?"),
        ({"model": "D", "zzz": 5}, "'zzz' is no key of .*; taken: model, method, num_speculative_tokens, "),
        *(
            ({"model": "D", "num_speculative_tokens": n}, f"is {n!r}, must be a number from 1")
            for n in (0, 65, True, "5")
        ),
    ],
)
def test_what_is_not_taken_is_named_with_what_to_type(config: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        draft_flags(config)
