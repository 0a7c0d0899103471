"""Run the tests of this folder in their own environments, against one demo system that is started for them.

    make clients                      # or: python -m tests.clients [PYTEST'S ARGUMENTS]

There are two environments, one for each major version of the official client: no version of it suits all libraries;
one for clients of the other protocols, and one for lm-evaluation-harness. What all of them ask is kept in
tests/data/requests, and `make test` asks it again.

Coding agents have one more, with npm's beside it, and a model of their own, of scripted.py: `make clients ARGS='--only
coding -k codex'`. Nothing of them is kept, since most of what they ask is their authors' prompts. OUTRIDER_CODERS_KEEP
names a new folder for those in which they worked, with what they told and asked.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.clients import scripted
from tests.clients.coding import CLAUDE_CODE, CODERS, MODEL, claude_code
from tests.clients.recording import recording
from tests.stack import running

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parents[1] / ".work/clients"
FILES = {
    "openai3": ("test_openai.py", "test_responses.py", "test_langchain.py", "test_litellm.py", "test_pydantic_ai.py"),
    "openai2": ("test_openai.py", "test_responses.py", "test_instructor.py", "test_llama_index.py"),
    "lmeval": ("test_lm_eval.py",),
    "layers": ("test_anthropic.py", "test_agents.py"),
    "coding": ("test_coding.py", "test_claude_code.py"),
}
CODING = "coding"
"""Of FILES: the coding agents, whose model is another one."""
REQUESTS = FOLDER.parent / "data/requests"
ALONE = ("-c", os.devnull, "--rootdir", str(FOLDER), "--confcutdir", str(FOLDER), "-p", "no:cacheprovider")
"""Without the settings, plugins and fixtures of the other tests, which need the engine."""


def main() -> int:
    only = sys.argv[2:3] if sys.argv[1:2] == ["--only"] else []
    arguments = sys.argv[3:] if only else sys.argv[1:]
    libraries = [name for name in only or FILES if name != CODING]
    failed = False
    if libraries:
        with running() as stack:
            for name in libraries:
                with recording(stack.http) as recorded:
                    code = _tested(name, recorded.url, arguments)
                failed |= code != 0
                if not code and not arguments:  # else only some of them were asked
                    kept = [json.dumps(each, ensure_ascii=False) for each in recorded.requests]
                    (REQUESTS / f"{name}.json").write_text("[\n" + ",\n".join(kept) + "\n]\n", encoding="utf-8")
    if only in ([], [CODING]):
        failed |= _coders(arguments) != 0
    return int(failed)


def _tested(name: str, url: str, arguments: list[str], **more: str) -> int:
    """Return pytest's exit code."""
    print(f"{name}:", flush=True)
    environment = os.environ | {"OPENAI_API_KEY": "any", "OUTRIDER_CLIENTS_URL": url, **more}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
    python = ENVIRONMENTS / name / "bin/python"
    options = ("-q", "-ra", "--timeout", "300" if name == CODING else "120", "-W", "ignore", *arguments)
    paths = [str(FOLDER / file) for file in FILES[name]]
    command = [str(python), "-m", "pytest", *ALONE, *options, *paths]
    return subprocess.run(command, env=environment, cwd=FOLDER.parents[1], check=False).returncode


def _coders(arguments: list[str]) -> int:
    """Test the coding agents, against a model that says what their scripts have."""
    with tempfile.TemporaryDirectory(prefix="outrider-coders-") as root, tempfile.TemporaryDirectory() as model:
        scripts = {coder.name: coder.script(Path(root)) for coder in CODERS}
        scripted.make(Path(model), scripts | {CLAUDE_CODE: claude_code(Path(root))})
        memory = ("--kv-cache-tokens", str(scripted.CONTEXT))
        named = ("--model-name", MODEL)
        with running(model, model, target_args=memory, draft_args=memory, gateway_args=named) as stack:
            code = _tested(CODING, stack.http, arguments, OUTRIDER_CODERS=root)
        if kept := os.environ.get("OUTRIDER_CODERS_KEEP"):
            shutil.copytree(root, kept, symlinks=True)
        return code


if __name__ == "__main__":
    sys.exit(main())
