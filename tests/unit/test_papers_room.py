"""The papers' methods stay in their room: no file of the step, the lease, the draft's engine or the round names one."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "outrider" / "papers"
FOLDERS = ("target_service", "draft_service", "gateway/rounds", "outrider/engine/speculation", "outrider/engine/worker")
DRAFTERS = {"LOOKAHEAD", "PASS", "UNIGRAM", "BIGRAM"}
"""Drafters of the room, as `Drafter` names them."""


def classes_of_the_room() -> set[str]:
    trees = [ast.parse(path.read_text()) for path in ROOM.glob("*.py")]
    return {node.name for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def names_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value.upper()


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_outside_the_room_names_what_is_in_it(folder: str) -> None:
    inside = classes_of_the_room() | DRAFTERS
    assert {"LookaheadDrafter", "PassDrafter", "BeamDrafts", "Unigram"} <= inside
    paths = list((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path.relative_to(ROOT)): inside.intersection(names_in(path)) for path in paths}
    assert not {path: names for path, names in found.items() if names}


def test_the_target_s_step_loads_neither_the_room_nor_the_table_of_drafters() -> None:
    names = "[name for name in sys.modules if name.startswith('outrider.')]"
    code = f"import sys, target_service.step.verifier; print({names})"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "outrider.engine.speculation.candidates" in found
    assert "outrider.papers" not in found and "outrider.engine.drafters" not in found
