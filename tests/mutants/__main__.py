"""`make mutants`: plant each fault in a copy of the repository and run the tests that are to catch it.

`make mutants ARGS='tickets detokenizer'` plants those whose file has one of the words in its path. Exits 1 unless the
tests pass without a fault and fail with each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants import Mutant
from tests.mutants.acceptance import ACCEPTANCE
from tests.mutants.beams import BEAMS
from tests.mutants.cascade import CASCADES
from tests.mutants.deliveries import DELIVERIES
from tests.mutants.encoder import ENCODER
from tests.mutants.explaining import EXPLAINING
from tests.mutants.grammar import GRAMMAR
from tests.mutants.heads import HEADS
from tests.mutants.health import HEALTH
from tests.mutants.keys import KEYS
from tests.mutants.layer_memory import LAYER_MEMORY
from tests.mutants.prompts import PROMPTS
from tests.mutants.sampling import SAMPLING
from tests.mutants.session import SESSION
from tests.mutants.translation import TRANSLATIONS
from tests.mutants.truncation import TRUNCATION
from tests.mutants.windows import WINDOWS

REPO = Path(__file__).resolve().parent.parent.parent
MUTANTS = (
    *ACCEPTANCE,
    *SAMPLING,
    *EXPLAINING,
    *GRAMMAR,
    *TRUNCATION,
    *DELIVERIES,
    *SESSION,
    *KEYS,
    *LAYER_MEMORY,
    *HEALTH,
    *HEADS,
    *PROMPTS,
    *WINDOWS,
    *BEAMS,
    *ENCODER,
    *TRANSLATIONS,
    *CASCADES,
)
TEST_LIMIT_S = 60
"""Seconds a test may take: a fault that makes one hang is caught."""


def copy_tree(folder: Path) -> None:
    """What git tracks, and what it would add."""
    names = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard"),
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    for name in names:
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, folder / name)


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Return pytest's exit status and what it said."""
    # No bytecode: a file that is changed twice within a second would be taken for its older self.
    options = ("-x", "-q", "-n", "0", "--timeout", str(TEST_LIMIT_S), "-p", "no:cacheprovider", "--tb", "line")
    ended = subprocess.run(
        (sys.executable, "-m", "pytest", *options, *tests),
        cwd=folder,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout


def caught_by(status: int, output: str) -> str | None:
    """Return the test that failed; None where none did: all passed, or there was nothing to run."""
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    return failed[1] if status == 1 and failed else None


def plant(folder: Path, mutant: Mutant) -> str | None:
    """Return the test that caught the fault. The file is as it was afterwards."""
    path = folder / mutant.file
    sound = path.read_text()
    path.write_text(mutant.apply(sound))
    try:
        status, output = run_tests(folder, mutant.tests)
    finally:
        path.write_text(sound)
    caught = caught_by(status, output)
    if caught is None:
        print(f"NOT CAUGHT {mutant.file}: {mutant.why}\n{mutant.new}\n{output[-2000:]}", flush=True)
    return caught


def main(words: list[str]) -> int:
    mutants = [mutant for mutant in MUTANTS if not words or any(word in mutant.file for word in words)]
    if not mutants:
        print(f"no planted fault is in a file with {' or '.join(words)} in its path\n\n{__doc__}", file=sys.stderr)
        return 2
    for mutant in mutants:
        mutant.apply((REPO / mutant.file).read_text())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_tree(folder)
        tests = tuple(sorted({test for mutant in mutants for test in mutant.tests}))
        status, output = run_tests(folder, tests)
        if status != 0:
            print(f"the tests fail without any fault:\n{output[-4000:]}", file=sys.stderr)
            return 1
        num_caught = 0
        for number, mutant in enumerate(mutants, 1):
            began_s = time.monotonic()
            caught = plant(folder, mutant)
            num_caught += caught is not None
            if caught is not None:
                took_s = time.monotonic() - began_s
                print(f"{number:3} {took_s:5.1f} s  {mutant.file}: {mutant.why} [{caught}]", flush=True)
    print(f"caught {num_caught} of {len(mutants)} planted")
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
