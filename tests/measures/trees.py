"""Product files that differ from an earlier commit in more than names, docstrings and comments.

python -m tests.measures.trees COMMIT             # files are compared by their syntax trees, all names made equal

A rename changes no law and no speed: what it touches need not be drawn or measured again. Strings and f-strings count,
and so does a statement that became two.
"""

import ast
import sys

from tests.measures.lines import PARTS, REPO, git

NAMES = ("arg", "asname", "attr", "id", "module", "name")
"""Fields of syntax nodes that hold names."""


def normalised(source: str) -> str:
    """Return a file's syntax tree as text, without docstrings and imports, with the same name everywhere."""
    tree = ast.parse(source)
    tree.body = [each for each in tree.body if not isinstance(each, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):
        for field in NAMES:
            if isinstance(getattr(node, field, None), str):
                setattr(node, field, "_")
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not is_text(each)]  # type: ignore[attr-defined]
    return ast.dump(tree)


def is_text(node: ast.AST) -> bool:
    """Return whether a statement is a string alone, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main(args: list[str]) -> int:
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    lines = git("diff", "-M40%", "--name-status", args[0], "--", *PARTS["PRODUCT"]).decode().splitlines()
    num_equal = 0
    for line in lines:
        kind, *names = line.split("\t")
        if not names[-1].endswith(".py"):
            continue
        if kind in "AD":
            print(f"{'added' if kind == 'A' else 'removed'}: {names[0]}")
        elif normalised(git("show", f"{args[0]}:{names[0]}").decode()) == normalised((REPO / names[-1]).read_text()):
            num_equal += 1
        else:
            print(f"differs: {names[-1]}")
    print(f"{num_equal} other files differ in names, docstrings and comments alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
