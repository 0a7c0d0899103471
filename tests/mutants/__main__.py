"""`make mutants`: plant each fault in a copy of the repository and run the tests that are to catch it.

`make mutants ARGS='tickets detokenizer'` plants those whose function has one of the words in its path or name. Exits 1
unless the tests pass without a fault and fail with each. `--check` runs no test: it exits 1 and lists the faults whose
function, place or tests are not found, which every run does first.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants import REPO, Mutant, mutants_of
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

TABLES = (
    ACCEPTANCE,
    SAMPLING,
    EXPLAINING,
    GRAMMAR,
    TRUNCATION,
    DELIVERIES,
    SESSION,
    KEYS,
    LAYER_MEMORY,
    HEALTH,
    HEADS,
    PROMPTS,
    WINDOWS,
    BEAMS,
    ENCODER,
    TRANSLATIONS,
    CASCADES,
)
MUTANTS = [mutant for faults in TABLES for mutant in mutants_of(faults)]
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
    options = ["-x", "-q", "-n", "0", "--timeout", str(TEST_LIMIT_S), "-p", "no:cacheprovider", "--tb", "line"]
    options += ["--hypothesis-profile", "first failure"]  # not the smallest
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
    """Return the test that failed; None where none did: all passed, or there was nothing to run. A name that the fault
    lacks is the mistake of who wrote it, and catches nothing.
    """
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    lacks_name = re.search(r"^\S+:\d+: (NameError|UnboundLocalError)", output, re.MULTILINE)
    return failed[1] if status == 1 and failed and not lacks_name else None


def misplaced(mutants: Sequence[Mutant]) -> list[str]:
    """Return what keeps faults from being planted, in words."""
    found = list[str]()
    for mutant in mutants:
        try:
            mutant.plant()
        except LookupError as error:
            found.append(f"{mutant.function}: {error}\n    {mutant.why}")
        found += [f"{mutant.function}: there is no test {test}" for test in mutant.missing_tests()]
    return found


def plant(folder: Path, mutant: Mutant) -> str | None:
    """Return the test that caught the fault. The file is as it was afterwards."""
    path = folder / mutant.file()
    sound = path.read_text()
    text, shown = mutant.plant()
    path.write_text(text)
    try:
        status, output = run_tests(folder, mutant.tests)
    finally:
        path.write_text(sound)
    caught = caught_by(status, output)
    if caught is None:
        print(f"NOT CAUGHT {mutant.function}: {mutant.why}\n    {shown}\n{output[-2000:]}", flush=True)
    return caught


def main(args: list[str]) -> int:
    wrong = misplaced(MUTANTS)
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        print(f"{len(wrong)} of {len(MUTANTS)} faults cannot be planted as they are written", file=sys.stderr)
        return 1
    if "--check" in args:
        print(f"{len(MUTANTS)} faults can be planted")
        return 0
    mutants = [each for each in MUTANTS if not args or any(word in f"{each.file()}:{each.function}" for word in args)]
    if not mutants:
        print(f"no planted fault is in a function with {' or '.join(args)} in its path\n\n{__doc__}", file=sys.stderr)
        return 2
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
                print(f"{number:3} {took_s:5.1f} s  {mutant.function}: {mutant.why} [{caught}]", flush=True)
    print(f"caught {num_caught} of {len(mutants)} planted")
    return 0 if num_caught == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
