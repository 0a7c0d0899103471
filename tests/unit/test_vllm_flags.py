"""vLLM's command lines, typed with `outrider`: what each becomes, or what it says to type."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main

from outrider.cli.main import app
from outrider.cli.vllm_flags import FLAGS, translated
from outrider.wire.errors import ConfigError

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
    ("T --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3", "T"),
    ("T --dtype half --max_num_seqs=8", "T --dtype float16 --max-running 8 --target-max-slots 8 --draft-max-slots 8"),
    ("T --quantization awq --max-model-len auto --served-model-name name", "T --model-name name"),
    (
        "T --no-enable-prefix-caching --max-model-len 8K",
        "T --no-target-prefix-caching --no-draft-prefix-caching --target-context-limit 8192",
    ),
    ("T --api-key a b --verbose", "T --api-key a --api-key b --verbose"),
]


@pytest.mark.parametrize(("theirs", "ours"), COMMANDS)
def test_a_command_line_of_vllms_becomes_one_of_ours(theirs: str, ours: str) -> None:
    assert translated(shlex.split(theirs))[0] == shlex.split(ours)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ("T --seed 42", "--seed 42 is vLLM's, and not taken here; instead: seed of each request"),
        ("T --speculative-model D --num-speculative-tokens 5", "instead: --speculative-config '{"),
        ("T --max-model-len many", "--max-model-len is 'many', which it cannot be"),
        ("T --max-model-len --port 8000", "--max-model-len has no value"),
        ("T --served-model-name a b", "--served-model-name has 2 names, and a model has one here"),
        ("T --speculative-config ngram", "--speculative-config is 'ngram', which is no JSON"),
        ("T --speculative-config [1]", "--speculative-config is '[1]', which is no object"),
        (
            """T --speculative-config '{"methode": "ngram"}'""",
            "'methode' is no key of --speculative-config here; did you mean method?",
        ),
        ("""T --speculative-config '{"method": "eagle3"}'""", "no model for method 'eagle3'"),
        (
            """T --speculative-config '{"method": "magic", "model": "D"}'""",
            "method of --speculative-config is 'magic'; known: ngram",
        ),
        ("""T --speculative-config '{"method": "mlp_speculator", "model": "D"}'""", "instead: train a head"),
        (
            """T --speculative-config '{"model": "D", "num_speculative_tokens": 0}'""",
            "num_speculative_tokens of --speculative-config is 0",
        ),
        (
            """T --speculative-config '{"model": "D", "draft_tensor_parallel_size": 2}'""",
            "draft_tensor_parallel_size of --speculative-config is 2",
        ),
    ],
)
def test_what_is_not_taken_says_what_to_type(theirs: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        translated(shlex.split(theirs))


def test_what_stands_in_a_flags_place_is_an_option_of_ours() -> None:
    group = typer.main.get_command(app)
    up = group.commands["up"]  # type: ignore[attr-defined]
    options = {name for each in up.params for name in (*each.opts, *each.secondary_opts)}
    assert {flag for each in FLAGS.values() for flag in each.ours} <= options
    assert {name for name, flag in FLAGS.items() if flag.refused or flag.note} & options == set()
