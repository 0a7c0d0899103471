"""`outrider.LLM`: a script's own system says what a service says, and is gone with the script, however that ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outrider.cli.offline import forget_variables, system_of
from outrider.client import Client, ConfigError
from outrider.wire.settings.system import SystemConfig, gateway_config
from tests.e2e.process_tree import Command, Tree, tree
from tests.forked import REPO, clean_environment
from tests.stack import DEMO_TARGET, Stack

PROMPTS = ["import os\n\ndef ", "Once upon a time", "class Queue:\n"]
(EXAMPLE,) = (
    block
    for block in re.findall(r"```python\n(.*?)```", (REPO / "docs" / "sdk.md").read_text(encoding="utf-8"), re.DOTALL)
    if "LLM(" in block
)
"""Of the demo pair. It ends inside its `with`."""
AND_MORE = f"""
    import json

    answers = llm.generate({PROMPTS!r}, {{"max_tokens": 24, "temperature": 0.0}})
    print(json.dumps([answer.text for answer in answers]))
    print(llm.chat([{{"role": "user", "content": "hi"}}], {{"max_tokens": 3, "ignore_eos": True}})[0].usage)
    raise LookupError("in the middle")
"""
ENDLESS = f"""
from outrider import LLM

llm = LLM({str(DEMO_TARGET)!r}, num_draft_tokens=0, drafter="ngram")
print("asking", flush=True)
llm.generate("x", {{"max_tokens": 500, "ignore_eos": True, "n": 64}})
"""


@pytest.fixture
def left() -> Iterator[Tree]:
    with tree() as found:
        yield found


def test_the_example_runs_texts_are_the_services_and_nothing_is_left_after_an_exception(
    stack: Stack, left: Tree
) -> None:
    command = Command("-c", EXAMPLE + AND_MORE)
    assert command.wait(120) == 1, command.log()
    assert left.now() == {}
    assert command.err[-1] == "LookupError: in the middle"
    assert any("target-0: ready" in line for line in command.err)
    with Client(stack.grpc) as client:
        texts = [client.generate(prompt, max_tokens=24, temperature=0.0).text for prompt in PROMPTS]
    assert json.loads(command.out[-2]) == texts
    assert "num_completion_tokens=3" in command.out[-1]
    command.end()


@pytest.mark.slow
def test_nothing_is_left_after_ctrl_c(left: Tree) -> None:
    """Without a `with`, and in the middle of answers."""
    command = Command("-c", ENDLESS)
    command.wait_for("asking", 120)
    assert len(left.now()) >= 4
    command.signal(signal.SIGINT)
    assert command.wait(30) != 0
    assert left.now() == {}
    assert command.err[-1] == "KeyboardInterrupt"
    command.end()


def test_nothing_is_left_after_a_kill(left: Tree) -> None:
    """While the parts load."""
    command = Command("-c", ENDLESS)
    command.wait_for("loading", 120)
    command.signal(signal.SIGKILL)
    command.wait()
    assert left.wait_empty(30) == {}
    command.end()


def test_what_cannot_be_started_is_said() -> None:
    assert system_of("t", {"model": "d", "dtype": "float32"}, {"dtype": "bfloat16", "drain_timeout_s": 1.0}) == {
        "target": {"model": "t", "dtype": "bfloat16", "drain_timeout_s": 1.0},
        "draft": {"model": "d", "dtype": "float32", "drain_timeout_s": 1.0},
        "gateway": {"port": 0, "grpc_port": 0, "drain_timeout_s": 1.0, "max_queue_wait_s": 600.0},
        "ray": None,
    }
    for name in ("heads", "port", "api_keys", "speed"):
        with pytest.raises(ConfigError, match=rf"^{name} is no setting of an LLM"):
            system_of("t", None, {name: 1})
    script = "from outrider import LLM\nLLM('/nowhere', progress=False, max_running=-3)"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean_environment())
    assert ended.returncode == 1
    assert "ConfigError: " in ended.stderr.splitlines()[-1] and "max_running" in ended.stderr.splitlines()[-1]


def test_what_the_environment_says_of_services_is_not_of_an_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    services = {"GATEWAY_HOST": "0.0.0.0", "GATEWAY_API_KEYS": "keys.yaml", "TARGET_TLS_DIR": "certificates"}
    for name, value in {**services, "gateway_port": "1", "GATEWAY_LOG_LEVEL": "error"}.items():
        monkeypatch.setenv(f"OUTRIDER_{name}", value)
    forget_variables()
    config = SystemConfig.read(system_of("t", None, {}))
    gateway = gateway_config(config.gateway, target="127.0.0.1:0")
    assert (gateway.host, gateway.api_keys, gateway.log_level) == ("127.0.0.1", None, "error")
    assert config.targets[0].worker.tls_dir is None and "OUTRIDER_gateway_port" not in os.environ


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, outrider; print([m for m in sys.modules if m.startswith(('outrider.', 'grpc', 'rich'))])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean_environment())
    assert ended.stdout.strip() == "[]", ended.stderr
