"""Run the tests of this folder in their own environments, against one demo system that is started for them.

    make clients                      # or: python -m tests.clients [PYTEST'S ARGUMENTS]

There are two environments, one for each major version of the official client: no version of it suits all libraries;
one for clients of the other protocols, and one for lm-evaluation-harness. What all of them ask is kept in
tests/data/requests, and `make test` asks it again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.clients.recording import recording
from tests.stack import running

FOLDER = Path(__file__).parent
ENVIRONMENTS = FOLDER.parents[1] / ".work/clients"
FILES = {
    "openai3": ("test_openai.py", "test_responses.py", "test_langchain.py", "test_litellm.py", "test_pydantic_ai.py"),
    "openai2": ("test_openai.py", "test_responses.py", "test_instructor.py", "test_llama_index.py"),
    "lmeval": ("test_lm_eval.py",),
    "layers": ("test_anthropic.py", "test_agents.py"),
}
REQUESTS = FOLDER.parent / "data/requests"
ALONE = ("-c", os.devnull, "--rootdir", str(FOLDER), "--confcutdir", str(FOLDER), "-p", "no:cacheprovider")
"""Without the settings, plugins and fixtures of the other tests, which need the engine."""


def main() -> int:
    failed = False
    with running() as stack:
        environment = os.environ | {"OPENAI_API_KEY": "any"}
        environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices
        for name, files in FILES.items():
            print(f"{name}:", flush=True)
            python = ENVIRONMENTS / name / "bin/python"
            options = ("-q", "-ra", "--timeout", "120", "-W", "ignore", *sys.argv[1:])
            paths = [str(FOLDER / file) for file in files]
            command = [str(python), "-m", "pytest", *ALONE, *options, *paths]
            with recording(stack.http) as recorded:
                environment["OUTRIDER_CLIENTS_URL"] = recorded.url
                code = subprocess.run(command, env=environment, cwd=FOLDER.parents[1], check=False).returncode
            failed |= code != 0
            if not code and not sys.argv[1:]:  # else only some of them were asked
                kept = [json.dumps(each, ensure_ascii=False) for each in recorded.requests]
                (REQUESTS / f"{name}.json").write_text("[\n" + ",\n".join(kept) + "\n]\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
