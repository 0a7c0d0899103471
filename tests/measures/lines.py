"""`make lines ARGS=COMMIT`: Python files and their lines by folder, at that commit and now, without generated stubs."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
GENERATED = "outrider/v1/"
PARTS = {
    "PRODUCT": ("gateway", "draft_service", "target_service", "outrider", "deploy"),
    "TESTS": ("tests",),
    "BENCHMARKS": ("benchmarks", "models"),
}
DEEP = ("gateway", "outrider", "outrider/engine", "outrider/wire", "tests")
"""Folders whose own folders have rows of their own."""

Weights = tuple[Counter[str], Counter[str]]
"""Files and lines, by folder; each file counts for every folder it lies in, and for its part."""


def git(*args: str) -> bytes:
    return subprocess.run(("git", *args), cwd=REPO, check=True, capture_output=True).stdout


def files_at(commit: str) -> Iterator[tuple[str, bytes]]:
    """Path and content of each source file of a commit, without a checkout."""
    names = [name for name in git("ls-tree", "-r", "--name-only", commit).decode().splitlines() if is_source(name)]
    asked = "".join(f"{commit}:{name}\n" for name in names).encode()
    batch = subprocess.run(("git", "cat-file", "--batch"), cwd=REPO, check=True, capture_output=True, input=asked)
    rest = batch.stdout
    for name in names:
        head, _, rest = rest.partition(b"\n")
        size = int(head.split()[2])
        yield name, rest[:size]
        rest = rest[size + 1 :]


def files_now() -> Iterator[tuple[str, bytes]]:
    """Of the working tree, what git would add included."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard").decode().splitlines():
        if is_source(name) and (REPO / name).is_file():
            yield name, (REPO / name).read_bytes()


def is_source(name: str) -> bool:
    return name.endswith(".py") and not name.startswith(GENERATED)


def weigh(files: Iterable[tuple[str, bytes]]) -> Weights:
    num_files, num_lines = Counter[str](), Counter[str]()
    for name, content in files:
        for folder in (part_of(name), *rows_of(name)):
            num_files[folder] += 1
            num_lines[folder] += content.count(b"\n")
    return num_files, num_lines


def part_of(name: str) -> str:
    return next(part for part, folders in PARTS.items() if name.split("/")[0] in folders)


def rows_of(name: str) -> Iterator[str]:
    """The folders that the file lies in and that have a row."""
    folders = name.split("/")[:-1]
    for depth in range(1, len(folders) + 1):
        folder = "/".join(folders[:depth])
        if depth == 1 or folder.rpartition("/")[0] in DEEP:
            yield folder


def table(before: Weights, now: Weights, base: str) -> Iterator[str]:
    yield f"{'':28}{base:>14}{'now':>16}"
    yield f"{'':28}{'files':>6}{'lines':>8}{'files':>8}{'lines':>8}{'change':>9}"
    for part in PARTS:
        folders = {*before[0], *now[0]} - set(PARTS)
        for row in [part, *sorted(folder for folder in folders if part_of(folder) == part)]:
            name = row if row in PARTS else f"{'  ' * (row.count('/') + 1)}{row}"
            files_before, lines_before = before[0][row], before[1][row]
            change = f"{100 * (now[1][row] / lines_before - 1):+8.0f}%" if lines_before else f"{'new':>9}"
            yield f"{name:28}{files_before:6}{lines_before:8}{now[0][row]:8}{now[1][row]:8}{change}"


def find_commit(args: list[str]) -> str | None:
    """Return the commit that is named on the command line; None, with a word of why, where there is none."""
    if len(args) != 1:
        print("name the commit to compare with: ARGS=COMMIT", file=sys.stderr)
        return None
    try:
        git("rev-parse", "--verify", "--quiet", f"{args[0]}^{{commit}}")
    except subprocess.CalledProcessError:
        print(f"commit {args[0]} is not in this clone; name one that is: ARGS=COMMIT", file=sys.stderr)
        if git("rev-parse", "--is-shallow-repository").strip() == b"true":
            print("The clone is shallow: `git fetch --unshallow` brings what is missing.", file=sys.stderr)
        return None
    return args[0]


def main(args: list[str]) -> int:
    base = find_commit(args)
    if base is None:
        return 2
    for line in table(weigh(files_at(base)), weigh(files_now()), base):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
