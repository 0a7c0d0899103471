"""Run the tests of this folder in their own environment, against one demo system that is started for them.

make clients                      # or: python -m tests.clients PYTHON [PYTEST'S ARGUMENTS]
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.stack import running

FOLDER = Path(__file__).parent


def main() -> int:
    python, *args = sys.argv[1:]
    with running() as stack:
        environment = os.environ | {"OUTRIDER_CLIENTS_URL": stack.http, "OPENAI_API_KEY": "any"}
        # These tests alone: no settings of ours, no plugins and fixtures of the other tests, which need the engine.
        bare = ("-c", os.devnull, "--rootdir", str(FOLDER), "--confcutdir", str(FOLDER), "-p", "no:cacheprovider")
        command = [python, "-m", "pytest", *bare, "-q", "-ra", "--timeout", "120", "-W", "ignore", str(FOLDER), *args]
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
