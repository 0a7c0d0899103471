"""vLLM's command lines, typed with `outrider`: what each becomes, or what it says to type."""

import shlex
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from outrider.cli.main import app
from outrider.cli.up.vllm_flags import translated
from outrider.wire.errors import ConfigError
from outrider.wire.settings.api_keys import digest_of, read_keys
from outrider.wire.settings.system import SystemConfig
from tests.stack import DEMO_TARGET

COMMANDS = [
    (  # a draft model
        "Qwen/Qwen3-4B-Thinking-2507 --host 0.0.0.0 --port 8000 -tp 1 --max-model-len 2048 "
        "--gpu-memory-utilization 0.8 "
        """--speculative-config '{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5, "method": "draft_model"}'""",
        "Qwen/Qwen3-4B-Thinking-2507 --host 0.0.0.0 --port 8000 --target-tensor-parallel 1 --target-context-limit 2048 "
        "--gpu-memory-utilization 0.8 --draft Qwen/Qwen3-0.6B -K 5",
    ),
    (  # n-grams
        """T --speculative-config '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5}'""",
        "T --no-draft --drafter ngram -K 4",
    ),
    (
        """T --speculative-config '{"method": "suffix", "num_speculative_tokens": 40}'""",
        "T --no-draft --drafter lookup -K 40 --max-draft-tokens 40",
    ),
    (  # a head
        """T -tp 2 --speculative-config '{"model": "H", "num_speculative_tokens": 3, "method": "eagle3"}'""",
        "T --target-tensor-parallel 2 --draft H -K 3",
    ),
    ("""T --speculative-config.method mtp --speculative-config.num_speculative_tokens 1""", "T --mtp -K 1"),
    (
        "T --chat-template ./template.jinja --api-key token-abc123",
        "T --chat-template ./template.jinja --api-key token-abc123",
    ),
    (
        "T --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3",
        "T --tool-call-parser hermes --reasoning-parser qwen3",
    ),
    ("T --dtype half --max_num_seqs=8", "T --dtype float16 --max-running 8 --target-max-slots 8 --draft-max-slots 8"),
    ("T --quantization awq --max-model-len auto --served-model-name name", "T --model-name name"),
    (
        "T --no-enable-prefix-caching --max-model-len 8K",
        "T --no-target-prefix-caching --no-draft-prefix-caching --target-context-limit 8192",
    ),
    ("T --generation-config vllm", "T --generation-config vllm"),
    ("T -q int8", "T --target-quantization int8"),
    ("T --api-key a b --verbose", "T --api-key a --api-key b --verbose"),
    ("T --no-enforce-eager --no-enable-lora --no-draft", "T --no-draft"),
]


@pytest.mark.parametrize(("theirs", "ours"), COMMANDS)
def test_a_command_line_of_vllms_becomes_one_of_ours(theirs: str, ours: str) -> None:
    assert translated(shlex.split(theirs))[0] == shlex.split(ours)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--max-modle-len", "--max-model-len"), ("--speculative_confg", "--speculative-config"), ("--drafer", "--draf")],
)
def test_a_flag_with_a_slip_in_it_names_the_one_that_is_meant_vllms_too(typed: str, meant: str) -> None:
    made = CliRunner().invoke(app, ["serve", "T", typed, "1"])
    assert made.exit_code == 2 and f"(Possible options: {meant}" in " ".join(made.output.split())
    assert "Possible" not in CliRunner().invoke(app, ["serve", "T", "--nothing-like-it"]).output


def settings_of(monkeypatch: pytest.MonkeyPatch, *args: str) -> SystemConfig:
    """Return what a command line would start."""
    caught: list[SystemConfig] = []

    def start(config: SystemConfig, *rest: object, **more: object) -> None:
        keys = config.gateway.get("api_keys")
        caught.append(config if keys is None else replace(config, gateway={**config.gateway, "keys": read_keys(keys)}))
        raise ConfigError("enough")

    monkeypatch.setattr("outrider.cli.up.up.Supervisor", start)
    monkeypatch.setattr("outrider.cli.up.up.StopFlag.install", lambda stop: None)
    made = CliRunner().invoke(app, list(args))
    assert made.exit_code == 1 and caught, made.output
    return caught[0]


def test_a_command_line_of_vllms_reaches_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(
        monkeypatch,
        *("serve", DEMO_TARGET, "--max-model-len", "256", "--gpu-memory-utilization", "0.8", "--api-key", "a", "b"),
        *("--served-model-name", "demo", "--dtype", "float", "--max-num-seqs", "4", "--generation-config", "vllm"),
    )
    (target,) = found.pools
    worker = target.worker
    assert (worker.model, worker.context_limit, worker.dtype, worker.max_slots) == (DEMO_TARGET, 256, "float32", 4)
    assert (target.model_name, found.gpu_memory_utilization, found.gateway["max_running"]) == ("demo", 0.8, "4")
    assert [key.sha256 for key in found.gateway["keys"]] == [digest_of("a"), digest_of("b")]
    assert found.gateway["generation_config"] == "vllm"
