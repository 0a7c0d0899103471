"""Draw public docstrings and attributes of the product by a seed that is the commit's hash, for a reader to grade.

python -m tests.measures.draw                     # 60 docstrings and 40 attributes of this commit
"""

import ast
import itertools
import random
import sys
from collections.abc import Iterator

from tests.measures.lines import PARTS, files_at, git

NUM_DOCSTRINGS = 60
NUM_ATTRIBUTES = 40


def is_public(name: str) -> bool:
    """Return whether a name begins with no underscore."""
    return not name.startswith("_")


def with_owners(source: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield each node of a file with the name of the class that it is directly in and a dot; outside of classes, ''."""
    for owner in ast.walk(ast.parse(source)):
        prefix = f"{owner.name}." if isinstance(owner, ast.ClassDef) else ""
        for node in ast.iter_child_nodes(owner):
            yield prefix, node


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the name of a class, or of a function with its parameters and result."""
    if isinstance(node, ast.ClassDef):
        return node.name
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){result}"


def docstrings(name: str, source: str) -> Iterator[str]:
    """Yield the public docstrings of classes and functions of a file, each with its place and signature."""
    for prefix, node in with_owners(source):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and is_public(node.name):
            text = ast.get_docstring(node)
            if text is not None:
                indented = text.replace("\n", "\n    ")
                yield f"{name}:{node.lineno} {prefix}{signature(node)}\n    {indented}"


def attributes(name: str, source: str) -> Iterator[str]:
    """Yield the docstrings of public attributes and constants of a file, each with its place."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for first, second in itertools.pairwise(body):
            is_text = isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
            if isinstance(first, (ast.Assign, ast.AnnAssign)) and is_text and isinstance(second.value.value, str):
                target = ast.unparse(first).partition(" =")[0]
                if is_public(target.removeprefix("self.")):
                    text = " ".join(second.value.value.split())
                    yield f"{name}:{first.lineno} {prefix}{target}\n    {text}"


def main() -> int:
    commit = git("rev-parse", "HEAD").decode().strip()
    texts = list[str]()
    values = list[str]()
    for name, content in files_at(commit):
        if name.split("/")[0] in PARTS["PRODUCT"]:
            source = content.decode()
            texts += docstrings(name, source)
            values += attributes(name, source)
    dice = random.Random(commit)
    print(f"commit {commit}: {len(texts)} public docstrings, {len(values)} public attributes and constants")
    for title, found, num in (("docstring", texts, NUM_DOCSTRINGS), ("attribute", values, NUM_ATTRIBUTES)):
        for index, text in enumerate(dice.sample(found, num), start=1):
            print(f"\n{title} {index}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
