"""Faults that the suite must catch: each a small change of one function, with the tests that are to fail for it.

A function is given by its name alone, below a package: it may move from file to file. What is changed in it is found by
its meaning (`tests.mutants.operators`): locals may be renamed and lines rewritten.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.mutants.operators import Operator

REPO = Path(__file__).resolve().parent.parent.parent
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Mutant:
    function: str
    """`package:Class.method`; the package may be a module. A class stands for its body."""
    operator: Operator
    why: str
    """What users or the laws would lose."""
    tests: tuple[str, ...]
    """Files or node ids, of which one test at least fails. They are run in this order, up to the first failure."""

    def file(self) -> Path:
        """Return the file of the function, below the repository. Raises LookupError where there is not just one."""
        package, _, name = self.function.partition(":")
        files = _files_with(package, name)
        if len(files) == 1:
            return files[0]
        places = ", ".join(map(str, files or _files_with("", name)))
        raise LookupError(f"{package} has {name} in {len(files)} files, expected 1: {places or 'it is nowhere'}")

    def plant(self) -> tuple[str, str]:
        """Return the file's text with the fault in it, and what was changed. Raises LookupError as `file` does, and
        where the operator does not find the one place that it is meant for.
        """
        tree = ast.parse((REPO / self.file()).read_text())
        function = next(node for name, node in _definitions(tree) if name == self.function.partition(":")[2])
        shown = self.operator.apply(function, _globals(tree))
        return ast.unparse(ast.fix_missing_locations(tree)), shown

    def missing_tests(self) -> list[str]:
        """Return those of the tests that are not in the repository."""
        return [test for test in self.tests if not _has_test(test)]


@cache
def _files_with(package: str, name: str) -> list[Path]:
    """Return the files below a package, by default of the product, that define a function or class of that name."""
    roots = [package] if package else ["gateway", "draft_service", "target_service", "outrider", "deploy"]
    files = list[Path]()
    for root in roots:
        path = REPO / root.replace(".", "/")
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    last = name.rpartition(".")[2]
    texts = {path: path.read_text() for path in files if path.is_file()}
    named = [path for path, text in texts.items() if f"def {last}(" in text or f"class {last}" in text]
    return [path.relative_to(REPO) for path in named if name in dict(_definitions(ast.parse(texts[path])))]


@dataclass(frozen=True)
class Fault:
    """A row of a table of faults."""

    function: str
    operator: Operator


Faults = dict[tuple[str, ...], dict[str, Fault]]
"""By the tests that are to catch them, and by what users or the laws would lose."""


def mutants_of(faults: Faults) -> Iterator[Mutant]:
    for tests, by_loss in faults.items():
        for why, fault in by_loss.items():
            yield Mutant(fault.function, fault.operator, why, tests)


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, DEFINITIONS):
            yield f"{prefix}{node.name}", node
            yield from _definitions(node, f"{prefix}{node.name}.")
        else:
            yield from _definitions(node, prefix)


def _globals(tree: ast.Module) -> set[str]:
    names = set[str]()
    for node in tree.body:
        match node:
            case ast.Import() | ast.ImportFrom():
                names |= {(each.asname or each.name).partition(".")[0] for each in node.names}
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case _:
                names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


def _has_test(test: str) -> bool:
    file, *names = test.partition("[")[0].split("::")
    path = REPO / file
    return path.is_file() and (not names or ".".join(names) in dict(_definitions(ast.parse(path.read_text()))))
