"""`make complexity ARGS=BASE`: what one must know to change how a step chooses its drafts, at that commit and now.

AST nodes, non-blank lines, comprehensions and conditional expressions by folder; the names that the files of the step
import from elsewhere in the product; the fields of the records that a step hands on, and of those that they hold. Fails
where such a field is named `extra` or `data`, or may be anything.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add
from pathlib import PurePath

from tests.measures.lines import files_at, files_now, find_commit

PAPERS = "outrider/papers"
GROUPS: Mapping[str, tuple[str, ...]] = {
    "target_service": ("target_service/",),
    "draft_service": ("draft_service/",),
    "engine/speculation": ("outrider/engine/speculation/",),
    "engine/heads": ("outrider/engine/heads/",),
    PAPERS: (f"{PAPERS}/",),
    "moved in or out": (
        "outrider/drafting/lookahead.py",
        "outrider/drafting/tables.py",
        "outrider/engine/drafter_table.py",
        "outrider/engine/sampling/acceptance.py",
        "outrider/engine/sampling/tree_acceptance.py",
    ),
}
"""Folders, and the files outside of them from which code came or to which it went."""
STEP_BEFORE = ("verifier.py", "drafts.py", "lease.py", "rows.py", "parked.py")
STEP = ("step.py", "drafting.py", "choice.py", "lease.py", "proposal.py", "budget.py", "draft_buffer.py")
"""Names of the target's files that choose what a step verifies: at commits that have no step.py, and later."""
RECORDS = ("Lease", "Candidates", "Ready", "Proposal", "Verdict")
"""What a step hands on, at any commit: classes of the target."""
RECORD_FOLDERS = ("target_service/", "outrider/engine/speculation/")
PRODUCT = ("gateway", "draft_service", "target_service", "outrider", "deploy")
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Weight:
    num_files: int = 0
    num_nodes: int = 0
    num_lines: int = 0
    """Not blank."""
    num_comprehensions: int = 0
    num_conditionals: int = 0

    def __add__(self, other: Weight) -> Weight:
        return Weight(*map(add, astuple(self), astuple(other)))

    def __str__(self) -> str:
        per_line = 1000 / max(1, self.num_lines)
        comprehensions, conditionals = self.num_comprehensions * per_line, self.num_conditionals * per_line
        return f"{self.num_files:6}{self.num_nodes:8}{self.num_lines:7}{comprehensions:7.1f}{conditionals:7.1f}"


@dataclass(frozen=True)
class Record:
    name: str
    fields: tuple[ast.AnnAssign, ...]
    is_own: bool
    """Whether it is of the step's own files, or one of RECORDS."""


def weigh(text: str) -> Weight:
    """Return the weight of a file."""
    nodes = list(ast.walk(ast.parse(text)))
    num_comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in nodes)
    num_conditionals = sum(isinstance(node, ast.IfExp) for node in nodes)
    num_lines = sum(bool(line.strip()) for line in text.splitlines())
    return Weight(1, len(nodes), num_lines, num_comprehensions, num_conditionals)


def weigh_groups(texts: Mapping[str, str]) -> dict[str, Weight]:
    """Return the weight of each group, of all, and of all but the papers' methods. texts: of files, by path."""
    found = dict.fromkeys(GROUPS, Weight())
    for path, text in texts.items():
        for group, places in GROUPS.items():
            if path.startswith(places):
                found[group] += weigh(text)
    all_of_them = sum(found.values(), Weight())
    without_papers = sum((weight for group, weight in found.items() if group != PAPERS), Weight())
    return {**found, "all": all_of_them, f"all but {PAPERS}": without_papers}


def _step(texts: Mapping[str, str]) -> Sequence[str]:
    by_path = {path: PurePath(path).name for path in sorted(texts) if path.startswith("target_service/")}
    names = STEP if "step.py" in by_path.values() else STEP_BEFORE
    return [path for path, name in by_path.items() if name in names]


def imported(texts: Mapping[str, str]) -> set[str]:
    """Return the names that the step's files import from other files of the product."""
    files = _step(texts)
    own = {path.removesuffix(".py").replace("/", ".") for path in files}
    found = set[str]()
    for path in files:
        for node in ast.walk(ast.parse(texts.get(path, ""))):
            if isinstance(node, ast.ImportFrom) and node.module not in own:
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith(PRODUCT)}


def records(texts: Mapping[str, str]) -> list[Record]:
    """Return what a step hands on, and what such a record holds in a field, of the classes in RECORD_FOLDERS."""
    step = _step(texts)
    records_of, aliases = dict[str, Record](), dict[str, ast.expr]()
    for path in sorted(path for path in texts if path.startswith(RECORD_FOLDERS)):
        for node in ast.parse(texts[path]).body:
            match node:
                case ast.ClassDef() if _is_record(node):
                    fields = tuple(line for line in node.body if isinstance(line, ast.AnnAssign))
                    records_of[node.name] = Record(node.name, fields, path in step or node.name in RECORDS)
                case ast.Assign(targets=[ast.Name(id=name)]):
                    aliases[name] = node.value
    found = list[Record]()
    pending = [*RECORDS]
    while pending:
        name = pending.pop(0)
        if name in aliases:
            pending += _names(aliases.pop(name))
        if name in records_of:
            record = records_of.pop(name)
            found.append(record)
            for line in record.fields:
                pending += _names(line.annotation)
    return found


def _names(annotation: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)]


def _is_record(node: ast.ClassDef) -> bool:
    marks = [*node.decorator_list, *node.bases]
    return any(word in ast.unparse(mark) for mark in marks for word in ("dataclass", "NamedTuple"))


def unclear(found: Sequence[Record]) -> list[str]:
    """Return the fields that say nothing of what they hold."""
    fields = [(record.name, line) for record in found for line in record.fields]
    return [
        f"{name}.{ast.unparse(line)}"
        for name, line in fields
        if ast.unparse(line.target) in ("extra", "data") or "Any" in _names(line.annotation)
    ]


def _counted(found: Sequence[Record], *, is_own: bool) -> str:
    counts = {record.name: len(record.fields) for record in found if record.is_own is is_own}
    return f"{sum(counts.values())} ({', '.join(f'{name} {count}' for name, count in counts.items())})"


def table(before: Mapping[str, str], now: Mapping[str, str], base: str) -> Iterator[str]:
    """Yield the lines of the report. before, now: text of each file, by path."""
    head = f"{'files':>6}{'nodes':>8}{'lines':>7}{'comp/k':>7}{'cond/k':>7}"
    yield f"{'':24}{base:>35}{'now':>35}"
    yield f"{'':24}{head}{head}{'nodes':>8}"
    weights_before, weights_now = weigh_groups(before), weigh_groups(now)
    for group, weight in weights_before.items():
        ratio = weights_now[group].num_nodes / weight.num_nodes if weight.num_nodes else 0.0
        change = f"{100 * (ratio - 1):+7.1f}%" if weight.num_nodes else f"{'new':>8}"
        yield f"{group:24}{weight}{weights_now[group]}{change}"
    yield f"names that the step imports from elsewhere: {len(imported(before))} before, {len(imported(now))} now"
    for word, found in (("before", records(before)), ("now", records(now))):
        yield f"fields of what a step hands on {word}: {_counted(found, is_own=True)}"
        yield f"  of records of other files that these hold: {_counted(found, is_own=False)}"


def main(args: list[str]) -> int:
    base = find_commit(args)
    if base is None:
        return 2
    before = {path: content.decode() for path, content in files_at(base)}
    now = {path: content.decode() for path, content in files_now()}
    for line in table(before, now, base):
        print(line)
    wrong = unclear(records(now))
    for line in wrong:
        print(f"says nothing of what it holds: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
