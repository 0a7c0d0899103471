"""Fail where the documentation names a path, module, `make` target or name of the code that is gone.

    python -m tests.measures.documents

Looks at what stands between backticks, and at indented commands, in README.md, CONTRIBUTING.md, SECURITY.md, docs
and the READMEs of models and benchmarks. Not in docs/reports and CHANGELOG.md: they say what was.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.__main__ import describe_all

REPO = Path(__file__).resolve().parents[2]
PACKAGES = "outrider|gateway|draft_service|target_service|deploy|tests|benchmarks|models"
SPAN = re.compile(r"`([^`\n]+)`|^    (?=\S)(.*)$", re.MULTILINE)
PATH = re.compile(rf"(?<![\w/.~-])(?:{PACKAGES}|docs|proto)/[\w./-]*\w")
MODULE = re.compile(rf"python3? -m ((?:{PACKAGES})[\w.]*)")
TARGET = re.compile(r"\bmake ([a-z][a-z-]+[a-z])\b")
NAME = re.compile(r"\b(?:[a-z]+(?:_[a-z0-9]+)+|(?:[A-Z][a-z]+){2,})\b")
"""Names in snake_case, and class names of two words or more."""
FOREIGN = {
    "outrider/role", "outrider/gpu", "models/name",
    "graceful_shutdown_timeout_s", "get_random_string", "process_virtual_memory_bytes", "process_max_fds",
    "server_name", "prefix_cache_queries_total", "AngelSlim",
    "kube_deployment_status_replicas_unavailable", "modeling_minimax_m3_vl",
}  # fmt: skip
"""Labels, and names of other projects' code and metrics."""
INVENTED = {"docs/add-a-drafter.md": re.compile("repeat|Repeat"), "docs/add-a-head.md": re.compile("glance|Glance")}
"""Names that a page has its reader write, by page."""
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "models", "benchmarks")


def tracked(*paths: str) -> list[str]:
    """Return the tracked files below paths."""
    made = subprocess.run(["git", "ls-files", *paths], cwd=REPO, check=True, stdout=subprocess.PIPE, text=True)
    return made.stdout.splitlines()


def documents() -> list[str]:
    """Return the documents that are checked."""
    found = list[str]()
    for name in tracked(*DOCUMENTS):
        if name.endswith(".md") and not name.startswith(("docs/reports/", "benchmarks/results/")):
            found.append(name)
    return found


def names_of_code() -> set[str]:
    """Return every name that occurs in a tracked text file that is no document."""
    found = set[str]()
    for name in tracked():
        path = REPO / name
        if name.endswith(".md") or not path.is_file() or path.stat().st_size > 1_000_000:
            continue
        found.add(path.stem)
        try:
            found.update(NAME.findall(path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def targets() -> set[str]:
    """Return the names of all `make` targets, and of all benchmarks as `bench-NAME`."""
    made = subprocess.run(["make", "-qp"], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found = set(re.findall(r"^([a-z][\w-]*):", made.stdout, re.MULTILINE))
    found.update(f"bench-{name}" for name in describe_all())
    return found


def is_excused(document: str, name: str) -> bool:
    """Return whether a name is another project's, or the reader's to write."""
    invented = INVENTED.get(document)
    return name in FOREIGN or (invented is not None and invented.search(name) is not None)


def problems(document: str, known_names: set[str], known_targets: set[str]) -> Iterator[str]:
    """Yield what a document names and is gone."""
    text = (REPO / document).read_text(encoding="utf-8")
    for match in SPAN.finditer(text):
        span = match.group(1) or match.group(2)
        where = f"{document}:{text.count(chr(10), 0, match.start()) + 1}"
        for path in PATH.findall(span):
            if is_excused(document, path):
                continue
            if not (REPO / path).exists() and not list(REPO.glob(f"{path}*")):
                yield f"{where}: no file or folder {path}"
        for module in MODULE.findall(span):
            place = REPO / module.rstrip(".").replace(".", "/")
            if not place.exists() and not place.with_suffix(".py").exists():
                yield f"{where}: no module {module}"
        for target in TARGET.findall(span):
            if target not in known_targets:
                yield f"{where}: no target {target}"
        for name in NAME.findall(span):
            if name not in known_names and not is_excused(document, name):
                yield f"{where}: no {name} in the code"


def main() -> int:
    known_names = names_of_code()
    known_targets = targets()
    num_problems = 0
    for document in documents():
        for problem in problems(document, known_names, known_targets):
            print(problem)
            num_problems += 1
    print(f"{len(documents())} documents, {num_problems} names that are gone")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
