"""Settings: command line over environment over defaults, everything unknown or impossible refused by name."""

from typing import Any

import pytest

from outrider.wire.errors import ConfigError
from outrider.wire.settings.config import DraftConfig, GatewayConfig, TargetConfig
from tests.unit.outrider.wire.settings.loading import ALL, NEEDED, env, load


@pytest.mark.parametrize("cls", ALL)
def test_defaults_are_valid_and_documented(cls: Any) -> None:
    config = load(cls, [], env(cls))
    assert config == cls(**NEEDED[cls])
    for name, field in cls.model_fields.items():
        assert field.description or name == "log_level", f"{cls.__name__}.{name} has no docstring"


def test_command_line_over_environment_over_default() -> None:
    environ = env(TargetConfig, max_slots=7, port=4000)
    config = load(TargetConfig, ["--port", "5000", "--drain-timeout-s", "2.5", "--model", "other"], environ)
    assert (config.model, config.port, config.max_slots, config.drain_timeout_s) == ("other", 5000, 7, 2.5)
    assert config.max_prefill_tokens == TargetConfig(model="m").max_prefill_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "bigram"}, "drafter is 'bigram' and drafter_text is missing"),
        ({"drafter": "lookup", "drafter_text": "a"}, "drafter_text is 'a' and drafter 'lookup', which reads none"),
        ({"drafter_text": "a"}, "drafter_text is 'a' and drafter 'model', which reads none"),
        ({"drafter": "ngram", "device": "cuda:1"}, "device is 'cuda:1' and drafter 'ngram', which runs on the CPU"),
        ({"drafter": "trigram"}, "drafter is 'trigram'"),
        ({"drafter": "ngram", "drafted_by": "ngram"}, "drafted_by is 'ngram' and drafter 'ngram', which asks no model"),
        ({"drafted_by": "bigram"}, "drafted_by is 'bigram'"),
    ],
)
def test_a_drafter_and_what_it_needs(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(DraftConfig, [], env(DraftConfig, **settings))
    assert message in error.value.message
    assert not load(DraftConfig, [], env(DraftConfig, drafter="unigram", drafter_text="a")).has_model


@pytest.mark.parametrize(
    "cls, name, value",
    [
        (TargetConfig, "port", "65536"),
        (TargetConfig, "max_slots", "0"),
        (TargetConfig, "dtype", "int8"),
        (TargetConfig, "drain_timeout_s", "nan"),
        (TargetConfig, "kv_cache_tokens", "0"),
        (TargetConfig, "cpu_cores", "1-0"),
        (DraftConfig, "cpu_cores", "a"),
        (DraftConfig, "kv_cache_fraction", "0"),
        (DraftConfig, "log_level", "loud"),
        (GatewayConfig, "num_draft_tokens", "65"),
        (GatewayConfig, "draft_logprobs", "half"),
        (GatewayConfig, "draft_logprobs", "topk:0"),
        (GatewayConfig, "max_queue", "-1"),
        (GatewayConfig, "allowed_origins", "app.example"),
        (GatewayConfig, "allowed_origins", "https://app.example/"),
        (GatewayConfig, "allowed_origins", "http://localhost:3000,null"),
        (GatewayConfig, "allowed_hosts", "llm.example:8000"),
    ],
)
@pytest.mark.parametrize("by", ["flag", "variable"])
def test_bad_values_are_named(cls: type, name: str, value: str, by: str) -> None:
    flag = f"--{name.replace('_', '-')}={value}"
    with pytest.raises(ConfigError) as error:
        if by == "flag":
            load(cls, [flag], env(cls))
        else:
            load(cls, [], env(cls, **{name: value}))
    assert error.value.param == name
    assert error.value.message.startswith(f"{name} is {value!r}: ")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--port", "80", "--grpc-port", "80"], "port and grpc_port are both 80"),
        (["--metrics-port", "8000"], "port and metrics_port are both 8000"),
        (["--registry", "127.0.0.1:7000"], "registry and target contradict each other"),
        (["--num-draft-tokens", "4", "--tree", "4x2x1"], "tree is 4x2x1 and num_draft_tokens 4"),
        (["--num-draft-tokens", "0", "--tree", "4x2x1"], "tree is 4x2x1 and num_draft_tokens 0"),
        (["--num-draft-tokens", "33"], "num_draft_tokens is 33, and at most 32 tokens are drafted"),
        (["--max-draft-tokens", "19", "--tree", "4x2x1"], "tree is 4x2x1, 20 nodes, and at most 19 tokens are drafted"),
        (["--drafter", "ngram", "--tree", "best:12x4"], "tree is best:12x4 and drafter ngram"),
    ],
)
def test_settings_that_contradict_each_other_are_named(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(GatewayConfig, flags, env(GatewayConfig))
    assert message in error.value.message


@pytest.mark.parametrize("cls", [DraftConfig, TargetConfig])
def test_what_is_missing_is_named_with_both_ways_to_give_it(cls: Any) -> None:
    (name,) = NEEDED[cls]
    with pytest.raises(ConfigError) as error:
        load(cls, [], {})
    assert (
        error.value.message == f"{name} is missing; give --{name} or set {cls.model_config['env_prefix']}{name.upper()}"
    )
