"""`outrider.LLM`: a script's own system says what a service says, and is gone with the script, however that ends."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outrider.client import Client
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


def test_the_example_runs_and_leaves_nothing(stack: Stack, left: Tree) -> None:
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


def test_importing_the_package_imports_nothing_else() -> None:
    script = "import sys, outrider; print([m for m in sys.modules if m.startswith(('outrider.', 'grpc', 'rich'))])"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean_environment())
    assert ended.stdout.strip() == "[]", ended.stderr
