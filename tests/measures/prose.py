"""Print how dense the product's code is and how much of it is prose, by package.

    make prose                                        # today's tree
    make prose ARGS=COMMIT                            # at that commit, and now

A line of code is neither blank, a docstring nor only a comment. Comprehensions and conditional expressions are counted
for a thousand lines of code, prose (docstrings and comments) as a share of all lines. `make check` prints the totals.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.measures.lines import PARTS, files_at, files_now, find_commit

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TOTAL = "product"


@dataclass
class Density:
    """Counts over the files of one package."""

    num_lines: int = 0
    num_code_lines: int = 0
    num_prose_lines: int = 0
    """Lines of docstrings, and lines that hold a comment and nothing else."""
    num_comprehensions: int = 0
    num_conditionals: int = 0
    """Conditional expressions: `a if condition else b`."""

    def add(self, source: str) -> None:
        """Count one file."""
        tree = ast.parse(source)
        lines = source.splitlines()
        prose = docstring_lines(tree) | comment_lines(source)
        num_blank = sum(not line.strip() for number, line in enumerate(lines, 1) if number not in prose)
        self.num_lines += len(lines)
        self.num_prose_lines += len(prose)
        self.num_code_lines += len(lines) - len(prose) - num_blank
        for node in ast.walk(tree):
            self.num_comprehensions += isinstance(node, COMPREHENSIONS)
            self.num_conditionals += isinstance(node, ast.IfExp)

    def cells(self) -> str:
        """Return the columns of the table."""
        if not self.num_code_lines:
            return f"{'':>34}"
        comprehensions = 1000 * self.num_comprehensions / self.num_code_lines
        conditionals = 1000 * self.num_conditionals / self.num_code_lines
        prose = 100 * self.num_prose_lines / self.num_lines
        return f"{self.num_code_lines:8}{comprehensions:9.1f}{conditionals:9.1f}{prose:7.1f}%"


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of lines in docstrings, those of attributes and constants among them."""
    numbers = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def comment_lines(source: str) -> set[int]:
    """Return the numbers of lines that hold a comment and no code."""
    numbers = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            numbers.add(token.start[0])
    return numbers


def package_of(name: str) -> str:
    """Return the folder that a file is counted under, two levels deep, three in outrider: `outrider/engine/heads`."""
    folders = name.split("/")[:-1]
    return "/".join(folders[: 3 if folders[0] == "outrider" else 2])


def measure(files: Iterable[tuple[str, bytes]]) -> dict[str, Density]:
    """Return the densities of the product by package, and of all of it under TOTAL."""
    densities = {TOTAL: Density()}
    for name, content in files:
        if name.split("/")[0] not in PARTS["PRODUCT"]:
            continue
        source = content.decode()
        densities[TOTAL].add(source)
        densities.setdefault(package_of(name), Density()).add(source)
    return densities


def table(columns: list[tuple[str, dict[str, Density]]]) -> Iterator[str]:
    """Yield the lines of the table: a row a package, a group of columns a commit."""
    packages = set[str]()
    for _, densities in columns:
        packages.update(densities)
    packages.remove(TOTAL)
    yield f"{'':30}" + "".join(f"{title:>34}" for title, _ in columns)
    yield f"{'':30}" + f"{'code':>8}{'compr.':>9}{'cond.':>9}{'prose':>8}" * len(columns)
    for package in [*sorted(packages), TOTAL]:
        yield f"{package:30}" + "".join(densities.get(package, Density()).cells() for _, densities in columns)


def main(args: list[str]) -> int:
    now = measure(files_now())
    if args == ["--total"]:
        print(f"a thousand lines of code: code, comprehensions, conditional expressions, prose: {now[TOTAL].cells()}")
        return 0
    columns = [("now", now)]
    if args:
        base = find_commit(args)
        if base is None:
            return 2
        columns.insert(0, (base, measure(files_at(base))))
    for line in table(columns):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
