"""The papers' methods stay in their room: the step, the lease, the draft's engine and the gateway's round name none."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.mutants import REPO

ROOM = "outrider/papers"
TABLE = "outrider/engine/drafters.py"
FOLDERS = ("target_service", "draft_service", "outrider/engine/speculation", "gateway/rounds")


def squeezed(name: str) -> str:
    return name.replace("_", "").lower()


def classes_in(folder: Path) -> set[str]:
    """Return the names of the methods' public classes."""
    trees = [ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))]
    names = [node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {squeezed(name) for name in names if not name.startswith("_")}


def drafters_in(folder: Path) -> set[str]:
    """Return the names of the drafters, as `Drafter.LOOKAHEAD`, that the methods and no others are."""
    found = set[str]()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.isupper() and ast.unparse(node.value).endswith("Drafter"):
                found.add(node.attr.lower())
    return found - {"model"}


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Yield what a file's code names, strings of one word among it; comments and docstrings do not count."""
    for node in ast.walk(tree):
        match node:
            case ast.Name():
                yield node.id
            case ast.Attribute():
                yield node.attr
            case ast.arg() | ast.keyword():
                yield node.arg or ""
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.alias():
                yield from node.name.split(".")
            case ast.ImportFrom():
                yield from (node.module or "").split(".")
            case ast.Constant(value=str()):
                yield from node.value.split() if node.value.isidentifier() else ()


def named(file: Path, classes: set[str], drafters: set[str]) -> list[str]:
    """Return which of the methods a file names: a class as a whole word, a drafter as a part of one, too."""
    found = list[str]()
    for name in identifiers(ast.parse(file.read_text())):
        parts = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))
        if squeezed(name) in classes or parts & drafters:
            found.append(name)
    return found


def test_no_file_of_a_step_or_a_round_names_a_method_of_a_paper() -> None:
    classes, drafters = classes_in(REPO / ROOM), drafters_in(REPO / ROOM)
    assert classes and drafters, "the room is empty"
    wrong = [
        f"{path.relative_to(REPO)} names {name}"
        for folder in FOLDERS
        for path in sorted((REPO / folder).rglob("*.py"))
        for name in named(path, classes, drafters)
    ]
    assert wrong == []


def test_only_the_table_of_drafters_may_import_the_room() -> None:
    settings = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["importlinter"]
    room, table = ROOM.replace("/", "."), TABLE.removesuffix(".py").replace("/", ".")
    (contract,) = [each for each in settings["contracts"] if each.get("forbidden_modules") == [room]]
    assert contract["type"] == "forbidden"
    assert contract["ignore_imports"] == [f"{table} -> {room}.**"]
    inside = {
        f"outrider.{path.stem}" for path in (REPO / "outrider").iterdir() if path.suffix == ".py" or path.is_dir()
    }
    packages = {name for name in inside if (REPO / name.replace(".", "/") / "__init__.py").is_file()}
    outside = {"gateway", "draft_service", "target_service", "deploy"}
    assert set(contract["source_modules"]) >= outside | packages - {room}


def test_a_method_that_is_named_is_found(tmp_path: Path) -> None:
    room = tmp_path / "papers"
    room.mkdir()
    (room / "ahead.py").write_text(
        "class LookaheadDrafter:\n    kind = Drafter.LOOKAHEAD\nclass Bigram:\n    pass\nclass _Own:\n    pass\n"
    )
    classes, drafters = classes_in(room), drafters_in(room)
    assert (classes, drafters) == ({"lookaheaddrafter", "bigram"}, {"lookahead"})
    file = tmp_path / "step.py"
    for line, found in (
        ("from papers import ahead\n'''Of Bigram.'''\nwindow = _Own", []),
        ("from papers.ahead import LookaheadDrafter", ["LookaheadDrafter"]),
        ("self.lookahead_drafter = 1", ["lookahead_drafter"]),
        ("if kind is Drafter.LOOKAHEAD: pass", ["LOOKAHEAD"]),
        ("num_lookahead_rows = 1", ["num_lookahead_rows"]),
        ("table = tables['bigram']", ["bigram"]),
    ):
        file.write_text(line)
        assert named(file, classes, drafters) == found, line
